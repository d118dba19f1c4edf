"""Models of few latents against sums, losses, bi-level gradients, and every method's end."""

from __future__ import annotations

import math
from functools import partial
from itertools import product

import ebm.losses as ebmkit
import pytest
import torch
from torch import Tensor, nn

from ebmguard.errors import ConfigError
from ebmguard.reference_training.bism.annealed import bracket
from ebmguard.reference_training.bism.bilevel import Moments, descend
from ebmguard.reference_training.bism.config import UpdateSettings
from ebmguard.reference_training.bism.deep import DeepEnergy
from ebmguard.reference_training.bism.matching import (
    contrastive,
    denoising,
    multiscale_denoising,
    sliced,
)
from ebmguard.reference_training.bism.methods import Update
from ebmguard.reference_training.bism.posterior import BernoulliPosterior, GaussianPosterior, Latent
from ebmguard.reference_training.bism.rbm import GaussianBernoulliRBM
from ebmguard.reference_training.likelihood import (
    quadrature_log_z,
)
from tests.reference_training.parts import binary_states, exact_posterior, rbm, rng

WIDE = torch.float64


def test_f_posterior_and_log_z_of_an_rbm_are_sums_over_its_latents():
    model, v = rbm(), torch.randn(5, 2, generator=rng(1), dtype=torch.float64)
    states = binary_states(4)
    summed = (-model.energy(v[:, None], states)).logsumexp(1)
    torch.testing.assert_close(model(v), summed)
    shares = (-model.energy(v[:, None], states)).softmax(1)
    torch.testing.assert_close(model.posterior_logits(v).sigmoid(), shares @ states)
    by_quadrature = quadrature_log_z(model, (-20, -20), (20, 20)).item()
    assert model.log_z().item() == pytest.approx(by_quadrature, abs=1e-6)
    with pytest.raises(ConfigError, match="bits is 21, expected 1 to 20"):
        GaussianBernoulliRBM(2, 21, rng()).log_z()


def test_gibbs_samples_have_the_models_moments():
    model, count = rbm(), 20_000
    v = model.gibbs(torch.zeros(count, 2, dtype=torch.float64), 100, rng(4))
    states = binary_states(4)
    means = model.visible_mean(states)
    pulled = states @ model.weight.T
    scale = (2 * model.log_std).exp()
    log_mass = (
        states @ model.hidden_bias
        + pulled @ model.visible_bias
        + (pulled.square() * scale).sum(1) / 2
    )
    mean = log_mass.softmax(0) @ means
    square = log_mass.softmax(0) @ (means.square() + scale)
    std = (square - mean.square()).sqrt()
    for index in range(2):
        apart = abs(v[:, index].mean() - mean[index]) / (std[index] / math.sqrt(count))
        assert apart < 5
        torch.testing.assert_close(v[:, index].std(), std[index], rtol=0.05, atol=0)


SEEDS = 8


def starts(model, count, seed):
    """Exact samples: the latents' own probabilities are a table."""
    h = binary_states(len(model.hidden_bias))
    centre = model.visible_mean(h)
    precision = (-2 * model.log_std).exp()
    log_mass = h @ model.hidden_bias
    log_mass += ((centre.square() - model.visible_bias.square()) * precision).sum(1) / 2
    chosen = torch.multinomial(log_mass.softmax(0), count, True, generator=rng(seed))
    return model.sample_visible(h[chosen], rng(seed))


@pytest.mark.parametrize("visible", [2, 20])
def test_both_sides_are_within_a_twentieth_of_a_nat_of_the_sum(visible):
    model = rbm(visible, 4)
    log_z, sides = model.log_z().item(), []
    for seed in range(SEEDS):
        v = starts(model, 400, seed)
        found = bracket(model, v, temperatures=60, generator=rng(seed))
        sides.append((found.forward.log_z - log_z, found.reverse.log_z - log_z))
    ahead, back = torch.tensor(sides).T
    for side in ahead, back:
        assert abs(side.mean()) < 0.05
    # On average the sum lies between them, but for what so many seeds leave to chance.
    chance = 3 * (ahead.var() + back.var()).sqrt() / SEEDS**0.5
    assert ahead.mean() < chance
    assert back.mean() > -chance


