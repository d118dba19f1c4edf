"""From one step to the next: one row and one judgement each, and one thread at a time."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ebmguard import Alert, Guard, Level, guard
from ebmguard.alerts import DEFAULT_RULES, FloorRule, Verdict
from ebmguard.errors import ConfigError, LossError
from tests.parts import Energy, Memory, Script, energies, langevin

X = torch.ones(4, 2)
LOST: Any = (torch.zeros(6), torch.full((6,), -20.0))  # GradScale 0: no negative is competitive


def run(losses: int, steps: int, **options: Any) -> tuple[Guard, Memory]:
    """A trainer that accumulates the gradients of several losses in each step (two under SAM)."""
    f, memory = Energy(), Memory()
    sgd = torch.optim.SGD(f.parameters(), lr=0.0)
    g = guard(None, langevin, beta_star=1.0, sinks=[memory], model=f, optimizer=sgd, **options)
    for _ in range(steps):
        for _ in range(losses):
            g.sampler(f, X)
            g.loss_fn(*(x.clone().requires_grad_() for x in LOST)).backward()
        sgd.step()
    return g, memory


@pytest.mark.parametrize("losses", [1, 2, 4])
def test_a_rules_patience_counts_steps_whatever_the_losses_in_each(losses):
    g, memory = run(losses, 40)
    found = [(alert.rule, alert.level.name, alert.step) for alert in g.alerts]
    assert ("sampler_failing", "WARN", 19) in found  # after 20 steps
    assert found == [(x.rule, x.level.name, x.step) for x in run(1, 40)[0].alerts]
    assert memory.steps == list(range(40))
    assert memory.column("alert_level") == [0.0] * 19 + [1.0] * 21
    assert g.verdict == Verdict("look", 19, "sampler_failing")


def test_an_error_in_the_last_of_a_steps_losses_is_acted_upon_in_it():
    f = Energy()
    sgd = torch.optim.SGD(f.parameters(), lr=0.0)
    g = guard(None, None, beta_star=1.0, optimizer=sgd, action="raise")
    pos, neg = energies()
    assert g.loss_fn(pos, neg) != 0
    loss = g.loss_fn(torch.full((6,), torch.nan), neg)
    assert loss.isnan()
    assert not torch.autograd.grad(loss, neg)[0].any()  # withheld
    assert [(alert.rule, alert.step) for alert in g.alerts] == [("nonfinite", 0)]


def test_rules_are_the_callers():
    """A changed threshold, a rule left out, and none at all."""
    sooner = tuple(
        replace(rule, warn_patience=5) if isinstance(rule, FloorRule) else rule
        for rule in DEFAULT_RULES
    )
    rest = tuple(rule for rule in DEFAULT_RULES if rule.name != "sampler_failing")
    alerts = run(1, 12, rules=sooner)[0].alerts
    assert [alert.step for alert in alerts if alert.rule == "sampler_failing"] == [4]
    assert "sampler_failing" not in {alert.rule for alert in run(1, 40, rules=rest)[0].alerts}
    assert run(1, 40, rules=())[0].alerts == []
    with pytest.raises(ConfigError, match="rule"):
        guard(None, None, beta_star=1.0, rules=[3])  # type: ignore[list-item]


def test_a_loss_from_a_second_thread_is_refused_and_the_first_goes_on():
    entered, leave = threading.Event(), threading.Event()

    def slow(pos: Tensor, neg: Tensor) -> Tensor:
        if threading.current_thread() is not threading.main_thread():
            entered.set()
            assert leave.wait(60)
        return neg.mean() - pos.mean()

    g = guard(slow, None, beta_star=0.0)
    g.loss_fn(*energies())
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(g.loss_fn(*energies())))
    thread.start()
    assert entered.wait(60)
    for call in (g.loss_fn, g.reweight):
        with pytest.raises(LossError, match="another call of it was under way"):
            call(*energies())
    leave.set()
    thread.join()
    assert len(found) == 1
    assert g.step == 1
    g.loss_fn(*energies())  # and is over
    assert g.step == 2


# -- what a caller may do with a guard -----------------------------------------------------------


class Broken(Exception):
    pass


@pytest.mark.parametrize("judge_in_loss", [True, False])
def test_a_callback_that_raises_loses_no_row_and_no_alert(judge_in_loss):
    def on_alert(alert: Alert) -> None:
        raise Broken

    f, memory = Energy(), Memory()
    sgd = torch.optim.SGD(f.parameters(), lr=0.0)
    g = guard(
        None,
        None,
        beta_star=1.0,
        sinks=[memory],
        optimizer=sgd,
        judge_in_loss=judge_in_loss,
        on_alert=on_alert,
    )
    g._loop.judge = Script({1: Level.WARN, 2: Level.ERROR})  # type: ignore[assignment]
    broken = 0
    for _ in range(4):
        for call in (lambda: g.loss_fn(*energies()), sgd.step):
            try:
                call()
            except Broken:
                broken += 1
    for _ in range(3):
        try:
            g.close()
        except Broken:
            broken += 1
    assert broken == 2
    assert memory.steps == list(range(4))
    assert memory.column("alert_level") == [0.0, 1.0, 2.0, 0.0]
    assert [record["step"] for record in memory.alerts] == [1, 2]
    assert [alert.step for alert in g.alerts] == [1, 2]
