"""What a row takes from the samples, and from the energies of several steps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from arviz_stats.base.array import array_stats

from ebmguard import guard
from tests.parts import Bowl, Memory, energies, gradient_at

BAD = torch.tensor([[1.0, 2.0], [torch.nan, 0.0], [0.0, torch.inf], [0.0, -torch.inf]])
GOOD = torch.zeros(4, 2)
LABELS = torch.arange(4)


def fraction_of_bad_samples(*returned: Any) -> float:
    results = iter(returned)
    g = guard(None, lambda: next(results), beta_star=1.0)
    for _ in returned:
        g.sampler()
    g.loss_fn(*energies())
    return g.last.get("nonfinite/samples", math.nan)


@pytest.mark.parametrize(
    "samples",
    [
        BAD,
        BAD.half(),
        BAD.double(),
        BAD.reshape(4, 1, 2, 1),
        (BAD, GOOD),
        [LABELS, BAD],
        (LABELS, (None, [BAD])),
        {"y": LABELS, "x": BAD},
        ("status", {"x": BAD}),
    ],
)
def test_first_floating_point_tensor_is_looked_at(samples):
    assert fraction_of_bad_samples(samples) == 0.75


@pytest.mark.parametrize("samples", [None, LABELS, (), "x", (LABELS, None), torch.zeros(0, 2)])
def test_unknown_where_there_is_none(samples):
    assert math.isnan(fraction_of_bad_samples(samples))


def test_other_shapes_of_samples():
    assert fraction_of_bad_samples(torch.tensor([0.0, torch.nan])) == 0.5
    assert fraction_of_bad_samples(torch.tensor(torch.nan)) == 1.0


def test_mean_over_the_samplers_that_tell():
    assert fraction_of_bad_samples(BAD, GOOD) == 0.375
    assert fraction_of_bad_samples(None, BAD, (LABELS,)) == 0.75


def test_samples_count_for_one_loss_only():
    g = guard(None, lambda: BAD, beta_star=1.0, action="warn")
    g.sampler()
    g.loss_fn(*energies())
    g.loss_fn(*energies())
    assert g.last["nonfinite/samples"] == 0.75  # of the one loss that has used them, not half of it


def oracle(batches: list[np.ndarray], beta_star: float) -> float:
    """Weights relative to their batch's mean, of the last 16 batches, by arviz-stats."""
    ratios = []
    for f in batches[-16:]:
        w = np.exp(beta_star * f)
        ratios.append(np.log(w / w.mean()))
    return float(array_stats.psislw(-np.concatenate(ratios))[1])


def test_pareto_shape_is_that_of_the_last_steps_pooled():
    memory = Memory()
    g = guard(None, None, beta_star=1.25, sinks=[memory], reference_beta_star=0.75)
    batches = []
    for step in range(52):
        f = torch.randn(10 + step, dtype=torch.float64) * 2 + step
        batches.append(f.numpy())
        g.loss_fn(torch.zeros(5, dtype=torch.float64), f)
    g.close()
    slow = [step for step, row in memory.rows if "pareto_k" in row]
    assert slow == [0, 50]
    row = memory.rows[50][1]
    assert row["pareto_k"] == pytest.approx(oracle(batches[:51], 1.25), rel=1e-6)
    assert row["ref/pareto_k"] == pytest.approx(oracle(batches[:51], 0.75), rel=1e-6)
    assert math.isnan(memory.rows[0][1]["pareto_k"])  # too few for a tail


def test_pareto_shape_at_beta_star_zero_is_unknown_but_at_the_reference():
    g = guard(None, None, beta_star=0.0)
    f = 2 * torch.randn(200)
    g.loss_fn(torch.zeros(5), f)
    assert math.isnan(g.last["pareto_k"])
    assert g.last["ref/pareto_k"] == pytest.approx(oracle([f.double().numpy()], 0.5), rel=1e-5)


def test_histograms_are_of_energies_high_on_data_and_are_copies():
    memory = Memory()
    g = guard(None, None, beta_star=1.0, convention="energy", sinks=[memory], judge_in_loss=False)
    pos, neg = torch.randn(4), torch.randn(5)
    g.loss_fn(pos, neg)
    expected = {"f_pos": (-pos).tolist(), "f_neg": (-neg).tolist()}
    pos.zero_()
    neg.zero_()
    g.close()
    assert memory.histograms == [(0, expected)]


def test_members_are_averaged_and_a_nan_of_one_stays():
    star = torch.tensor([1.0, 1.0])
    g = guard(None, None, beta_star=star)
    pos, neg = torch.randn(2, 4), torch.randn(2, 5)
    g.loss_fn(pos, neg)
    assert g.last["f_pos/max"] == pytest.approx(pos.amax(1).mean().item())
    pos[1, 0] = torch.nan
    g.loss_fn(pos, neg)
    assert math.isnan(g.last["f_pos/max"])
    assert g.last["nonfinite/pos"] == 0.5
    assert g.last["f_neg/max"] == pytest.approx(neg.amax(1).mean().item())


def test_nothing_from_the_sampler_where_nothing_was_sampled():
    f, g = Bowl(), guard(None, None, beta_star=1.0, output_scale=2.0)
    gradient_at(lambda x: g.temper(f(x)), torch.ones(2, 2).double())
    g.loss_fn(*energies())
    assert not {tag for tag in g.last if tag.startswith("sampler/")}
