"""What a step is, in every kind of loop; that it has one row, one β* and one judgement."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ebmguard import Alert, Guard, Level, guard
from ebmguard.alerts import DEFAULT_RULES, FloorRule, Verdict
from ebmguard.errors import LossError
from ebmguard.retrofit import watches
from tests.parts import Bowl, Energy, Memory, Script, energies, gradient_at, langevin
from tests.runs import Training

X = torch.ones(4, 2)


class Loop:
    """A guard whose beta* is 1, 2, 3, ... by step, on f = Energy(), with all it has seen."""

    def __init__(self, *, sampler: bool = True, optimizer: Any = None, scale: float = 100.0):
        self.f, self.memory, self.scale = Energy(), Memory(), scale
        self.factors: list[float] = []
        self.betas: list[float] = []
        self.guard = guard(
            None,
            self._sample if sampler else None,
            beta_star=lambda step: float(step + 1),
            output_scale=scale,
            sinks=[self.memory],
            flush_every=1,
            model=self.f,
        )
        self.optimizer: Any = optimizer and optimizer(self.f.parameters())
        if optimizer is not None:
            self.guard.attach(optimizer=self.optimizer)

    def _sample(self) -> Tensor:
        with torch.no_grad():
            tempered = self.f(X)
        ratio = tempered / self.f.net(X).squeeze(-1)
        self.factors.append(ratio.mean().item())
        return X

    def loss(self) -> Tensor:
        value: Tensor = self.guard.loss_fn(self.f(X), self.f(0.5 * X))
        self.betas.append(self.guard.last["beta_star"])
        return value

    def temper(self) -> None:
        out = self.guard.temper(torch.ones(3, dtype=torch.float64))
        self.factors.append(out.mean().item())

    def go(self, script: str) -> None:
        """Runs a loop: s is a sampler call, t an inline one, l a loss, b one with its backward
        pass, u an update by the optimizer."""
        acts: dict[str, Any] = {"s": lambda: self.guard.sampler(), "t": self.temper}
        acts |= {"l": self.loss, "b": lambda: self.loss().backward()}
        acts["u"] = lambda: self.optimizer.step()
        for act in script.replace(" ", ""):
            acts[act]()

    def check(self, *, factors: list[int], losses: list[int], rows: list[int]) -> None:
        """Which step's beta* each sampler call and each loss had; which rows were written."""
        self.guard.close()
        expected = [1 - (step + 1) / self.scale for step in factors]
        assert self.factors == pytest.approx(expected, rel=1e-5)
        assert self.betas == [step + 1 for step in losses]
        assert self.memory.steps == rows


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters)


# Name -> what a loop does, step by step; whether an optimizer is attached; the step whose β* each
# sampler call had, and the same of each loss.
LOOPS: dict[str, tuple[str, bool, list[int], list[int]]] = {
    "sampler, loss": ("sl sl sl", False, [0, 1, 2], [0, 1, 2]),
    "sampler, loss, optimizer": ("sbu sbu sbu", True, [0, 1, 2], [0, 1, 2]),
    "loss alone": ("l l l", False, [], [0, 1, 2]),
    "loss and optimizer without a sampler": ("lbu lbu", True, [], [0, 0, 1, 1]),
    "inline sampler": ("ttttll ttttll", False, [0] * 4 + [1] * 4, [0, 0, 1, 1]),
    "sharpness-aware, losses alone": ("slb slb", False, [0, 1], [0, 0, 1, 1]),
    "sharpness-aware": ("slbu slbu", True, [0, 1], [0, 0, 1, 1]),
    "two samplers and two losses": ("ssbbu ssbbu", True, [0, 0, 1, 1], [0, 0, 1, 1]),
    "gradient accumulation": ("sbsbsbu sbsbsbu", True, [0] * 3 + [1] * 3, [0] * 3 + [1] * 3),
}


@pytest.mark.parametrize("name", LOOPS)
def test_sampler_and_losses_of_a_step_share_its_beta_star(name):
    script, has_optimizer, factors, losses = LOOPS[name]
    loop = Loop(sampler="s" in script, optimizer=adam if has_optimizer else None)
    for step, part in enumerate(script.split()):
        assert not has_optimizer or loop.guard.step == step
        loop.go(part)
    loop.check(factors=factors, losses=losses, rows=sorted(set(losses)))


def test_an_update_without_a_loss_as_a_classifiers_counts_as_a_step():
    loop = Loop(optimizer=adam)
    loop.go("sbu u sbu")
    loop.check(factors=[0, 2], losses=[0, 2], rows=[0, 1, 2])


# -- one judgement -------------------------------------------------------------------------------

LOST: Any = (torch.zeros(6), torch.full((6,), -20.0))  # GradScale 0: no negative is competitive


def run(losses: int, steps: int, **options: Any) -> tuple[Guard, Memory]:
    """A trainer that accumulates the gradients of several losses in each step (two under SAM)."""
    memory = Memory()
    training = Training(langevin, beta_star=1.0, sinks=[memory], **options)
    for _ in range(steps):
        for _ in range(losses):
            training.g.sampler(training.f, X)
            training.g.loss_fn(*(x.clone().requires_grad_() for x in LOST)).backward()
        training.optimizer.step()
    return training.g, memory


@pytest.mark.parametrize("losses", [1, 4])
def test_a_rules_patience_counts_steps_whatever_the_losses_in_each(losses):
    g, memory = run(losses, 40)
    found = [(alert.rule, alert.level.name, alert.step) for alert in g.alerts]
    assert found == [("sampler_failing", "WARN", 19)]  # after 20 steps
    assert memory.steps == list(range(40))
    assert memory.column("alert_level") == [0.0] * 19 + [1.0] * 21
    assert g.verdict == Verdict("look", 19, "sampler_failing")


