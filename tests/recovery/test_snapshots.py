"""Which snapshots are certified, kept and used; their copies, and what ranks have on the disk."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebmguard.ranks import Ranks
from ebmguard.recovery.archive import Archive
from ebmguard.recovery.snapshots import Snapshot, Snapshots, copied, copied_back, devices_of

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


def test_ages_grow_by_factors() -> None:
    """Each but the first is a few times as old as the next."""
    last = 20_000
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
    assert max(factors) <= 2 * evenly


def test_what_came_after_a_restored_snapshot_is_forgotten() -> None:
    ring = Snapshots(keep=3, certify_after=1)
    first, second, third, *ring.waiting = (Snapshot(step, {}) for step in range(5))
    ring.certified = [first, second, third]
    ring.restart_from(second)
    assert (ring.certified, ring.waiting) == ([first, second], [])
    ring.certified, ring.waiting = [], [first, second]
    ring.restart_from(first)
    assert ring.waiting == [first]


def test_snapshots_are_themselves_whatever_their_tensors_hold():
    """Comparing their values asked tensors for one truth value, and dropped a twin."""
    one, twin = (Snapshot(50, {"model": torch.zeros(3)}) for _ in range(2))
    assert one != twin
    assert one in [one]
    assert twin not in [one]


# -- copies ----------------------------------------------------------------------------------------


def test_leaves_go_back_to_where_they_were() -> None:
    tree: dict[str, Any] = {"a": torch.ones(2), "b": [3, torch.zeros(1, dtype=torch.float64)]}
    assert devices_of(tree) == ["cpu", "cpu"]
    back = copied_back(copied(tree), ["meta", "cpu"])
    assert back["a"].device.type == "meta"
    assert back["b"][0] == 3
    assert back["b"][1].equal(tree["b"][1])


def test_a_device_that_is_not_there_leaves_the_host() -> None:
    assert copied_back([torch.ones(1)], ["cuda:99"])[0].device.type == "cpu"


# -- on the disk, while ranks write ----------------------------------------------------------------


class Killed(BaseException):
    """Stands in for a kill of this rank or another."""


class WaitsInVain(Ranks):
    """A rank that is killed while it waits for the others."""

    def from_all(self, value: Any) -> list[Any]:
        raise Killed


def test_a_rank_keeps_its_files_until_all_have_written_the_next_one(tmp_path):
    def steps():
        return [int(path.stem.removeprefix("snapshot-")) for path in sorted(tmp_path.iterdir())]

    archive = Archive(tmp_path, 1, Ranks())
    for step in (100, 200, 300):
        archive.write(step, {}, {})
    assert steps() == [200, 300]
    # A rollback to before all of them.
    with pytest.raises(Killed):
        Archive(tmp_path, 1, WaitsInVain()).write(150, {}, {})
    assert steps() == [150, 200, 300]
    archive.write(150, {}, {})
    assert steps() == [150]


class HearsOf(Ranks):
    """A rank among others, of which one has a problem."""

    problem = ""

    def from_all(self, value: Any) -> list[Any]:
        return [value, self.problem]


def test_what_one_rank_cannot_write_none_keeps_and_all_try_again(tmp_path, caplog):
    ranks = HearsOf()
    archive = Archive(tmp_path, 100, ranks)
    archive.write(100, {}, {})
    for step in (200, 201):
        object.__setattr__(ranks, "problem", "the disk is full")
        archive.write(step, {}, {})
        assert [path.name for path in tmp_path.iterdir()] == ["snapshot-00000100.pt"]
        assert archive.is_due(step + 1)
    object.__setattr__(ranks, "problem", "")
    archive.write(202, {}, {})
    assert not archive.is_due(203)
    assert len(list(tmp_path.iterdir())) == 2
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2  # once for all that fail, and once when they are written again
    assert said[0].startswith("No snapshot of step 200: the disk is full. Training goes on")
    assert said[1] == "Snapshots are written again, that of step 202."
