"""Feature networks by what names them; Inception against another implementation."""

from __future__ import annotations

import hashlib
import math
import re

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ebmguard.errors import ConfigError
from ebmguard.reference_training.judge.features import load_features
from ebmguard.reference_training.networks import WideResNet
from tests.parts import save_script
from tests.reference_training.judge.parts import jem_folder
from tests.reference_training.parts import CPU

NETWORK = WideResNet(width=1)


class Halves(nn.Module):
    """Features and logits that can be told apart."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.flatten(1)
        return flat * 0.5, flat + 1.0


def load(spec, network=NETWORK):
    return load_features(str(spec), CPU, network)


def checksum(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()


def assert_is_classifier(features, network):
    x = torch.rand(3, 1, 8, 8)
    with torch.no_grad():
        own, logits = features.module(x)
        torch.testing.assert_close(own, network.features(x))
        torch.testing.assert_close(logits, network.classify(x))
    assert own.shape == (3, 64)
    assert not features.comparable


def test_own_follows_the_network_in_training():
    network = WideResNet(width=1)
    features = load("own", network=network)
    with torch.no_grad():
        network.stem.weight.mul_(1.5)
    assert_is_classifier(features, network)
    assert not features.fixed
    assert "one evaluation only" in features.label
    assert network.training
    assert all(parameter.requires_grad for parameter in network.parameters())


def test_a_run_folder_is_that_runs_best_classifier(tmp_path):
    other = WideResNet(depth=16, width=1, early_stride=True)
    run = tmp_path / "run"
    jem_folder(run, best=False, depth=16)
    with pytest.raises(ConfigError, match="--checkpoint last"):
        load(run)
    state = {"step": 1234, "valid_accuracy": 0.5, "network": other.state_dict()}
    torch.save(state, run / "checkpoints" / "best.pt")
    features = load(run)
    assert_is_classifier(features, other)
    assert features.fixed
    assert "1,234" in features.label


def test_a_torchscript_file_is_read_without_a_warning(tmp_path):
    file = tmp_path / "halves.pt"
    save_script(Halves(), file)
    features = load(file)
    x = torch.rand(2, 3, 4, 4)
    own, logits = features.module(x)
    assert torch.equal(own, x.flatten(1) * 0.5)
    assert torch.equal(logits, x.flatten(1) + 1)
    assert checksum(file)[:8] in features.label


def test_what_names_nothing_is_refused_with_what_could_be_named(tmp_path):
    with pytest.raises(ConfigError, match="inception:FILE"):
        load(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="not there"):
        load(f"inception:{tmp_path / 'missing.pth'}")
    torch.save({"fc.weight": torch.zeros(2, 2)}, tmp_path / "weights.pth")
    with pytest.raises(ConfigError, match="does not hold the weights of pt_inception"):
        load(f"inception:{tmp_path / 'weights.pth'}")
    (tmp_path / "text.pt").write_text("not a network")
    with pytest.raises(ConfigError, match="not a TorchScript file"):
        load(tmp_path / "text.pt")


# What FeatureExtractorInceptionV3 of torch-fidelity 0.4.0 ("2048", "logits_unbiased"), the usual
# reader of the published weights, makes of the weights and images below, in float32 on a CPU.
FEATURES = [
    [0.1818731427, 1.7390707731, 10.3721418381, 6.2601599693],
    [0.1356873959, 1.7478760481, 10.7906236649, 6.4223732948],
]
FEATURE_MEANS, FEATURE_STDS = [3.1833302366, 3.2132814952], [4.4483450409, 4.4906604679]
LOGITS = [
    [1.9992483854, -11.4128913879, 3.0076930523, -4.0737876892, -5.0853004456],
    [2.0610206127, -11.4348964691, 3.1461558342, -4.0593290329, -5.1044678688],
]
LOGIT_MEANS, LOGIT_STDS = [-0.1648690996, -0.1700268082], [5.7559540961, 5.8091167050]


# Of each block the channels that come in, and of each branch those that its convolutions put out,
# with the height and width of their kernels; a and b read one input.
BLOCKS = """
Mixed_5b 192 branch1x1 64:1x1 branch5x5_1 48:1x1 branch5x5_2 64:5x5 branch3x3dbl_1 64:1x1
    branch3x3dbl_2 96:3x3 branch3x3dbl_3 96:3x3 branch_pool 32:1x1
Mixed_6a 288 branch3x3 384:3x3 branch3x3dbl_1 64:1x1 branch3x3dbl_2 96:3x3 branch3x3dbl_3 96:3x3
Mixed_6b 768 branch1x1 192:1x1 branch7x7_1 128:1x1 branch7x7_2 128:1x7 branch7x7_3 192:7x1
    branch7x7dbl_1 128:1x1 branch7x7dbl_2 128:7x1 branch7x7dbl_3 128:1x7 branch7x7dbl_4 128:7x1
    branch7x7dbl_5 192:1x7 branch_pool 192:1x1
