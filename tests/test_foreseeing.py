"""Foreseeing: curvatures against dense Hessians, futures against the run, scores without leaks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import nn

from benchmarks import foreseeing, futures
from benchmarks.foretelling import HORIZONS, area_under_curve, flattened, judge, question, share
from benchmarks.futures import (
    hessian_of_f,
    hessian_of_loss,
    largest_sizes,
    preconditioner,
    top_eigenvalues,
)
from benchmarks.grid import RESULTS, read_rows
from benchmarks.population.families import Run
from benchmarks.population.trainer import Trainer

MANY = 3000
# Power iteration stops short of an eigenvalue that has another one near it.
CLOSE = 1e-3


@pytest.fixture
def network():
    torch.manual_seed(0)
    layers = nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)
    return nn.Sequential(*layers, nn.Flatten(0)).double()


def test_curvature_in_x_is_that_of_the_dense_hessian(network):
    x = torch.randn(4, 5, dtype=torch.float64)
    start = torch.randn(4, 5, dtype=torch.float64)
    product = hessian_of_f(network, x)
    dense = [torch.autograd.functional.hessian(lambda z: network(z[None])[0], each) for each in x]
    values = torch.stack([torch.linalg.eigvalsh(each) for each in dense])
    sizes = largest_sizes(product, start, MANY)
    assert torch.allclose(sizes, values.abs().amax(1), rtol=CLOSE)
    assert torch.allclose(top_eigenvalues(product, start, sizes, MANY), values.amax(1), atol=CLOSE)


@pytest.mark.parametrize("diagonal", [(2.0, -2.0, 0.5), (-3.0, -1.0, 1.0), (4.0, 0.0, -1.0)])
def test_signs_of_eigenvalues(diagonal):
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    start = torch.ones(1, 3, dtype=torch.float64)
    sizes = largest_sizes(lambda v: v @ matrix, start)
    assert sizes.item() == pytest.approx(max(map(abs, diagonal)))
    top = top_eigenvalues(lambda v: v @ matrix, start, sizes)
    assert top.item() == pytest.approx(max(diagonal))


def test_preconditioned_sharpness_of_a_quadratic():
    torch.manual_seed(0)
    root = torch.randn(6, 6, dtype=torch.float64)
    matrix, scales = root + root.T, torch.rand(6, dtype=torch.float64) + 0.1
    a, b = (torch.randn(2, 2, dtype=torch.float64), torch.randn(2, dtype=torch.float64))
    parameters = [a.requires_grad_(), b.requires_grad_()]
    flat = torch.cat([p.flatten() for p in parameters])
    product = hessian_of_loss(flat @ matrix @ flat / 2, parameters, [scales[:4], scales[4:]])
    values = torch.linalg.eigvalsh(matrix / (scales[:, None] * scales).sqrt())
    start = torch.randn(1, 6, dtype=torch.float64)
    sizes = largest_sizes(product, start, MANY)
    assert sizes.item() == pytest.approx(float(values.abs().max()))
    top = top_eigenvalues(product, start, sizes, MANY)
    assert top.item() == pytest.approx(float(values.max()))


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW])
def test_preconditioner_is_what_adam_divides_by(make):
    p = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    optimizer = make([p], 0.1, betas=(0.0, 0.9), weight_decay=0.0)
    for factor in (1.0, 5.0, 2.0):
        p.grad = gradient = factor * torch.tensor([0.1, 1.0, -3.0])
        before = p.detach().clone()
        optimizer.step()
    (scale,) = preconditioner(optimizer)
    assert torch.allclose(before - p, 0.1 * gradient / scale, rtol=1e-4)


def test_preconditioner_of_plain_descent_is_one():
    p = torch.zeros(3, requires_grad=True)
    assert torch.equal(preconditioner(torch.optim.SGD([p], 0.1))[0], torch.ones(3))


RUN = Run("digits-jem-mlp", 99, "digits", 1e-3, width=8, sgld_steps=2, batch=8, beta_star=0.5)


@pytest.fixture(params=["jem", "ebm"])
def trainer(request):
    return Trainer(Run(**{**vars(RUN), "task": request.param}))


def test_a_saved_state_goes_on_as_the_run_did(trainer):
    for _ in range(3):
        trainer.step()
    state = futures.saved(trainer)
    gaps = [trainer.step()["energy_gap"] for _ in range(5)]
    futures.restore(trainer, state)
    assert [trainer.step()["energy_gap"] for _ in range(5)] == gaps
    futures.restore(trainer, state)  # what was done with it has left it alone
    plain = [futures.plain_step(trainer) for _ in range(5)]
    assert plain == pytest.approx(gaps, rel=1e-3, abs=1e-4)


def test_features_are_known_and_leave_the_future_alone(trainer):
    rows = [trainer.step() for _ in range(futures.LAST)]
    state = futures.saved(trainer)
    before = futures.future(trainer, state, 0)
    gaps = futures.plain_step(trainer)
    found = futures.features_of(trainer, state, rows)
    assert all(math.isfinite(x) for x in found.values())
    assert set(foreseeing.SEVEN) <= set(found)
    assert futures.future(trainer, state, 0) == before
    assert futures.plain_step(trainer) == gaps


@pytest.mark.parametrize(
    ("deaths", "count"),
    [
        ([None] * 5, 3),  # the majority lives, whatever the others do
        ([10, 20, 30, 40, 50], 3),
        ([10, None, 30, 40, 50], 5),
        ([10, 70, 30, 40, 50], 5),  # within 50 steps one lives
    ],
)
def test_futures_end_where_the_majority_is_known(monkeypatch, deaths, count):
    trainer: Any = None
    monkeypatch.setattr(futures, "future", lambda trainer, state, seed: deaths[seed])
    assert futures.futures(trainer, {}, deaths[0]) == deaths[:count]


def table_of(rng, signal):
    """Twelve runs of ten states each, half of them dying; a signal says how much is known."""
    lines = []
    for run in range(12):
        for i in range(10):
            lost_in = 20 * i + 5 if run % 2 else None
            near = 0 if lost_in is None else 1 - lost_in / 200
            lines.append(
                {
                    "run": f"r{run}",
                    "lives": not run % 2,
                    "lost within 50": share([lost_in], 50),
                    "lost within 100": share([lost_in], 100),
                    "known": -signal * near + rng.normal(),
                    "number": float(run),
                }
            )
    return pd.DataFrame(lines)


@pytest.mark.parametrize("features", [["known"], ["known", "number"]])
@pytest.mark.parametrize("horizon", HORIZONS, ids=str)
def test_what_is_known_is_found_and_what_is_not_is_not(features, horizon):
    rng = np.random.default_rng(0)
    strong, none = (judge(table_of(rng, s), horizon, features) for s in (1000, 0))
    assert strong.auc() > 0.95
    assert strong.false()[0] == 0
    assert strong.caught()[0] >= 0.5 * strong.doomed.sum()
    assert [*strong.by_run()] == [f"r{run}" for run in range(1, 12, 2)]
    assert min(strong.by_run().values()) > 0.9
    assert none.auc() < 0.75
    low, high = none.interval()
    assert low < none.auc() < high


def test_the_states_of_a_question():
    kept = table_of(np.random.default_rng(0), 1)
    counts = {str(h): (len(question(kept, h)[0]), question(kept, h)[1].sum()) for h in HORIZONS}
    # Of each of six dying runs three are lost within 50 steps, and five within 100.
    assert counts == {"within 50": (120, 18), "within 100": (120, 30), "50 to 100": (102, 12)}


def test_a_feature_that_is_unknown_now_and_then_is_no_problem():
    kept = table_of(np.random.default_rng(0), 50)
    kept.loc[::7, "known"] = math.nan
    for features in (["known"], ["known", "number"]):
        assert judge(kept, HORIZONS[1], features).auc() > 0.8


def test_area_under_the_curve_with_ties():
    scores, labels = np.array([1.0, 2, 2, 2, 3, 3, 5]), np.array([0, 0, 1, 0, 1, 0, 1]) > 0
    assert area_under_curve(labels, scores) == pytest.approx(roc_auc_score(labels, scores))
    assert math.isnan(area_under_curve(labels[:2], scores[:2]))


def test_share():
    assert share([None, 40, 60, 100, 101], 100) == pytest.approx(0.6)


def test_runs_that_die_stand_beside_as_many_that_live():
    cells = list(foreseeing.CELLS.values())
    for dying, healthy in zip(cells[::2], cells[1::2], strict=True):
        assert dying["end"] == healthy["end"]
        assert not dying["lives"]
        assert healthy["lives"]
    assert len(foreseeing.RUNS) == len(cells) == 20
    assert all(run.batch <= 64 for run in foreseeing.RUNS.values())


def test_the_page_is_that_of_the_rows_that_are_kept():
    page = RESULTS / "foreseeing.md"
    kept = pd.DataFrame(
        line for row in read_rows(page.with_suffix(".csv.gz")) for line in flattened(row)
    )
    text = page.read_text(encoding="utf-8")
    assert foreseeing.by_lead(kept) in text
    single = judge(kept, HORIZONS[-1], ["row/f_pos/std"])
    line = next(x for x in text.splitlines() if x.startswith("| `row/f_pos/std`"))
    assert f"| {foreseeing.area(single)} |" in line
    assert foreseeing.false_alarms(single) in line
