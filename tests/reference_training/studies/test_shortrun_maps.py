"""Chains and flows in closed form: those of quadratic f are Gaussian processes and linear maps."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest
import torch

from ebmguard.reference_training.studies import shortrun_flows as m
from ebmguard.reference_training.studies.command import find
from ebmguard.reference_training.studies.shortrun_chains import over_saturated, stops_of
from tests.reference_training.parts import Function, Quadratic, rng, tiny_run, uniform
from tests.reference_training.studies import small
from tests.reference_training.studies.small import study_of

STOPS = (0, 3, 6, 15, 30, 60, 150, 300)
ENTRIES = 64
CLIFF = Function(lambda x: torch.where(x.mean(1) > 0, 1e30 * x.mean(1).square(), 0 * x.mean(1)))
"""Flat, but for images of positive mean: those are thrown to infinity."""


def at_steps(frame: pd.DataFrame, images: str = "chains") -> pd.DataFrame:
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
    found = at_steps(frame)
    data, held_out = (frame[frame["images"] == n].iloc[0] for n in ("data", "held-out"))
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


def test_lost_chains_have_no_numbers_and_the_others_are_measured():
    run = tiny_run(network=CLIFF, noise_std=1e-6, beta_star=0.0)
    last = at_steps(study_of("long-run", run), "from noise").loc[300]
    positive = int((run.starts(32, rng()).mean(dim=(1, 2, 3)) > 0).sum())
    assert 0 < positive < 32
    assert last["finite"] == 32 - positive
    assert last["contrast"] == pytest.approx(math.sqrt(1 / 3), rel=0.05)


@pytest.mark.parametrize(
    ("early", "late", "held"),
    [(1.0, 1.5, True), (0.6, 1.1, True), (1.0, 0.5, False), (0.4, 0.8, False), (1, math.nan, None)],
)
def test_over_saturation_is_contrast_that_grows_beyond_that_of_the_data(early, late, held):
    rows = {"path": "a", "images": "chains", "K": 10, "steps": [10, 20]}
    assert over_saturated(pd.DataFrame({**rows, "contrast_of_data": [early, late]})) is held


# -- a hundred times as long -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trained", "last", "stops"),
    [
        (3, 300, STOPS),
        # Beside a run of more steps: the common end is no multiple of its own kind.
        (20, 10_000, (0, 20, 40, 100, 200, 400, 1000, 2000, 4000, 10_000)),
        (7, 7, (0, 7)),
    ],
)
def test_schedule(trained, last, stops):
    assert stops_of(trained, last) == [*stops]


@pytest.mark.parametrize("beta_star", [0.0, 400.0])
def test_mean_and_variance_follow_the_recursion(beta_star):
    a, m, sigma = 0.02, 0.3, 0.05
    frame = long_run(Quadratic(a, m), noise_std=sigma, beta_star=beta_star)
    # o = 2 / sigma**2 = 800: at 400 the drift is halved.
    decay = 1 - a * (1 - beta_star / 800)
    noise, data = at_steps(frame, "from noise"), at_steps(frame, "from data")
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
    last = at_steps(frame, "from data").loc[300]
    names = ("contrast_above", "contrast_below", "f_above", "f_below")
    assert [name for name in names if last[name] >= 0.25] == beyond
    assert find("long-run").verdict(frame).endswith("does not hold." if beyond else ": holds.")


INVERSES, COUNT = 18, 6
FACTOR = (1 - 0.2) ** 3
"""Of K = 3 steps on -0.1 |x|²: M(z) is this times z, in every one of D = 64 dimensions."""
BITS = 1 + math.log2(FACTOR) + 3
"""Per dimension, of any image: a box of 2 FACTOR a side, in levels of 0..16."""
RUN = small.flows()[0]


@pytest.fixture(scope="module")
def few_iterations():
    """Of a hundred; numbers are recorded with all, and these have come as near."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(m, "STAGES", (0, 5, 20))
        yield


@pytest.fixture(scope="module")
def inverses(few_iterations) -> pd.DataFrame:
    """Of the linear run, whose numbers are the recorded ones with those of another."""
    found = small.recorded("reconstruction", small.flows(), INVERSES)
    return found[found["run"] == RUN.name]


@pytest.fixture(scope="module")
def bits(few_iterations) -> pd.DataFrame:
    """The same of densities."""
    found = small.recorded("likelihood", small.flows(), COUNT)
    return found[found["run"] == RUN.name].reset_index(drop=True)


def one(frame: pd.DataFrame, **words: str) -> Any:
    """The first row with these words."""
    return frame[(frame[list(words)] == list(words.values())).all(axis=1)].iloc[0]


@pytest.mark.parametrize("kind", [m.HELD_OUT, m.PERMUTED, m.NOISE])
def test_a_map_that_shrinks_reaches_everything_free_and_its_own_cube_else(inverses, kind):
    free, cube = (one(inverses, network=m.TRAINED, images=kind, z=z) for z in (m.FREE, m.CUBE))
    assert free["errors"].max() < 1e-10
    expected = (cube["target"].abs() - FACTOR).clamp(min=0).square().flatten(1).mean(1)
    assert cube["errors"].tolist() == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-6)
    assert (cube["outside"], cube["largest"]) == (0, 1)
    outside = (free["target"].abs() > FACTOR).double().mean().item()
    assert free["outside"] == pytest.approx(outside)
    largest = free["target"].abs().max().item() / FACTOR
    assert free["largest"] == pytest.approx(largest, rel=1e-4)


@pytest.mark.parametrize(
    ("data", "others", "held"),
    [
        (0.2, 0.5, "holds."),
        (0.5, 0.2, "does not hold."),
        # What is left of an image that is reached is rounding, or nothing.
        (1e-9, 1e-7, "cannot be told."),
        (0.0, 0.0, "cannot be told."),
    ],
)
def test_what_is_rounding_tells_data_from_nothing(inverses, data, others, held):
    kinds = inverses["images"] == m.HELD_OUT
    frame = inverses.assign(of_variance=kinds.map({True: data, False: others}))
    assert find("reconstruction").verdict(frame).endswith(f": {held}")


def test_bits_of_a_linear_flow_are_those_of_its_box(bits):
    flows = bits[bits["density"] == m.FLOW]
    assert flows[["images", "z"]].to_numpy().tolist() == [
        [m.STORED, m.FREE],
        *([kind, m.CUBE] for kind in (m.STORED, m.NOISY, m.DEQUANTISED)),
        [m.OWN, m.DRAWN],
    ]
    for row in flows.to_dict("records"):
        assert row["bits"].tolist() == pytest.approx([BITS] * COUNT, abs=1e-6)
        assert row["folded"] == 0
        expected = [k / 3 * math.log2(FACTOR) for k in range(4)]
        assert row["log2_det_per_dim"].tolist() == pytest.approx(expected, abs=1e-6)


def test_the_map_is_that_of_the_tempered_sampler(few_iterations):
    # β = β*/o is a half: f counts half in every step.
    run = tiny_run("model", network=Quadratic(0.2), activation="gelu", beta_star=10_000.0)
    found = one(study_of("likelihood", run, count=2), z=m.FREE)
    assert found["bits"][0] == pytest.approx(4 + 3 * math.log2(1 - 0.1), abs=1e-6)
    found = one(study_of("reconstruction", run, count=3), network=m.TRAINED, z=m.FREE)
    assert found["largest"] == pytest.approx(1 / 0.9**3, rel=1e-4)