Mixed_7a 768 branch3x3_1 192:1x1 branch3x3_2 320:3x3 branch7x7x3_1 192:1x1 branch7x7x3_2 192:1x7
    branch7x7x3_3 192:7x1 branch7x7x3_4 192:3x3
Mixed_7b 1280 branch1x1 320:1x1 branch3x3_1 384:1x1 branch3x3_2a 384:1x3 branch3x3_2b 384:3x1
    branch3x3dbl_1 448:1x1 branch3x3dbl_2 384:3x3 branch3x3dbl_3a 384:1x3 branch3x3dbl_3b 384:3x1
    branch_pool 192:1x1
"""
LIKE = {
    "Mixed_5c": ("Mixed_5b", "192", "256", "32:", "64:"),
    "Mixed_5d": ("Mixed_5b", "192", "288", "32:", "64:"),
    "Mixed_6c": ("Mixed_6b", "128:", "160:"),
    "Mixed_6d": ("Mixed_6b", "128:", "160:"),
    "Mixed_6e": ("Mixed_6b", "128:", "192:"),
    "Mixed_7c": ("Mixed_7b", "1280", "2048"),
}
"""Blocks that are as another one but for some numbers."""


def shapes():
    """Shapes of the published weights, in their order."""
    found = {"Conv2d_1a_3x3": (32, 3, 3, 3), "Conv2d_2a_3x3": (32, 32, 3, 3)}
    found |= {"Conv2d_2b_3x3": (64, 32, 3, 3), "Conv2d_3b_1x1": (80, 64, 1, 1)}
    found |= {"Conv2d_4a_3x3": (192, 80, 3, 3)}
    blocks = {text.split()[0]: text.split()[1:] for text in re.split(r"\n(?=M)", BLOCKS.strip())}
    for name, (like, *numbers) in LIKE.items():
        words = blocks[like]
        for old, new in zip(numbers[::2], numbers[1::2], strict=True):
            words = [re.sub(f"^{old}", new, word) for word in words]
        blocks[name] = words
    for block in sorted(blocks):
        first, *words = blocks[block]
        channels = int(first)
        for branch, word in zip(words[::2], words[1::2], strict=True):
            out, height, width = map(int, re.split("[:x]", word))
            if branch[-2:] in ("_1", "ol") or "_" not in branch:
                channels = int(first)
            found[f"{block}.{branch}"] = (out, channels, height, width)
            channels = channels if branch.endswith("a") else out
    every: dict[str, tuple[int, ...]] = {}
    for name, shape in found.items():
        every[f"{name}.conv.weight"] = shape
        for part in ("weight", "bias", "running_mean", "running_var"):
            every[f"{name}.bn.{part}"] = shape[:1]
        every[f"{name}.bn.num_batches_tracked"] = ()
    return every | {"fc.weight": (1008, 2048), "fc.bias": (1008,)}


def drawn_weights():
    """Weights in the order of the published file, drawn so that no activation dies or grows."""
    random = np.random.RandomState(0)
    weights = {}
    for name, shape in shapes().items():
        if name.endswith("num_batches_tracked"):
            values = np.zeros(())
        elif len(shape) > 1:
            gain = 2 if len(shape) == 4 else 1
            values = random.standard_normal(shape) * np.sqrt(gain / math.prod(shape[1:]))
        elif name.endswith(("running_var", "bn.weight")):
            values = random.uniform(0.5, 1.5, shape)
        else:
            values = 0.1 * random.standard_normal(shape)
        weights[name] = torch.from_numpy(np.asarray(values)).float()
    return weights


def test_features_and_logits_are_those_of_the_usual_reader_of_the_weights(tmp_path):
    weights = drawn_weights()
    # As many tensors as the published file has.
    assert len(weights) == 566
    file = tmp_path / "weights.pth"
    torch.save(weights, file, _use_new_zipfile_serialization=False)  # as old as the published one
    digest = checksum(file)
    found = load_features(f"inception:{file}", torch.device("cpu"))
    file.unlink()  # 96 MB
    assert not found.comparable
    assert found.label == f"other weights of the Inception network (sha256 {digest[:8]})"
    pixels = np.random.RandomState(1).randint(0, 256, (2, 3, 32, 32), dtype=np.uint8)
    images = torch.from_numpy(pixels).float() / 127.5 - 1
    features, logits = found.module(images)
    for actual, expected in (
        (features[:, ::512], FEATURES),
        (features.mean(dim=1), FEATURE_MEANS),
        (features.std(dim=1), FEATURE_STDS),
        (logits[:, ::250], LOGITS),
        (logits.mean(dim=1), LOGIT_MEANS),
        (logits.std(dim=1), LOGIT_STDS),
    ):
        torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-4, atol=1e-4)
    assert not features.requires_grad
    # Outside of [-1, 1], between two levels of a byte, and grey.
    changed = images.clone()
    changed[0] += 0.4 / 255
    changed[1][images[1] == 1] = 7.0
    torch.testing.assert_close(found.module(changed)[0], features)
    grey = images[:1, :1]
    torch.testing.assert_close(found.module(grey)[0], found.module(grey.expand(1, 3, 32, 32))[0])
