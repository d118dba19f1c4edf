"""Which snapshots are certified, kept and used: a property over random histories."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebmguard.recovery.snapshots import Snapshot, Snapshots

EVENTS = st.lists(st.sampled_from(["quiet"] * 20 + ["alert"]), min_size=1, max_size=400)


@given(EVENTS, st.integers(1, 6), st.integers(1, 30), st.integers(1, 20))
def test_only_what_stayed_quiet_is_certified(
    events: list[str], keep: int, certify_after: int, every: int
) -> None:
    ring = Snapshots(keep, certify_after)
    alerts: list[int] = []
    for step, event in enumerate(events):
        if event == "alert":
            alerts.append(step)
            ring.drop_waiting(step)
            continue
        for ripe in ring.certify(step):
            assert step - ripe.step >= certify_after
        if step % every == 0:
            ring.waiting.append(Snapshot(step, {"at": step}))
        steps = [each.step for each in ring.certified]
        assert len(steps) <= keep
        assert steps == sorted(set(steps))
        for each in ring.certified:
            assert each.state["at"] == each.step
            near = [a for a in alerts if each.step <= a < each.step + certify_after]
            # The very first one stays as the last resort.
            assert not near or each.step == 0 or each.step <= min(alerts)


@pytest.mark.parametrize("last", [1000, 5000, 20_000])
def test_ages_grow_by_factors(last: int) -> None:
    """Each but the first is a few times as old as the next, however long the run."""
    ring = Snapshots(keep=5, certify_after=10)
    for step in range(0, last, 50):
        ring.certify(step)
        ring.waiting.append(Snapshot(step, {}))
    ages = [last - each.step for each in ring.certified]
    assert len(ages) == 5
    assert ages[0] == last
    assert ages[-1] <= 110
    evenly = (ages[0] / ages[-1]) ** (1 / 4)
    factors = [older / newer for older, newer in itertools.pairwise(ages)]
    print(ages, evenly, factors)
    assert max(factors) <= 2 * evenly


def test_condemning_never_takes_the_last_one() -> None:
    ring = Snapshots(keep=3, certify_after=1)
    for step in (0, 10, 20):
        ring.waiting.append(Snapshot(step, {}))
        ring.certify(step + 5)
    assert ring.best() is not None
    assert [ring.condemn(step) for step in (20, 10, 0)] == [(20,), (10,), ()]
    best = ring.best()
    assert best is not None
    assert best.step == 0


def test_snapshots_are_themselves_whatever_their_tensors_hold():
    """Comparing their values asked tensors for one truth value, and dropped a twin."""
    one, twin = (Snapshot(50, {"model": torch.zeros(3)}) for _ in range(2))
    assert one != twin
    assert one in [one]
    assert twin not in [one]
