"""A guarded loss that is subtracted trains backwards: said once, and only then."""

from __future__ import annotations

import logging

import pytest
import torch

import ebmguard


def after_backward(caplog, sign, *, steps=1, beta_star=0.5, **options):
    torch.manual_seed(0)
    f = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(f.parameters(), 0.1, **options)
    g = ebmguard.guard(None, None, beta_star=beta_star, output_scale=100.0)
    if options:
        g.attach(model=f, optimizer=optimizer)
    with caplog.at_level(logging.WARNING, "ebmguard"):
        for _ in range(steps):
            loss = sign * g.loss(f(torch.randn(8, 3)), f(torch.randn(8, 3)))
            optimizer.zero_grad()
            (3 * loss).backward()
            optimizer.step()
    return [r.getMessage() for r in caplog.records if "wrong way" in r.getMessage()]


@pytest.mark.parametrize("beta_star", [0.0, 0.5])
def test_a_loss_that_is_subtracted_is_said_once(beta_star, caplog):
    (said,) = after_backward(caplog, -1, steps=3, beta_star=beta_star)
    assert "is negative" in said
    assert "add it, do not subtract it" in said


@pytest.mark.parametrize("beta_star", [0.0, 0.5])
def test_a_loss_that_is_added_is_not(beta_star, caplog):
    assert not after_backward(caplog, 1, steps=3, beta_star=beta_star)


def test_an_optimizer_that_maximises_wants_the_other_sign(caplog):
    assert not after_backward(caplog, -1, maximize=True)
    (said,) = after_backward(caplog, 1, maximize=True)
    assert "is positive, and the optimizer ascends" in said
