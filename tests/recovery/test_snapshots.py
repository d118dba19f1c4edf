"""Which snapshots are certified, kept and used; their copies, and what ranks have on the disk."""

from __future__ import annotations

import copy
import itertools
import logging
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebmguard import Recovery, guard
from ebmguard.errors import ConfigError
from ebmguard.ranks import Ranks
from ebmguard.recovery.archive import Archive
from ebmguard.recovery.chain_tracker import ChainTracker
from ebmguard.recovery.snapshots import Snapshot, Snapshots, copied, copied_back, devices_of
from tests.parts import Energy, gradient_at
from tests.recovery.parts import QUICK, SAME, Run, Scripted, run_until

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


# -- state that a trainer keeps in its own way, and buffers that nobody writes to any more ---------


class Counter(torch.nn.Module):
    """A module whose extra state is the very object that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = {"steps": 0}

    def get_extra_state(self) -> dict[str, int]:
        return self.seen

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state


class Own(dict[str, Any]):
    """A container of the trainer's own, which torch takes for one plain value."""


class Average:
    """An average outside of torch that keeps what it is given."""

    def __init__(self) -> None:
        self.x, self.y = np.zeros(3), torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"x": self.x, "own": Own(y=self.y)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.x, self.y = state["x"], state["own"]["y"]


def test_a_snapshot_that_is_restored_twice_gives_the_same_twice() -> None:
    settings = {**SAME, **QUICK, "every": 12, "relapse_within": 0}
    # The second comes more than twice as late as the first: no relapse.
    run = Run(Recovery(**settings), detector=Scripted([18, 33]))
    counter, average = Counter(), Average()
    run.model.add_module("counter", counter)
    run.guard.attach(ema=average)
    found: list[tuple[Any, ...]] = []
    for _ in range(34):
        run.step()
        if len(run.guard.rollbacks) > len(found):
            assert average.y.tolist() == average.x.tolist()
            found.append((counter.seen["steps"], average.x.tolist(), {**run.state(), "ema": None}))
        counter.seen["steps"] += 1
        average.x += 1
        average.y += 1
    first, second = run.guard.rollbacks
    assert first.restored_step == second.restored_step == 12
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("late", "names"),
    [
        ({"scaler": torch.amp.GradScaler("cpu")}, "scaler"),
        ({"generators": [torch.Generator(), torch.Generator()]}, "generators"),
    ],
)
def test_what_no_snapshot_holds_is_refused_before_anything_changes(
    late: dict[str, Any], names: str
) -> None:
    run = Run(Recovery(**SAME, **QUICK), detector=Scripted([18]), judge_in_loss=False)
    run_until(run, 20)
    run.guard.attach(**late)
    with pytest.raises(ConfigError, match=f"taken with other parts for {names}. Attach the same"):
        run.step()
    quiet = run_until(Run(None, detector=Scripted([])), 21)[-1]
    assert all(run.state()[part] == quiet[part] for part in ("model", "buffer", "rng"))
    assert run.guard.attempt == 0


@pytest.mark.parametrize("grows", [True, False])
def test_a_list_of_tensors_is_cut_to_the_same_tensors(grows: bool) -> None:
    run = Run(Recovery(**SAME, **QUICK), detector=Scripted([18]))
    rows = [torch.zeros(2), torch.zeros(3)]
    first, second = rows
    run.guard.attach(buffer=rows)
    for i in range(19):
        first.add_(1)
        run.step()
        if grows and not run.guard.rollbacks:
            rows.append(torch.full((2,), float(i)))
    assert run.guard.rollbacks[0].restored_step == 12
    if not grows:  # a list that has grown is filled anew
        assert rows[0] is first
        assert rows[1] is second
    assert [float(x[0]) for x in rows] == [12.0, 0.0, *(map(float, range(11)) if grows else ())]


@pytest.mark.parametrize("way", ["kept", "copied", ""])
def test_whether_a_loop_passes_its_samples_on_or_copies_of_them_is_known(way: str) -> None:
    tracker, x = ChainTracker(), torch.randn(4, 2)
    for _ in range(3):
        tracker.enter(gradient_at, (x,), {}, None)
        result = x + 0.1
        tracker.leave(result)
        if way:
            x = result if way == "kept" else result.clone()
        else:
            x.normal_()  # the trainer's own noise, in the same memory
    assert tracker.feedback == way


