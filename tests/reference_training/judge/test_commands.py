"""`ebmguard evaluate`: what every one does the same way, and those of JEM and of toys."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from ebmguard.errors import ConfigError, DiskError
from ebmguard.reference_training.data import load_data
from ebmguard.reference_training.judge import bism, jem, shortrun, toy
from ebmguard.reference_training.judge.classification import accuracy, calibration_error, classify
from ebmguard.reference_training.judge.config import (
    EvaluateBism,
    EvaluateJem,
    EvaluateShortRun,
    EvaluateToy,
)
from ebmguard.reference_training.judge.evaluate import EvaluateConfig, run
from ebmguard.reference_training.judge.features import load_features
from ebmguard.reference_training.judge.quality import SampleQuality
from ebmguard.reference_training.judge.robustness import robustness
from ebmguard.reference_training.judge.stored import load_network
from ebmguard.reference_training.judge.toy import table
from ebmguard.reference_training.networks import WideResNet
from ebmguard.reference_training.shortrun.trained import load_run
from ebmguard.samplers import sgld
from tests.reference_training.judge.parts import jem_folder
from tests.reference_training.parts import CPU, TOY, small_evaluations, trained_folder

COMMANDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "jem": (jem.run, EvaluateJem, {}),
    "shortrun": (shortrun.run, EvaluateShortRun, {"likelihood": True}),
    "bism": (bism.run, EvaluateBism, {"features": "judge"}),
    "toy": (toy.run, EvaluateToy, {}),
}
NO_CLASSIFIER = "and the model has no classifier"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("jem", {"samples": 0}, "samples is 0, expected 1 or more"),
    ("jem", {"chain_steps": -1}, "chain_steps is -1, expected 0 or more"),
    *(("jem", {"attacks": (x,)}, f"has '{x}'") for x in ("linf", "l1:8", "linf:nan")),
    ("shortrun", {"likelihood": False}, f'features is "None", {NO_CLASSIFIER}'),
    ("shortrun", {"count": 1}, "count is 1, expected 2 or more"),
    ("bism", {"chain_steps": 0}, "chain_steps is 0, expected 1 or more"),
    ("bism", {"features": "own"}, f'features is "own", {NO_CLASSIFIER}'),
    ("bism", {"likelihood": True}, "likelihood is on, expected it off"),
    ("toy", {"temperatures": 0}, "temperatures is 0, expected 1 or more"),
    ("bism", {"ais_chains": 1}, "ais_chains is 1, expected 2 or more"),
    *((name, {"device": "abacus"}, "device is 'abacus', which cannot be") for name in COMMANDS),
    *((name, {"run": Path("no")}, "no holds no run") for name in COMMANDS),
]


@pytest.mark.parametrize(("name", "given", "says"), REFUSED)
def test_what_cannot_be_meant_is_refused(name, given, says):
    evaluate, settings, least = COMMANDS[name]
    with pytest.raises(ConfigError, match=says):
        evaluate(settings(**{"run": Path("x"), "device": "cpu", **least, **given}))


@pytest.mark.parametrize("name", COMMANDS)
def test_what_cannot_be_evaluated_is_refused(tmp_path, name):
    evaluate, settings, least = COMMANDS[name]

    def refused(path, says):
        with pytest.raises(ConfigError, match=says):
            evaluate(settings(run=path, device="cpu", **least))
        assert not (path / "evaluation.json").exists()

    jem_folder(tmp_path / "jem")
    trained_folder(tmp_path / "shortrun", iterations=1)
    for other in {"jem", "shortrun"} - {name}:
        refused(tmp_path / other, f"{other} (is not a|holds no) run.* of `ebmguard train {name}")
    if name in ("jem", "shortrun"):
        for file in (tmp_path / name / "checkpoints").iterdir():
            file.unlink()
        refused(tmp_path / name, "has no checkpoint")


@pytest.mark.parametrize("stored", [True, False])
def test_results_are_printed_and_stored_where_they_can_be(tmp_path, capsys, stored):
    def measure(config, device):
        return {"device": device.type, "score": math.nan}

    file = tmp_path / "evaluation.json"
    if not stored:
        file.mkdir()
    with nullcontext() if stored else pytest.raises(DiskError, match=r"evaluation\.json could not"):
        assert run(measure, str, EvaluateConfig(run=tmp_path, device="cpu")) == 0
        assert json.loads(file.read_text()) == {"device": "cpu", "score": "NaN"}
    printed = capsys.readouterr().out
    told = f"\nwritten to {file}\n" if stored else ""
    assert printed == "{'device': 'cpu', 'score': nan}\n" + told


SPREAD = [i for i in range(30) if i % 6 != 5]
"""25 of 30 chains, from all parts of the buffer."""


def evaluate(path, **settings):
    config = EvaluateJem(run=path, **{"samples": 25, "device": "cpu", **settings})
    assert jem.run(config) == 0
    return json.loads((path / "evaluation.json").read_text())


def quality_of(network, data, samples):
    features = load_features("own", CPU, network)
    return SampleQuality(features, data).measure(samples)


def test_everything_is_measured_printed_and_stored(tmp_path, capsys):
    networks, chains = jem_folder(tmp_path / "run")
    attacks = {"attacks": ("linf:8", "l2:64.5"), "attack_images": 5, "refine_steps": 1}
    results = evaluate(tmp_path / "run", **attacks)
    printed = capsys.readouterr().out
    data = load_data("digits", train_images=90, valid_images=20, test_images=40)
    best = networks["best"].eval()
    for name, images, labels in (
        ("validation", data.valid_x, data.valid_y),
        ("test", data.test_x, data.test_y),
    ):
        logits = classify(best, data.scale(images), noise_std=0.03)
        row = results["classification"][name]
        assert row["images"] == len(labels)
        assert row["accuracy"] == accuracy(logits, labels)
        assert row["ece"] == pytest.approx(calibration_error(logits, labels))
        assert f"{row['accuracy']:.2%}" in printed
    assert (results["checkpoint"], results["step"], results["reference_images"]) == ("best", 4, 90)
    buffer = results["samples"]["buffer"]
    assert buffer == pytest.approx({"step": 12, **quality_of(best, data, chains[SPREAD])})
    # Four steps: two of each training step, at most twice before a restart in the mean.
    rng = torch.Generator().manual_seed(0)
    x0 = torch.rand(25, 1, 8, 8, generator=rng) * 2 - 1
    fresh = sgld(best, x0, steps=4, step_size=1.0, noise_std=0.01, generator=rng)
    expected = quality_of(best, data, fresh)
    assert results["samples"]["fresh"] == pytest.approx({"steps": 4, **expected})
    assert f"{expected['fid']:.2f}" in printed
    assert "not comparable with published scores" in printed
    assert list(results["ood"]) == ["uniform", "constant", "interpolated"]
    balls = [("linf", 8.0), ("l2", 64.5)]
    sizes = {"step_size": 1.0, "noise_std": 0.01}
    rows = robustness(best, data, balls, images=5, steps=1, noise=0.03, **sizes)
    assert (results["refine_steps"], results["robustness"]) == (1, rows)
    assert "l2, radius 64.5/255" in printed


@pytest.mark.parametrize(("name", "noise"), [("jem", 0.0), ("shortrun", 0.03)])
def test_the_likelihood_is_that_of_the_samplers_model(tmp_path, capsys, name, noise):
    """At o = 2 step_size / noise_std² = 1/2 f is nearly flat, and log Z nearly the volume."""
    path = tmp_path / "run"
    if name == "jem":
        network = jem_folder(path, noise_std=2.0, eval_noise=noise)[0]["best"]
        data = load_data("digits", train_images=90, valid_images=20, test_images=40)
    else:
        trained = load_run(trained_folder(path, noise_std=2.0, data_noise=noise), CPU)
        network, data = trained.network, trained.data
    judge, settings, _ = COMMANDS[name]
    own = {"chains": (), "ood": ()} if name == "jem" else {}
    options = {"likelihood": True, "temperatures": 12, "ais_chains": 20, "device": "cpu"}
    assert judge(settings(run=path, **own, **options)) == 0
    stored = json.loads((path / "evaluation.json").read_text())
    assert "scores" not in stored  # of which features would be needed
    found = stored["likelihood"]
    assert found["holds"], found["verdict"]
    with torch.no_grad():
        f = 0.5 * network(data.scale(data.test_x)).mean().item()
    volume = 64 * math.log(2 * (1 + 6 * noise))
    assert found["log_z"] == pytest.approx([volume + f] * 2, abs=0.5)
    assert found["held_out"] == len(data.test_x)
    low, high = found["log_likelihood"]
    assert (low, high) == pytest.approx([f - end for end in reversed(found["log_z"])], abs=0.02)
    assert found["verdict"] in capsys.readouterr().out


def test_the_newest_checkpoint_instead(tmp_path):
    networks, chains = jem_folder(tmp_path / "run", best=False)
    with pytest.raises(ConfigError, match="--checkpoint last"):
        evaluate(tmp_path / "run", checkpoint="best")
    assert not (tmp_path / "run" / "evaluation.json").exists()
    # A run without validation images, such as the default one on the digits, has no best one.
    results = evaluate(tmp_path / "run", chains=("buffer",), ood=())
    assert results["checkpoint"] == "last"
    data = load_data("digits", train_images=90, valid_images=20, test_images=40)
    assert (results["step"], results["ood"]) == (12, {})
    expected = quality_of(networks["last"].eval(), data, chains[SPREAD])
    assert results["samples"] == {"buffer": pytest.approx({"step": 12, **expected})}


def test_data_are_where_and_as_small_as_in_the_training(tmp_path):
    jem_folder(tmp_path / "run", stored={"data": "mnist", "data_root": str(tmp_path / "then")})
    with pytest.raises(ConfigError, match="then"):
        evaluate(tmp_path / "run")
    with pytest.raises(ConfigError, match="now"):
        evaluate(tmp_path / "run", data_root=str(tmp_path / "now"))
    networks, _ = jem_folder(tmp_path, stored={"image_size": 4})
    data = load_data("digits", train_images=90, valid_images=20, test_images=40, image_size=4)
    logits = classify(networks["best"], data.scale(data.test_x), noise_std=0.03)
    row = evaluate(tmp_path, chains=(), ood=())["classification"]["test"]
    assert row["ece"] == pytest.approx(calibration_error(logits, data.test_y))


def test_the_network_and_its_arithmetic_are_those_of_the_training(tmp_path):
    x = torch.rand(5, 1, 8, 8)

    def f(**stored):
        torch.manual_seed(1)
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        jem_folder(path, stored=stored)
        return load_network(path, "best", CPU)[0](x)

    own = WideResNet(width=1, early_stride=True, norm="layer", unconditional=True)
    jem_folder(tmp_path / "other", stored={"norm": "layer", "unconditional": True}, network=own)
    torch.testing.assert_close(load_network(tmp_path / "other", "best", CPU)[0](x), own(x))

    exact = f()
    assert not torch.equal(exact, f(activation="silu"))
    rounded = f(precision="bfloat16")
    assert not torch.equal(exact, rounded)
    torch.testing.assert_close(exact, rounded, rtol=0.02, atol=0.02)


def test_a_folder_names_no_code_that_is_run(tmp_path):
    jem_folder(tmp_path / "run", stored={"features": "evil_network.pt"})
    results = evaluate(tmp_path / "run", chains=("buffer",), ood=())
    assert results["features"].startswith("the run's own classifier")


def test_annealing_agrees_with_the_quadrature(tmp_path, capsys, monkeypatch):
    small_evaluations(monkeypatch)
    monkeypatch.setattr(toy, "POOL", 20_000)
    out = tmp_path / "run"
    TOY.run(out, betas=("0", "0.5"), seeds=1, evaluations=1)
    monkeypatch.undo()
    assert toy.run(EvaluateToy(run=out, device="cpu")) == 0
    without = json.loads((out / "evaluation.json").read_text())["members"]
    assert "log_z" not in without[0]
    config = EvaluateToy(run=out, device="cpu", likelihood=True, temperatures=40)
    assert toy.run(config) == 0
    printed = capsys.readouterr().out
    stored = json.loads((out / "evaluation.json").read_text())
    for member, plain in zip(stored["members"], without, strict=True):
        assert {k: member[k] for k in plain} == plain
        low, high = member["log_z"]
        assert member["holds"], member["verdict"]
        # The ends are two standard errors away; one of many networks may need four.
        assert low - (high - low) < member["quadrature_log_z"] < high + (high - low)
        low, high = member["annealed_kl"]
        assert low - (high - low) < member["kl"] < high + (high - low)
        assert f"{low:.3f} to {high:.3f}" in printed
    assert table(stored) in printed
