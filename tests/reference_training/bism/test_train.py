"""`ebmguard train bism` from settings to a run folder, of RBMs and of deep models."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ebmguard.errors import ConfigError
from ebmguard.reference_training.bism.config import DeepConfig
from ebmguard.reference_training.bism.deep import DeepEnergy, DeepModel
from ebmguard.reference_training.bism.deep_train import SHORT_STD, SHORT_STEP, ShortRuns
from ebmguard.reference_training.bism.images import Checkerboard, FlatImages
from ebmguard.reference_training.bism.matching import score
from ebmguard.reference_training.bism.posterior import BernoulliPosterior, Latent
from ebmguard.reference_training.bism.rbm import GaussianBernoulliRBM
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


def test_flat_images_are_within_half_a_level_of_the_test_images():
    data, black = load_data("digits"), 0.0
    images = FlatImages(data, black)
    level = (1 - black) / 16
    exact = black + level * data.test_x.flatten(1)
    apart = (images.held_out(1000, rng()) - exact) / level
    assert apart.shape == (360, 64)
    assert apart.abs().max() <= 0.5 + 1e-4
    # Uniform, with variance 1/12: its standard error over all entries is below 1e-3.
    assert apart.var().item() == pytest.approx(1 / 12, abs=5e-3)


def test_the_guard_sees_the_models_samples_beside_the_data(tmp_path):
    RBM.run(tmp_path / "run", method="dsm")
    frames = load(tmp_path / "run")
    rows = frames.rows.droplevel("run")
    assert list(rows.index) == list(range(30))
    assert rows[["energy_gap", "update_loss"]].notna().all(axis=None)
    assert rows["energy_gap"].tolist() == pytest.approx((-rows["loss"]).tolist(), rel=1e-4)
    assert list(frames.evaluations.droplevel("run").index) == [10, 20, 30]


@pytest.mark.parametrize("rule", [None, "weights_degenerate"])
def test_samples_of_many_entries_are_not_degenerate_but_a_single_good_one_is(
    tmp_path, monkeypatch, rule
):
    # f of exact samples has a spread of sqrt(64 / 2): at an exponent of 0.5 the ESS of a Gaussian's
    # is 2^32 / 1.5^64 = 0.02 of them, under the rule's limit.
    if rule:

        def gibbs(model, v, steps, rng):
            v = model.visible_bias.repeat(len(v), 1).detach()
            v[1:] += 30 * model.log_std.exp()
            return v

        monkeypatch.setattr(GaussianBernoulliRBM, "gibbs", gibbs)
    options: dict[str, Any] = {"data": "digits", "method": "dsm", "lr": 1e-9, "batch": 200}
    RBM.run(tmp_path / "run", **options, iterations=80, evaluations=1)
    alerts = (tmp_path / "run" / "alerts.jsonl").read_text()
    assert ("weights_degenerate" in alerts) == bool(rule)
    ess = load(tmp_path / "run").rows["ref/ess"]
    assert ess.iloc[-1] < 0.1 if rule else ess.iloc[20:].min() > 0.3


def test_methods_side_by_side(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="nothing there holds"):
        page(tmp_path)
    few = {"iterations": 8, "evaluations": 1}
    runs = [RBM.run(tmp_path / f"dsm_{i}", method="dsm", seed=i, **few) for i in range(3)]
    assert "mdsm" not in page(tmp_path)
    RBM.run(tmp_path / "mdsm_0", method="mdsm", **few)
    *lines, _, noisy = page(tmp_path).splitlines()
    assert "noise of 0.1" in noisy
    by_method = {line.split("|")[1].strip(): line for line in lines}
    cells = [cell.strip() for cell in by_method["dsm"].split("|")[1:-1]]
    low, middle, high = sorted(run["log_likelihood"] for run in runs)
    assert cells[1:4] == ["3", f"{middle:.3f}", f"{low:.3f} to {high:.3f}"]
    assert cells[4] == f"{sorted(run['kl'] for run in runs)[1]:.3f}"
    # A part of the run's time is that of its updates.
    assert 0 < 8 * float(cells[6]) / 1000 < float(cells[7]) + 0.05
    assert by_method["mdsm"].split("|")[2].strip() == "1"


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


def test_training_lowers_the_loss_of_test_images(tmp_path):
    options = {"channels": 8, "train_images": 500, "lr": 2e-3, "iterations": 40, "evaluations": 8}
    after = DEEP.run(tmp_path / "run", **options)["test_loss"]
    first, *_ = read_jsonl(tmp_path / "run" / "evaluations.jsonl")
    assert after < 0.9 * first["test_loss"]


COUNT, STEPS, STIFF = 4000, 5, 3.0


class Tied(nn.Module):
    """E = STIFF / 2 |h - v|^2, of v with as many entries as h."""

    hidden = 2

    def projected(self, v):
        return v.flatten(1)

    def of_projected(self, projected, h):
        return STIFF / 2 * (h - projected).square().sum(1)

    def energy(self, v, h):
        return self.of_projected(self.projected(v), h)


def agree(ends, mean, variance):
    """Whether chains have a mean and a variance, but for six standard errors."""
    off = (ends - mean).mean(0).abs().max().item()
    assert off < 6 * math.sqrt(variance / COUNT)
    spread = (ends - mean).var().item()
    assert abs(spread / variance - 1) < 6 * math.sqrt(2 / ends.numel())


def test_chains_end_where_a_quadratic_energy_takes_them():
    runs = ShortRuns(Tied(), (1, 1, 2), STEPS, rng())
    v = torch.tensor([0.3, -0.2]).view(1, 1, 1, 2).expand(COUNT, -1, -1, -1)
    h = torch.tensor([1.0, 2.0]).expand(COUNT, -1)
    flat = v.flatten(1)
    # Each step takes the distance to 1 - SHORT_STEP STIFF of it, and adds noise.
    kept = 1 - SHORT_STEP * STIFF
    noise = SHORT_STD**2 * sum(kept ** (2 * k) for k in range(STEPS))
    agree(runs.infer(v, h), flat + kept**STEPS * (h - flat), noise)
    # In (v, h) the sum stays, and the difference shrinks twice as fast.
    ends_v, ends_h = runs.synthesize(v, h)
    kept = 1 - 2 * SHORT_STEP * STIFF
    noise = 2 * SHORT_STD**2 * sum(kept ** (2 * k) for k in range(STEPS))
    agree(ends_h - ends_v.flatten(1), kept**STEPS * (h - flat), noise)
    agree(ends_h + ends_v.flatten(1), flat + h, 2 * SHORT_STD**2 * STEPS)
