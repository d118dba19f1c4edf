"""`sampler/grad_norm` is the analytic gradient norm of the untempered energy, of the last step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ebmguard import guard
from tests.parts import Bowl, energies, gradient_at

X = torch.tensor([[3.0, 4.0], [0.0, 2.0], [0.6, 0.8]], dtype=torch.float64)
NORMS = [5.0, 2.0, 1.0]  # of the gradient -x


def near(value):
    return pytest.approx(value, rel=1e-6)


def measured(sampler, *args, f=None, **options):
    options = {"beta_star": 0.5, "output_scale": 2.0} | options
    g = guard(None, sampler, **options)
    g.sampler(f or Bowl(), *args)
    g.loss_fn(*energies(dtype=torch.float64))
    return g.last["sampler/grad_norm"], g.last["sampler/grad_norm_max"]


def test_mean_and_largest_norm_per_sample():
    mean, largest = measured(gradient_at, X)
    assert mean == near(sum(NORMS) / 3)
    assert largest == near(5.0)


@pytest.mark.parametrize("options", [{"output_scale": None}, {"beta_star": 0.0}])
def test_without_a_factor(options):
    assert measured(gradient_at, X, **options)[0] == near(8 / 3)


@pytest.mark.parametrize("in_place", [True, False])
def test_samplers_whose_number_of_steps_changes(in_place):
    def sampler(f, x, steps):
        x = x.clone().requires_grad_()
        for _ in range(steps):
            (grad,) = torch.autograd.grad(f(x).sum(), x)
            move = (1 / 0.75) * 0.5 * grad  # halves x
            if in_place:
                x.data += move
            else:
                x = (x + move).detach().requires_grad_()
        return x.detach()

    g, f = guard(None, sampler, beta_star=0.5, output_scale=2.0), Bowl()
    norms = []
    for steps in (3, 5, 2, 2, 4):
        g.sampler(f, X, steps)
        g.loss_fn(*energies())
        norms.append(g.last["sampler/grad_norm"])
    expected = [8 / 3 / 2 ** (steps - 1) for steps in (3, 5, 2, 2, 4)]
    assert norms == pytest.approx(expected, rel=1e-6)


def test_unknown_without_gradients():
    def sampler(f, x):
        with torch.no_grad():
            f(x)
        f(x)
        return x

    assert all(math.isnan(value) for value in measured(sampler, X))


def test_unknown_where_the_factor_is_zero():
    assert math.isnan(measured(gradient_at, X, beta_star=2.0)[0])


def test_unknown_where_no_module_is_known():
    f = Bowl()
    value, _ = measured(lambda _: gradient_at(f, X), f=nn.Identity(), output_scale=None)
    assert math.isnan(value)


def test_one_call_does_not_speak_for_the_next():
    calls = iter([True, False])

    def sampler(f, x):
        if next(calls):
            return gradient_at(f, x)
        f(x)
        return x

    g = guard(None, sampler, beta_star=0.5, output_scale=2.0)
    f = Bowl()
    for expected in (8 / 3, math.nan):
        g.sampler(f, X)
        g.loss_fn(*energies())
        value = g.last["sampler/grad_norm"]
        assert value == pytest.approx(expected, nan_ok=True)


def test_functional_transforms_run_but_tell_nothing():
    def per_sample(f, x):
        return torch.func.vmap(torch.func.grad(lambda one: f(one[None]).sum()))(x)

    def whole(f, x):
        return torch.func.grad(lambda x: f(x).sum())(x)

    f = Bowl()
    for sampler in (per_sample, whole):
        assert torch.allclose(
            guard(None, sampler, beta_star=0.5, output_scale=2.0).sampler(f, X), -0.75 * X
        )
        assert math.isnan(measured(sampler, X)[0])


def test_no_hook_stays_on_the_samples():
    x = X.clone().requires_grad_()
    f = Bowl()

    def sampler(f):
        return torch.autograd.grad(f(x).sum(), x)[0]

    g = guard(None, sampler, beta_star=0.5, output_scale=2.0)
    for _ in range(3):
        g.sampler(f)
        assert not x._backward_hooks
    (9 * f(x)).sum().backward()
    g.loss_fn(*energies())
    assert g.last["sampler/grad_norm"] == near(8 / 3)


def test_pooled_over_the_samplers_of_one_step():
    g = guard(None, gradient_at, beta_star=0.5, output_scale=2.0)
    f = Bowl()
    g.sampler(f, X)
    g.sampler(f, 3 * X)
    g.loss_fn(*energies())
    assert g.last["sampler/grad_norm"] == pytest.approx(2 * 8 / 3, rel=1e-6)
