from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebmguard.reference_training.jem.sweep.remaining import remaining_seconds


def simulated(mean, running, waiting, slots):
    """The same grid, second by second; all times are whole seconds."""
    left = [max(0, mean - seconds) for seconds in running]
    clock = 0
    while waiting or any(left):
        left = [seconds for seconds in left if seconds]
        while waiting and len(left) < slots:
            left.append(mean)
            waiting -= 1
        left = [seconds - 1 for seconds in left]
        clock += 1
    return clock


@given(
    mean=st.integers(1, 20),
    running=st.lists(st.integers(0, 30), max_size=4),
    waiting=st.integers(0, 12),
    more=st.integers(0, 3),
)
def test_it_is_what_the_work_takes_second_by_second(mean, running, waiting, more):
    slots = max(1, len(running) + more)
    expected = simulated(mean, running, waiting, slots)
    assert remaining_seconds([mean, mean], running, waiting, slots) == pytest.approx(expected)


def test_nothing_is_said_before_the_first_run_has_ended():
    assert remaining_seconds([], [3.0], 4, 2) is None
