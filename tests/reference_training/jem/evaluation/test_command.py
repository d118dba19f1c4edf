"""`ebmguard evaluate jem` on run folders made by hand."""

from __future__ import annotations

import json
import math

import pytest
import torch
import tyro

from ebmguard.errors import ConfigError
from ebmguard.reference_training.data import load_data
from ebmguard.reference_training.jem.evaluation import command
from ebmguard.reference_training.jem.evaluation.classification import (
    accuracy,
    calibration_error,
    classify,
)
from ebmguard.reference_training.jem.evaluation.command import fresh_chains, run
from ebmguard.reference_training.jem.evaluation.config import EvaluateConfig
from ebmguard.reference_training.jem.evaluation.features import load_features
from ebmguard.reference_training.jem.evaluation.quality import SampleQuality
from ebmguard.reference_training.jem.evaluation.stored import load_network
from ebmguard.reference_training.networks import WideResNet

CPU = torch.device("cpu")
SPREAD = [i for i in range(30) if i % 6 != 5]
"""25 of 30 chains, from all parts of the buffer."""
SETTINGS = {
    "depth": 10,
    "width": 1,
    "early_stride": True,
    "sgld_steps": 2,
    "step_size": 1.0,
    "noise_std": 0.01,
    "reinit_rate": 0.5,
    "eval_noise": 0.03,
    "train_images": 90,
    "valid_images": 20,
    "test_images": 40,
}


def make_run(path, *, best=True, parts=1, **settings):
    """A run folder with a checkpoint of 30 chains; the networks of its checkpoints."""
    (path / "checkpoints").mkdir(parents=True)
    config = {"data": "digits", "scenario": "digits", "beta_star": 2.0, "seed": 3}
    config |= {"precision": "float32", "data_root": None}
    config["settings"] = {**SETTINGS, **settings}
    (path / "config.json").write_text(json.dumps(config))
    networks = {name: WideResNet(width=1, early_stride=True) for name in ("best", "last")}
    if best:
        state = {"step": 4, "valid_accuracy": 0.2, "network": networks["best"].state_dict()}
        torch.save(state, path / "checkpoints" / "best.pt")
    chains = torch.randn(30, 1, 8, 8)
    for rank, own in enumerate(chains.chunk(parts)):
        part = f".rank{rank}of{parts}" if parts > 1 else ""
        for step in (6, 12):
            shift = 0.0 if step == 12 else 1.0
            torch.save(
                {"network": networks["last"].state_dict(), "buffer": {"samples": own + shift}},
                path / "checkpoints" / f"step-{step:08d}{part}.pt",
            )
    return networks, chains


def evaluate(path, **settings):
    config = EvaluateConfig(run=path, **{"samples": 25, "device": "cpu", **settings})
    assert run(config) == 0
    return json.loads((path / "evaluation.json").read_text())


def quality_of(network, data, samples):
    features = load_features("own", sha256=None, network=network, device=CPU)
    return SampleQuality(features, data.train_x, data.scale, CPU).measure(samples)


def test_everything_is_measured_printed_and_stored(tmp_path, capsys):
    networks, chains = make_run(tmp_path / "run")
    results = evaluate(tmp_path / "run")
    printed = capsys.readouterr().out
    data = load_data("digits", train_images=90, valid_images=20, test_images=40)
    best = networks["best"].eval()
    for name, images, labels in (
        ("validation", data.valid_x, data.valid_y),
        ("test", data.test_x, data.test_y),
    ):
        logits = classify(best, images, data.scale, noise_std=0.03)
        row = results["classification"][name]
        assert row["images"] == len(labels)
        assert row["accuracy"] == accuracy(logits, labels)
        assert row["ece"] == pytest.approx(calibration_error(logits, labels))
        assert f"{row['accuracy']:.2%}" in printed
    assert (results["checkpoint"], results["step"], results["reference_images"]) == ("best", 4, 90)
    buffer = results["samples"]["buffer"]
    assert buffer == pytest.approx({"step": 12, **quality_of(best, data, chains[SPREAD])})
    fresh = fresh_chains(best, (25, 1, 8, 8), steps=4, settings=SETTINGS)
    # Four steps: two of each training step, at most twice before a restart in the mean.
    expected = quality_of(best, data, fresh)
    assert results["samples"]["fresh"] == pytest.approx({"steps": 4, **expected})
    assert "replay buffer after 12 steps" in printed
    assert "fresh chains of 4 steps" in printed
    assert f"{expected['fid']:.2f}" in printed
    assert "one evaluation only" in printed
    assert "not comparable with published scores" in printed
    assert list(results["ood"]) == ["uniform", "constant", "interpolated"]
    assert all(
        0 <= row[score] <= 1 for row in results["ood"].values() for score in ("f", "gradient")
    )


def test_the_likelihood_is_that_of_the_samplers_model(tmp_path, capsys):
    # o = 2 step_size / noise_std² = 1/2, where f is nearly flat and log Z nearly the volume.
    networks, _ = make_run(tmp_path / "run", noise_std=2.0, eval_noise=0.0)
    options = {"likelihood": True, "temperatures": 12, "ais_chains": 20}
    found = evaluate(tmp_path / "run", chains=(), ood=(), **options)["likelihood"]
    data = load_data("digits", train_images=90, valid_images=20, test_images=40)
    with torch.no_grad():
        f = 0.5 * networks["best"](data.scale(data.test_x)).mean().item()
    assert found["holds"], found["verdict"]
    for end in found["log_z"]:
        assert end == pytest.approx(64 * math.log(2) + f, abs=0.5)
    low, high = found["log_likelihood"]
    assert (low, high) == pytest.approx([f - end for end in reversed(found["log_z"])], abs=1e-4)
    assert found["verdict"] in capsys.readouterr().out
    make_run(tmp_path / "still", noise_std=0.0)
    with pytest.raises(ConfigError, match="noise_std is 0"):
        evaluate(tmp_path / "still", chains=(), ood=(), **options)


