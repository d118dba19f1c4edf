"""Bundles against loops in plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.scale import SymmetricalLogTransform

from ebmguard.reference_training.studies.jem_progress import LINTHRESH, bundle, bundle_size

AXIS = SymmetricalLogTransform(base=10, linthresh=LINTHRESH, linscale=1)
finite = st.floats(-1e12, 1e12)
anything = st.one_of(finite, st.sampled_from([math.nan, math.inf, -math.inf]))


@given(st.lists(anything, max_size=40), st.integers(1, 12), st.integers(1, 3))
def test_bundles_are_those_of_a_loop(values, size, stride):
    steps = np.arange(len(values)) * stride
    found = bundle(steps, np.array(values, dtype=float), size)
    starts = range(0, len(values), size)
    assert len(found["steps"]) == len(starts)
    for k, start in enumerate(starts):
        part = values[start : start + size]
        known = [value for value in part if math.isfinite(value)]
        assert found["lost"][k] == len(part) - len(known)
        assert found["steps"][k] == pytest.approx(np.mean(steps[start : start + size]))
        if not known:
            assert math.isnan(found["low"][k])
            assert math.isnan(found["high"][k])
            assert math.isnan(found["centre"][k])
            continue
        assert (found["low"][k], found["high"][k]) == (min(known), max(known))
        places = [float(AXIS.transform(np.array([value]))[0]) for value in known]
        expected = AXIS.inverted().transform(np.array([math.fsum(places) / len(places)]))
        assert found["centre"][k] == pytest.approx(float(expected[0]), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    ("longest", "size"), [(140_600, 200), (8_000, 200), (7_999, 199), (600, 15), (30, 1), (0, 1)]
)
def test_short_runs_have_fewer_values_a_point(longest, size):
    assert bundle_size(longest) == size
