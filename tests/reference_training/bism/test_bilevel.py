"""The bi-level gradient against finite differences and alternation, and every method's end."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from ebmguard.reference_training.bism.bilevel import Moments, descend
from ebmguard.reference_training.bism.config import UpdateSettings
from ebmguard.reference_training.bism.deep import DeepEnergy
from ebmguard.reference_training.bism.matching import denoising, multiscale_denoising, sliced
from ebmguard.reference_training.bism.methods import Update
from ebmguard.reference_training.bism.posterior import BernoulliPosterior, GaussianPosterior, Latent
from ebmguard.reference_training.bism.rbm import GaussianBernoulliRBM
from tests.reference_training.parts import exact_posterior, rbm, rng

WIDE = torch.float64
BATCH, STD, SHAPE = 4, 0.4, (1, 8, 8)


class Case:
    """A bi-level problem all of whose random numbers are held, of an RBM or a deep model."""

    def __init__(self, kind: str, lower: str, upper: str) -> None:
        self.model, posterior, shape = problem(kind)
        generator = rng(5)
        self.v, noise, other = (
            torch.randn(BATCH, *shape, generator=generator, dtype=WIDE) for _ in range(3)
        )
        latent = Latent(self.model.energy, posterior)
        draws = posterior.noise(BATCH, generator)
        self.phi = {name: p.detach() for name, p in posterior.named_parameters()}
        weight = {"fisher": latent.conditional_fisher, "elbo": latent.log_weight}[lower]
        self.sign, self.lower = (
            1 if lower == "fisher" else -1,
            partial(weight, v=self.v, noise=draws),
        )
        self.log_weight = partial(latent.log_weight, noise=draws)
        stds = torch.linspace(0.2, 0.5, BATCH, dtype=WIDE)
        self.upper = {
            "denoising": partial(denoising, v=self.v, noise=noise, std=STD),
            "sliced": partial(sliced, v=self.v, directions=other.sign()),
            "multiscale": partial(multiscale_denoising, v=self.v, noise=noise, stds=stds, held=STD),
        }[upper]

    def loss(self, steps: int) -> Tensor:
        def lower(phi):
            return self.sign * self.lower(phi).mean()

        moments = Moments.none(self.phi)
        phi, _ = descend(lower, self.phi, moments, 0.01, steps, unrolled=True)
        found: Tensor = self.upper(partial(self.log_weight, phi)).mean()
        return found


def problem(kind: str):
    """A model, a posterior whose draws are warm, and the shape of v.

    Cold draws of bits are nearly steps, and their third derivatives vast.
    """
    torch.manual_seed(1)
    if kind == "rbm":
        return rbm(3, 2), BernoulliPosterior(3, 2, temperature=1.0).double(), (3,)
    network = DeepEnergy(SHAPE, 2, 2, 3, "latent").double()
    if kind == "deep":
        return network, GaussianPosterior(SHAPE, 2, (2, 2, 2)).double(), SHAPE
    return network, BernoulliPosterior(64, 2, temperature=1.0).double(), SHAPE


@pytest.mark.parametrize(
    ("kind", "lower", "upper"),
    [
        ("rbm", "elbo", "denoising"),
        ("rbm", "elbo", "sliced"),
        ("rbm", "fisher", "multiscale"),
        ("deep", "fisher", "denoising"),
        ("deep", "elbo", "multiscale"),
        ("deep bits", "elbo", "denoising"),
    ],
)
def test_the_unrolled_gradient_is_that_of_finite_differences(kind, lower, upper):
    case, apart = Case(kind, lower, upper), 1e-6
    parameters = list(case.model.parameters())
    slopes = torch.autograd.grad(case.loss(2), parameters, materialize_grads=True)
    for p, slope in zip(parameters, slopes, strict=True):
        # Along one random direction of each tensor, which has all of its entries.
        direction, kept = torch.randn(p.shape, generator=rng(4), dtype=WIDE), p.data.clone()
        values = []
        for sign in (1, -1):
            p.data.copy_(kept + sign * apart * direction)
            values.append(case.loss(2).item())
        p.data.copy_(kept)
        by_differences = (values[0] - values[1]) / (2 * apart)
        along = (slope * direction).sum().item()
        assert along == pytest.approx(by_differences, rel=1e-6, abs=1e-6)


def test_without_unrolled_steps_it_is_alternation():
    """Of torch's Adam, on the posterior and then on the model."""
    (model, posterior, _), (twin, q, _) = problem("deep"), problem("deep")
    settings = UpdateSettings(
        method="bidsm", lower="fisher", noise_std=STD, inner_steps=3, unrolled_steps=0, lr=0.01
    )
    v, stream = torch.rand(BATCH, *SHAPE, generator=rng(1), dtype=WIDE), rng(5)
    Update(model, settings, rng(5), posterior, lambda *_: v)(v)

    latent = Latent(twin.energy, q)
    adams = [torch.optim.Adam(of.parameters(), lr=0.01, betas=(0.9, 0.95)) for of in (q, twin)]

    def normal():
        return torch.randn(v.shape, generator=stream, dtype=WIDE)

    for _ in range(3):
        phi, seen = dict(q.named_parameters()), v + STD * normal()
        adams[0].zero_grad()
        latent.conditional_fisher(phi, seen, q.noise(BATCH, stream)).mean().backward()
        adams[0].step()
    phi = {name: p.detach() for name, p in q.named_parameters()}
    weight = partial(latent.log_weight, phi, noise=q.noise(BATCH, stream))
    adams[1].zero_grad()
    denoising(weight, v, normal(), STD).mean().backward()
    adams[1].step()
    for ours, theirs in ((model, twin), (posterior, q)):
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


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


