"""`ebmguard evaluate` of short-run and latent-variable models: scores of the right images."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from ebmguard.cli import main
from ebmguard.reference_training.bism.deep import DeepEnergy, DeepModel, pixels
from ebmguard.reference_training.bism.posterior import GaussianPosterior
from ebmguard.reference_training.data import load_data
from ebmguard.reference_training.judge import bism
from ebmguard.reference_training.judge.bism import (
    Sampler,
    as_images,
    from_images,
)
from ebmguard.reference_training.judge.chains import temperatures
from ebmguard.reference_training.judge.shortrun import (
    short_run_samples,
)
from tests.reference_training.judge.parts import frechet as frechet_distance
from tests.reference_training.judge.parts import jem_folder
from tests.reference_training.parts import CPU, DEEP, Quadratic, rng, tiny_run


def moments(x):
    """Three features of an image, and three logits."""
    flat = x.flatten(1)
    features = torch.stack((flat.mean(1), flat.std(1), flat[:, :20].mean(1)), dim=1)
    return features, 5 * features


def frechet(one, two):
    return frechet_distance(*(moments(x)[0] for x in (one, two)))


def test_samples_have_gone_through_the_chains():
    # One step of a parabola goes to its middle, but for the noise of that step.
    trained = tiny_run(network=Quadratic(1.0, 0.25), beta_star=0.0, sgld_steps=1)
    samples = short_run_samples(trained, 60)
    assert samples.shape == (60, 1, 8, 8)
    assert float(samples.mean()) == pytest.approx(0.25, abs=0.001)
    assert float(samples.std()) == pytest.approx(0.01, rel=0.05)
    assert torch.equal(short_run_samples(trained, 60), samples)


def test_the_published_course_of_temperatures():
    course = temperatures(2700)
    assert (course[:500], course[500]) == ([100.0] * 500, 100.0)
    assert course[2499] == pytest.approx(1)
    assert (course[2500], course[-1]) == (1.0, 0.0)
    assert all(b <= a * (1 + 1e-12) for a, b in pairwise(course))
    cool = temperatures(2700, 1.0)
    assert cool[:2501] == pytest.approx([1.0] * 2501)
    assert cool[2501:] == course[2501:]


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


@pytest.mark.parametrize("size", [4, 8])
def test_the_frame_comes_off(size):
    data = load_data("digits", train_images=5, test_images=5, image_size=size)
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
    assert [row["samples"] for row in found["scores"].values()] == [12] * (len(kinds) + 2)
    assert (folder / "figures" / f"samples_{kinds[0]}.png").is_file()
    has_latents = "model" not in options
    assert ("accuracy" in found) == has_latents == ("linear classifier" in said)
    assert (folder / "figures" / "samples_interpolated.png").is_file() == has_latents
    assert bism.load_run(folder, CPU, "elsewhere")[0].data_root == "elsewhere"
    trained, model, *_ = bism.load_run(folder, CPU, None)
    assert trained.data_root is None
    assert found["parameters"] == sum(p.numel() for p in model.network.parameters())
