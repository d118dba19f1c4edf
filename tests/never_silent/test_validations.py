"""Losses that cannot train leave no trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD

from ebmguard import guard
from tests.never_silent.parts import Run
from tests.parts import Energy, unit_langevin


def far(run: Run, grad: Any) -> None:
    with grad():
        run.g.loss_fn(run.f(torch.randn(8, 2) * 1e4), run.f(torch.randn(8, 2)))


def detached(run: Run) -> None:
    run.g.loss_fn(run.f(torch.randn(8, 2) * 1e4).detach(), run.f(torch.randn(8, 2)).detach())


def not_finite(run: Run) -> None:
    x = torch.full((4,), torch.nan)
    run.g.loss_fn(x, x)


def reweighted(run: Run) -> None:
    with torch.no_grad():
        pos, neg = run.f(torch.randn(8, 2) * 1e4), run.f(torch.randn(8, 2))
        assert all(x is y for x, y in zip(run.g.reweight(pos, neg), (pos, neg), strict=True))


VALIDATIONS: dict[str, tuple[Callable[[Run], None], dict[str, Any]]] = {
    "no_grad": (lambda run: far(run, torch.no_grad), {}),
    "energies that are detached": (detached, {}),
    "reweighted": (reweighted, {}),
    "not finite": (not_finite, {}),
}


@pytest.mark.parametrize("action", ["raise", "rollback"])
@pytest.mark.parametrize("name", VALIDATIONS)
def test_a_validation_leaves_no_trace(name, action):
    each, options = VALIDATIONS[name]
    runs = []
    for has_validation in (True, False):
        torch.manual_seed(0)
        run = Run(action=action, **options)
        for step in range(30):
            run.backward()
            run.told.step()
            if has_validation and step % 3 == 0:
                state = torch.get_rng_state()
                each(run)
                torch.set_rng_state(state)
        run.g.close()
        runs.append(run)
    assert not runs[0].g.alerts
    assert not runs[0].g.rollbacks
    ours, theirs = ([repr(row) for row in run.memory.rows] for run in runs)
    assert ours == theirs
    assert len(ours) == 30


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("loss_fn", [None, lambda pos, neg: 2 * (neg.mean() - pos.mean())])
def test_a_validation_comes_first_and_has_the_loss_of_a_training_step(grad, loss_fn):
    f = Energy()
    g = guard(
        loss_fn, unit_langevin, optimizer=SGD(f.parameters(), lr=0.1), beta_star=0.5, output_scale=1
    )
    x, y = torch.randn(8, 2), torch.randn(8, 2)
    with grad():
        value = g.loss_fn(f(x), f(y))  # before any sampler call
    assert g.last == {}
    g.sampler(f, y)
    torch.testing.assert_close(value, g.loss_fn(f(x), f(y)).detach())


def test_a_training_without_gradients_is_told_how_to_be_recorded(caplog):
    run = Run()
    for step in range(30):
        for p in run.f.parameters():
            p.data.mul_(0.99)
        far(run, torch.no_grad)
        assert len(caplog.records) == (step >= 10), step
    assert "torch.enable_grad()" in caplog.text
    assert not run.memory.rows


def test_validations_before_training_are_not_mistaken_for_it(caplog):
    run = Run()
    for epoch in range(5):  # of another loss
        for _ in range(30):
            far(run, torch.no_grad)
        next(run.f.parameters()).data.add_(epoch)
    assert not caplog.records
