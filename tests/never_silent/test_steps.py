"""Steps that do not end are said, and right trainers are left in peace."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from ebmguard import errors
from tests.never_silent.parts import Run
from tests.parts import Energy, difference, unit_langevin


@pytest.fixture
def said(caplog) -> Iterator[Callable[[], list[str]]]:
    with caplog.at_level(logging.WARNING, "ebmguard"):
        yield lambda: [text for x in caplog.records if "without a step" in (text := x.getMessage())]


# -- steps that do not end -----------------------------------------------------------------------


class Wrapper(SGD):
    """Of an inner optimizer; nobody calls its own step."""

    def __init__(self, f: nn.Module) -> None:
        super().__init__(f.parameters(), lr=0.1)
        self.base_optimizer = SGD(f.parameters(), lr=0.01)


def two_step_sam(run: Run) -> None:
    run.backward()
    before = [p.detach().clone() for p in run.f.parameters()]
    with torch.no_grad():
        for p, gradient in run.each():
            p.add_(gradient, alpha=0.05)
    run.backward()
    with torch.no_grad():
        for p, old in zip(run.f.parameters(), before, strict=True):
            p.copy_(old)
    run.told.base_optimizer.step()


def optimizer_made_anew(run: Run) -> None:
    run.backward()
    if run.g.step == 3 and run.other is None:
        run.other = SGD(run.f.parameters(), lr=0.01)
    (run.other or run.told).step()


def updates_by_itself(run: Run) -> None:
    run.backward()
    for p, gradient in run.each():
        p.data.sub_(0.01 * gradient)  # which no version of p tells


def model_made_anew(run: Run) -> None:
    if run.g.step == 3 and run.other is None:
        run.f = copy.deepcopy(run.f)
        run.other = SGD(run.f.parameters(), lr=0.01)
    run.backward()
    (run.other or run.told).step()


UNENDED: dict[str, tuple[Callable[[Run], None], str]] = {
    "two-step SAM": (two_step_sam, "optimizer=optimizer.base_optimizer"),
    "an optimizer made anew": (optimizer_made_anew, "SGD(lr=0.01), has stepped"),
    "a wrapper that updates by itself": (updates_by_itself, "leave it out"),
    "a model made anew": (model_made_anew, "leave it out"),
}


def told_for(name: str, **told: Any) -> Run:
    f = Energy()
    if name == "a model made anew":
        told |= {"model": None}
    return Run(Wrapper(f) if "SAM" in name else None, f, **told)


@pytest.mark.parametrize("name", UNENDED)
def test_steps_that_do_not_end_are_said_and_rows_go_on(name, said):
    each, fix = UNENDED[name]
    run = told_for(name)
    for _ in range(40):
        each(run)
    run.g.close()
    (message,) = said()
    assert type(run.told).__name__ in message
    assert fix in message
    assert run.g.step >= 24
    assert len(run.memory.rows) >= 24
    assert max(len(run.g._loop.rows._open.numbers), 1) < 8  # nothing piles up


@pytest.mark.parametrize("name", ["two-step SAM", "an optimizer made anew"])
def test_an_optimizer_that_steps_instead_is_followed(name, said):
    run = told_for(name)
    for _ in range(20):
        UNENDED[name][0](run)
    step = run.g.step
    assert run.g.trainer.optimizer is (run.other or run.told.base_optimizer)
    run.backward(math.nan)
    run.g.trainer.optimizer.step()
    assert run.is_finite
    assert run.g.step == step + 1


REFUSED = [(name, action) for name in UNENDED for action in ("raise", "rollback")]
REFUSED.remove(("a model made anew", "rollback"))  # which needs the model, told by name


@pytest.mark.parametrize(("name", "action"), REFUSED)
def test_an_action_that_waits_for_such_a_step_is_refused(name, action, said):
    run = told_for(name, action=action)
    each = UNENDED[name][0]

    def train() -> None:
        for _ in range(20):
            each(run)

    with pytest.raises(errors.ConfigError, match="losses without a step of the attached") as error:
        train()
    assert f"action={action!r}" in str(error.value)
    assert run.is_finite
    assert not said()


@pytest.mark.parametrize(
    ("name", "action"),
    [("two-step SAM", "rollback"), ("a wrapper that updates by itself", "raise")],
)
def test_at_beta_star_zero_it_is_only_said_and_nothing_changes(name, action, said):
    found = []
    for is_guarded in (True, False):
        torch.manual_seed(1)
        run = told_for(name, action=action, beta_star=0.0)
        if not is_guarded:
            plain: Any = difference
            run.g.loss_fn, run.g.sampler = plain, unit_langevin
        for _ in range(30):
            UNENDED[name][0](run)
        found.append([p.detach().clone() for p in run.f.parameters()])
    assert len(said()) == 1
    assert all(map(torch.equal, *found))


# Trainers whose steps end, whatever they do to the parameters in between.


class Normed(nn.Linear):
    """Weights made to length 1 in every forward pass, as in EDM2."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.copy_(self.weight / (1e-4 + self.weight.norm(dim=1, keepdim=True)))
        return super().forward(x)


def sam_of_micro_batches(run: Run) -> None:
    total = [torch.zeros_like(p) for p in run.f.parameters()]
    for _ in range(16):
        run.backward()
        moves = [0.05 * gradient for _, gradient in run.each()]
        for sign in (1, -1):
            with torch.no_grad():
                for p, move in zip(run.f.parameters(), moves, strict=True):
                    p.add_(move, alpha=sign)
            if sign > 0:
                run.backward()
        total = [x + gradient for x, (_, gradient) in zip(total, run.each(), strict=True)]
    for p, x in zip(run.f.parameters(), total, strict=True):
        p.grad = x
    run.told.step()


def accumulation(run: Run) -> None:
    for _ in range(32):
        run.loss().backward()
    run.told.step()
    run.told.zero_grad()


def closures(run: Run) -> None:
    def closure() -> float:
        run.backward()
        return 1.0

    run.told.step(closure)


ENDED: dict[str, tuple[Callable[[Run], None], Any]] = {
    "SAM of micro-batches": (sam_of_micro_batches, None),
    "accumulation": (accumulation, None),
    "weights normalised in the forward pass": (accumulation, None),
    "L-BFGS": (closures, lambda f: torch.optim.LBFGS(f.parameters(), max_iter=30, lr=1e-3)),
}


@pytest.mark.parametrize("name", ENDED)
def test_right_trainers_are_left_in_peace(name, said):
    each, optimizer = ENDED[name]
    f = Energy()
    if "norm" in name:
        f.net[0] = Normed(2, 8)
    run = Run(optimizer(f) if optimizer else SGD(f.parameters(), lr=1e-3), f, action="raise")
    for _ in range(3):
        each(run)
    assert run.g.step == 3
    assert not said()
