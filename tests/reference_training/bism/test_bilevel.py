"""The bi-level gradient against finite differences, alternation, and the known posterior."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from ebmguard.reference_training.bism.bilevel import Adam, Moments, descend
from ebmguard.reference_training.bism.latent import Latent
from ebmguard.reference_training.bism.matching import denoising, multiscale_denoising, sliced
from ebmguard.reference_training.bism.posterior import BernoulliPosterior, GaussianPosterior

from .parts import exact_posterior, rbm, rng

WIDE = torch.float64
BATCH, STD = 6, 0.4


def test_steps_are_adams():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.randn(8, 3, dtype=WIDE)
    phi = {name: p.detach().clone() for name, p in network.named_parameters()}
    before = {name: p.clone() for name, p in phi.items()}

    def loss(parameters):
        return torch.func.functional_call(network, parameters, (x,)).square().mean()

    found, moments = descend(loss, phi, Moments.none(phi), Adam(0.01), 7)
    found, _ = descend(loss, found, moments, Adam(0.01), 3)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01, betas=(0.9, 0.95))
    for _ in range(10):
        optimizer.zero_grad()
        network(x).square().mean().backward()
        optimizer.step()
    for name, p in network.named_parameters():
        torch.testing.assert_close(found[name], p.detach(), rtol=1e-9, atol=1e-12)
        assert torch.equal(phi[name], before[name])
        assert not phi[name].requires_grad
        assert not found[name].requires_grad


def test_an_entry_without_a_gradient_has_a_finite_derivative():
    theta = torch.tensor(2.0, requires_grad=True)
    phi = {"used": torch.ones(1), "unused": torch.ones(1)}

    def loss(parameters):
        return (theta * parameters["used"] + 0 * parameters["unused"]).square().sum()

    found, _ = descend(loss, phi, Moments.none(phi), Adam(0.1), 2, unrolled=True)
    (slope,) = torch.autograd.grad(found["used"].sum() + found["unused"].sum(), theta)
    assert slope.isfinite()


def gradient(loss, model):
    return torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)


class Case:
    """A bi-level problem all of whose random numbers are held."""

    def __init__(self, lower: str, upper: str) -> None:
        self.model = rbm(3, 2)
        generator = rng(5)
        self.v, self.noise, other = (
            torch.randn(BATCH, 3, generator=generator, dtype=WIDE) for _ in range(3)
        )
        self.directions = other.sign()
        torch.manual_seed(1)
        # Warm draws: cold ones are nearly steps, and their third derivatives vast.
        posterior = BernoulliPosterior(3, 2, temperature=1.0).double()
        self.latent = Latent(self.model.energy, posterior)
        self.h_noise = posterior.noise(BATCH, generator)
        self.phi = {name: p.detach() for name, p in posterior.named_parameters()}
        self.lower = partial(getattr(self.latent, lower), v=self.v, noise=self.h_noise)
        self.upper = upper

    def loss(self, steps: int):
        phi, _ = descend(
            lambda found: self.lower(found).mean(),
            self.phi,
            Moments.none(self.phi),
            Adam(0.05),
            steps,
            unrolled=True,
        )

        def log_density(v):
            return self.latent.log_weight(phi, v, self.h_noise)

        stds = torch.linspace(0.2, 0.5, BATCH, dtype=WIDE)
        return {
            "denoising": lambda: denoising(log_density, self.v, self.noise, STD),
            "sliced": lambda: sliced(log_density, self.v, self.directions),
            "multiscale": lambda: multiscale_denoising(
                log_density, self.v, self.noise, stds, held=STD
            ),
        }[self.upper]().mean()

    def gradient(self, steps: int):
        return gradient(self.loss(steps), self.model)


@pytest.mark.parametrize("upper", ["denoising", "sliced", "multiscale"])
@pytest.mark.parametrize("lower", ["negative_elbo", "conditional_fisher"])
def test_the_unrolled_gradient_is_that_of_finite_differences(lower, upper):
    case, apart = Case(lower, upper), 1e-5
    for p, slope in zip(case.model.parameters(), case.gradient(3), strict=True):
        for index in range(p.numel()):
            entry, values = p.data.view(-1), []
            kept = entry[index].item()
            for sign in (1, -1):
                entry[index] = kept + sign * apart
                values.append(case.loss(3).item())
            entry[index] = kept
            by_differences = (values[0] - values[1]) / (2 * apart)
            assert slope.view(-1)[index].item() == pytest.approx(by_differences, rel=1e-6, abs=1e-6)


def test_without_unrolled_steps_it_is_alternation():
    case = Case("negative_elbo", "denoising")
    phi = {name: p.detach() for name, p in case.latent.posterior.named_parameters()}
    weight = partial(case.latent.log_weight, phi, noise=case.h_noise)
    loss = denoising(weight, case.v, case.noise, STD).mean()
    plain = gradient(loss, case.model)
    for one, other in zip(case.gradient(0), plain, strict=True):
        assert torch.equal(one, other)
    assert any(
        not torch.allclose(one, other) for one, other in zip(case.gradient(3), plain, strict=True)
    )


@pytest.mark.parametrize("seed", range(3))
def test_with_the_exact_posterior_it_is_score_matching_of_f(seed):
    model = rbm(seed=seed)
    posterior = exact_posterior(model)
    latent = Latent(model.energy, posterior)
    generator = rng(10 + seed)
    v, noise = (torch.randn(BATCH, 2, generator=generator, dtype=WIDE) for _ in range(2))
    phi = dict(posterior.named_parameters())
    weight = partial(latent.log_weight, phi, noise=posterior.noise(BATCH, generator))
    torch.testing.assert_close(denoising(weight, v, noise, STD), denoising(model, v, noise, STD))
    torch.testing.assert_close(sliced(weight, v, noise), sliced(model, v, noise))
    # The lower level has reached its end: every draw's weight is f.
    torch.testing.assert_close(weight(v), model(v))


def test_a_trained_posterior_comes_close_to_the_exact_one():
    model = rbm()
    v = model.gibbs(torch.zeros(256, 2, dtype=WIDE), 50, rng(1))
    torch.manual_seed(0)
    posterior = BernoulliPosterior(2, 4).double()
    latent, generator = Latent(model.energy, posterior), rng(2)
    phi = {name: p.detach() for name, p in posterior.named_parameters()}

    def lower(parameters):
        return latent.negative_elbo(parameters, v, posterior.noise(256, generator)).mean()

    found, _ = descend(lower, phi, Moments.none(phi), Adam(0.02), 500)
    logits = torch.func.functional_call(posterior, found, (v,)).sigmoid()
    exact = model.posterior_logits(v).sigmoid()
    before = (posterior(v).sigmoid() - exact).abs().mean()
    assert (logits - exact).abs().mean() < before / 4


def test_a_gaussian_posteriors_density_and_draws():
    torch.manual_seed(0)
    posterior = GaussianPosterior((1, 8, 8), hidden=3, channels=(2, 3, 4)).double()
    v = torch.randn(5, 1, 8, 8, dtype=WIDE)
    moments = posterior(v)
    mean, log_std = moments.chunk(2, dim=-1)
    known = torch.distributions.Independent(torch.distributions.Normal(mean, log_std.exp()), 1)
    noise = posterior.noise(5, rng())
    h = posterior.draw(moments, noise)
    torch.testing.assert_close(posterior.log_prob(moments, h), known.log_prob(h))
    torch.testing.assert_close((h - mean) / log_std.exp(), noise)
