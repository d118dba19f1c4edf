"""Feature networks by what names them, and that files are checked before they are read."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor, nn

from ebmguard.errors import ConfigError
from ebmguard.reference_training.judge.features import load_features
from ebmguard.reference_training.networks import WideResNet
from tests.parts import save_script
from tests.reference_training.judge.parts import CPU, jem_folder

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
    assert "own classifier" in features.label
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
    assert str(run) in features.label
    assert "1,234" in features.label


def test_a_torchscript_file_is_read_without_a_warning(tmp_path):
    file = tmp_path / "halves.pt"
    save_script(Halves(), file)
    features = load(file)
    x = torch.rand(2, 3, 4, 4)
    own, logits = features.module(x)
    assert torch.equal(own, x.flatten(1) * 0.5)
    assert torch.equal(logits, x.flatten(1) + 1)
    assert "halves.pt" in features.label
    assert checksum(file)[:8] in features.label


@pytest.mark.parametrize("content", [{"fc.weight": torch.zeros(2, 2)}, [1.0], b"no pickle"])
def test_what_is_not_inceptions_weights_is_refused(tmp_path, content):
    file = tmp_path / "weights.pth"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    with pytest.raises(
        ConfigError, match=r"weights\.pth does not hold the weights of pt_inception"
    ):
        load(f"inception:{file}")


def test_what_names_nothing_is_refused_with_what_could_be_named(tmp_path):
    with pytest.raises(ConfigError, match="inception:FILE"):
        load(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="not there"):
        load(f"inception:{tmp_path / 'missing.pth'}")
    (tmp_path / "text.pt").write_text("not a network")
    with pytest.raises(ConfigError, match="not a TorchScript file"):
        load(tmp_path / "text.pt")
