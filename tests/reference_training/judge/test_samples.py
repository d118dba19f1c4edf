"""Samples that are judged: their chains, their scores, their densities, and attacks."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from ebmguard.cli import main
from ebmguard.errors import ConfigError
from ebmguard.reference_training.bism.deep import DeepEnergy, DeepModel, pixels
from ebmguard.reference_training.bism.posterior import GaussianPosterior
from ebmguard.reference_training.data import load_data
from ebmguard.reference_training.judge import bism, chains, robustness
from ebmguard.reference_training.judge.bism import Sampler, as_images, from_images, linear_accuracy
from ebmguard.reference_training.judge.chains import anneal, fresh_chains, temperatures
from ebmguard.reference_training.judge.features import Features, load_features
from ebmguard.reference_training.judge.likelihood import Cube, described, measure
from ebmguard.reference_training.judge.robustness import CHAINS, holds, refined_logits
from ebmguard.reference_training.judge.shortrun import (
    EvaluateShortRun,
    check_features,
    judged,
    run,
    short_run_samples,
    table,
)
from ebmguard.reference_training.likelihood import Path
from ebmguard.reference_training.shortrun.trained import load_run
from tests.parts import Bowl
from tests.reference_training.judge.parts import frechet as frechet_distance
from tests.reference_training.judge.parts import jem_folder
from tests.reference_training.parts import CPU, DEEP, rng, tiny_run, trained_folder

WIDE = torch.float64


def test_each_batch_draws_its_steps_and_its_starts(monkeypatch):
    monkeypatch.setattr(chains, "BATCH", 4)
    steps: list[int] = []
    sizes: list[int] = []

    def walk(x0, k, generator):
        steps.append(k)
        sizes.append(len(x0))
        return x0

    draw = partial(fresh_chains, walk, (202, 1, 2, 3))
    found = draw((4, 6), CPU)
    assert set(steps) == {4, 5, 6}
    assert sizes == [4] * 50 + [2]
    assert found.shape == (202, 1, 2, 3)
    assert len({tuple(image.flatten().tolist()) for image in found}) == 202
    assert torch.equal(draw((4, 4), CPU), found)
    assert steps[51:] == [4] * 51


CUBE = Cube(1.5, torch.zeros(2, dtype=torch.float64))


def test_walls_reflect_and_likelihoods_turn_the_bracket_around():
    x = torch.tensor([0.0, 1.5, 1.7, 4.5, 4.6, 7.4, -1.6, -4.4, 13.5], dtype=torch.float64)
    expected = torch.tensor([0.0, 1.5, 1.3, -1.5, -1.4, 1.4, -1.4, 1.4, 1.5], dtype=torch.float64)
    torch.testing.assert_close(CUBE.fold(x), expected)
    inside = CUBE.sample(500, rng())
    assert torch.equal(CUBE.fold(inside), inside)
    assert CUBE.log_prob(inside)[0] == pytest.approx(-2 * math.log(3))
    path = Path(lambda x: -CUBE.fold(x).square().sum(1), CUBE)
    held_out = torch.zeros(30, 2, dtype=torch.float64)
    generator = rng(2)
    found = measure(path, held_out, held_out, generator, temperatures=20, chains=50, exact=False)
    low, high = found["log_z"]
    assert found["log_likelihood"] == (-high, -low)
    assert found["starts"] == "long-run"
    assert found["log_likelihood_error"] == 0
    assert "not to be quoted" not in described(found)
    assert "not to be quoted" in described(found | {"holds": False})


SHAPE = (1, 3, 4)
WEIGHTS = torch.randn(3, 12, generator=rng(1), dtype=torch.float64)


class Linear(Bowl):
    """Of a model whose logits are W x."""

    def classify(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ WEIGHTS.T


@pytest.mark.parametrize(("norm", "dual"), [("linf", 1), ("l2", 2)])
def test_an_attack_finds_the_worst_case_of_a_linear_classifier(norm, dual):
    def classify(x: Tensor) -> Tensor:
        return Linear().classify(x)[:, :2]  # of several, the steepest loss is not the worst case

    x = 0.3 * torch.randn(200, *SHAPE, generator=rng(), dtype=torch.float64)
    logits = classify(x)
    y = logits.argmax(dim=1)
    y[:20] = 1 - y[:20]  # these are wrong without an attack
    radius = 0.1
    # In a ball, w @ x falls by radius times the dual norm of w.
    gap = (logits[:, 0] - logits[:, 1]) * (1 - 2 * y)
    fall = radius * float((WEIGHTS[0] - WEIGHTS[1]).norm(dual))
    inside = x.flatten(1).abs().amax(dim=1) < 1 - radius  # the cube stops no attack
    clear = inside & ((gap - fall).abs() > 0.02 * fall)
    assert 20 < int((gap[clear] > fall).sum()) < int(clear.sum()) - 20
    found = holds(classify, x, y, norm, radius, rng())
    assert torch.equal(found[clear], gap[clear] > fall)
    assert torch.equal(holds(classify, x, y, norm, 0.0, rng()), gap > 0)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_an_attack_stays_in_its_ball_and_in_the_cube(norm):
    x = torch.rand(30, *SHAPE, generator=rng(), dtype=torch.float64) * 2 - 1
    seen: list[Tensor] = []

    def logits(at: Tensor) -> Tensor:
        seen.append(at.detach())
        return Linear().classify(at) * torch.tensor([1.0, 0.0, 0.0]) + torch.tensor([99.0, 0, 0])

    assert holds(logits, x, torch.zeros(30, dtype=torch.int64), norm, 0.25, rng()).all()
    away = torch.stack(seen) - x
    size = away.abs().flatten(2).amax(2) if norm == "linf" else away.flatten(2).norm(dim=2)
    assert 0.2 < float(size.max()) <= 0.25 + 1e-9
    assert torch.stack(seen).abs().max() <= 1


def test_images_are_refined_by_chains_that_gradients_do_not_see():
    x = torch.randn(4, *SHAPE, dtype=torch.float64, requires_grad=True)
    options = {"step_size": 0.1, "noise_std": 0.2}
    found = refined_logits(Linear(), x, 3, rng(), **options)
    at, noise = x.detach().repeat_interleave(CHAINS, 0), rng()
    for z in torch.randn(3, *at.shape, generator=noise, dtype=torch.float64):
        at = at - 0.1 * at + 0.2 * z
    expected = (at.flatten(1) @ WEIGHTS.T).view(4, CHAINS, 3).mean(1)
    torch.testing.assert_close(found, expected)
    (slope,) = torch.autograd.grad(found[:, 0].sum(), x)
    torch.testing.assert_close(slope, WEIGHTS[0].view(SHAPE).expand(4, *SHAPE))
    assert torch.equal(refined_logits(Linear(), x, 0, rng(), **options), Linear().classify(x))


def test_accuracies_are_of_radii_in_255ths(monkeypatch):
    radii = []

    def held(logits, x, y, norm, radius, rng):
        radii.append((norm, radius, len(x)))
        return torch.arange(len(x)) % 2 == 0

    monkeypatch.setattr(robustness, "holds", held)
    data = load_data("digits", test_images=60)
    attacks = [("linf", 8.0), ("l2", 128.0)]
    sizes = {"step_size": 1.0, "noise_std": 0.01}
    rows = robustness.robustness(Linear(), data, attacks, images=52, steps=1, noise=0.0, **sizes)
    assert {row["accuracy"] for row in rows} == {0.5}
    balls = [("none", 0.0), *attacks]
    assert radii == [(norm, 2 * radius / 255, n) for norm, radius in balls for n in (50, 2)]


def moments(x):
    """Three features of an image, and three logits."""
    flat = x.flatten(1)
    features = torch.stack((flat.mean(1), flat.std(1), flat[:, :20].mean(1)), dim=1)
    return features, 5 * features


MOMENTS = Features(moments, "moments", comparable=False, fixed=True)


def frechet(one, two):
    return frechet_distance(*(moments(x)[0] for x in (one, two)))


def test_each_score_is_of_its_images():
    trained = tiny_run(train_images=200, test_images=60)
    results = judged(trained, MOMENTS, 40)
    data = load_data("digits", train_images=200, test_images=60)
    train = data.scale(data.train_x)
    scores = results["scores"]
    assert [row["samples"] for row in scores.values()] == [40, 40, 40]
    samples = short_run_samples(trained, 40).clamp(-1, 1)
    assert scores["samples"]["fid"] == pytest.approx(frechet(train, samples), rel=1e-4)
    # Forty of sixty: two of each three.
    rows = [i for i in range(60) if i % 3 != 2]
    held_out = data.scale(data.test_x[rows])
    assert scores["held_out"]["fid"] == pytest.approx(frechet(train, held_out), rel=1e-4)
    noise = torch.rand(5000, 1, 8, 8, generator=rng(9)) * 2 - 1
    assert scores["noise"]["fid"] == pytest.approx(frechet(train, noise), rel=0.1)
    assert (results["reference_images"], results["step"], results["image_size"]) == (200, 6, 8)
    assert (results["features"], results["features_comparable"]) == ("moments", False)


def test_the_command_prints_and_stores_what_it_measured(tmp_path, capsys):
    path, judge = trained_folder(tmp_path / "run"), str(tmp_path / "judge")
    jem_folder(tmp_path / "judge")
    assert run(EvaluateShortRun(run=path, features=judge, count=30, device="cpu")) == 0
    stored = json.loads((path / "evaluation.json").read_text())
    expected = judged(load_run(path, CPU), load_features(judge, CPU), 30)
    assert stored == json.loads(json.dumps(expected))
    printed = capsys.readouterr().out
    assert table(stored) in printed
    for words in ("3 steps from noise", "uniform noise", "at 8x8", judge):
        assert words in printed


@pytest.mark.parametrize(
    ("stored", "settings", "says"),
    [
        ({"data": "mnist"}, {}, "a run on mnist, and .* is on digits; train the classifier with"),
        ({"image_size": 2}, {"image_size": 4}, "to 2x2, and .* is on digits averaged down to 4x4;"),
    ],
)
def test_features_of_other_images_are_refused(tmp_path, stored, settings, says):
    jem_folder(tmp_path / "judge", stored=stored)
    with pytest.raises(ConfigError, match=says):
        check_features(str(tmp_path / "judge"), tiny_run(**settings))
    jem_folder(tmp_path / "same", stored=settings)
    check_features(str(tmp_path / "same"), tiny_run(**settings))
    check_features("inception:file.pth", tiny_run())


def test_the_published_course_of_temperatures():
    course = temperatures(2700)
    assert (course[:500], course[500]) == ([100.0] * 500, 100.0)
    assert course[2499] == pytest.approx(1)
    assert (course[2500], course[-1]) == (1.0, 0.0)
    assert all(b <= a * (1 + 1e-12) for a, b in pairwise(course))
    cool = temperatures(2700, 1.0)
    assert cool[:2501] == pytest.approx([1.0] * 2501)
    assert cool[2501:] == course[2501:]


def test_annealed_chains_end_where_a_gaussian_is_densest():
    centre, std = 0.3, 0.05
    ends = anneal(
        lambda x: -((x - centre) / std).square().sum(1) / 2,
        torch.randn(200, 2, generator=rng(), dtype=WIDE),
        2000,
        0.0,
        rng(1),
    )
    assert (ends - centre).abs().mean() < std / 2
    # The last step is Tweedie's: of a Gaussian seen through noise, its own mean comes out.
    noisy = torch.randn(200, 2, generator=rng(2), dtype=WIDE)
    step = anneal(lambda x: -(x - centre).square().sum(1) / 2 / 0.1**2, noisy, 0, 0.1, rng(3))
    torch.testing.assert_close(step, torch.full_like(step, centre))


class Pull(DeepEnergy):  # type: ignore[misc]
    """E = |v - mean of h|^2 / 0.01 + |h - 1/4|^2 / 0.001: latents say how bright v is."""

    def energy(self, v, h):
        bright = (v - h.mean(1)[:, None, None, None]).square().flatten(1).sum(1)
        return (bright + 10 * (h - 0.25).square().sum(1)) / 0.01


def test_each_way_to_sample_is_of_its_density():
    data = load_data("digits", train_images=50, test_images=20)
    torch.manual_seed(0)
    posterior = GaussianPosterior((1, 8, 8), 3, (2, 2, 2))
    with torch.no_grad():  # every image's h are 0.6, but for a little
        posterior[-1].weight.zero_()
        posterior[-1].bias.copy_(torch.tensor([0.6, 0.6, 0.6, -5.0, -5.0, -5.0]))
    model = DeepModel(Pull((1, 8, 8), 3, 2, 3, "latent"), posterior)
    sampler = Sampler(model, data, 0.0, 600, rng())

    def off(v, h):  # of an image's mean: a pixel's own noise is 0.07
        assert v.shape == (20, 1, 8, 8)
        return (v.mean((1, 2, 3)) - h).abs().max()

    for h in (0.2, 0.9):
        assert off(sampler.given(torch.full((20, 3), h)), h) < 0.05
    of_images = from_images(data, model.means, sampler.given, rng(1), 20)
    assert off(of_images, 0.6) < 0.05
    for each in (sampler, replace(sampler, hottest=1.0)):
        assert off(each.marginal(20), 0.6) < 0.05
    # In (v, h) it is the model's own h that counts, not the posterior's.
    assert off(sampler.joint(20), 0.25) < 0.15


def test_the_frame_comes_off():
    data = load_data("digits", train_images=5, test_images=5, image_size=4)
    images = as_images(data, pixels(data, data.train_x))
    torch.testing.assert_close(images, data.scale(data.train_x))


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({}, ["marginal", "cool", "joint", "from_images"]),
        ({"posterior": "bernoulli"}, ["marginal", "cool", "from_images"]),
        ({"model": "wide"}, ["marginal", "cool"]),
        ({"method": "sr2"}, ["short_run", "long_run", "from_images"]),
    ],
    ids=["gaussian", "bernoulli", "wide", "short_run"],
)
def test_a_run_is_judged_from_its_checkpoint(tmp_path, capsys, options, kinds):
    folder = tmp_path / "run"
    DEEP.run(folder, iterations=3, evaluations=1, **options)
    jem_folder(tmp_path / "judge")
    words = ["evaluate", "bism", str(folder), "--features", str(tmp_path / "judge")]
    assert main([*words, "--samples", "12", "--chain-steps", "3"]) == 0
    said = capsys.readouterr().out
    found = json.loads((folder / "evaluation.json").read_text())
    assert list(found["scores"]) == [*kinds, "held_out", "noise"]
    assert (folder / "figures" / f"samples_{kinds[0]}.png").is_file()
    has_latents = "model" not in options
    assert ("accuracy" in found) == has_latents == ("linear classifier" in said)
    assert (folder / "figures" / "samples_interpolated.png").is_file() == has_latents
    _, model, *_ = bism.load_run(folder, CPU, None)
    assert found["parameters"] == sum(p.numel() for p in model.network.parameters())


def test_the_linear_classifier_is_of_what_it_is_given():
    data = load_data("digits", train_images=200, test_images=100)

    def label(x):  # by its place, since bytes alone do not say it
        known = data.train_y if len(x) == 200 else data.test_y
        return torch.nn.functional.one_hot(known, 10).float()

    assert linear_accuracy(data, label) == 1
    by_pixels = linear_accuracy(data, lambda x: data.scale(x).flatten(1))
    assert by_pixels == linear_accuracy(data, lambda x: 1e4 * data.scale(x).flatten(1) + 7)
    plain = LogisticRegression(max_iter=1000).fit(data.train_x.flatten(1), data.train_y)
    own = plain.score(data.test_x.flatten(1), data.test_y)
    assert by_pixels == pytest.approx(own, abs=0.08)
