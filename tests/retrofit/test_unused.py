"""Samples that no guarded loss uses are mentioned, once; plots are not mistaken for them."""

from __future__ import annotations

import logging

import pytest
import torch

from ebmguard import guard
from tests.parts import Bowl, energies, gradient_at

X = torch.ones(2, 2, dtype=torch.float64)


@pytest.fixture
def said(caplog):
    with caplog.at_level(logging.WARNING, "ebmguard"):
        yield lambda: [record.getMessage() for record in caplog.records]


def make(**options):
    return guard(None, gradient_at, **({"beta_star": 0.5, "output_scale": 2.0} | options))


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
        g.sampler(f, X)
        train(f)
    (message,) = said()
    assert message.startswith("The guarded sampler was called 10 times, but the guarded loss never")
    assert "g.paused()" in message


def test_a_step_may_call_two_networks_in_turn(said):
    g, networks = make(), (Bowl(), Bowl())
    train(networks[1])
    for _ in range(50):
        for f in networks:
            g.sampler(f, X)
    assert said() == []


def test_plots_while_paused_do_not_count(said):
    g = make()
    with g.paused():
        for _ in range(50):
            g.sampler(Bowl(), X)
    for _ in range(9):  # long-run chains before the first step, say
        g.sampler(Bowl(), X)
    g.loss_fn(*energies())
    for _ in range(9):
        g.sampler(Bowl(), X)
    assert said() == []


def one_more(g, f):
    for _ in range(101):
        g.sampler(f, X)


def in_evaluation_mode(g, f):
    g.sampler(f.eval(), X)


def without_gradients(g, f):
    with torch.no_grad():
        g.sampler(f, X)


def for_a_grid(g, f):
    g.sampler(f, X.repeat(50, 1))


def for_other_steps(g, f):
    g.sampler(f, X, steps=500)


@pytest.mark.parametrize(
    ("evaluate", "how"),
    [
        (one_more, "101 times since the last guarded loss, against 100 before"),
        (in_evaluation_mode, "in evaluation mode"),
        (without_gradients, "in evaluation mode, without gradients"),
        (for_a_grid, "for 100 samples, against 2 before"),
        (for_other_steps, "in evaluation mode, without gradients or for other steps"),
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
            g.sampler(f, X)
        g.loss_fn(*energies())
        train(f)
    assert said() == []
    for _ in range(2):  # said once
        evaluate(g, f)
    (message,) = said()
    assert message.startswith(f"The guarded sampler was called {how}")
    assert "sampler.original" in message


@pytest.mark.parametrize("options", [{"beta_star": 0.0}, {"sampler_scale": 1.0}], ids=str)
def test_an_evaluation_that_is_not_tempered(said, options):
    g = make(**options)
    g.sampler(Bowl(), X)
    g.loss_fn(*energies())
    for _ in range(50):
        g.sampler(Bowl(), X)
    assert said() == []


def test_standard_trainer_is_left_in_peace(said):
    g = make(beta_star=0.0)
    for _ in range(50):
        g.sampler(Bowl(), X)
    assert said() == []


def test_schedule_that_starts_late(said):
    f = Bowl()
    f.height.grad = torch.ones_like(f.height)
    optimizer = torch.optim.SGD(f.parameters(), lr=0.1)
    g = guard(None, gradient_at, beta_star=lambda step: 0.5 if step >= 15 else 0.0, output_scale=2)
    g.attach(optimizer=optimizer)
    for step in range(20):
        g.sampler(f, X)
        assert len(said()) == (step >= 15)
        optimizer.step()


def test_loss_without_its_sampler_is_an_error():
    g = make()
    with pytest.raises(RuntimeError, match="the guarded sampler never was"):
        g.loss_fn(*energies())
    with g.paused():
        g.sampler(Bowl(), X)
        g.loss_fn(*energies())  # evaluation: any energies will do
    assert g.step == 0
    assert g.last == {}
    with pytest.raises(RuntimeError, match="the guarded sampler never was"):
        g.loss_fn(*energies())
