"""The bias of unrolled gradients where it is known, and the figure of it from runs."""

from __future__ import annotations

import json
import shutil
from functools import partial
from typing import Any

import pandas as pd
import pytest
import torch

from ebmguard.cli import main
from ebmguard.errors import ConfigError
from ebmguard.reference_training.bism.config import BismConfig, UpdateSettings
from ebmguard.reference_training.bism.methods import Levels, Update
from ebmguard.reference_training.bism.train import train
from ebmguard.reference_training.studies.bilevel import exact_posterior, gradient_bias, measured
from ebmguard.reference_training.studies.command import find, run
from ebmguard.reference_training.studies.config import BilevelFigure
from tests.reference_training.parts import rbm, rng
from tests.reference_training.studies.small import assert_no_text_on_text, assert_recorded

STD = 0.3


@pytest.mark.parametrize("follows", [True, False])
def test_where_the_upper_loss_is_quadratic_all_is_known(follows):
    # J = a/2 |phi|^2 + b <phi, phi*(theta)>: its second derivatives are a and b everywhere.
    model, a, b = rbm(), 0.7, 0.4
    goal = exact_posterior(model)
    size = torch.cat([x.reshape(-1) for x in goal.values()]).norm().item()
    apart = {n: torch.full_like(x, 0.1) for n, x in goal.items()}
    after = {n: (x if follows else x.detach()) + apart[n] for n, x in goal.items()}

    def upper(phi):
        return sum(a / 2 * x.square().sum() + b * (x * goal[n]).sum() for n, x in phi.items())

    before = {n: x.detach() + 3 * apart[n] for n, x in goal.items()}
    norms, error = gradient_bias(model, Levels(before, after, upper))
    distance = 0.1 * 12**0.5
    assert norms["distance"] == pytest.approx(distance)
    assert norms["drift"] == pytest.approx(2 * distance)
    assert norms["left"] == pytest.approx(1 / 3)
    assert norms["gradient"] == pytest.approx((a + 2 * b) * size)
    assert norms["error"] == pytest.approx(error.norm().item())
    if follows:  # D_N = D*: nothing but the distance is left, and the bound is met
        assert norms["error"] == pytest.approx((a + b) * distance)
        assert norms["bound"] == pytest.approx((a + b) * distance)
    else:
        assert norms["bound"] == pytest.approx(b * distance + (a + b) * size)
        assert norms["error"] < norms["bound"]


def begin(steps: int, seed: int = 0):
    model, generator = rbm(seed=seed), rng(seed)
    settings = UpdateSettings(noise_std=STD, lr=0.02, inner_steps=10, unrolled_steps=steps)
    return model, Update(model, settings, generator), generator


@pytest.mark.parametrize(("steps", "seed"), [(0, 0), (3, 0), (3, 1)])
def test_the_error_stays_below_its_bound(steps, seed):
    model, update, generator = begin(steps, seed)
    state = {name: x.clone() for name, x in update.posterior.state_dict().items()}
    data = partial(torch.randn, 50, 2, generator=generator, dtype=torch.float64)
    batches = [update.levels(data()) for _ in range(3)]
    each = [gradient_bias(model, levels) for levels in batches]
    for norms, _ in each:
        assert norms["error"] <= norms["bound"]
        assert (norms["drift"] > 0) is (steps > 0)
    found = measured(model, batches)
    assert found["error"] == pytest.approx(sum(norms["error"] for norms, _ in each) / 3)
    mean = sum(error for _, error in each) / 3
    assert found["bias"] == pytest.approx(mean.norm().item())
    assert found["bias"] <= found["error"]
    assert all(torch.equal(x, state[name]) for name, x in update.posterior.state_dict().items())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    options: dict[str, Any] = {"iterations": 5, "batch": 20, "evaluations": 1, "test_samples": 50}
    for n, k, seed in ((2, 2, 0), (2, 2, 1), (0, 2, 0), (2, 0, 0)):
        own: dict[str, Any] = {"unrolled_steps": n, "inner_steps": k, "seed": seed}
        out = folder / f"{n}_{k}_{seed}"
        train(*BismConfig(out=out, fresh_inner=k == 0, **own, **options).open())
    train(*BismConfig(out=folder / "dsm", method="dsm", **options).open())
    (folder / "unfinished").mkdir()
    for name in ("config.json", "metrics.jsonl"):
        shutil.copy(folder / "2_2_0" / name, folder / "unfinished")
    return folder


def test_figure_of_runs(runs, tmp_path, capsys):
    words = [str(path) for path in sorted(runs.glob("?_*"))]
    options = ["--minibatches", "3", "--out", str(tmp_path / "f.png")]
    assert main(["figure", "bilevel", "--runs", *words, *options]) == 0
    rows = json.loads((tmp_path / "f.json").read_text())["rows"]
    assert_recorded("bilevel", rows)
    steps = [(row["unrolled_steps"], row["inner_steps"], row["runs"]) for row in rows]
    assert steps == [(0, 2, 1), (2, 0, 1), (2, 2, 2)]
    assert (rows[0]["drift"], rows[0]["left"]) == (0, 1)
    files = [runs / f"2_2_{seed}" / "results.json" for seed in range(2)]
    of_seeds = [json.loads(file.read_text())["log_likelihood"] for file in files]
    assert rows[2]["log_likelihood"] == pytest.approx(sum(of_seeds) / 2)
    shown = capsys.readouterr().out
    cells = [[cell.strip() for cell in line.split("|")[1:4]] for line in shown.splitlines()]
    assert ["2", "2", "2"] in cells
    assert (tmp_path / "f.png").read_bytes()[:4] == b"\x89PNG"
    study = find("bilevel")
    for figure in study.drawn(pd.DataFrame(rows)).values():
        assert_no_text_on_text(figure)


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        ((), {}, "runs is empty"),
        (("2_2_0",), {"minibatches": 1}, "minibatches is 1, expected 2 or more"),
        (("dsm",), {}, "dsm holds no run of .* by bidsm, bissm or bimdsm"),
        (("unfinished",), {}, "unfinished is not finished"),
    ],
)
def test_what_makes_no_figure_is_refused(runs, names, options, message):
    own = {"name": "bilevel", "out": runs / "f.png", "runs": tuple(runs / n for n in names)}
    with pytest.raises(ConfigError, match=message):
        run(BilevelFigure(**own, **options))
