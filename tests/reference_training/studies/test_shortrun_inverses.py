"""Figure "reconstruction": a model whose inverse is known, and what follows from its numbers."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch

from ebmguard.reference_training.studies import shortrun_inverses
from ebmguard.reference_training.studies.command import find
from ebmguard.reference_training.studies.shortrun_inverses import (
    CONTROLS,
    CUBE,
    FREE,
    HELD_OUT,
    NEAREST,
    NOISE,
    PERMUTED,
    TRAINED,
    UNTRAINED,
    prefers_data,
)
from tests.reference_training.shortrun.parts import Quadratic, tiny_run
from tests.reference_training.studies import small

COUNT = 18
FACTOR = (1 - 0.2) ** 3
"""Of K = 3 steps on -0.1 |x|²: M(z) is this times z, and its cube reaches as far."""


RUN = small.flows()[0]


@pytest.fixture(scope="module", autouse=True)
def _few_iterations():
    """Of a hundred; numbers are recorded with all, and these have come as near."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shortrun_inverses, "STAGES", (0, 5, 20))
        yield


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    """Of the linear run, whose numbers are the recorded ones with those of another."""
    found = small.recorded("reconstruction", small.flows(), COUNT)
    return found[found["run"] == RUN.name]


def one(frame: pd.DataFrame, network: str, images: str = HELD_OUT, z: str | None = CUBE) -> Any:
    rows = frame[(frame["network"] == network) & (frame["images"] == images)]
    return rows[rows["z"] == z].iloc[0] if z else rows.iloc[0]


@pytest.mark.parametrize("kind", [HELD_OUT, PERMUTED, NOISE])
def test_a_map_that_shrinks_reaches_everything_free_and_its_own_cube_else(frame, kind):
    free, cube = one(frame, TRAINED, kind, FREE), one(frame, TRAINED, kind)
    assert free["errors"].max() < 1e-10
    expected = (cube["target"].abs() - FACTOR).clamp(min=0).square().flatten(1).mean(1)
    assert cube["errors"].tolist() == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-6)
    assert (cube["outside"], cube["largest"]) == (0, 1)
    outside = (free["target"].abs() > FACTOR).double().mean().item()
    assert free["outside"] == pytest.approx(outside)
    largest = free["target"].abs().max().item() / FACTOR
    assert free["largest"] == pytest.approx(largest, rel=1e-4)


def test_what_is_reconstructed(frame):
    x = one(frame, TRAINED)["target"]
    held_out = {tuple(image.flatten().tolist()) for image in RUN.data.scale(RUN.data.test_x)}
    assert len({tuple(image.flatten().tolist()) for image in x} & held_out) == COUNT
    permuted = one(frame, TRAINED, PERMUTED)["target"]
    assert len(permuted) == CONTROLS
    some = x[:CONTROLS].flatten(1)
    torch.testing.assert_close(permuted.flatten(1).sort(1).values, some.sort(1).values)
    # One order for all images: equal pixels of all images stay so, and pairs keep their distance.
    apart = torch.cdist(permuted.flatten(1), permuted.flatten(1))
    torch.testing.assert_close(apart, torch.cdist(some, some), rtol=1e-4, atol=1e-3)
    assert not torch.equal(permuted, x[:CONTROLS])
    assert torch.equal(one(frame, UNTRAINED)["target"], x[:CONTROLS])
    assert len(one(frame, TRAINED)["course"]) == 20 + 1


def test_shares_of_the_variance(frame):
    mean = RUN.data.scale(RUN.data.train_x).mean(0)
    own = one(frame, TRAINED)
    variance = (own["target"] - mean).square().mean().item()
    assert own["variance"] == pytest.approx(variance, rel=1e-5)
    assert one(frame, NEAREST, z=None)["principal"][0] == pytest.approx(variance, rel=1e-5)
    assert one(frame, "mean training image", z=None)["of_variance"] == pytest.approx(1)
    assert own["of_variance"] == pytest.approx(own["errors"].mean() / variance, rel=1e-5)
    assert one(frame, TRAINED, NOISE)["variance"] == pytest.approx(1 / 3, rel=0.15)
    # The figure has a row for each kind and network, and for each baseline.
    assert len(frame) == 8 + 3


def test_the_nearest_training_image_is_searched_among_all(frame):
    near, x = one(frame, NEAREST, z=None), one(frame, TRAINED)["target"]
    train = RUN.data.scale(RUN.data.train_x)
    errors = (train[None] - x[:, None]).square().flatten(2).mean(2)
    assert near["errors"].tolist() == pytest.approx(errors.min(1).values.tolist(), rel=1e-5)
    assert torch.equal(near["target"], train[errors.argmin(1)])


def test_a_cube_that_shrinks_reaches_noise_more_easily_than_digits(frame):
    assert find("reconstruction").verdict(frame).endswith("than of other images: does not hold.")


@pytest.mark.parametrize(
    ("data", "others", "held"),
    [
        (0.2, 0.5, True),
        (0.2, 0.2, False),
        (0.5, 0.2, False),
        # What is left of an image that is reached is rounding, or nothing.
        (1e-9, 1e-7, None),
        (0.0, 0.0, None),
        (0.0, 0.1, True),
        (0.1, 0.0, False),
    ],
)
def test_what_is_rounding_tells_data_from_nothing(frame, data, others, held):
    kinds = frame["images"] == HELD_OUT
    assert prefers_data(frame.assign(of_variance=kinds.map({True: data, False: others}))) is held


def test_the_map_is_that_of_the_tempered_sampler():
    # β = β*/o is a half: f counts half in every step.
    run = tiny_run("two", network=Quadratic(0.2), activation="gelu", beta_star=10_000.0)
    found = small.study_of("reconstruction", run, count=3)
    assert one(found, TRAINED, z=FREE)["largest"] == pytest.approx(1 / 0.9**3, rel=1e-4)