def made_anew(box: list[Any], x: torch.Tensor) -> None:
    box[0] = torch.cat([x, box[0]])[:64]


def through_data(box: list[Any], x: torch.Tensor) -> None:
    box[0].data[:4] = x


def list_made_anew(box: list[Any], x: torch.Tensor) -> None:
    box[0] = [*x, *box[0]][:64]


def into_a_list(box: list[Any], x: torch.Tensor) -> None:
    box[0][7:11] = [*x]


BUFFERS: dict[str, tuple[Any, Any, int]] = {  # the buffer, how samples get into it, words of it
    "made anew": (torch.randn(64, 2), made_anew, 1),
    "through .data": (torch.randn(64, 2), through_data, 0),
    "a list made anew": ([*torch.randn(64, 2)], list_made_anew, 1),
    "into the middle of a list": ([*torch.randn(64, 2)], into_a_list, 0),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer_that_is_no_longer_written_to_is_told_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    buffer, keep, times = BUFFERS[name]
    f, box = Energy(), [copy.deepcopy(buffer)]

    def sampler(f: Any) -> torch.Tensor:
        x = torch.randn(4, 2)
        x = x + gradient_at(f, x) + 0.1 * torch.randn(4, 2)
        keep(box, x)
        return x

    optimizer = torch.optim.SGD(f.parameters(), lr=1e-3)
    told: Any = {"model": f, "optimizer": optimizer, "buffer": box[0], "action": "rollback"}
    loss, sample = guard(None, sampler, **told)
    caplog.set_level(logging.WARNING, "ebmguard")
    for _ in range(150):
        loss(f(torch.randn(4, 2)), f(sample(f))).backward()
        optimizer.step()
    said = [each for each in caplog.messages if "no longer the one that the loop" in each]
    assert len(said) == times
    assert all("buffer[:] = new" in each and "state_dict()" in each for each in said)


def test_loading_a_state_forgets_an_error_of_the_course_that_is_left() -> None:
    run = Run(Recovery(**SAME, **QUICK), detector=Scripted([10]))
    run_until(run, 9)
    state = run.guard.state_dict()
    run.step()
    loss_fn, sample_q = run.guard
    x = sample_q(run.model, run.buffer)
    loss_fn(run.model(x), run.model(x))  # the ERROR waits for the optimizer
    run.guard.load_state_dict(state)
    run_until(run, 3)
    assert not run.guard.rollbacks


def test_a_row_on_its_way_is_the_snapshots_own() -> None:
    """With every=1 a row that was put back can be on its way a second time."""
    settings: dict[str, Any] = {"every": 1, "certify_after": 4, "relapse_within": 0, "keep": 8}
    run = Run(Recovery(**SAME, **settings), detector=Scripted([18]), judge_in_loss=False)
    run_until(run, 24)
    assert run.guard.rollbacks
    recoverer = run.guard._loop.actions.recoverer
    assert recoverer is not None
    for each in recoverer._snapshots.certified:
        assert not any("alert_level" in row for _, row, *_ in each.state["guard"]["rows"])


def test_schedulers_in_a_list_with_a_state_are_taken_back() -> None:
    """As the adapter of Lightning attaches them: a list is a buffer's state, not a scheduler's."""

    class Schedulers(list[Any]):
        def state_dict(self) -> list[Any]:
            return [each.state_dict() for each in self]

        def load_state_dict(self, states: list[Any]) -> None:
            for each, state in zip(self, states, strict=True):
                each.load_state_dict(state)

    run = Run(Recovery(**SAME, **QUICK), detector=Scripted([18]))
    run.guard.attach(scheduler=Schedulers([run.scheduler]))
    steps = []
    for _ in range(19):
        run.step()
        steps.append(run.scheduler.last_epoch)
    (rollback,) = run.guard.rollbacks
    assert steps[:18] == list(range(1, 19))
    assert steps[18] == rollback.restored_step  # taken before the scheduler's own step
