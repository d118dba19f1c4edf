from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ebmguard.reference_training.engine.rows import last_course, series
from tests.reference_training.jem.table.fabricate import write_lines


@given(st.lists(st.integers(0, 9), max_size=30))
def test_the_last_course_is_what_a_reader_with_an_array_would_keep(steps):
    rows = [{"step": step, "row": i} for i, step in enumerate(steps)]
    kept: dict[int, int] = {}
    for row in rows:
        kept = {step: i for step, i in kept.items() if step < row["step"]}
        kept[row["step"]] = row["row"]
    assert {row["step"]: row["row"] for row in last_course(rows)} == kept
    assert [row["step"] for row in last_course(rows)] == sorted(kept)


def test_series_are_the_lines_with_what_is_not_finite(tmp_path):
    write_lines(
        tmp_path / "metrics.jsonl",
        [
            {"step": 0, "energy_gap": 0.5, "ess": 1.0},
            {"step": 1, "energy_gap": math.inf},
            {"step": 2, "energy_gap": 7.0},
            {"step": 3, "energy_gap": 8.0},
            {"step": 1, "energy_gap": -math.inf, "ess": 0.25},
            {"step": 2, "energy_gap": math.nan, "ess": 0.5},
        ],
    )
    steps, values = series(tmp_path, ["energy_gap", "ess"])
    assert steps.tolist() == [0, 1, 2]
    # The later line of a step counts, and gives up what came after the earlier one.
    np.testing.assert_array_equal(values["energy_gap"], [0.5, -math.inf, math.nan])
    np.testing.assert_array_equal(values["ess"], [1.0, 0.25, 0.5])
