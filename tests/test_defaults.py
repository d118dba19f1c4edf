"""The study of defaults: its distance, its chains of bits, and what its rule decides."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

from benchmarks import default_rule, defaults, discrete
from benchmarks.beta_star import RUNS


def test_the_distance_of_gaussians_that_share_their_axes_is_that_of_means_and_spreads():
    def moments(mean: list[float], spreads: list[float]) -> tuple[Tensor, Tensor]:
        turn = torch.linalg.qr(torch.arange(9.0).reshape(3, 3).double().cos())[0]
        spread = torch.tensor(spreads).double().square().diag()
        return torch.tensor(mean).double(), turn @ spread @ turn.T

    p, q = moments([0, 1, 2], [1, 2, 3]), moments([1, 1, 0], [0, 2, 5])
    assert defaults.frechet(p, q) == pytest.approx(1 + 4 + 1 + 0 + 4)
    assert defaults.frechet(p, p) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("dims", [3, 30])
def test_samples_are_as_near_as_the_training_data_at_1(dims):
    generator = torch.Generator().manual_seed(0)
    train, held_out = torch.randn(2, 100, dims, generator=generator)
    distance = defaults.Distance(train, held_out)
    assert distance(train) == pytest.approx(1)
    assert distance(held_out) == pytest.approx(0, abs=1e-6)
    far = distance(train + 100)
    assert far is not None
    assert far > 100
    assert distance(train / 0) is None


def shares(x: Tensor) -> Tensor:
    """How often each state of bits is there."""
    place = 2 ** torch.arange(x.shape[1])
    return torch.bincount((x.long() * place).sum(1), minlength=2 ** x.shape[1]) / len(x)


def states(bits: int) -> Tensor:
    """All of them, in the order of their numbers."""
    return torch.tensor([each[::-1] for each in itertools.product((0.0, 1.0), repeat=bits)])


@pytest.mark.parametrize("kind", ["flips", "gibbs"])
def test_chains_of_bits_are_of_the_density_that_can_be_enumerated(kind):
    torch.manual_seed(0)
    machine, rng, count = discrete.Machine(4, 3), torch.Generator().manual_seed(0), 5000
    with torch.no_grad():
        for p in machine.parameters():
            p.normal_(0, 1.5)
        exact = (-machine.free_energy(states(4))).softmax(0)
    start = torch.randint(2, (count, 4), generator=rng).float()
    if kind == "gibbs":
        found = discrete.gibbs(machine, start, 100, rng)
    else:
        found = discrete.flips(lambda v: -machine.free_energy(v), start, 100, rng)
    # Five standard deviations of each share; where the chains start is far from it.
    error = (exact * (1 - exact) / count).sqrt()
    assert ((shares(found) - exact).abs() < 5 * error).all()
    assert ((shares(start) - exact).abs() > 5 * error).any()


@pytest.mark.parametrize("name", ["digits-jem-mlp-05", "tabular-ebm-cd-09"])
def test_fresh_chains_begin_as_the_run_begins_new_ones_and_are_not_tempered(name, monkeypatch):
    run = RUNS[name]
    trainer = defaults.Kept(run, beta_star=100.0)
    trainer.guard.close()
    if trainer.buffer is not None:
        trainer.buffer.samples.fill_(5)  # none of these chains goes on
    monkeypatch.setattr(defaults, "FRESH_STEPS", 0)
    start = trainer.fresh(run)
    if trainer.buffer is None:  # contrastive divergence
        assert torch.equal(start[:100], trainer.data.x)
    else:
        assert float(start.square().mean()) == pytest.approx(1 / 3, rel=0.05)  # of [-1, 1]
    monkeypatch.setattr(defaults, "FRESH_STEPS", 1)
    silent = dataclasses.replace(run, noise_std=0.0, step_size=0.5)
    trainer.rng.manual_seed(0)
    after = trainer.fresh(silent)
    monkeypatch.setattr(defaults, "FRESH_STEPS", 0)
    trainer.rng.manual_seed(0)
    before = trainer.fresh(silent).requires_grad_()
    (slope,) = torch.autograd.grad(trainer.network(before).sum(), before)
    torch.testing.assert_close(after, (before + 0.5 * slope).detach())


def test_a_machine_is_trained_and_judged():
    row = defaults.measure(Path(), "RBM, 0.1", defaults.SHIPPED, 0)
    assert row["best"] <= row["last"] < 40  # 64 where nothing was learned
    assert row["updates"] == discrete.UPDATES
    assert 0 < row["buffer"] < row["fresh"] < math.inf


def test_beta_star_comes_where_the_finest_steps_are_too_long_for_five_rows():
    star = defaults.Late(2.0)
    rows = [(1, 3.0)] * 9 + [(4, 3.0)] * 9 + [(16, s) for s in (1.1, 0.5, 1.1, 0.9, 0.9, 1.1, 1.1)]
    values = []
    for substeps, sharpness in rows:
        star.observe({defaults.SUBSTEPS: substeps, defaults.SHARPNESS: sharpness})
        values.append(star(0))
    assert values == [0.0] * 24 + [2.0]
    star.observe({defaults.SUBSTEPS: 16, defaults.SHARPNESS: math.nan})
    assert star(0) == 2.0


def runs(of_arm: dict[str, Any], part: str = "settings", seeds: int = 2) -> list[dict[str, Any]]:
    """Lines of arms in one part: what has a list has an entry a setting."""
    found = []
    for arm, own in of_arm.items():
        for i, fate in enumerate(own["fates"]):
            for seed in range(seeds):
                line = {"setting": f"{part} {i}", "seed": seed, "arm": arm, "part": part}
                line |= {"healthy": fate == "h", "lost": fate == "x", "other_bits": False}
                line |= {"buffer": own["buffer"][i], "gradients": own.get("gradients", 7.0)}
                found.append(line)
    return found


A = {"fates": "hhhhhxxxxx", "buffer": [1.0] * 5 + [1e9] * 5}
FINER = {"fates": "hhhhhhhhhh", "buffer": [1.0] * 5 + [2.0] * 5, "gradients": 14.0}


def test_the_rule_takes_fewest_losses_then_samples_then_compute():
    def decided(**others: Any) -> str:
        return default_rule.chosen(pd.DataFrame(runs({"a": A, **others})))

    assert decided() == "a"
    assert decided(c=FINER) == "c"
    # Limping counts as lost does; nearer samples do not make up for two runs.
    assert decided(c=FINER, d={**FINER, "fates": "hhhhhhhhhl", "buffer": [0.5] * 10}) == "c"
    # Where a is healthy samples decide, then where it is not, and within 5% compute.
    assert decided(b={**FINER, "buffer": [3.0] * 5 + [1.0] * 5, "gradients": 7.0}, c=FINER) == "c"
    assert decided(c=FINER, e={**FINER, "buffer": [1.04] * 5 + [1.0] * 5}) == "e"
    assert decided(c=FINER, e={**FINER, "buffer": [1.04] * 5 + [2.05] * 5}) == "c"
    cheap = {**FINER, "buffer": [1.04] * 5 + [2.05] * 5, "gradients": 13.0}
    assert decided(c=FINER, e=cheap) == "e"
