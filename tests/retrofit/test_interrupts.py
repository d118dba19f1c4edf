"""Ctrl-C before any line of the guard in a step: the run goes on, and nothing of it is left."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from operator import eq
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import ebmguard
from ebmguard import guard
from ebmguard.recovery import Recovery
from tests.parts import Energy, unit_langevin

ROOT = f"{Path(ebmguard.__file__).parent}/"


class Run:
    def __init__(self, steps: int, **options: Any) -> None:
        torch.manual_seed(0)
        self.f = Energy()
        self.own = set(vars(self.f))
        self.sgd = torch.optim.Adam(self.f.parameters(), lr=0.01)
        told: dict[str, Any] = {"model": self.f, "optimizer": self.sgd, "buffer": torch.zeros(1, 2)}
        told |= {"beta_star": 0.5, "output_scale": 1, **options}
        self.g = guard(None, unit_langevin, **told)
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        loss, sample = self.g
        x = torch.randn(4, 2) + 1
        value = loss(self.f(x), self.f(sample(self.f, torch.randn(4, 2))))
        self.sgd.zero_grad()
        value.backward()
        self.sgd.step()

    def check(self) -> None:
        """Nothing of a call is left, and the run goes on."""
        x = torch.randn(3, 2)
        assert torch.equal(self.f(x), Energy.forward(self.f, x))
        assert {*vars(self.f)} == self.own
        assert torch.is_grad_enabled()
        assert not torch.overrides._get_current_function_mode_stack()
        assert len(self.f._forward_hooks) <= 1
        assert [group["lr"] for group in self.sgd.param_groups] == [0.01]
        step = self.g.step
        self.step()
        self.step()
        assert self.g.step - step in (2, 3)  # an optimizer's step that was made may end late


def traced(run: Run, before: Callable[[tuple[str, int]], bool]) -> None:
    """One step, which is interrupted before the line of the guard for which ``before`` is true."""
    known: list[str] = []

    def each_line(frame: FrameType, event: str, _: Any) -> Any:
        place = frame.f_code.co_filename.removeprefix(ROOT), frame.f_lineno
        if event == "line" and not known and before(place):
            known.append("")
            raise KeyboardInterrupt
        return each_line

    old = sys.gettrace()
    sys.settrace(
        lambda frame, *_: each_line if frame.f_code.co_filename[: len(ROOT)] == ROOT else None
    )
    try:
        run.step()
    except KeyboardInterrupt:
        assert known
    finally:
        sys.settrace(old)


def blown_up() -> Run:
    run = Run(60, action="rollback", recovery=Recovery(every=5, certify_after=5))
    with torch.no_grad():
        [*run.f.parameters()][2].mul_(1e4)  # of the last layer
    return run


@pytest.mark.parametrize("options", [{}, {"beta_star": 0}, {"substeps": 4}], ids=str)
def test_before_each_line_of_a_step(options: dict[str, Any]) -> None:
    run, lines = Run(6, **options), dict[tuple[str, int], None]()
    traced(run, lambda place: bool(lines.setdefault(place)))
    assert len(lines) > 500
    for line in lines:
        traced(run, partial(eq, line))
        run.check()


def test_before_lines_of_a_rollback() -> None:
    """What is put back is put back whole, by the step that follows where the first could not."""
    lines = dict[tuple[str, int], None]()
    traced(blown_up(), lambda place: bool(lines.setdefault(place)))
    those = [line for line in lines if line[0].startswith("recovery/snapshots")]
    assert len(those) > 20
    for line in those:
        run = blown_up()
        traced(run, partial(eq, line))
        for _ in range(2):
            run.step()
        assert run.g.rollbacks
        assert all(p.abs().max() < 100 for p in run.f.parameters())
        assert all(x["exp_avg"].abs().max() < 100 for x in run.sgd.state.values())
