"""A run that is saved, loaded and continued is the uninterrupted one: same rows, same alerts."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from ebmguard import Level, guard
from ebmguard.errors import ConfigError
from tests.parts import Bowl, Memory, Script, gradient_at

STEPS, SAVED_AFTER = 60, 45


class Run:
    """A loop on given energies that blow up late: alerts, a schedule, histograms, all of it."""

    def __init__(self, *, judge_in_loss=True, optimizer=False, sampler=True):
        self.memory = Memory()
        self.alerts: list[dict[str, object]] = []
        self.sampling = sampler
        self.guard = guard(
            None,
            gradient_at if sampler else None,
            beta_star=lambda step: 0.5 + 0.01 * step,
            output_scale=100.0,
            sinks=[self.memory],
            flush_every=7,
            judge_in_loss=judge_in_loss,
            on_alert=lambda alert: self.alerts.append(alert.record()),
        )
        self.optimizer = None
        if optimizer:
            self.optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
            self.guard.attach(optimizer=self.optimizer)
        self.f = Bowl()

    def go(self, first: int, last: int) -> None:
        for step in range(first, last):
            rng = torch.Generator().manual_seed(step)
            pos, neg = torch.randn(16, generator=rng), torch.randn(12, generator=rng)
            if self.sampling:
                self.guard.sampler(self.f, torch.randn(12, 2, generator=rng))
            self.guard.loss_fn(pos + (100.0 if step >= 43 else 0.0), neg)
            if self.optimizer is not None:
                self.optimizer.step()

    def rows(self):
        # NaN is not equal to itself, but its text is.
        return [(step, repr(sorted(row.items()))) for step, row in self.memory.rows]


def through_json(state):
    return json.loads(json.dumps(state))


def through_torch(state, tmp_path):
    torch.save(state, tmp_path / "state.pt")
    return torch.load(tmp_path / "state.pt", weights_only=True)


@pytest.mark.parametrize("judge_in_loss", [True, False])
@pytest.mark.parametrize("optimizer", [True, False])
@pytest.mark.parametrize("sampler", [True, False])
@pytest.mark.parametrize("via", [through_json, through_torch])
def test_continued_run_is_the_uninterrupted_one(judge_in_loss, optimizer, sampler, via, tmp_path):
    options = {"judge_in_loss": judge_in_loss, "optimizer": optimizer, "sampler": sampler}
    whole = Run(**options)
    whole.go(0, STEPS)
    whole.guard.close()
    assert whole.memory.steps == list(range(STEPS))
    assert any(record["level"] == "ERROR" for record in whole.alerts)
    assert [step for step, _ in whole.memory.histograms] == [0, 50]

    first = Run(**options)
    first.go(0, SAVED_AFTER)
    state = first.guard.state_dict()
    rows, alerts = first.rows(), list(first.alerts)
    state = via(state, tmp_path) if via is through_torch else via(state)
    second = Run(**options)
    second.guard.load_state_dict(state)
    assert second.guard.step == SAVED_AFTER
    second.go(SAVED_AFTER, STEPS)
    second.guard.close()
    assert rows + second.rows() == whole.rows()
    assert alerts + second.alerts == whole.alerts
    assert second.memory.histograms == [h for h in whole.memory.histograms if h[0] == 50]

    # Saving changes nothing for who goes on.
    first.go(SAVED_AFTER, STEPS)
    first.guard.close()
    assert first.rows() == whole.rows()
    assert first.alerts == whole.alerts


def test_histogram_of_a_row_that_was_under_way():
    first = Run(judge_in_loss=False, optimizer=True)
    first.go(0, 1)
    second = Run(judge_in_loss=False, optimizer=True)
    second.guard.load_state_dict(first.guard.state_dict())
    second.go(1, 4)
    first.go(1, 4)
    assert second.memory.histograms == first.memory.histograms
    assert second.rows() == first.rows()


def test_schedule_goes_on_where_it_stopped():
    first, second = Run(), Run()
    first.go(0, 10)
    second.guard.load_state_dict(first.guard.state_dict())
    second.go(10, 11)
    assert second.guard.last["beta_star"] == pytest.approx(0.6)


def test_own_hold_wins_over_the_saved_one():
    held = Run(judge_in_loss=True, optimizer=True)
    held.go(0, 5)
    lagging = Run(judge_in_loss=False, optimizer=True)
    lagging.guard.load_state_dict(held.guard.state_dict())
    lagging.go(5, 9)
    assert lagging.memory.steps == [5, 6]
    # And the other way round: rows that were under way are judged when they come.
    back = Run(judge_in_loss=True, optimizer=True)
    back.guard.load_state_dict(lagging.guard.state_dict())
    detector: Any = Script({8: Level.WARN})
    back.guard._loop.judge = detector
    back.go(9, 10)
    assert sorted(step for step, _ in detector.seen) == [7, 8, 9]
    assert back.memory.steps == [7, 8, 9]
    assert back.memory.column("alert_level") == [0.0, 1.0, 0.0]


def test_nothing_is_over_before_its_loss():
    run = Run()
    assert run.guard.state_dict()["step"] == 0
    assert run.guard.state_dict()["rows"] == []
    run.go(0, 3)
    run.guard.sampler(run.f, torch.ones(2, 2).double())  # ends step 2, and is of step 3
    state = run.guard.state_dict()
    assert (state["step"], state["rows"]) == (3, [])


def test_what_was_loaded_is_what_was_saved():
    for options in (
        {"judge_in_loss": True},
        {"judge_in_loss": False},
        {"judge_in_loss": False, "optimizer": True},
    ):
        first, second = Run(**options), Run(**options)
        first.go(0, 5)
        state = first.guard.state_dict()
        second.guard.load_state_dict(state)
        assert repr(second.guard.state_dict()) == repr(state)


@pytest.mark.parametrize("optimizer", [True, False])
def test_loading_in_place_rewinds(optimizer):
    run = Run(optimizer=optimizer)
    run.go(0, 5)
    state = run.guard.state_dict()
    run.go(5, 9)
    run.guard.load_state_dict(state)
    assert run.guard.step == 5
    run.go(5, 7)
    run.guard.close()
    again = run.memory.steps
    assert again[-2:] == [5, 6]
    # Without an optimizer step 4 was open when it was saved, and 8 when it was forgotten.
    assert again[:-2] == ([*range(9)] if optimizer else [*range(8), 4])


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state | {"version": 99},
        lambda state: state | {"version": 3},  # its pooled energies had no log q beside them
        lambda state: {k: v for k, v in state.items() if k != "rows"},
        lambda state: state | {"more": 1},
        lambda state: {},
        lambda state: state | {"detector": {"unknown_rule": {}}},
    ],
)
def test_foreign_states_are_refused_and_change_nothing(change):
    run, other = Run(), Run()
    run.go(0, 5)
    other.go(0, 20)
    before = repr(run.guard.state_dict())
    with pytest.raises(ConfigError):
        run.guard.load_state_dict(change(other.guard.state_dict()))
    assert repr(run.guard.state_dict()) == before