def test_the_newest_checkpoint_instead(tmp_path):
    networks, chains = make_run(tmp_path / "run", best=False)
    with pytest.raises(ConfigError, match="--checkpoint last"):
        evaluate(tmp_path / "run")
    assert not (tmp_path / "run" / "evaluation.json").exists()
    results = evaluate(tmp_path / "run", checkpoint="last", chains=("buffer",), ood=())
    data = load_data("digits", train_images=90, valid_images=20, test_images=40)
    assert (results["step"], results["ood"]) == (12, {})
    expected = quality_of(networks["last"].eval(), data, chains[SPREAD])
    assert results["samples"] == {"buffer": pytest.approx({"step": 12, **expected})}


def test_the_buffer_of_several_processes_is_one(tmp_path):
    torch.manual_seed(1)
    make_run(tmp_path / "one")
    torch.manual_seed(1)
    make_run(tmp_path / "three", parts=3)
    # The newest checkpoint counts only with the parts of all.
    one, three = (
        evaluate(tmp_path / name, chains=("buffer",), samples=30) for name in ("one", "three")
    )
    assert one["samples"] == three["samples"]
    (tmp_path / "three" / "checkpoints" / "step-00000012.rank1of3.pt").unlink()
    assert evaluate(tmp_path / "three", chains=("buffer",))["samples"]["buffer"]["step"] == 6


def test_fresh_chains_start_in_the_box_and_climb():
    network = WideResNet(width=1)
    settings = {"step_size": 1.0, "noise_std": 0.0}
    start = fresh_chains(network, (300, 1, 8, 8), steps=0, settings=settings)
    assert -1 <= float(start.min()) < -0.98
    assert 0.98 < float(start.max()) <= 1
    end = fresh_chains(network, (300, 1, 8, 8), steps=5, settings=settings)
    with torch.no_grad():
        assert bool((network(end) > network(start)).all())


def test_settings_that_cannot_be_meant(tmp_path):
    with pytest.raises(ConfigError, match="not a run folder"):
        evaluate(tmp_path)
    make_run(tmp_path / "run", reinit_rate=0.0)
    with pytest.raises(ConfigError, match="--chain-steps"):
        evaluate(tmp_path / "run")
    assert evaluate(tmp_path / "run", chain_steps=1)["samples"]["fresh"]["steps"] == 1
    for settings in ({"samples": 0}, {"chain_steps": -1}, {"ood": ("digits",)}):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            evaluate(tmp_path / "run", **{"chain_steps": 1, **settings})


def test_the_data_are_where_the_run_had_them_unless_told_otherwise(tmp_path):
    make_run(tmp_path / "run")
    file = tmp_path / "run" / "config.json"
    config = json.loads(file.read_text()) | {"data": "mnist", "data_root": str(tmp_path / "then")}
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="then"):
        evaluate(tmp_path / "run")
    with pytest.raises(ConfigError, match="now"):
        evaluate(tmp_path / "run", data_root=tmp_path / "now")


def test_the_images_are_as_small_as_in_the_training(tmp_path, monkeypatch):
    make_run(tmp_path / "run")
    file = tmp_path / "run" / "config.json"
    stored = json.loads(file.read_text())
    assert "image_size" not in stored  # a folder from before there was a choice
    seen = []

    def seen_by(network, images, scale, *, noise_std):
        seen.append(tuple(images.shape[1:]))
        return classify(network, images, scale, noise_std=noise_std)

    monkeypatch.setattr(command, "classify", seen_by)
    for size in ({}, {"image_size": None}, {"image_size": 4}):
        file.write_text(json.dumps(stored | size))
        evaluate(tmp_path / "run", chains=(), ood=())
    # The validation and the test images of each.
    assert seen == [(1, 8, 8)] * 4 + [(1, 4, 4)] * 2


def test_the_arithmetic_is_that_of_the_training(tmp_path):
    make_run(tmp_path / "run")
    file = tmp_path / "run" / "config.json"
    x = torch.rand(5, 1, 8, 8)
    exact, _ = load_network(tmp_path / "run", "best", CPU)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"precision": "bfloat16"}))
    rounded, _ = load_network(tmp_path / "run", "best", CPU)
    assert not torch.equal(exact(x), rounded(x))
    torch.testing.assert_close(exact(x), rounded(x), rtol=0.02, atol=0.02)


def test_the_network_is_that_of_the_training(tmp_path):
    make_run(tmp_path / "run")
    file = tmp_path / "run" / "config.json"
    stored = json.loads(file.read_text())
    assert "activation" not in stored  # a folder from before there was a choice
    x = torch.rand(5, 1, 8, 8)
    found = {}
    for name in (None, "leaky_relu", "silu"):
        file.write_text(json.dumps(stored | ({"activation": name} if name else {})))
        found[name] = load_network(tmp_path / "run", "best", CPU)[0](x)
    assert torch.equal(found[None], found["leaky_relu"])
    assert not torch.equal(found[None], found["silu"])


def test_the_command_line():
    words = "runs/a --checkpoint last --ood svhn uniform --chains fresh --features inception:w.pth"
    config = tyro.cli(EvaluateConfig, args=words.split())
    assert (str(config.run), config.checkpoint, config.samples) == ("runs/a", "last", 10_000)
    assert (config.ood, config.chains) == (("svhn", "uniform"), ("fresh",))
    assert config.features == "inception:w.pth"
