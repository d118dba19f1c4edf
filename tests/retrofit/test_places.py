"""A loss and a sampler are told apart by what they do, whatever their names are."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ebmguard import guard
from ebmguard.errors import ConfigError
from ebmguard.samplers import hmc, sgld
from tests.parts import Bowl, gradient_at

POS, NEG = torch.tensor([1.0, 3.0]), torch.tensor([0.5, -1.5, 4.0])


def mcmc_cd(f, f_q):
    return f_q.mean() - f.mean()


def sampled_gap(energy, energy_neg):
    return energy_neg.mean() - energy.mean()


def langevin_hmc(model, x, n_steps=1):
    return n_steps * (x.mean() - model.mean())


class HMCLike:
    def __call__(self, f, x):
        return x.mean() - f.mean()


class Sampled(nn.Module):
    def forward(self, net, x_init):
        return x_init.mean() - net.mean()


class Unready:
    """What it weighs by is set by the loop."""

    weight: float

    def sample(self, f, buffer):
        return self.weight * (buffer.mean() - f.mean())


def drawing(f, x0):
    torch.rand(3)
    return x0.mean() - f.mean()


def heads(net, x):
    assert len(x) > 2
    return x[:3].mean() - net.mean()


LOSSES: list[Any] = [mcmc_cd, sampled_gap, langevin_hmc, HMCLike(), Sampled(), drawing, heads]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_is_one_whatever_it_is_called(loss):
    random = torch.get_rng_state()
    g = guard(loss, gradient_at, model=Bowl())
    assert torch.equal(torch.get_rng_state(), random)
    g.sampler(Bowl(), torch.ones(3, 2))
    # Not as a number with its own name: the plain difference, by hand.
    assert g.loss(POS.clone().requires_grad_(), NEG.clone().requires_grad_()) == 1.0 - 2.0


def test_a_loss_may_wait_for_what_comes_later():
    own = Unready()
    g = guard(own.sample)
    own.weight = 3.0
    assert g.loss(POS, NEG) == -3.0


def sample(f_pos, f_neg):
    return gradient_at(f_pos, f_neg)


def contrastive_loss(e_pos, e_neg):
    x = e_neg.detach().requires_grad_()
    return torch.autograd.grad(e_pos(x).sum(), x)[0]


class Loss:
    def __call__(self, f_real, f_fake):
        return gradient_at(f_real, f_fake)


@pytest.mark.parametrize("sampler", [sample, contrastive_loss, Loss()])
def test_a_sampler_is_one_whatever_it_is_called(sampler: Any):
    """The gradient of the bowl -|x|²/2 is -x."""
    x = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
    assert torch.equal(guard(None, sampler).sampler(Bowl(), x), -x)
    with pytest.raises(ConfigError, match=r"fails: 'Tensor' object is not callable\. .*second"):
        guard(sampler)


CALLS: list[Tensor] = []


def counting(f, x):
    CALLS.append(x)
    return gradient_at(f, x)


def difference(f, x):
    return torch.mean(x) - torch.mean(f)


def test_what_a_sampler_has_of_the_trainer_is_left_alone():
    guard(None, counting)
    assert not CALLS


@pytest.mark.parametrize("loss", [mcmc_cd, sampled_gap, difference])
def test_a_loss_in_the_place_of_the_sampler(loss):
    with pytest.raises(ConfigError, match=r"a loss: it makes one number of two.*comes first"):
        guard(None, loss)


@pytest.mark.parametrize(
    "sampler", [sgld, hmc, partial(sgld, steps=2, step_size=0.1, noise_std=0.1)]
)
def test_own_samplers_in_the_place_of_the_loss(sampler: Any):
    with pytest.raises(ConfigError, match="comes second"):
        guard(sampler)


def draw(buffer, n):
    return buffer.sample(n)


def test_a_sampler_that_asks_a_vector_for_what_it_has_not():
    with pytest.raises(ConfigError, match=r"has no attribute 'sample'.*comes second"):
        guard(draw)
