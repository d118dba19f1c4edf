"""Deep models against sums over bits, finite differences, and the settings that were published."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ebmguard.errors import ConfigError
from ebmguard.reference_training.bism.config import DeepConfig
from ebmguard.reference_training.bism.deep import DeepEnergy, DeepModel, pixels
from ebmguard.reference_training.bism.matching import score
from ebmguard.reference_training.bism.posterior import BernoulliPosterior, Latent
from ebmguard.sinks import read_jsonl

from . import parts
from .parts import binary_states, rng

go = partial(parts.go, DeepConfig)
WIDE = torch.float64
SHAPE, BATCH, BITS = (1, 8, 8), 4, 3


def deep() -> DeepModel:
    torch.manual_seed(0)
    network = DeepEnergy(SHAPE, BITS, 2, 3, "latent").double()
    return DeepModel(network, BernoulliPosterior(64, BITS).double())


def images(count: int = BATCH, seed: int = 1) -> Tensor:
    return torch.rand(count, *SHAPE, generator=rng(seed), dtype=WIDE)


def joint(model: DeepModel, v: Tensor) -> Tensor:
    """log p~(v, h) of every state of the bits, (B, 2^H)."""
    states = binary_states(BITS)
    rows = [-model.network.energy(v, h.expand(len(v), -1)) for h in states]
    return torch.stack(rows, 1)


def test_the_score_is_that_of_the_sum_over_bits_at_any_state():
    model, v = deep(), images()

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
    model, v = deep(), images()
    q, latent = model.posterior, Latent(model.network.energy, model.posterior)
    states = binary_states(BITS)
    log_q = torch.stack([q.log_prob(q(v), h.expand(BATCH, -1)) for h in states], 1)
    log_p = joint(model, v)
    divergence = (log_q.exp() * (log_q - log_p.log_softmax(1))).sum(1)
    elbo = (log_q.exp() * (log_p - log_q)).sum(1)
    torch.testing.assert_close(elbo, log_p.logsumexp(1) - divergence)
    torch.testing.assert_close(log_q.exp() @ states, model.means(v))
    # Cold draws are all but bits: the mean of the log weight comes close to the exact one.
    many, count = v.repeat(500, 1, 1, 1), 500
    with torch.no_grad():
        drawn = latent.log_weight(dict(q.named_parameters()), many, q.noise(len(many), rng()))
    spread = drawn.view(count, BATCH).std(0) / math.sqrt(count)
    assert ((drawn.view(count, BATCH).mean(0) - elbo).abs() < 5 * spread + 0.02 * elbo.abs()).all()


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
        ({"method": "dsm"}, "method is 'dsm', expected bimdsm, bidsm, bissm, srK or psrK"),
        ({"model": "visible", "method": "bidsm"}, "method is 'bidsm', expected mdsm, dsm, ssm"),
        ({"posterior": "bernoulli", "lower": "fisher"}, "lower is 'fisher', expected 'elbo'"),
        ({"channels": 0}, "channels is 0, expected 1 or more"),
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


def test_training_lowers_the_loss_of_test_images(tmp_path):
    options = {"channels": 8, "train_images": 500, "lr": 2e-3, "iterations": 40, "evaluations": 8}
    after = go(tmp_path / "run", **options)["test_loss"]
    first, *_ = read_jsonl(tmp_path / "run" / "evaluations.jsonl")
    assert after < 0.9 * first["test_loss"]


def test_visible_networks_are_of_the_same_size_and_of_the_published_one():
    sizes = [
        sum(p.numel() for p in DeepEnergy((1, 32, 32), 50, 64, 6, form).parameters())
        for form in ("latent", "visible", "wide")
    ]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.05)
    assert 3 < sizes[2] / sizes[0] < 4