SCALE = torch.tensor([0.5, 2.0], dtype=WIDE)


def gaussian(v):
    """log N(0, diag(SCALE^2)) but for its constant."""
    return -(v / SCALE).square().sum(-1) / 2


def normal(*shape: int, seed: int):
    return torch.randn(shape, generator=rng(seed), dtype=WIDE)


def test_sliced_and_multiscale_losses_of_a_gaussian_are_known():
    # Both coordinates' directions have unit covariance, so that nothing is left to chance.
    v = normal(6, 2, seed=1)
    directions = [torch.tensor(u, dtype=WIDE).expand(6, 2) for u in product((-1, 1), repeat=2)]
    mean = sum(sliced(gaussian, v, u) for u in directions) / 4
    by_hand = (v / SCALE**2).square().sum(1) / 2 - (1 / SCALE**2).sum()
    torch.testing.assert_close(mean, by_hand)
    v, noise = normal(6, 2, seed=4), normal(6, 2, seed=5)
    many = multiscale_denoising(gaussian, v, noise, torch.full((6,), 0.1, dtype=WIDE), held=0.1)
    # At this level the two residuals differ by the factor 1 / 0.1.
    torch.testing.assert_close(many, denoising(gaussian, v, noise, 0.1) * 100)


@pytest.mark.parametrize("name", ["denoising", "sliced", "contrastive"])
def test_against_ebmkit(name):
    v = normal(64, 2, seed=8)
    torch.manual_seed(9)
    noise = torch.distributions.Independent(
        torch.distributions.Normal(torch.zeros(2, dtype=WIDE), torch.ones(2, dtype=WIDE)), 1
    )
    losses = {
        "denoising": ebmkit.DenoisingScoreMatching(sigma=0.3),
        "sliced": ebmkit.SlicedScoreMatching(),
        "contrastive": ebmkit.NoiseContrastiveEstimation(noise_dist=noise).double(),
    }
    theirs = losses[name](lambda x: -gaussian(x), v).loss
    torch.manual_seed(9)
    drawn = noise.sample((64,)) if name == "contrastive" else torch.randn_like(v)
    ours = {
        "denoising": lambda: denoising(gaussian, v, drawn, 0.3),
        "sliced": lambda: sliced(gaussian, v, drawn),
        "contrastive": lambda: contrastive(
            gaussian(v) - noise.log_prob(v), gaussian(drawn) - noise.log_prob(drawn)
        ),
    }[name]()
    torch.testing.assert_close(ours.mean(), theirs)


BATCH, STD, SHAPE = 4, 0.4, (1, 8, 8)


def test_steps_are_adams_and_finite_where_there_is_no_gradient():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.randn(8, 3, dtype=WIDE)
    phi = {name: p.detach().clone() for name, p in network.named_parameters()}
    before = {name: p.clone() for name, p in phi.items()}

    def loss(parameters):
        return torch.func.functional_call(network, parameters, (x,)).square().mean()

    found, moments = descend(loss, phi, Moments.none(phi), 0.01, 7)
    found, _ = descend(loss, found, moments, 0.01, 3)
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
    theta = torch.tensor(2.0, requires_grad=True)
    phi = {"used": torch.ones(1), "unused": torch.ones(1)}

    def partly(parameters):
        return (theta * parameters["used"] + 0 * parameters["unused"]).square().sum()

    found, _ = descend(partly, phi, Moments.none(phi), 0.1, 2, unrolled=True)
    (slope,) = torch.autograd.grad(found["used"].sum() + found["unused"].sum(), theta)
    assert slope.isfinite()


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
        ("rbm", "fisher", "multiscale"),
        ("deep", "fisher", "denoising"),
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


def test_with_the_exact_posterior_it_is_score_matching_of_f():
    model = rbm()
    posterior = exact_posterior(model)
    latent = Latent(model.energy, posterior)
    generator = rng(10)
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