def test_rules_are_the_callers():
    """A changed threshold, and a rule left out."""
    sooner = [replace(x, warn_patience=5) if isinstance(x, FloorRule) else x for x in DEFAULT_RULES]
    assert [alert.step for alert in run(1, 12, rules=sooner)[0].alerts] == [4]
    rest = [rule for rule in DEFAULT_RULES if rule.name != "sampler_failing"]
    assert run(1, 40, rules=rest)[0].alerts == []


def test_a_loss_from_a_second_thread_is_refused_and_the_first_goes_on():
    entered, leave = threading.Event(), threading.Event()

    def slow(pos: Tensor, neg: Tensor) -> Tensor:
        if threading.current_thread() is not threading.main_thread():
            entered.set()
            assert leave.wait(60)
        return neg.mean() - pos.mean()

    g = guard(slow, None, beta_star=0.0)
    g.loss_fn(*energies())
    thread = threading.Thread(target=g.loss_fn, args=energies())
    thread.start()
    assert entered.wait(60)
    for call in (g.loss_fn, g.reweight):
        with pytest.raises(LossError, match="another call of it was under way"):
            call(*energies())
    leave.set()
    thread.join()
    g.loss_fn(*energies())  # and is over
    assert g.step == 2


@pytest.mark.parametrize("judge_in_loss", [True, False])
def test_a_callback_that_raises_loses_no_row_and_no_alert(judge_in_loss):
    def on_alert(alert: Alert) -> None:
        raise InterruptedError

    memory, broken = Memory(), 0
    told: Any = {"judge_in_loss": judge_in_loss, "on_alert": on_alert, "action": "warn"}
    training = Training(sinks=[memory], **told)
    g = training.g
    Script({1: Level.WARN, 2: Level.ERROR}).watches(g)
    for call in [lambda: g.loss_fn(*energies()), training.optimizer.step] * 4 + [g.close] * 3:
        try:
            call()
        except InterruptedError:
            broken += 1
    assert broken == 2
    assert memory.steps == list(range(4))
    assert memory.column("alert_level") == [0.0, 1.0, 2.0, 0.0]
    assert [x["step"] for x in memory.alerts] == [alert.step for alert in g.alerts] == [1, 2]


# -- steps that do not end, and samples that no loss uses ------------------------------------------

POINTS = torch.ones(2, 2, dtype=torch.float64)


@pytest.fixture
def said(caplog):
    with caplog.at_level(logging.WARNING, "ebmguard"):
        yield lambda: caplog.messages


def make(**options: Any) -> Guard:
    return guard(None, gradient_at, **({"beta_star": 0.5, "output_scale": 2.0} | options))


def test_optimizer_that_never_steps_is_mentioned_once(said, monkeypatch):
    """As where SAM's second_step calls the inner optimizer's step, never its own."""
    monkeypatch.setattr(watches, "_ENDLESS", 50)
    loop = Loop(optimizer=adam)
    loop.go("s")
    for _ in range(55):
        loop.guard.loss_fn(*energies())
    (message,) = said()
    assert "50 losses without a step" in message


def train(f):
    with torch.no_grad():
        f.height.mul_(0.9)


def step_fused(f):
    """Moves parameters without a new version of them."""
    f.height.grad = torch.ones_like(f.height)
    torch.optim.Adam(f.parameters(), lr=0.1, fused=True).step()


@pytest.mark.parametrize("train", [train, step_fused])
def test_sampler_without_its_loss(said, train):
    g, f = make(), Bowl()
    for _ in range(50):
        g.sampler(f, POINTS)
        train(f)
    (message,) = said()
    assert message.startswith("The guarded sampler was called 10 times, but the guarded loss never")
    assert "g.paused()" in message


def one_more(g, f):
    for _ in range(101):
        g.sampler(f, POINTS)


@pytest.mark.parametrize(
    ("evaluate", "how"),
    [
        (one_more, "101 times since the last guarded loss, against 100 before"),
        (lambda g, f: torch.no_grad()(g.sampler)(f, POINTS), "in evaluation mode, without gradi"),
        (lambda g, f: g.sampler(f, POINTS.repeat(50, 1)), "for 100 samples, against 2 before"),
        (
            lambda g, f: g.sampler(f, POINTS, steps=500),
            "in evaluation mode, without gradients or for other steps",
        ),
    ],
)
def test_an_evaluation_is_told_from_training(said, evaluate, how):
    """A step of a discrete sampler is many calls too, but each step has a loss."""

    def sampler(f, x, steps=20):
        with torch.enable_grad():
            return gradient_at(f, x)

    f = Bowl()
    g = guard(None, sampler, beta_star=0.5, output_scale=2.0, sgld_steps=20, steps_argument="steps")
    for _ in range(3):
        for _ in range(100):
            g.sampler(f, POINTS)
        g.loss_fn(*energies())
        train(f)
    assert said() == []
    for _ in range(2):  # said once
        evaluate(g, f)
    (message,) = said()
    assert message.startswith(f"The guarded sampler was called {how}")
    assert "sampler.original" in message


def test_schedule_that_starts_late(said):
    f = Bowl()
    f.height.grad = torch.ones_like(f.height)
    optimizer = torch.optim.SGD(f.parameters(), lr=0.1)
    g = make(beta_star=lambda step: 0.5 if step >= 15 else 0.0, optimizer=optimizer)
    for step in range(20):
        g.sampler(f, POINTS)
        assert len(said()) == (step >= 15)
        optimizer.step()
