"""Figure "likelihood": a model whose densities are known, and what follows from its numbers."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest
import torch

from ebmguard.errors import ConfigError
from ebmguard.reference_training.studies import shortrun_bits as module
from ebmguard.reference_training.studies import shortrun_inverses
from ebmguard.reference_training.studies.command import find
from ebmguard.reference_training.studies.shortrun_bits import (
    CUBE,
    DEQUANTISED,
    DRAWN,
    ENTROPY,
    FLOW,
    FREE,
    GAUSSIAN,
    NOISY,
    OWN,
    PIXELS,
    STORED,
    UNIFORM,
)
from tests.reference_training.pictures import assert_no_text_on_text
from tests.reference_training.shortrun.parts import Quadratic, tiny_run
from tests.reference_training.studies import small

COUNT = 6
STRENGTH = 0.2
FACTOR = (1 - STRENGTH) ** 3
"""Of K = 3 steps on -0.1 |x|²: M(z) is this times z, in every one of D = 64 dimensions."""
BITS = 1 + math.log2(FACTOR) + 3
"""Per dimension, of any image: a box of 2 FACTOR a side, in levels of 0..16."""


def shrinking(**settings: Any) -> Any:
    given: dict[str, Any] = {"activation": "gelu", "beta_star": 0.0, **settings}
    return tiny_run("model", network=Quadratic(STRENGTH), **given)


def bits(run: Any, count: int = COUNT) -> pd.DataFrame:
    return small.study_of("likelihood", run, count=count)


@pytest.fixture(scope="module", autouse=True)
def _few_iterations():
    """Of a hundred; numbers are recorded with all, and these have come as near."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shortrun_inverses, "STAGES", (0, 5, 20))
        yield


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    """Of the linear run, whose numbers are the recorded ones with those of another."""
    found = small.recorded("likelihood", small.flows(), COUNT)
    return found[found["run"] == "linear"].reset_index(drop=True)


def one(frame: pd.DataFrame, images: str, z: str | None = CUBE, density: str = FLOW) -> Any:
    rows = frame[(frame["density"] == density) & (frame["images"] == images)]
    return rows[rows["z"] == z].iloc[0] if z else rows.iloc[0]


def test_bits_of_a_linear_flow_are_those_of_its_box(frame):
    flows = frame[frame["density"] == FLOW]
    assert flows[["images", "z"]].to_numpy().tolist() == [
        [STORED, FREE],
        [STORED, CUBE],
        [NOISY, CUBE],
        [DEQUANTISED, CUBE],
        [OWN, DRAWN],
    ]
    for row in flows.to_dict("records"):
        assert row["bits"].tolist() == pytest.approx([BITS] * COUNT, abs=1e-6)
        assert row["flips"].tolist() == [0] * COUNT
        expected = [k / 3 * math.log2(FACTOR) for k in range(4)]
        assert row["log2_det_per_dim"].tolist() == pytest.approx(expected, abs=1e-6)


def test_outside_of_the_flows_box_z_is_not_in_the_cube(frame):
    free, cube = one(frame, STORED, FREE), one(frame, STORED)
    # Every digit has black pixels, at -1, where the flow does not come from within the cube.
    assert free["in_cube"] == 0
    assert free["miss"] < 1e-3
    assert cube["in_cube"] == 1
    expected = (cube["target"].abs() - FACTOR).clamp(min=0).square().mean().sqrt().item()
    assert cube["miss"] == pytest.approx(expected, rel=1e-3)


def test_what_lies_in_the_box_has_a_density():
    z = torch.full((2, 1, 8, 8), 0.5)
    found = module._flow(shrinking(), STORED, FREE, torch.zeros_like(z), z)
    assert found["in_cube"] == 1
    # M(z) is computed anew, and so is its distance from the image.
    torch.testing.assert_close(found["x"], torch.full_like(found["x"], FACTOR / 2))
    assert found["misses"].tolist() == pytest.approx([FACTOR / 2] * 2)


def test_the_map_is_that_of_the_tempered_sampler():
    # β = β*/o is a half: f counts half in every step.
    found = one(bits(shrinking(beta_star=10_000.0), count=2), STORED, FREE)
    assert found["bits"][0] == pytest.approx(4 + 3 * math.log2(1 - STRENGTH / 2), abs=1e-6)


