"""What a guard finds out about itself in its first steps: said once, or made good."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad

from ebmguard import Recovery
from ebmguard.report.problems import problems_of_run
from tests.never_silent.parts import Run, batched, by, mapped
from tests.parts import Energy, unit_langevin
from tests.recovery.parts import Scripted

N = 8


# -- chains that come in again: two tensors that a loop would go on with ------------------------


class Chains:
    """Draws by ``draw(chains, sample, f)``."""

    def __init__(self, draw: Any = None) -> None:
        self.draw = draw or returned
        self.first, self.second = torch.randn(4 * N, 2), torch.randn(N, 2) + 5

    def __call__(self, sample: Any, f: nn.Module) -> Tensor:
        drawn: Tensor = self.draw(self, sample, f)
        return drawn

    def own(self, f: nn.Module) -> Tensor:
        """A sampler that has the chains."""
        return returned(self, unit_langevin, f)

    @property
    def parts(self) -> list[Tensor]:
        return [self.first, self.second]


def returned(c: Chains, sample: Any, f: nn.Module) -> Tensor:
    c.first = sample(f, c.first)
    return c.first


def in_turns(c: Chains, sample: Any, f: nn.Module) -> Tensor:
    """Two sets of chains, a call for each."""
    c.first, c.second = sample(f, c.first), sample(f, c.second)
    return c.first


def written(c: Chains, sample: Any, f: nn.Module) -> Tensor:
    """By the loop, into the tensor that goes in."""
    return c.first.copy_(sample(f, c.first)).clone()


TURNS = itertools.cycle(range(0, 4 * N, N))


def a_few(c: Chains, sample: Any, f: nn.Module) -> Tensor:
    """Of a tensor of many chains a few move at a time."""
    rows = slice(start := next(TURNS), start + N)
    c.first[rows] = sample(f, c.first[rows])
    return c.first[rows].clone()


def restarted(c: Chains, sample: Any, f: nn.Module) -> Tensor:
    """A few chains start afresh before each call, in place."""
    c.first[torch.rand(4 * N) < 0.2] = 0.0
    return returned(c, sample, f)


def in_the_sampler(c: Chains, sample: Any, f: nn.Module) -> Tensor:
    drawn: Tensor = sample(f, c.first)
    return drawn


def writes(f: nn.Module, x: Tensor) -> Tensor:
    return x.copy_(unit_langevin(f, x)).clone()


def owned(c: Chains, sample: Any, f: nn.Module) -> Tensor:
    drawn: Tensor = sample(f)
    return drawn


KEPT = [returned, in_turns, written, a_few, restarted, in_the_sampler, owned]
SAVING: Any = {"action": "rollback", "recovery": Recovery(every=4, certify_after=3, reseed=False)}


@pytest.mark.parametrize("draw", KEPT)
def test_chains_that_come_in_again_are_taken_back(draw, caplog):
    chains = Chains(draw)
    samplers = {in_the_sampler: writes, owned: chains.own}
    run = Run(sampler=samplers.get(draw, unit_langevin), **SAVING)
    run.g._loop.judge = Scripted([17])
    at = {}
    while not run.g.rollbacks:
        at[run.g.step] = [part.clone() for part in chains.parts]
        run.go(1, chains)
    restored = run.g.rollbacks[0].restored_step
    assert restored == run.g.step >= 8
    assert all(map(torch.equal, chains.parts, at[restored]))
    assert "chains" not in caplog.text


def test_a_rollback_to_before_the_first_update_has_the_first_chains():
    chains, run = Chains(), Run(**SAVING)
    run.g._loop.judge = Scripted([1])
    before = [p.clone() for p in run.f.parameters()]
    run.go(1, chains)
    first = chains.first.clone()
    run.go(1, chains)
    assert run.g.step == 0
    assert torch.equal(chains.first, first)
    assert all(map(torch.equal, run.f.parameters(), before))


COPIED: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": lambda x: x.clone(),
    "another device": lambda x: torch.from_numpy(x.numpy().copy()),
    "with fresh ones": lambda x: torch.cat([x[2:], torch.randn(2, 2)]),
    "another order": lambda x: x.flip(0),
}
FRESH: dict[str, Callable[[Tensor], Tensor]] = {"fresh": torch.randn_like}


@pytest.mark.parametrize("kind", COPIED | FRESH)
def test_chains_that_are_left_behind_are_named_once(kind, caplog):
    chains, change = Chains(), (COPIED | FRESH)[kind]

    def copied(sample: Any, f: nn.Module) -> Tensor:
        chains.first = change(chains.first)
        return chains(sample, f)

    Run(**SAVING).go(60, copied)
    (said,) = [x for x in caplog.messages if "rollback_incomplete" in x]
    fix = "chains.copy_(sample(f, chains))" if kind in COPIED else "if every chain starts afresh"
    assert fix in said
    assert "buffer=" in said


# -- diagnostics that a run cannot have -----------------------------------------------------------


def differences(f: nn.Module, x: Tensor) -> Tensor:
    return torch.stack([(f(x + h) - f(x - h)) / 2e-2 for h in 1e-2 * torch.eye(2)], 1)


@torch.no_grad()
def metropolis(f: nn.Module, x: Tensor) -> Tensor:
    y = x + 0.2 * torch.randn_like(x)
    return torch.where(((f(y) - f(x)).exp() > torch.rand(len(x)))[:, None], y, x)


BLIND = {
    "grad": (by(lambda f, x: grad(lambda x: f(x).sum())(x)), "torch.func"),
    "vmap": (by(mapped), "torch.func"),
    "is_grads_batched": (by(batched), "batched"),
    "differences": (by(differences), "it takes none"),
    "no gradient": (metropolis, "it takes none"),
}


@pytest.mark.parametrize("kind", BLIND)
def test_a_gradient_norm_that_nobody_sees_is_said_once(kind, caplog, tmp_path):
    sampler, why = BLIND[kind]
    more = {"log_dir": tmp_path / "run", "beta_star": 0.0 if kind == "no gradient" else 0.5}
    run = Run(sampler=sampler, step_size=0.02, noise_std=0.2, **more)
    run.go(60, Chains())
    (said,) = [x for x in caplog.messages if "sampler/grad_norm" in x]
    assert why in said
    assert "sampler/drift_to_noise" in said
    run.g.close()
    for problems in (run.g.check(), problems_of_run(tmp_path / "run")):
        (problem,) = [x for x in problems if x.name == "unknown"]
        assert why in problem.what


def test_a_run_that_has_its_diagnostics_says_nothing(caplog):
    run = Run(step_size=0.02, noise_std=0.2)
    run.go(60, Chains())
    assert not caplog.messages
    assert not run.g.check()


# -- the rest of the check ------------------------------------------------------------------------


def decaying(f: nn.Module | None = None, **told: Any) -> Run:
    f = f or Energy()
    return Run(torch.optim.Adam(f.parameters(), lr=1e-3, weight_decay=0.1), f, **told)


def dropping(**told: Any) -> Run:
    return Run(f=Energy(nn.Dropout(0.1)), **told)


SAID: dict[str, Callable[[], Run]] = {
    "weight_decay": decaying,
    "dropout": dropping,
    "batch_norm": lambda: Run(f=Energy(nn.BatchNorm1d(8))),
    "sampler_factor": lambda: Run(output_scale=0.51),
}


@pytest.mark.parametrize("name", SAID)
def test_a_problem_is_said_after_the_first_step_once(name, caplog):
    run = SAID[name]()
    run.go(1, Chains())
    assert sum(f" {name}: " in x and x.startswith("g.check()") for x in caplog.messages) == 1
    run.go(60, Chains())
    assert sum(x.startswith("g.check()") for x in caplog.messages) == 1


@pytest.mark.parametrize("make", [decaying, dropping])
def test_at_0_nothing_is_said_of_what_the_guard_does_not_touch(make, caplog):
    make(beta_star=0).go(60, Chains())
    assert not caplog.messages


class Shy(nn.Dropout):
    """Nobody may ask how much it drops."""

    @property
    def p(self) -> float:
        raise RuntimeError("not while training")

    @p.setter
    def p(self, value: float) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_what_cannot_be_found_out_is_no_problem(caplog):
    run = decaying(Energy(Shy()))
    with caplog.at_level(logging.WARNING):
        run.go(3, Chains())
    assert ["weight_decay" in x for x in caplog.messages] == [True]
