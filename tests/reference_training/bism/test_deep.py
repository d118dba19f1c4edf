"""Deep models against sums over bits, finite differences, and the settings that were published."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ebmguard.errors import ConfigError
from ebmguard.reference_training.bism.bilevel import Adam, Moments, descend
from ebmguard.reference_training.bism.deep import DeepEnergy, DeepModel, pixels
from ebmguard.reference_training.bism.deep_config import DeepConfig
from ebmguard.reference_training.bism.latent import Latent
from ebmguard.reference_training.bism.matching import denoising, score
from ebmguard.reference_training.bism.methods import Update
from ebmguard.reference_training.bism.posterior import BernoulliPosterior, GaussianPosterior
from ebmguard.reference_training.bism.presets import UpdateSettings

from . import parts
from .parts import binary_states, rng

go = partial(parts.go, DeepConfig)
WIDE = torch.float64
SHAPE, BATCH, BITS = (1, 8, 8), 4, 3


def deep(hidden: int = BITS, posterior: str = "gaussian", channels: int = 2) -> DeepModel:
    torch.manual_seed(0)
    network = DeepEnergy(SHAPE, hidden, channels, 3, "latent").double()
    if posterior == "gaussian":
        return DeepModel(network, GaussianPosterior(SHAPE, hidden, (2, 2, 2)).double())
    return DeepModel(network, BernoulliPosterior(64, hidden).double())


def images(count: int = BATCH, seed: int = 1) -> Tensor:
    return torch.rand(count, *SHAPE, generator=rng(seed), dtype=WIDE)


def joint(model: DeepModel, v: Tensor) -> Tensor:
    """log p~(v, h) of every state of the bits, (B, 2^H)."""
    states = binary_states(BITS)
    rows = [-model.network.energy(v, h.expand(len(v), -1)) for h in states]
    return torch.stack(rows, 1)


def test_the_score_is_that_of_the_sum_over_bits_at_any_state():
    model, v = deep(posterior="bernoulli"), images()

    def exact(x):
        return joint(model, x).logsumexp(1)

    marginal = score(exact, v)

    def log_joint(x, h):
        return -model.network.energy(x, h)

    for state in range(2**BITS):
        h = binary_states(BITS)[state].expand(BATCH, -1)
        of_joint = score(partial(log_joint, h=h), v)
        of_posterior = score(lambda x, s=state: joint(model, x).log_softmax(1)[:, s], v)
        torch.testing.assert_close(marginal, of_joint - of_posterior)


def test_the_log_weight_is_f_less_the_divergence_of_the_posterior():
    model, v = deep(posterior="bernoulli"), images()
    q, latent = model.posterior, Latent(model.network.energy, model.posterior)
    states = binary_states(BITS)
    log_q = torch.stack([q.log_prob(q(v), h.expand(BATCH, -1)) for h in states], 1)
    log_p = joint(model, v)
    divergence = (log_q.exp() * (log_q - log_p.log_softmax(1))).sum(1)
    elbo = (log_q.exp() * (log_p - log_q)).sum(1)
    torch.testing.assert_close(elbo, log_p.logsumexp(1) - divergence)
    torch.testing.assert_close(log_q.exp() @ states, model.means(v))
    # Cold draws are all but bits: the mean of the log weight comes close to the exact one.
    many, count = v.repeat(2000, 1, 1, 1), 2000
    with torch.no_grad():
        drawn = latent.log_weight(dict(q.named_parameters()), many, q.noise(len(many), rng()))
    spread = drawn.view(count, BATCH).std(0) / math.sqrt(count)
    assert ((drawn.view(count, BATCH).mean(0) - elbo).abs() < 5 * spread + 0.02 * elbo.abs()).all()


class Case:
    """A bi-level problem of the deep model all of whose random numbers are held."""

    def __init__(self, lower: str, posterior: str = "gaussian") -> None:
        self.model = deep(2, posterior)
        q = self.model.posterior
        q.temperature = 1.0  # cold draws are nearly steps, and their third derivatives vast
        self.latent = Latent(self.model.network.energy, q)
        self.v = images()
        self.noise = torch.randn(self.v.shape, generator=rng(2), dtype=WIDE)
        self.draws = q.noise(BATCH, rng(3))
        self.phi = {name: p.detach() for name, p in q.named_parameters()}
        self.lower = partial(getattr(self.latent, lower), v=self.v, noise=self.draws)

    def loss(self, steps: int) -> Tensor:
        phi, _ = descend(
            lambda found: self.lower(found).mean(),
            self.phi,
            Moments.none(self.phi),
            Adam(0.01),
            steps,
            unrolled=True,
        )
        weight = partial(self.latent.log_weight, phi, noise=self.draws)
        loss: Tensor = denoising(weight, self.v, self.noise, 0.4).mean()
        return loss


@pytest.mark.parametrize(
    ("lower", "posterior"),
    [
        ("conditional_fisher", "gaussian"),
        ("negative_elbo", "gaussian"),
        ("negative_elbo", "bernoulli"),
    ],
)
def test_the_unrolled_gradient_is_that_of_finite_differences(lower, posterior):
    case, apart = Case(lower, posterior), 1e-6
    network = case.model.network
    slopes = torch.autograd.grad(case.loss(2), list(network.parameters()), materialize_grads=True)
    for p, slope in zip(network.parameters(), slopes, strict=True):
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


def test_without_unrolled_steps_an_update_is_alternation():
    model, twin = deep(), deep()
    settings = UpdateSettings(
        method="bidsm", lower="fisher", noise_std=0.4, inner_steps=3, unrolled_steps=0, lr=0.01
    )
    v = images()
    Update(model.network, settings, rng(5), model.posterior, lambda *_: v)(v)

    q, stream = twin.posterior, rng(5)
    latent = Latent(twin.network.energy, q)
    adams = [
        torch.optim.Adam(each.parameters(), lr=0.01, betas=(0.9, 0.95))
        for each in (q, twin.network)
    ]

    def normal():
        return torch.randn(v.shape, generator=stream, dtype=WIDE)

    for _ in range(3):
        phi, seen = dict(q.named_parameters()), v + 0.4 * normal()
        adams[0].zero_grad()
        latent.conditional_fisher(phi, seen, q.noise(BATCH, stream)).mean().backward()
        adams[0].step()
    phi = {name: p.detach() for name, p in q.named_parameters()}
    weight = partial(latent.log_weight, phi, noise=q.noise(BATCH, stream))
    adams[1].zero_grad()
    denoising(weight, v, normal(), 0.4).mean().backward()
    adams[1].step()
    for ours, theirs in ((model.network, twin.network), (model.posterior, q)):
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("data", ["digits", "mnist", "cifar10"])
def test_settings_are_the_published_ones(data, tmp_path):
    s = DeepConfig(out=tmp_path, data=data).settings
    assert s.update_problems() == []
    assert (s.method, s.inner_steps, s.unrolled_steps, s.lower) == ("bimdsm", 5, 0, "fisher")
    known = {
        "mnist": (1e-4, (0.1, 3.0), "geometric", 64, 6, 100_000),
        "cifar10": (5e-5, (0.05, 1.2), "linear", 128, 9, 300_000),
    }
    if data in known:
        assert known[data] == (
            s.lr, s.noise_range, s.noise_spacing, s.channels, s.blocks, s.iterations
        )  # fmt: skip
        assert (s.hidden, s.batch, s.widths, s.image_size) == (50, 100, (64, 128, 256), None)
        small = DeepConfig(out=tmp_path, data=data, small=True).settings
        assert small.channels < s.channels
        assert small.noise_range == s.noise_range


def test_a_visible_model_and_bits_follow_from_one_setting(tmp_path):
    assert DeepConfig(out=tmp_path, model="wide").settings.method == "mdsm"
    assert DeepConfig(out=tmp_path, posterior="bernoulli").settings.lower == "elbo"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": "svhn"}, "data is 'svhn', expected one of digits, mnist, cifar10"),
        ({"method": "dsm"}, "method is 'dsm', expected bimdsm, bidsm, bissm, srK or psrK"),
        ({"model": "visible", "method": "bidsm"}, "method is 'bidsm', expected mdsm, dsm, ssm"),
        ({"posterior": "bernoulli", "lower": "fisher"}, "lower is 'fisher', expected 'elbo'"),
        ({"channels": 0}, "channels is 0, expected 1 or more"),
        ({"lower": "kl"}, "lower is 'kl', expected elbo or fisher"),
    ],
)
def test_settings_that_make_no_run_are_refused(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        go(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_the_frame_is_black():
    data = DeepConfig(out=Path(), data="digits", image_size=4).load_data()
    v = pixels(data, data.train_x[:5])
    assert v.shape == (5, 1, 8, 8)
    assert 0 <= v.min() <= v.max() <= 1
    assert v[..., 2:6, 2:6].sum() == v.sum()


@pytest.mark.parametrize("model", ["latent", "visible"])
def test_training_lowers_the_loss_of_test_images(tmp_path, model):
    options = {"model": model, "channels": 8, "train_images": 500, "lr": 2e-3}
    before = go(tmp_path / "short", iterations=1, **options)["test_loss"]
    after = go(tmp_path / "long", iterations=60, **options)["test_loss"]
    assert after < 0.8 * before


def test_visible_networks_are_of_the_same_size_and_of_the_published_one():
    sizes = [
        sum(p.numel() for p in DeepEnergy((1, 32, 32), 50, 64, 6, form).parameters())
        for form in ("latent", "visible", "wide")
    ]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.05)
    assert 3 < sizes[2] / sizes[0] < 4
