"""The map of a linear flow, whose inverse and whose densities are known, and what follows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from ebmguard.errors import ConfigError
from ebmguard.reference_training.studies import shortrun_flows as m
from ebmguard.reference_training.studies.command import find
from tests.reference_training.parts import Quadratic, tiny_run
from tests.reference_training.studies import small
from tests.reference_training.studies.small import assert_no_text_on_text

INVERSES, COUNT = 18, 6
FACTOR = (1 - 0.2) ** 3
"""Of K = 3 steps on -0.1 |x|²: M(z) is this times z, in every one of D = 64 dimensions."""
BITS = 1 + math.log2(FACTOR) + 3
"""Per dimension, of any image: a box of 2 FACTOR a side, in levels of 0..16."""
RUN = small.flows()[0]


def shrinking(**settings: Any) -> Any:
    given: dict[str, Any] = {"activation": "gelu", "beta_star": 0.0, **settings}
    return tiny_run("model", network=Quadratic(0.2), **given)


@pytest.fixture(scope="module", autouse=True)
def _few_iterations():
    """Of a hundred; numbers are recorded with all, and these have come as near."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(m, "STAGES", (0, 5, 20))
        yield


@pytest.fixture(scope="module")
def inverses() -> pd.DataFrame:
    """Of the linear run, whose numbers are the recorded ones with those of another."""
    found = small.recorded("reconstruction", small.flows(), INVERSES)
    return found[found["run"] == RUN.name]


@pytest.fixture(scope="module")
def bits() -> pd.DataFrame:
    """The same of densities."""
    found = small.recorded("likelihood", small.flows(), COUNT)
    return found[found["run"] == RUN.name].reset_index(drop=True)


def one(frame: pd.DataFrame, **words: str) -> Any:
    """The first row with these words."""
    return frame[(frame[list(words)] == list(words.values())).all(axis=1)].iloc[0]


# -- reconstruction ---------------------------------------------------------------------------


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


# -- likelihood -------------------------------------------------------------------------------


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


def test_the_map_is_that_of_the_tempered_sampler():
    # β = β*/o is a half: f counts half in every step.
    run = shrinking(beta_star=10_000.0)
    found = one(small.study_of("likelihood", run, count=2), z=m.FREE)
    assert found["bits"][0] == pytest.approx(4 + 3 * math.log2(1 - 0.1), abs=1e-6)
    found = one(small.study_of("reconstruction", run, count=3), network=m.TRAINED, z=m.FREE)
    assert found["largest"] == pytest.approx(1 / 0.9**3, rel=1e-4)


def test_references_are_densities_of_the_same_images(bits):
    assert one(bits, density=m.UNIFORM)["bits"].tolist() == [4.0] * COUNT
    noise, rows = RUN.settings.data_noise, RUN.data.scale(RUN.data.train_x).flatten(1).double()
    covariance = torch.cov(rows.T, correction=0) + noise**2 * torch.eye(64)
    density = torch.distributions.MultivariateNormal(rows.mean(0), covariance)
    for images in (m.STORED, m.NOISY, m.DEQUANTISED):
        x = one(bits, images=images, z=m.CUBE)["target"].flatten(1).double()
        expected = -density.log_prob(x) / (64 * math.log(2)) + 3
        found = one(bits, density=m.GAUSSIAN, images=images)["bits"]
        assert found.tolist() == pytest.approx(expected.tolist())
    # Entropy of N(0, (8 * noise)²), in bits.
    entropy = 0.5 * math.log2(2 * math.pi * math.e * (8 * noise) ** 2)
    assert one(bits, density=m.ENTROPY)["mean"] == pytest.approx(entropy)


def test_fewer_bits_than_the_noise_are_no_likelihoods_and_infinities_are_not_drawn(bits):
    verdict = find("likelihood").verdict
    assert verdict(bits).endswith(": holds.")
    # A box of half a level has fewer bits than noise of a quarter of a level, and cannot hold it.
    flows = bits["density"] == m.FLOW
    less = bits.assign(mean=bits["mean"].where(~flows, bits["mean"] - 6))
    assert verdict(less).endswith(": does not hold.")
    rows = bits.copy()
    rows.at[0, "bits"] = np.array([-math.inf, math.nan, *bits["bits"][0][2:]])
    (figure,) = find("likelihood").drawn(rows).values()
    assert_no_text_on_text(figure)


def test_a_network_without_second_derivatives_is_refused():
    with pytest.raises(ConfigError, match="--activation gelu"):
        small.study_of("likelihood", shrinking(activation="leaky_relu"), count=2)
