"""Chains from the same noise, for as long as in training and for shorter and longer."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from ebmguard.reference_training.studies import shortrun_samples as module
from ebmguard.reference_training.studies.command import find
from ebmguard.reference_training.studies.config import ShortRunFigure
from ebmguard.reference_training.studies.measures import energy_distance
from tests.reference_training.shortrun.parts import Quadratic, tiny_run


def samples(*runs: Any, count: int | None = None, seed: int = 0) -> pd.DataFrame:
    config = ShortRunFigure(name="15", runs=(), count=count, seed=seed)
    return module.samples(runs, config)


def steps(*runs: Any, count: int = 4, seed: int = 0) -> pd.DataFrame:
    config = ShortRunFigure(name="steps", runs=(), count=count, seed=seed)
    return module.steps(runs, config)


def of(frame: pd.DataFrame, images: str = "chains") -> pd.DataFrame:
    return frame[frame["images"] == images].set_index("steps")


def test_runs_are_shown_the_same_starts_and_noise():
    first = tiny_run("a", beta_star=0.0, network=Quadratic(0.4), sgld_steps=3)
    x = samples(first, count=5, seed=7)["shown"][1]
    # A flat energy gives starts and noise themselves: x is what three steps make of them.
    generator = torch.Generator().manual_seed(7)
    expected = torch.rand((5, 1, 8, 8), generator=generator) * 2 - 1
    for z in torch.randn((3, 5, 1, 8, 8), generator=generator):
        expected = expected * (1 - 0.4) + 0.01 * z
    torch.testing.assert_close(x, expected)
    assert not torch.equal(x, samples(first, count=5, seed=8)["shown"][1])


@pytest.mark.parametrize(("count", "shown", "held_out"), [(25, 25, 20), (64, 30, 20)])
def test_the_images_to_compare_with_are_others_than_those_shown(
    monkeypatch, count, shown, held_out
):
    seen: list[Any] = []

    def quality(images: Any, reference: Any) -> dict[str, Any]:
        seen.append((images, reference))
        return {}

    monkeypatch.setattr(module, "quality", quality)
    run = tiny_run(train_images=60, test_images=20)
    own = samples(run, count=count)["shown"][0]
    test, reference = seen[-1]
    # Half of the images at most are shown.
    assert (len(own), len(reference), len(test)) == (shown, 60 - shown, held_out)
    both = torch.cat([own, reference]).flatten(1)
    everything = run.data.scale(run.data.train_x).flatten(1)
    np.testing.assert_array_equal(np.sort(both, axis=0), np.sort(everything, axis=0))
    torch.testing.assert_close(test, run.data.scale(run.data.test_x))


def test_quality_of_images_beyond_the_cube():
    reference = torch.rand((30, 1, 4, 4), generator=torch.Generator().manual_seed(0)) * 2 - 1
    images = reference[:10].clone()
    images[0, 0, 0, 0] = 3.0
    found = module.quality(images, reference)
    assert found["beyond"] == pytest.approx(2 / 160)
    expected = energy_distance(images.clamp(-1, 1).double(), reference.double())
    assert found["distance"] == pytest.approx(expected)
    assert found["mean"] == pytest.approx(float(images.mean()), abs=1e-6)
    assert found["std"] == pytest.approx(float(images.numpy().std()))
    images[3, 0, 1, 1] = math.nan
    images[4, 0, 1, 1] = math.inf
    lost = module.quality(images, reference)
    assert lost["not_finite"] == 2
    assert all(math.isnan(lost[name]) for name in ("distance", "mean", "std", "beyond"))


def test_lost_samples_are_counted_and_red():
    frame = samples(tiny_run(network=Quadratic(math.nan)))
    assert frame["not_finite"][1] == 64
    (figure,) = find("15").drawn(frame).values()
    assert (np.asarray(figure.axes[1].images[0].get_array())[10, 10] == (1, 0, 0)).all()


def test_the_stops_of_the_author_response():
    assert module.even_stops([100, 50]) == tuple(range(0, 201, 20))
    long = tiny_run("long", sgld_steps=10)
    frame = steps(long, tiny_run("drawn", sgld_steps=5, most_sgld_steps=6), count=2)
    assert list(of(frame).loc[of(frame)["run"] == "long"].index) == [
        *(0, 2, 4, 5, 6, 8, 10, 12, 14, 16, 18, 20)
    ]
    assert frame["most_K"].unique().tolist() == [10, 6]


def test_chains_on_a_quadratic_have_a_closed_form():
    """x <- x - s a (x - m) without noise: x_k = m + (1 - s a)^k (x_0 - m)."""
    strength, mean, step_size = 0.05, 0.3, 0.5
    # f of the sampler is (1 - β) f, and β* is β times 2 s / σ².
    run = tiny_run(
        network=Quadratic(strength, mean),
        step_size=step_size,
        noise_std=1e-7,
        beta_star=0.2 * 2 * step_size / 1e-14,
    )
    frame = steps(run, count=40, seed=8)
    found, data = of(frame), frame[frame["images"] == "data"].iloc[0]
    z = torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(8)).double() * 2 - 1
    for stop, row in found.iterrows():
        x = mean + (1 - step_size * 0.8 * strength) ** float(stop) * (z - mean)
        squares = (x - mean).square().flatten(1).sum(dim=1)
        assert row["f"] == pytest.approx(-strength / 2 * squares.mean().item(), rel=1e-4)
        slope = strength * squares.sqrt().mean().item()
        assert row["slope"] == pytest.approx(slope, rel=1e-4)
        contrast = x.flatten(1).std(dim=1, correction=0).mean().item()
        assert row["contrast"] == pytest.approx(contrast, rel=1e-4)
        assert row["gap"] == pytest.approx(data["f"] - row["f"], rel=1e-12)
        torch.testing.assert_close(row["shown"].double(), x[:3], atol=1e-5, rtol=0)


def test_the_noise_of_chains_adds_up_over_stops():
    """On a quadratic Var x_k = r^2k / 3 + σ² (1 - r^2k) / (1 - r²) with r = 1 - s a."""
    run = tiny_run(network=Quadratic(0.1), noise_std=0.2, beta_star=0.0)
    for stop, f in of(steps(run, count=300))["f"].items():
        kept = 0.9 ** (2 * stop)
        variance = kept / 3 + 0.2**2 * (1 - kept) / (1 - 0.9**2)
        assert math.sqrt(2 * -f / 0.1 / 64) == pytest.approx(math.sqrt(variance), rel=0.02)


def test_the_data_have_the_noise_of_training_and_the_references_have_none():
    frame = steps(tiny_run(data_noise=0.5), count=2)
    clean, data, held_out = (
        frame[frame["images"] == name].iloc[0]
        for name in ("data without noise", "data", "held-out")
    )
    assert clean["distance"] == clean["beyond"] == held_out["beyond"] == 0.0
    # Half of the noise at a black or white entry leaves the cube, on the mean by σ / sqrt(2 pi).
    assert data["beyond"] > 0.4 * clean["ends"]
    assert data["excess"] > 0.9 * clean["ends"] * 0.5 / math.sqrt(2 * math.pi)
    first = of(frame).loc[0]
    assert first["contrast_of_data"] == pytest.approx(first["contrast"] / data["contrast"])
    assert first["distance_of_data"] == pytest.approx(first["distance"] / held_out["distance"])
    assert math.isnan(first["colour_of_data"])  # of grey images, 0 over 0


def test_in_parts_all_chains_go_on(monkeypatch):
    monkeypatch.setattr(module, "BATCH", 2)
    run = tiny_run(network=Quadratic(0.1), noise_std=1e-7, beta_star=0.0)
    found = of(steps(run, count=5))["f"]
    assert found[3] == pytest.approx(0.9**6 * found[0], rel=1e-4)


def test_chains_that_are_lost_have_no_numbers():
    frame = steps(tiny_run(network=Quadratic(-1e30)), count=2)
    assert math.isfinite(of(frame)["contrast"][0])
    assert of(frame).loc[3, ["contrast", "beyond", "distance"]].isna().all()
    assert find("steps").verdict(frame).endswith("cannot be told.")
    find("steps").drawn(frame)


@pytest.mark.parametrize(
    ("early", "late", "held"),
    [(1.0, 1.5, True), (0.6, 1.1, True), (1.0, 0.5, False), (0.4, 0.8, False), (1, math.nan, None)],
)
def test_over_saturation_is_contrast_that_grows_beyond_that_of_the_data(early, late, held):
    rows = {"path": "a", "images": "chains", "K": 10, "steps": [10, 20]}
    assert module.over_saturated(pd.DataFrame({**rows, "contrast_of_data": [early, late]})) is held
