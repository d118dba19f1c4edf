"""What a step is, in every kind of loop; and that sampler and loss share its values."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from ebmguard import guard
from ebmguard.retrofit import watches
from tests.parts import Energy, Memory, energies, gradient_at

X = torch.ones(4, 2)


class Loop:
    """A guard whose beta* is 1, 2, 3, ... by step, on f = Energy(), with all it has seen."""

    def __init__(self, *, sampler: bool = True, optimizer: Any = None, scale: float = 100.0):
        self.f = Energy()
        self.memory = Memory()
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
        self.scale = scale
        self.optimizer: Any = None
        if optimizer is not None:
            self.optimizer = optimizer(self.f.parameters())
            self.guard.attach(optimizer=self.optimizer)

    def _sample(self) -> torch.Tensor:
        with torch.no_grad():
            tempered = self.f(X)
        ratio = tempered / self.f.net(X).squeeze(-1)
        self.factors.append(ratio.mean().item())
        return X

    def sample(self) -> None:
        self.guard.sampler()

    def loss(self) -> torch.Tensor:
        value: torch.Tensor = self.guard.loss_fn(self.f(X), self.f(0.5 * X))
        self.betas.append(self.guard.last["beta_star"])
        return value

    def update(self) -> None:
        assert self.optimizer is not None
        self.optimizer.step()

    def temper(self) -> None:
        out = self.guard.temper(torch.ones(3, dtype=torch.float64))
        self.factors.append(out.mean().item())

    def go(self, script: str) -> None:
        """Runs a loop: s is a sampler call, t an inline one, l a loss, b one with its backward
        pass, u an update by the optimizer."""
        for act in script.replace(" ", ""):
            if act == "b":
                self.loss().backward()
            else:
                {"s": self.sample, "t": self.temper, "l": self.loss, "u": self.update}[act]()

    def check(self, *, factors: list[int], losses: list[int], rows: list[int]) -> None:
        """Which step's beta* each sampler call and each loss had; which rows were written."""
        self.guard.close()
        expected = [1 - (step + 1) / self.scale for step in factors]
        assert self.factors == pytest.approx(expected, rel=1e-5)
        assert self.betas == [step + 1 for step in losses]
        assert self.memory.steps == rows
        by_step = [step + 1 for step in rows]
        assert self.memory.column("beta_star") == by_step


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)


# Name: the loop, whether it has an optimizer, and which step's beta* each sampler call and each
# loss had.
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


def test_rows_of_one_step_are_averaged():
    memory = Memory()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    g = guard(None, None, beta_star=1.0, sinks=[memory]).attach(optimizer=optimizer)
    pos, neg = energies()
    for shift in (0.0, 1.0, 5.0):
        g.loss_fn(pos + shift, neg)
    optimizer.step()
    gap = (pos.mean() - neg.mean()).item()
    assert memory.rows[0][1]["energy_gap"] == pytest.approx(gap + 2.0, rel=1e-5)
    # The raw energies behind the histogram are those of the first.
    step, histograms = memory.histograms[0]
    assert (step, histograms["f_pos"]) == (0, pos.tolist())


@pytest.mark.parametrize("step", ["sb", "sbu"])
def test_plotting_calls_between_steps_do_no_harm(step):
    loop = Loop(optimizer=adam if "u" in step else None)
    for _ in range(2):
        loop.go(step)
        loop.go("s")  # a plot, tempered; it belongs to the next step
        with loop.guard.paused():
            loop.go("sl")
    loop.guard.close()
    assert loop.memory.steps == [0, 1]
    plain = loop.factors[2::3]
    assert plain == pytest.approx([1.0, 1.0])
    assert loop.factors[3] == pytest.approx(0.98, rel=1e-5)


def test_closure_that_an_optimizer_calls_several_times():
    def lbfgs(parameters):
        return torch.optim.LBFGS(parameters, max_iter=3)

    loop = Loop(optimizer=lbfgs)
    calls = []

    def closure():
        loop.optimizer.zero_grad()
        value = loop.loss() + sum(p.square().sum() for p in loop.f.parameters())
        value.backward()
        calls.append(loop.guard.step)
        return value

    for _ in range(2):
        loop.sample()
        loop.optimizer.step(closure)
    assert len(calls) > 4  # more than once per step
    losses = sorted(calls)
    assert set(losses) == {0, 1}
    loop.check(factors=[0, 1], losses=losses, rows=[0, 1])


def test_updates_without_a_loss_count_as_steps():
    loop = Loop(optimizer=adam)
    loop.go("sbu u sbu")  # the second, a classifier's, say
    loop.guard.close()
    assert loop.betas == [1, 3]
    assert loop.factors == pytest.approx([0.99, 0.97], rel=1e-5)


def test_optimizer_that_never_steps_is_mentioned_once(caplog, monkeypatch):
    monkeypatch.setattr(watches, "_ENDLESS", 50)

    class Wrapper(torch.optim.SGD):
        """SAM's second_step calls the inner optimizer's step, never its own."""

    loop = Loop(optimizer=lambda parameters: Wrapper(parameters, lr=0.1))
    pos, neg = energies()
    loop.sample()
    with caplog.at_level(logging.WARNING, "ebmguard"):
        for _ in range(55):
            loop.guard.loss_fn(pos, neg)
    (record,) = caplog.records
    assert "50 losses without a step" in record.getMessage()


def test_attaching_again_adds_up_and_replaces():
    loop = Loop(optimizer=adam)
    first = loop.optimizer
    buffer = torch.zeros(3)
    loop.guard.attach(buffer=buffer, step_size=1.0)
    attached = loop.guard.trainer
    assert [attached.optimizer, attached.step_size] == [first, 1.0]
    assert attached.buffer is buffer
    loop.go("sb")
    first.step()
    assert loop.guard.step == 1
    second = torch.optim.SGD(loop.f.parameters(), lr=0.1)
    loop.guard.attach(optimizer=second)
    first.step()
    assert loop.guard.step == 1
    second.step()
    assert loop.guard.step == 2


def test_unpacks_into_loss_and_sampler():
    g = guard(None, gradient_at, beta_star=1.0)
    loss_fn, sample_q = g
    assert loss_fn is g.loss_fn
    assert sample_q is g.sampler
    assert loss_fn.guard is g
    assert repr(g) == "<ebmguard.Guard step=0 alerts=0>"
    assert not any(isinstance(part, torch.nn.Module) for part in (g, loss_fn, sample_q))
