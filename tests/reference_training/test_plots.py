"""Images and numbers as people see them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from ebmguard.reference_training.plots.images import (
    as_bytes,
    load_samples,
)
from ebmguard.reference_training.plots.numbers import mean, median


def test_kept_bytes_are_clamped_and_come_back_within_half_a_level(tmp_path):
    x = torch.tensor([-7.0, -1.0, 0.0, 1.0, 7.0, math.inf, -math.inf, math.nan])
    assert as_bytes(x).tolist() == [0, 0, 128, 255, 255, 255, 0, 0]
    x = torch.linspace(-1, 1, 3 * 16 * 16, dtype=torch.float64).reshape(1, 3, 16, 16)
    np.save(tmp_path / "x.npy", as_bytes(x).numpy())
    back = load_samples(tmp_path / "x.npy")
    assert back.dtype == torch.float32
    # Half a level of 2 / 255, and a rounding of numbers of size 1.
    assert (back - x).abs().max() <= 1 / 255 + torch.finfo(torch.float32).eps


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("of", "values", "expected"),
    [
        *((median, values, NAN) for values in itertools.permutations([1.0, 2.0, NAN])),
        (median, [], None),
        (median, [INF, 1.0, 2.0], 2.0),
        (median, [INF, INF, 2.0], INF),
        (mean, [INF, 1.0], INF),
        (mean, [-INF, 1.0], -INF),
        *((mean, values, NAN) for values in ([NAN, 1.0], [INF, -INF], [NAN, INF, -INF])),
    ],
)
def test_what_is_undefined_stays_so_and_infinities_are_numbers(of, values, expected):
    assert of(values) == pytest.approx(expected, nan_ok=True)
