"""`ebmguard train bism` from settings to a run folder."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from ebmguard.cli import main
from ebmguard.errors import ConfigError
from ebmguard.reference_training.bism.config import BismConfig
from ebmguard.reference_training.bism.images import Checkerboard, FlatImages
from ebmguard.reference_training.bism.rbm import GaussianBernoulliRBM
from ebmguard.reference_training.bism.table import page
from ebmguard.reference_training.bism.train import told
from ebmguard.reference_training.data import load_data
from ebmguard.runs import load

from . import parts
from .parts import rng

go = partial(parts.go, BismConfig)


def test_the_checkerboards_density_is_that_of_its_samples():
    board = Checkerboard()
    x = board.sample(10_000, rng())
    assert board.log_density(x).eq(math.log(2)).all()
    assert abs((x[:, 0] < 0.5).double().mean() - 0.5) < 5 * 0.5 / 100
    centres = torch.arange(-0.25, 1.25, 0.01) + 0.005
    cells = torch.cartesian_prod(centres, centres)
    assert (board.log_density(cells).exp().sum() * 1e-4).item() == pytest.approx(1)


@pytest.mark.parametrize("black", [-1.0, 0.0])
def test_flat_images_are_within_half_a_level_of_the_test_images(black):
    data = load_data("digits")
    images = FlatImages(data, black)
    assert images.dim == 64
    level = (1 - black) / 16
    exact = black + level * data.test_x.flatten(1)
    apart = (images.held_out(1000, rng()) - exact) / level
    assert apart.shape == (360, 64)
    assert apart.abs().max() <= 0.5 + 1e-4
    # Uniform, with variance 1/12: its standard error over all entries is below 1e-3.
    assert apart.var().item() == pytest.approx(1 / 12, abs=5e-3)


def test_samples_of_flat_images_are_training_images():
    data = load_data("digits")
    drawn = FlatImages(data, -1.0).sample(50, rng(1))
    levels = ((drawn + 1) * 8).round().to(torch.uint8)
    known = {tuple(row) for row in data.train_x.flatten(1).tolist()}
    assert all(tuple(row) in known for row in levels.tolist())


def test_the_guard_sees_the_models_samples_beside_the_data(tmp_path):
    go(tmp_path / "run", method="dsm")
    frames = load(tmp_path / "run")
    rows = frames.rows.droplevel("run")
    assert list(rows.index) == list(range(30))
    assert rows[["energy_gap", "update_loss"]].notna().all(axis=None)
    assert rows["energy_gap"].tolist() == pytest.approx((-rows["loss"]).tolist(), rel=1e-4)
    assert list(frames.evaluations.droplevel("run").index) == [10, 20, 30]


def test_a_density_of_noisy_data_is_watched_beside_noisy_data(tmp_path):
    # Beside clean ones the gap of such a model is up to 64 / 2, half the squares of the noise.
    options: dict[str, Any] = {"data": "digits", "method": "dsm", "noise_std": 1.0, "lr": 3e-3}
    go(tmp_path / "run", **options, iterations=300, batch=100, evaluations=1)
    gaps = load(tmp_path / "run").rows["energy_gap"]
    assert gaps.iloc[-50:].abs().mean() < 64 / 2 / 10


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
    go(tmp_path / "run", **options, iterations=80, evaluations=1)
    alerts = (tmp_path / "run" / "alerts.jsonl").read_text()
    assert ("weights_degenerate" in alerts) == bool(rule)
    ess = load(tmp_path / "run").rows["ref/ess"]
    assert ess.iloc[-1] < 0.1 if rule else ess.iloc[20:].min() > 0.3


def test_methods_side_by_side(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="nothing there holds"):
        page(tmp_path)
    few = {"iterations": 8, "evaluations": 1}
    runs = [go(tmp_path / f"dsm_{i}", method="dsm", seed=i, **few) for i in range(3)]
    assert "mdsm" not in page(tmp_path)
    go(tmp_path / "mdsm_0", method="mdsm", **few)
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


def test_many_latents_are_bracketed_around_what_few_have_exactly(tmp_path):
    digits: dict[str, Any] = {"data": "digits", "noise_std": 0.3, "temperatures": 200}
    exact = go(tmp_path / "dsm", **digits, method="dsm", hidden=5, evaluations=1)
    assert "kl" not in exact
    assert "verdict" not in exact
    found = go(tmp_path / "cd1", **digits, method="cd1", hidden=21)
    assert "log_likelihood" not in found
    assert found["bracket_holds"], found["verdict"]
    assert found["log_likelihood_high"] - found["log_likelihood_low"] < 1
    lines = page(tmp_path).splitlines()
    cells = {line.split("|")[1].strip(): line.split("|")[3].strip() for line in lines}
    ends = [f"{found[f'log_likelihood_{end}']:.3f}" for end in ("low", "high")]
    assert cells["cd1"] == " to ".join(ends)
    assert cells["dsm"] == f"{exact['log_likelihood']:.3f}"
    assert all("nats per sample" in told(results) for results in (exact, found))


def test_no_likelihood_is_shown_where_the_sides_do_not_bracket_it(tmp_path):
    options: dict[str, Any] = {"data": "digits", "hidden": 21, "ais_chains": 4, "temperatures": 1}
    options |= {"iterations": 5, "evaluations": 1}
    assert not go(tmp_path / "dsm", **options, method="dsm")["bracket_holds"]
    assert "no bracket" in page(tmp_path)


def test_on_the_command_line(tmp_path, capsys):
    words = ["train", "bism", "--out", str(tmp_path / "run"), "--iterations", "3"]
    assert main([*words, "--method", "cd1", "--evaluations", "1"]) == 0
    assert "nats per sample" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "r.html")]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "hmc"}, "method is 'hmc'"),
        ({"hidden": 0}, "hidden is 0, expected 1 or more"),
        ({"data": "frey", "data_root": "."}, "no frey_rawface.mat.*take the digits"),
        ({"ais_chains": 1}, "ais_chains is 1, expected 2 or more"),
        ({"batch": 0}, "batch is 0, expected 1 or more"),
    ],
)
def test_settings_that_make_no_run_are_refused(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        go(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
