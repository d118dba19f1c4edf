from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebmguard.reference_training.numbers import mean, median


@given(st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_median_is_that_of_numpy(values):
    assert median(values) == pytest.approx(np.median(values))


def test_a_nan_anywhere_is_a_nan():
    for place in range(3):
        values = [1.0, 2.0, 3.0]
        values[place] = math.nan
        found = median(values)
        assert found is not None
        assert math.isnan(found)


def test_nothing_has_no_median():
    assert median([]) is None


def test_infinities_are_numbers():
    assert median([math.inf, 1.0, 2.0]) == 2.0
    assert median([math.inf, math.inf, 2.0]) == math.inf


@given(st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_mean_is_that_of_numpy(values):
    assert mean(values) == pytest.approx(np.mean(values), abs=1e-9)


def test_a_mean_hides_nothing():
    assert mean([math.inf, 1.0]) == math.inf
    assert mean([-math.inf, 1.0]) == -math.inf
    for values in ([math.nan, 1.0], [math.inf, -math.inf], [math.nan, math.inf, -math.inf]):
        assert math.isnan(mean(values))
