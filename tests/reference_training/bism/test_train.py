"""`ebmguard train bism` from settings to a run folder, of RBMs and of deep models."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ebmguard.reference_training.bism.config import DeepConfig
from ebmguard.reference_training.bism.deep import DeepEnergy, DeepModel, pixels
from ebmguard.reference_training.bism.images import Checkerboard, FlatImages
from ebmguard.reference_training.bism.matching import score
from ebmguard.reference_training.bism.posterior import BernoulliPosterior, Latent
from ebmguard.reference_training.bism.table import page
from ebmguard.reference_training.bism.train import told
from ebmguard.reference_training.data import load_data
from ebmguard.runs import load
from ebmguard.sinks import read_jsonl
from tests.reference_training.parts import DEEP, RBM, binary_states, rng


def test_the_checkerboards_density_is_that_of_its_samples():
    board = Checkerboard()
    x = board.sample(10_000, rng())
    assert board.log_density(x).eq(math.log(2)).all()
    assert abs((x[:, 0] < 0.5).double().mean() - 0.5) < 5 * 0.5 / 100
    centres = torch.arange(-0.25, 1.25, 0.01) + 0.005
    cells = torch.cartesian_prod(centres, centres)
    assert (board.log_density(cells).exp().sum() * 1e-4).item() == pytest.approx(1)


def test_samples_of_flat_images_are_training_images():
    data = load_data("digits")
    drawn = FlatImages(data, -1.0).sample(50, rng(1))
    levels = ((drawn + 1) * 8).round().to(torch.uint8)
    known = {tuple(row) for row in data.train_x.flatten(1).tolist()}
    assert all(tuple(row) in known for row in levels.tolist())


def test_the_guard_sees_the_models_samples_beside_the_data(tmp_path):
    RBM.run(tmp_path / "run", method="dsm")
    frames = load(tmp_path / "run")
    rows = frames.rows.droplevel("run")
    assert list(rows.index) == list(range(30))
    assert rows[["energy_gap", "update_loss"]].notna().all(axis=None)
    assert rows["energy_gap"].tolist() == pytest.approx((-rows["loss"]).tolist(), rel=1e-4)
    assert list(frames.evaluations.droplevel("run").index) == [10, 20, 30]


def test_a_density_of_noisy_data_is_watched_beside_noisy_data(tmp_path):
    # Beside clean ones the gap of such a model is up to 64 / 2, half the squares of the noise.
    options: dict[str, Any] = {"data": "digits", "method": "dsm", "noise_std": 1.0, "lr": 3e-3}
    RBM.run(tmp_path / "run", **options, iterations=300, batch=100, evaluations=1)
    gaps = load(tmp_path / "run").rows["energy_gap"]
    assert gaps.iloc[-50:].abs().mean() < 64 / 2 / 10


def test_likelihoods_of_many_latents_are_bracketed_or_not_shown(tmp_path):
    digits: dict[str, Any] = {"data": "digits", "noise_std": 0.3, "temperatures": 200}
    exact = RBM.run(tmp_path / "dsm", **digits, method="dsm", hidden=5, evaluations=1)
    assert "kl" not in exact
    assert "verdict" not in exact
    found = RBM.run(tmp_path / "cd1", **digits, method="cd1", hidden=21)
    assert "log_likelihood" not in found
    assert found["bracket_holds"], found["verdict"]
    assert found["log_likelihood_high"] - found["log_likelihood_low"] < 1
    lines = page(tmp_path).splitlines()
    cells = {line.split("|")[1].strip(): line.split("|")[3].strip() for line in lines}
    ends = [f"{found[f'log_likelihood_{end}']:.3f}" for end in ("low", "high")]
    assert cells["cd1"] == " to ".join(ends)
    assert cells["dsm"] == f"{exact['log_likelihood']:.3f}"
    assert all("nats per sample" in told(results) for results in (exact, found))
    options: dict[str, Any] = {"data": "digits", "hidden": 21, "ais_chains": 4, "temperatures": 1}
    options |= {"iterations": 5, "evaluations": 1}
    assert not RBM.run(tmp_path / "none" / "dsm", **options, method="dsm")["bracket_holds"]
    assert "no bracket" in page(tmp_path / "none")


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


def test_the_frame_is_black():
    data = DeepConfig(out=Path(), data="digits", image_size=4).load_data()
    v = pixels(data, data.train_x[:5])
    assert v.shape == (5, 1, 8, 8)
    assert 0 <= v.min() <= v.max() <= 1
    assert v[..., 2:6, 2:6].sum() == v.sum()


def test_training_lowers_the_loss_of_test_images(tmp_path):
    options = {"channels": 8, "train_images": 500, "lr": 2e-3, "iterations": 40, "evaluations": 8}
    after = DEEP.run(tmp_path / "run", **options)["test_loss"]
    first, *_ = read_jsonl(tmp_path / "run" / "evaluations.jsonl")
    assert after < 0.9 * first["test_loss"]


def test_visible_networks_are_of_the_same_size_and_of_the_published_one():
    sizes = [
        sum(p.numel() for p in DeepEnergy((1, 32, 32), 50, 64, 6, form).parameters())
        for form in ("latent", "visible", "wide")
    ]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.05)
    assert 3 < sizes[2] / sizes[0] < 4


COUNT, STEPS, STIFF = 4000, 5, 3.0


def test_training_moves_samples_towards_images(tmp_path):
    """The images are mostly black, chains begin at a mean of 1/2."""
    options = {"method": "sr5", "train_images": 200, "lr": 1e-3, "channels": 4}
    after = DEEP.run(tmp_path, iterations=100, evaluations=25, **options)
    first, *_ = read_jsonl(tmp_path / "evaluations.jsonl")
    assert after["reconstruction_error"] < 0.9 * first["reconstruction_error"]
