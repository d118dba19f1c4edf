"""Chains in closed form: those of quadratic f are Gaussian processes, or leave for infinity."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest
import torch

from ebmguard.reference_training.studies import shortrun
from ebmguard.reference_training.studies.command import find
from tests.reference_training.parts import Function, Quadratic, rng, tiny_run, uniform
from tests.reference_training.studies.small import study_of

STOPS = (0, 3, 6, 15, 30, 60, 150, 300)
ENTRIES = 64
REFERENCES = ("data", "held-out")
CLIFF = Function(lambda x: torch.where(x.mean(1) > 0, 1e30 * x.mean(1).square(), 0 * x.mean(1)))
"""Flat, but for images of positive mean: those are thrown to infinity."""


def of(frame: pd.DataFrame, images: str = "chains") -> pd.DataFrame:
    return frame[frame["images"] == images].set_index("steps")


def long_run(network: torch.nn.Module, count: int = 32, **settings: Any) -> pd.DataFrame:
    run = tiny_run("model", network=network, **{"beta_star": 0.0, **settings})
    return study_of("long-run", run, count=count)


# -- for as long as in training, and for shorter and longer -----------------------------------


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
    frame = study_of("steps", run, count=40, seed=8)
    found, data, held_out = of(frame), *(frame[frame["images"] == n].iloc[0] for n in REFERENCES)
    z = uniform(40, 1, 8, 8, seed=8).double()
    for stop, row in found.iterrows():
        x = mean + (1 - step_size * 0.8 * strength) ** float(stop) * (z - mean)
        squares = (x - mean).square().flatten(1).sum(dim=1)
        assert row["f"] == pytest.approx(-strength / 2 * squares.mean().item(), rel=1e-4)
        slope = strength * squares.sqrt().mean().item()
        assert row["slope"] == pytest.approx(slope, rel=1e-4)
        contrast = x.flatten(1).std(dim=1, correction=0).mean().item()
        assert row["contrast"] == pytest.approx(contrast, rel=1e-4)
        assert row["contrast_of_data"] == pytest.approx(row["contrast"] / data["contrast"])
        ratio = row["distance"] / held_out["distance"]
        assert row["distance_of_held_out"] == pytest.approx(ratio)
        assert row["gap"] == pytest.approx(data["f"] - row["f"], rel=1e-12)
        torch.testing.assert_close(row["shown"].double(), x[:3], atol=1e-5, rtol=0)


def test_in_parts_all_chains_go_on(monkeypatch):
    monkeypatch.setattr(shortrun, "TOGETHER", 2)
    run = tiny_run(network=Quadratic(0.1), noise_std=1e-7, beta_star=0.0)
    found = of(study_of("steps", run, count=5))["f"]
    assert found[3] == pytest.approx(0.9**6 * found[0], rel=1e-4)


def test_lost_chains_have_no_numbers_and_the_others_are_measured():
    frame = study_of("steps", tiny_run(network=Quadratic(-1e30)), count=2)
    assert math.isfinite(of(frame)["contrast"][0])
    assert of(frame).loc[3, ["contrast", "excess", "distance"]].isna().all()
    assert find("steps").verdict(frame).endswith("cannot be told.")
    find("steps").drawn(frame)
    run = tiny_run(network=CLIFF, noise_std=1e-6, beta_star=0.0)
    last = of(study_of("long-run", run), "from noise").loc[300]
    positive = int((run.starts(32, rng()).mean(dim=(1, 2, 3)) > 0).sum())
    assert 0 < positive < 32
    assert last["finite"] == 32 - positive
    assert last["contrast"] == pytest.approx(math.sqrt(1 / 3), rel=0.05)


# -- a hundred times as long -------------------------------------------------------------------


@pytest.mark.parametrize("beta_star", [0.0, 400.0])
def test_mean_and_variance_follow_the_recursion(beta_star):
    a, m, sigma = 0.02, 0.3, 0.05
    frame = long_run(Quadratic(a, m), noise_std=sigma, beta_star=beta_star)
    # o = 2 / sigma**2 = 800: at 400 the drift is halved.
    decay = 1 - a * (1 - beta_star / 800)
    noise, data = of(frame, "from noise"), of(frame, "from data")
    for stop in STOPS:
        power = decay**stop
        variance = sigma**2 * (1 - power**2) / (1 - decay**2)
        # E f = -a/2 sum of (x - m)**2, from U(-1, 1) of mean 0 and variance 1/3.
        from_noise = power**2 / 3 + variance + (power * m) ** 2
        assert noise["f"][stop] == pytest.approx(-a / 2 * ENTRIES * from_noise, rel=0.06)
        drift = data["slope"][stop] * (1 - beta_star / 800)
        assert data["pull"][stop] == pytest.approx(drift / (sigma * math.sqrt(ENTRIES)))
        spread_of_noise = math.sqrt(power**2 / 3 + variance) / noise["variety"][stop]
        assert spread_of_noise == pytest.approx(math.sqrt(1 / 3) / noise["variety"][0], rel=0.06)
    # Both have forgotten where they came from: one distribution.
    steady = -a / 2 * ENTRIES * sigma**2 / (1 - decay**2)
    if beta_star == 0:
        assert noise["f"][300] == pytest.approx(steady, rel=0.06)
        assert data["f"][300] == pytest.approx(steady, rel=0.06)


@pytest.mark.parametrize(
    ("network", "settings", "beyond"),
    [
        # x grows by a tenth each step, and is 1.1**300 in the end: finite, and beyond all data.
        (Quadratic(-0.1), {}, ["contrast_above", "f_above"]),
        # To a grey image with a noise of 0.01 / sqrt(1 - 0.9**2).
        (Quadratic(0.1), {}, ["contrast_below", "f_above"]),
        # Moves all pixels up by one amount: contrast stays, f does not.
        (Function(lambda x: x.sum(1) / 10), {"noise_std": 1e-4}, ["f_above"]),
        # A flat f leaves data where they are.
        (Quadratic(0.0), {"noise_std": 1e-4}, []),
    ],
)
def test_chains_from_data_stay_where_they_are_beyond_no_quantile(network, settings, beyond):
    frame = long_run(network, count=8, **settings)
    last = of(frame, "from data").loc[300]
    names = ("contrast_above", "contrast_below", "f_above", "f_below")
    assert [name for name in names if last[name] >= 0.25] == beyond
    assert find("long-run").verdict(frame).endswith("does not hold." if beyond else ": holds.")