COUNT, SIZE = 2000, 100


@pytest.fixture(scope="module")
def data():
    truth = rbm().float()
    return truth, truth.gibbs(torch.zeros(2 * COUNT, 2), 50, rng(1)).split(COUNT)


def begin(method: str, **options: object) -> tuple[GaussianBernoulliRBM, Update]:
    model, generator = GaussianBernoulliRBM(2, 4, rng(3)), rng(4)
    settings = {
        "lr": 0.01,
        "noise_std": 0.1,
        "noise_range": (0.05, 0.3),
        "inner_steps": 2,
        "unrolled_steps": 2,
        **options,
    }
    return model, Update(model, UpdateSettings(method=method, **settings), generator)


@torch.no_grad()
def nats(model: GaussianBernoulliRBM, v: torch.Tensor) -> float:
    return float((model(v) - model.log_z()).mean())


# Nats per sample that are left to the model that drew the data, of 4.8 at the beginning. NCE's
# noise is far from the data. BiSSM with few unrolled steps leaves the optimum again: its partial
# gradient is not 0 there, since the trace of the Hessian has no part in it. That of the others is,
# because the residual of denoising has no mean given the noisy sample.
LEFT = {
    **dict.fromkeys(("dsm", "ssm", "mdsm", "cd1", "pcd5"), 0.15),
    **dict.fromkeys(("bidsm", "bimdsm"), 0.4),
    **dict.fromkeys(("nce", "vnce", "bissm"), 1.0),
}


@pytest.mark.parametrize("method", LEFT)
def test_every_method_comes_close_to_the_datas_model(method, data):
    truth, (trained, held_out) = data
    best = nats(truth, held_out)
    lr, updates = (0.01, 400) if LEFT[method] == 0.15 else (0.016, 250)  # the others cost more
    model, update = begin(method, lr=lr)
    assert best - nats(model, held_out) > 4
    order = rng(5)
    for _ in range(updates):
        numbers = update(trained[torch.randint(COUNT, (SIZE,), generator=order)])
        assert all(x.isfinite() for x in numbers.values())
    assert best - nats(model, held_out) < LEFT[method]
