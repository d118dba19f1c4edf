"""A training step, for every term and variant, against the same steps written out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ebmguard.reference_training.data import load_data
from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.reference_training.jem.course import gap_of
from ebmguard.reference_training.jem.trainer import (
    Trainer,
    make_network,
)
from ebmguard.reference_training.networks import WideResNet
from tests.reference_training.parts import JEM, in_float64, largest_difference, pulled

config_for = JEM.config_for

STEPS = 3


def made(config: JemConfig, **how: Any) -> Trainer:
    data = load_data("digits")
    return Trainer(config, make_network(config, data), data, **how)


def by_hand(config: JemConfig) -> tuple[dict[str, Tensor], Tensor, list[tuple[float, float]]]:
    """Parameters, chains and (cross-entropy, energy gap) after a few steps on the digits."""
    settings, seed, beta = config.settings, config.seed, config.beta_star
    data = load_data("digits")
    torch.manual_seed(seed)
    kind: Any = {k: getattr(config, k) for k in ("activation", "norm", "dropout", "unconditional")}
    net = WideResNet(width=1, early_stride=True, **kind)
    net.to(memory_format=torch.channels_last)  # in whose order masks are drawn
    torch.manual_seed(10**9 + seed)  # of the dropout
    decay = {"lr": 1.0, "weight_decay": config.weight_decay}
    optimizer: Any = torch.optim.Adam(net.parameters(), **decay)
    if config.optimizer == "sgd":
        optimizer = torch.optim.SGD(net.parameters(), momentum=0.9, **decay)
    image_rng = torch.Generator().manual_seed(2 * seed)
    rng = torch.Generator().manual_seed(2 * seed + 1)
    buffer = torch.rand(settings.buffer_size, 1, 8, 8, generator=rng) * 2 - 1
    per_class = settings.buffer_size // 10
    numbers = []

    def f(x: Tensor, y: Tensor | None) -> Tensor:
        logits = net.head(net.features(x))
        if config.unconditional:
            own: Tensor = logits[:, 10]
            return own
        energies: Tensor = logits.exp().sum(1).log() if y is None else logits[range(len(x)), y]
        return energies

    few = list(range(1437))
    if config.labels_per_class is not None:
        counts = [0] * 10
        for row, label in enumerate(data.train_y.tolist()):
            counts[label] += 1
            if counts[label] > config.labels_per_class:
                few.remove(row)

    def images(n: int, among: Sequence[int] = range(1437)) -> tuple[Tensor, Tensor]:
        rows = torch.tensor(among)[torch.randint(len(among), (n,), generator=image_rng)]
        noise = torch.randn(n, 1, 8, 8, generator=image_rng)
        return data.scale(data.train_x[rows]) + 0.03 * noise, data.train_y[rows]

    def samples(n: int, y: Tensor | None) -> Tensor:
        """20 steps of α/2 o (1 - β) df/dx + sqrt(α) z, with α = 1e-4, o = 20,000, β = β*/o."""
        chains = settings.buffer_size if y is None else per_class
        rows = torch.randint(chains, (n,), generator=rng)
        if y is not None:
            rows = rows + y * per_class
        fresh = torch.rand(n, generator=rng) < settings.reinit_rate
        uniform = torch.rand(n, 1, 8, 8, generator=rng) * 2 - 1
        x = torch.where(fresh[:, None, None, None], uniform, buffer[rows])
        noise = torch.randn(settings.sgld_steps, n, 1, 8, 8, generator=rng)
        net.eval()  # as in the published code
        for z in noise:
            x = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(f(x, y).sum(), x)
            x = x + 0.5e-4 * 20_000 * (1 - beta / 20_000) * gradient + 1e-4**0.5 * z
        x = x.detach()
        net.train()
        for row, sample in zip(rows.tolist(), x, strict=True):
            buffer[row] = sample
        return x

    for step in range(STEPS):
        warm = step / settings.warmup if settings.warmup else 1.0
        optimizer.param_groups[0]["lr"] = 3e-3 * warm
        x_pos, labels = images(settings.n_pos)
        x_lab = x_pos
        if settings.n_labelled:
            x_lab, labels = images(settings.n_labelled, few)
        loss: Any = 0.0
        gap = 0.0
        # All samples come before the update, those of p(x) first.
        x_neg = x_neg_y = None
        if config.p_x_weight:
            y = None
            if config.class_conditional:
                y = torch.randint(10, (settings.n_neg,), generator=rng)
            x_neg = samples(settings.n_neg, y)
        if config.p_x_y_weight:
            x_neg_y = samples(len(labels), labels)
        if x_neg_y is not None:
            f_pos, f_neg = f(x_lab, labels), f(x_neg_y, labels)
            penalty = config.energy_l2 * ((f_pos**2).mean() + (f_neg**2).mean())
            loss_xy = pulled(f_pos, f_neg, beta, config.variant, labels if beta else None)
            loss += config.p_x_y_weight * (loss_xy + penalty)
            gap = float((f_pos.mean() - f_neg.mean()).detach())
        if x_neg is not None:
            f_pos, f_neg = f(x_pos, None), f(x_neg, None)
            penalty = config.energy_l2 * ((f_pos**2).mean() + (f_neg**2).mean())
            loss += config.p_x_weight * (pulled(f_pos, f_neg, beta, config.variant) + penalty)
            gap = float((f_pos.mean() - f_neg.mean()).detach())
        cross_entropy = F.cross_entropy(net.head(net.features(x_lab))[:, :10], labels)
        loss += config.p_y_x_weight * cross_entropy
        optimizer.zero_grad()
        loss.backward()
        if config.clip_norm is not None:
            gradients = [p.grad for p in net.parameters() if p.grad is not None]
            norm = sum(float((g**2).sum()) for g in gradients) ** 0.5
            for gradient in gradients:
                gradient *= min(1.0, config.clip_norm / (norm + 1e-6))  # as in PyTorch
        optimizer.step()
        numbers.append((cross_entropy.item(), gap))
    return {k: v.detach() for k, v in net.named_parameters()}, buffer, numbers


CASES: dict[str, dict[str, Any]] = {
    "p(x)": {},
    "p(x), no_pos": {"variant": "no_pos"},
    "p(x), batch": {"variant": "batch"},
    "p(x), true": {"variant": "true", "n_pos": 7},
    "a classifier": {"p_x_weight": 0.0},
    "a classifier with a batch of its own": {"p_x_weight": 0.0, "n_labelled": 5},
    "samples alone": {"p_y_x_weight": 0.0, "n_labelled": 5},
    "labelled images of their own": {"n_labelled": 5},
    "p(x, y) alone": {"p_x_weight": 0.0, "p_y_x_weight": 0.0, "p_x_y_weight": 1.0},
    "p(x, y), no_pos": {"p_x_weight": 0.0, "p_x_y_weight": 0.4, "variant": "no_pos"},
    "p(x) by classes": {"class_conditional": True},
    "energies near 0": {"energy_l2": 0.1, "p_x_weight": 0.5},
    # One of the three gradients is longer; Adam would undo a factor that all have.
    "short gradients": {"clip_norm": 0.6},
    "a smooth network": {"activation": "silu"},
    "an output of its own": {"unconditional": True, "n_labelled": 5},
    "batches with their statistics": {"norm": "batch", "n_labelled": 5},
    "images with their statistics": {"norm": "layer", "optimizer": "sgd", "lr": 3e-3},
    "a classifier with dropout": {"p_x_weight": 0.0, "dropout": 0.4},
    "SGD with weight decay": {"optimizer": "sgd", "weight_decay": 0.1},
    "few labels": {"labels_per_class": 2, "n_labelled": 9, "weight_decay": 0.1},
    "all": {
        "energy_l2": 0.2,
        "clip_norm": 0.42,
        "activation": "silu",
        "class_conditional": True,
        "p_x_weight": 0.5,
        "p_y_x_weight": 0.3,
        "p_x_y_weight": 0.7,
        "n_labelled": 9,
        "warmup": 2,
    },
}


@pytest.mark.parametrize(
    ("case", "beta_star"), [("p(x)", 0.0), ("all", 0.0), *((case, 2.0) for case in CASES)]
)
@in_float64()
def test_steps_are_those_written_by_hand(tmp_path, case, beta_star):
    config = config_for(tmp_path, seed=1, beta_star=beta_star, **CASES[case])
    trainer = made(config)
    network = trainer.network
    start = network.stem.weight.detach().clone()
    chains = trainer.buffer.samples.clone()
    settings, found = config.settings, []
    n_labelled = settings.n_labelled or settings.n_pos
    for step in range(STEPS):
        x_neg = trainer.step(step)
        row = trainer.guards["p_x"].last
        found.append([x for x in (row["cross_entropy"], gap_of(row)) if x is not None])
        if not config.has_samples:
            assert x_neg is None
        else:
            assert x_neg is not None
            assert len(x_neg) == (settings.n_neg if config.p_x_weight else n_labelled)
    parameters, buffer, expected = by_hand(config)
    assert largest_difference(dict(network.named_parameters()), parameters) < 1e-8
    torch.testing.assert_close(trainer.buffer.samples, buffer, rtol=0, atol=1e-8)
    for mine, theirs in zip(found, expected, strict=True):
        wanted = theirs[: 1 + config.has_samples]
        assert mine == pytest.approx(list(wanted), rel=1e-8, abs=1e-10)
    # It was a training at all; and a classifier draws no samples.
    assert not torch.equal(network.stem.weight, start)
    assert torch.equal(chains, trainer.buffer.samples) == (not config.has_samples)


def test_each_guard_watches_its_own_energies_and_steps(tmp_path):
    config = config_for(tmp_path, p_x_y_weight=1.0)
    trainer = made(config, log_dir=tmp_path)
    for step in range(4):
        trainer.step(step)
    for own in trainer.guards.values():
        own.close()
    assert set(trainer.guards) == {"p_x", "p_x_y"}
    p_x, p_x_y = (trainer.guards[name] for name in ("p_x", "p_x_y"))
    assert p_x.step == 4
    gap = p_x_y.last["energy_gap"]
    assert p_x.last["p_x_y/energy_gap"] == pytest.approx(gap, abs=1e-5)
    assert p_x.last["energy_gap"] != gap
    assert (tmp_path / "metrics.jsonl").is_file()
    assert (tmp_path / "p_x_y" / "metrics.jsonl").is_file()
    trainer = made(config_for(tmp_path))
    trainer.step(0)
    last = trainer.loss_fn.guard.last
    assert last["sampler/steps"] == last["sampler/evaluations"] == trainer.settings.sgld_steps


@pytest.mark.parametrize(("size", "count"), [(30, 7), (30, 30), (30, 1), (30, 50), (37, 20)])
def test_chains_are_spread_over_the_buffer(tmp_path, size, count):
    trainer = made(config_for(tmp_path, buffer_size=size))
    trainer.buffer.samples[:] = torch.arange(size, dtype=torch.float32).view(-1, 1, 1, 1)
    rows = trainer.chains(count)[:, 0, 0, 0].tolist()
    assert len(rows) == min(size, count)
    assert rows == sorted(set(rows))
    gaps = [b - a for a, b in pairwise([*rows, size])]
    assert max(gaps) - min(gaps) <= 1  # and the end of the buffer is as near
    assert rows[0] == 0


def test_steps_become_finer_where_that_is_asked_for(tmp_path):
    """Steps 3,000 times as long as published are too long from the start."""
    rows: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for finer_steps, own in rows.items():
        settings = {"sgld_steps": 4, "step_size": 3000.0, "finer_steps": finer_steps}
        trainer = made(config_for(tmp_path, beta_star=0.0, **settings))
        for step in range(12):
            trainer.step(step)
            last = trainer.loss_fn.guard.last
            own.append((last["energy_gap"], last["sampler/substeps"]))
    # From row 10 on a median of five counts, and the row after it is the first of finer steps.
    assert rows[True][:11] == rows[False][:11]
    assert [substeps for _, substeps in rows[True]] == [1] * 11 + [4]
    assert [substeps for _, substeps in rows[False]] == [1] * 12