def test_images_are_held_out_and_noise_is_as_said(frame):
    run = shrinking()
    test = {tuple(row.tolist()) for row in run.data.scale(run.data.test_x).flatten(1)}
    stored = one(frame, STORED)["target"]
    assert all(tuple(row.tolist()) in test for row in stored.flatten(1))
    assert len({tuple(row.tolist()) for row in stored.flatten(1)}) == COUNT
    noise = one(frame, NOISY)["target"] - stored
    assert noise.std().item() == pytest.approx(run.settings.data_noise, rel=0.2)
    cells = (one(frame, DEQUANTISED)["target"] - stored) * run.data.levels / 2
    assert float(cells.abs().max()) <= 0.5 + 1e-5
    assert cells.std().item() == pytest.approx(12**-0.5, rel=0.2)


def test_its_own_images_are_where_its_starts_lead(frame):
    drawn = one(frame, OWN, DRAWN)
    assert drawn["in_cube"] == 1
    assert drawn["misses"].tolist() == [0.0] * COUNT
    # A uniform box of 2 FACTOR a side.
    assert FACTOR * 0.99 < float(drawn["x"].abs().max()) <= FACTOR
    assert drawn["x"].std().item() == pytest.approx(FACTOR * 3**-0.5, rel=0.05)


def test_references_are_densities_of_the_same_images(frame):
    assert one(frame, STORED, None, UNIFORM)["bits"].tolist() == [4.0] * COUNT
    run = shrinking()
    noise, rows = run.settings.data_noise, run.data.scale(run.data.train_x).flatten(1).double()
    covariance = torch.cov(rows.T, correction=0) + noise**2 * torch.eye(64)
    density = torch.distributions.MultivariateNormal(rows.mean(0), covariance)
    pixels = torch.distributions.Normal(rows.mean(0), covariance.diagonal().sqrt())
    for images in (STORED, NOISY, DEQUANTISED):
        x = one(frame, images)["target"].flatten(1).double()
        for name, nats in ((GAUSSIAN, density.log_prob(x)), (PIXELS, pixels.log_prob(x).sum(1))):
            expected = -nats / (64 * math.log(2)) + 3
            assert one(frame, images, None, name)["bits"].tolist() == pytest.approx(
                expected.tolist()
            )
    # Entropy of N(0, (8 * noise)²), in bits.
    entropy = 0.5 * math.log2(2 * math.pi * math.e * (8 * noise) ** 2)
    assert one(frame, NOISY, None, ENTROPY)["mean"] == pytest.approx(entropy)


def test_without_noise_in_the_training_there_is_no_reading_of_it():
    found = bits(shrinking(data_noise=0.0), count=2)
    assert found["images"].tolist() == [STORED, STORED, DEQUANTISED, OWN, STORED]
    assert found["density"].tolist() == [*[FLOW] * 4, UNIFORM]
    find("likelihood").drawn(found)
    assert find("likelihood").verdict(found).endswith(": cannot be told.")


def test_fewer_bits_than_the_noise_has_are_no_likelihoods(frame):
    study = find("likelihood")
    assert study.verdict(frame).endswith(": holds.")
    # A box of half a level has fewer bits than noise of a quarter of a level, and cannot hold it.
    flows = frame["density"] == FLOW
    less = frame.assign(mean=frame["mean"].where(~flows, frame["mean"] - 6))
    assert study.verdict(less).endswith(": does not hold.")


@pytest.mark.parametrize(
    ("values", "middle"),
    [
        ([3.0, 1.0, 2.0], 2.0),
        ([1.0, math.inf], math.inf),
        ([-math.inf, 1.0, 2.0], 1.0),
        ([math.inf, math.nan, 1.0], math.nan),
    ],
)
def test_medians_of_what_may_be_infinite(values, middle):
    found = module._spread(torch.tensor(values))
    assert found["median"] == pytest.approx(middle, nan_ok=True)
    least = math.nan if math.isnan(middle) else min(values)
    assert found["least"] == pytest.approx(least, nan_ok=True)


def test_determinants_that_are_not_finite_are_not_drawn(frame):
    rows = frame.copy()
    rows.at[0, "bits"] = [-math.inf, math.nan, *frame["bits"][0][2:]]
    rows["bits"] = rows["bits"].map(lambda own: own if own is None else torch.tensor(own).numpy())
    (figure,) = find("likelihood").drawn(rows).values()
    assert_no_text_on_text(figure)


def test_a_network_without_second_derivatives_is_refused():
    with pytest.raises(ConfigError, match="--activation gelu"):
        bits(shrinking(activation="leaky_relu"))
