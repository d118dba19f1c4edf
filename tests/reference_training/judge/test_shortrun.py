"""`ebmguard evaluate shortrun`: scores of the right images, and what is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from ebmguard.errors import ConfigError
from ebmguard.reference_training.data import load_data
from ebmguard.reference_training.judge.features import Features, load_features
from ebmguard.reference_training.judge.shortrun import (
    EvaluateShortRun,
    check_features,
    judged,
    run,
    short_run_samples,
    table,
)
from ebmguard.reference_training.shortrun.trained import load_run
from tests.reference_training.judge.parts import CPU, jem_folder
from tests.reference_training.judge.parts import frechet as frechet_distance
from tests.reference_training.shortrun.parts import Quadratic, tiny_run, trained_folder


def moments(x):
    """Three features of an image, and three logits."""
    flat = x.flatten(1)
    features = torch.stack((flat.mean(1), flat.std(1), flat[:, :20].mean(1)), dim=1)
    return features, 5 * features


MOMENTS = Features(moments, "moments", comparable=False, fixed=True)


def frechet(one, two):
    return frechet_distance(*(moments(x)[0] for x in (one, two)))


def classifier(path, **stored):
    """A folder of a JEM run, which can judge."""
    jem_folder(path, stored=stored)
    return path


def test_each_score_is_of_its_images():
    trained = tiny_run(train_images=200, test_images=60)
    results = judged(trained, MOMENTS, 40)
    data = load_data("digits", train_images=200, test_images=60)
    train = data.scale(data.train_x)
    scores = results["scores"]
    assert list(scores) == ["samples", "held_out", "noise"]
    assert [row["samples"] for row in scores.values()] == [40, 40, 40]
    samples = short_run_samples(trained, 40).clamp(-1, 1)
    assert scores["samples"]["fid"] == pytest.approx(frechet(train, samples), rel=1e-4)
    # Forty of sixty: two of each three.
    rows = [i for i in range(60) if i % 3 != 2]
    held_out = data.scale(data.test_x[rows])
    assert scores["held_out"]["fid"] == pytest.approx(frechet(train, held_out), rel=1e-4)
    # Of noise the features have known means: 0, sqrt(1/3), 0.
    noise = torch.rand(5000, 1, 8, 8, generator=torch.Generator().manual_seed(9)) * 2 - 1
    expected = frechet(train, noise)
    assert scores["noise"]["fid"] == pytest.approx(expected, rel=0.1)
    assert scores["noise"]["fid"] > 5 * scores["held_out"]["fid"]
    assert (results["reference_images"], results["step"], results["image_size"]) == (200, 6, 8)
    assert (results["features"], results["features_comparable"]) == ("moments", False)


def test_samples_have_gone_through_the_chains():
    # One step of a parabola goes to its middle, but for the noise of that step.
    trained = tiny_run(network=Quadratic(1.0, 0.25), beta_star=0.0, sgld_steps=1)
    samples = short_run_samples(trained, 60)
    assert samples.shape == (60, 1, 8, 8)
    assert float(samples.mean()) == pytest.approx(0.25, abs=0.001)
    assert float(samples.std()) == pytest.approx(0.01, rel=0.05)
    assert torch.equal(short_run_samples(trained, 60), samples)


def test_the_command_prints_and_stores_what_it_measured(tmp_path, capsys):
    path = trained_folder(tmp_path / "run")
    judge = classifier(tmp_path / "judge")
    config = EvaluateShortRun(run=path, features=str(judge), count=30, device="cpu")
    assert run(config) == 0
    stored = json.loads((path / "evaluation.json").read_text())
    features = load_features(str(judge), CPU)
    expected = judged(load_run(path, CPU), features, 30)
    assert stored == json.loads(json.dumps(expected))
    printed = capsys.readouterr().out
    assert table(stored) in printed
    assert f"written to {path / 'evaluation.json'}" in printed
    for row in stored["scores"].values():
        assert f"{row['fid']:.2f}" in printed
        assert f"{row['is']:.3f}" in printed
    for words in ("3 steps from noise", "held-out images", "uniform noise", "at 8x8", str(judge)):
        assert words in printed
    assert "not comparable with published scores" in printed


@pytest.mark.parametrize(
    ("stored", "settings", "says"),
    [
        ({"data": "mnist"}, {}, "a run on mnist, and .* is on digits; train the classifier with"),
        ({"image_size": 4}, {}, "a run on digits averaged down to 4x4, and .* is on digits;"),
        ({}, {"image_size": 4}, "a run on digits, and .* is on digits averaged down to 4x4;"),
        ({"image_size": 2}, {"image_size": 4}, "to 2x2, and .* is on digits averaged down to 4x4;"),
    ],
)
def test_features_of_other_images_are_refused(tmp_path, stored, settings, says):
    judge = classifier(tmp_path / "judge", **stored)
    with pytest.raises(ConfigError, match=says):
        check_features(str(judge), tiny_run(**settings))
    same = classifier(tmp_path / "same", **settings)
    check_features(str(same), tiny_run(**settings))
    check_features("inception:file.pth", tiny_run())


def test_what_cannot_be_meant(tmp_path):
    path = trained_folder(tmp_path / "run")
    judge = str(classifier(tmp_path / "judge"))

    def refused(says, **settings):
        values = {"run": path, "features": judge, "device": "cpu", **settings}
        with pytest.raises(ConfigError, match=says):
            run(EvaluateShortRun(**values))
        assert not (path / "evaluation.json").is_file()

    refused('features is "None", and the model', features=None)
    refused('features is "own", and the model has no classifier', features="own")
    refused("count is 1, expected 2 or more", count=1)
    refused("features is 'nothing'; expected", features="nothing")
    refused("run is not a run folder of `ebmguard train jem`", features=str(path))


def test_likelihood_needs_no_features(tmp_path, capsys):
    path = trained_folder(tmp_path / "run", noise_std=2.0)
    options: dict[str, Any] = {"likelihood": True, "temperatures": 12, "ais_chains": 20}
    assert run(EvaluateShortRun(run=path, device="cpu", **options)) == 0
    stored = json.loads((path / "evaluation.json").read_text())
    assert "scores" not in stored
    found, trained = stored["likelihood"], load_run(path, CPU)
    assert (found["held_out"], found["starts"]) == (32, "long-run")
    # f is nearly flat at o = 1/2, and log Z nearly the volume of the cube.
    assert found["holds"], found["verdict"]
    volume = 64 * math.log(2 * (1 + 6 * trained.settings.data_noise))
    f = 0.5 * trained.energies(trained.data.scale(trained.data.test_x)).mean()
    assert found["log_z"] == pytest.approx([volume + float(f)] * 2, abs=0.5)
    assert found["verdict"] in capsys.readouterr().out
