"""A run that is saved, loaded and continued is the uninterrupted one: same rows, same alerts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ebmguard import guard
from ebmguard.errors import ConfigError
from tests.parts import Bowl, Memory, gradient_at

STEPS, SAVED_AFTER = 60, 45


class Run:
    """A loop on given energies that blow up late: alerts, a schedule, histograms, all of it.

    Args:
        models: dimensions of an ensemble, of which the last member's energies blow up.
    """

    def __init__(
        self,
        *,
        judge_in_loss: bool = True,
        optimizer: bool = False,
        sampler: bool = True,
        models: tuple[int, ...] = (),
    ) -> None:
        self.memory, self.sampling, self.models = Memory(), sampler, models
        self.alerts: list[dict[str, object]] = []
        stars: Any = torch.tensor([0.5, 0.0, 2.0]) if models else lambda step: 0.5 + 0.01 * step
        self.guard = guard(
            None,
            gradient_at if sampler else None,
            beta_star=stars,
            variant=["default", "no_pos", "batch"] if models else "default",
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
            pos, neg = (torch.randn(*self.models, n, generator=rng) for n in (16, 12))
            if self.sampling:
                self.guard.sampler(self.f, torch.randn(12, 2, generator=rng))
            pos.view(-1, 16)[-1] += 100.0 if step >= 43 else 0.0
            self.guard.loss_fn(pos, neg)
            if self.optimizer is not None:
                self.optimizer.step()

    def rows(self) -> list[tuple[int, str]]:
        # NaN is not equal to itself, but its text is.
        return [(step, repr(sorted(row.items()))) for step, row in self.memory.rows]


def copied(state: Any, via: str, folder: Path) -> Any:
    if via == "json":
        return json.loads(json.dumps(state))
    torch.save(state, folder / "state.pt")
    return torch.load(folder / "state.pt", weights_only=True)


ENSEMBLE: dict[str, Any] = {"models": (3,), "sampler": False}


@pytest.mark.parametrize(
    ("options", "saved_after", "via"),
    [
        ({"optimizer": True}, SAVED_AFTER, "torch"),
        ({"judge_in_loss": False, "optimizer": True}, SAVED_AFTER, "json"),
        ({"sampler": False}, SAVED_AFTER, "torch"),
        # A step whose row is under way has its histogram.
        ({"judge_in_loss": False, "optimizer": True}, 1, "json"),
        (ENSEMBLE, SAVED_AFTER, "torch"),
        ({**ENSEMBLE, "judge_in_loss": False, "optimizer": True}, 30, "json"),
    ],
)
def test_continued_run_is_the_uninterrupted_one(options, saved_after, via, tmp_path):
    whole, first, second = (Run(**options) for _ in range(3))
    whole.go(0, STEPS)
    whole.guard.close()
    assert whole.memory.steps == list(range(STEPS))
    assert any(record["level"] == "ERROR" for record in whole.alerts)
    assert {record.get("member") for record in whole.alerts} == {2 if "models" in options else None}
    assert [step for step, _ in whole.memory.histograms] == [0, 50]

    first.go(0, saved_after)
    state = first.guard.state_dict()
    rows, alerts = first.rows(), list(first.alerts)
    histograms = list(first.memory.histograms)
    second.guard.load_state_dict(copied(state, via, tmp_path))
    assert second.guard.step == saved_after
    assert repr(second.guard.state_dict()) == repr(state)
    second.go(saved_after, STEPS)
    second.guard.close()
    assert rows + second.rows() == whole.rows()
    assert alerts + second.alerts == whole.alerts
    assert histograms + second.memory.histograms == whole.memory.histograms
    assert repr(second.guard.members) == repr(whole.guard.members)

    # Saving changes nothing for who goes on.
    first.go(saved_after, STEPS)
    first.guard.close()
    assert first.rows() == whole.rows()
    assert first.alerts == whole.alerts


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


def judged(**change: Any) -> Callable[[Any], Any]:
    """A change of what the judge has."""
    return lambda state: state | {"judge": state["judge"] | change}


OTHER = "Not a guard's state of version"
OF_MEMBERS = "ensemble members, but this one has"


@pytest.mark.parametrize(
    ("options", "change", "message"),
    [
        ({}, lambda state: state | {"version": 99}, OTHER),
        # Its pooled energies had no log q beside them.
        ({}, lambda state: state | {"version": 3}, OTHER),
        ({}, lambda state: {k: v for k, v in state.items() if k != "rows"}, OTHER),
        *(
            ({}, lambda state, x=x: state | {"step": x}, "step=.*; expected a whole number")
            for x in (2.5, -1, 2**53 + 1)
        ),
        ({}, judged(rules={}), "is of a judge with the rules"),
        ({}, judged(members=[{}, {}, {}]), rf"of 3 {OF_MEMBERS} 0 \(0 for a sin"),
        (ENSEMBLE, judged(members=[{}, {}]), f"of 2 {OF_MEMBERS} 3"),
        (ENSEMBLE, judged(members=[{}, {}, {}]), "damaged"),
    ],
)
def test_foreign_states_are_refused_and_change_nothing(options, change, message):
    run, other = Run(**options), Run(**options)
    run.go(0, 5)
    other.go(0, 20)
    before = repr(run.guard.state_dict())
    with pytest.raises(ConfigError, match=message):
        run.guard.load_state_dict(change(other.guard.state_dict()))
    assert repr(run.guard.state_dict()) == before
