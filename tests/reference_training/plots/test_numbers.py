from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebmguard.reference_training.plots.numbers import mean, median, number

NAN, INF = math.nan, math.inf


@given(st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_mean_and_median_are_those_of_numpy(values):
    assert median(values) == pytest.approx(np.median(values))
    assert mean(values) == pytest.approx(np.mean(values), abs=1e-9)


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


@pytest.mark.parametrize(
    ("value", "digits", "words"),
    [
        (math.nan, 3, "undefined"),
        (math.inf, 2, "∞"),
        (-math.inf, 3, "−∞"),
        (None, 3, "–"),
        (0.0, 2, "0"),
        (0.0864, 2, "0.086"),
        (8.04, 2, "8"),
        (99.4, 2, "99"),
        (99.7, 2, "100"),
        (999.7, 3, "1,000"),
        (-1234.5, 3, "-1,234"),
        (2.5e7, 2, "2.5e+07"),
    ],
)
def test_numbers_as_people_read_them(value, digits, words):
    assert number(value, digits) == words


@given(st.floats(1e-4, 1e6, exclude_max=True), st.sampled_from([2, 3]))
def test_numbers_of_everyday_size_are_no_powers_of_ten(value, digits):
    text = number(value, digits)
    assert "e" not in text
    assert float(text.replace(",", "")) == pytest.approx(value, rel=0.5 * 10 ** (1 - digits))
