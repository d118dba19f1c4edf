"""Scenarios of Appendix M.1, written down a second time, and the settings beside them."""

from __future__ import annotations

import dataclasses
import math
import shlex
from pathlib import Path

import pytest
import torch
import tyro

from ebmguard.errors import ConfigError
from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.reference_training.jem.options import from_words
from ebmguard.reference_training.jem.paper import TABLE_1, TABLE_2
from ebmguard.reference_training.jem.scenarios import SCENARIOS, Scenario
from tests.parts import save_script
from tests.reference_training.parts import JEM

go = JEM.go

# Appendix M.1: 1 is the default set-up of JEM; 2 takes 5 SGLD steps for 20; 3 takes 8 negatives for
# 64; 4 and 5 have an output scale of 40,000 and 10,000 for 20,000; 6 has 4 times the SGLD step
# size α, 5,000 for the output scale and a quarter of the learning rate; 7 has a quarter of α.
# SGLD steps, negatives, output scale o, α = (standard deviation of the noise)**2, learning rate:
TABLE = {
    "1": (20, 64, 20_000, 0.0001, 1e-4, "the default setup"),
    "2": (5, 64, 20_000, 0.0001, 1e-4, "steps 20 → 5"),
    "3": (20, 8, 20_000, 0.0001, 1e-4, "64 → 8"),
    "4": (20, 64, 40_000, 0.0001, 1e-4, "output scale × 2"),
    "5": (20, 64, 10_000, 0.0001, 1e-4, "output scale × 0.5"),
    "6": (20, 64, 5_000, 0.0004, 0.25e-4, "step size × 4"),
    "7": (20, 64, 20_000, 0.000025, 1e-4, "step size × 0.25"),
}


def of(**settings) -> Scenario:
    return JemConfig(**{"out": Path("x"), "data": "cifar10", **settings}).settings


@pytest.mark.parametrize("name", TABLE)
def test_a_scenario_is_that_of_the_paper(name):
    sgld_steps, n_neg, output_scale, alpha, lr, words = TABLE[name]
    assert words in TABLE_2[name].setup
    settings = of(scenario=name)
    assert settings == SCENARIOS[name]
    assert (settings.sgld_steps, settings.n_neg) == (sgld_steps, n_neg)
    assert settings.noise_std**2 == pytest.approx(alpha, rel=1e-12)
    assert settings.output_scale == pytest.approx(output_scale, rel=1e-12)
    # p(x) ∝ exp(o f(x)) is sampled by x += α/2 o df/dx + sqrt(α) z (Appendix M.2).
    assert settings.step_size == pytest.approx(alpha / 2 * output_scale, rel=1e-12)
    assert settings.lr == pytest.approx(lr, rel=1e-12)
    # All scenarios share the rest.
    varied = ("sgld_steps", "n_neg", "step_size", "noise_std", "lr")
    assert (
        dataclasses.replace(SCENARIOS["1"], **{x: getattr(settings, x) for x in varied}) == settings
    )
    assert settings.iterations == 200 * 703
    assert settings.stop_after == settings.eval_every * 2 == 703 * 2
    assert (settings.n_pos, settings.n_labelled, settings.epochs) == (64, 64, True)
    assert (settings.buffer_size, settings.reinit_rate) == (10_000, 0.05)
    assert settings.data_noise == settings.eval_noise == 0.03
    assert (settings.depth, settings.width, settings.early_stride) == (28, 10, False)
    assert settings.train_images is settings.valid_images is settings.test_images is None
    assert settings.problems() == []


def published_learning_rates(lr: float):
    """The loop of the published trainer, in its order: decay by epoch, warm-up by update."""
    now, update = lr, 0
    for epoch in range(200):
        if epoch in (160, 180):
            now *= 0.3
        for _ in range(703):
            if update <= 1000:
                now = lr * update / 1000
            yield now
            update += 1


@pytest.mark.parametrize("name", ["1", "6"])
def test_the_learning_rate_is_that_of_the_published_loop(name):
    settings = SCENARIOS[name]
    expected = list(published_learning_rates(settings.lr))
    assert len(expected) == settings.iterations
    decay = 160 * 703
    ends = [expected[i] / settings.lr for i in (0, 1000, decay - 1, decay, -1)]
    assert ends == pytest.approx([0, 1, 1, 0.3, 0.09])
    for update, lr in enumerate(expected):
        assert math.isclose(settings.lr_at(update), lr, rel_tol=1e-12), update


def test_tables_1_and_2_agree_and_print_beta():
    line = TABLE_2["1"]
    assert line.at_zero == TABLE_1[0.0]
    others = {beta_star: scores for beta_star, scores in TABLE_1.items() if beta_star}
    for metric, pick in (("accuracy", max), ("inception", max), ("fid", min)):
        values = {beta_star: getattr(scores, metric) for beta_star, scores in others.items()}
        best = pick(values, key=values.__getitem__)
        assert getattr(line.best_beta_star, metric) == best
        assert getattr(line.best, metric) == values[best]
    scale = SCENARIOS["1"].output_scale
    assert scale == 20_000
    printed = ["0.000000", "0.000025", "0.000050", "0.000100", "0.000200", "0.000500"]
    assert [f"{beta_star / scale:.6f}" for beta_star in TABLE_1] == printed


def test_where_beta_is_better_in_table_2():
    lines = TABLE_2.values()
    assert [line.best.accuracy > line.at_zero.accuracy for line in lines].count(True) == 7
    assert [line.best.inception > line.at_zero.inception for line in lines].count(True) == 7
    assert [line.best.fid < line.at_zero.fid for line in lines].count(True) == 4


def at(out="x", **settings):
    return JemConfig(**{"out": Path(out), **settings})


@pytest.mark.parametrize(
    "settings",
    [
        {"beta_star": 0.5, "lr": 1e-3, "sgld_steps": 7},
        {"data": "cifar10", "data_root": "/data sets", "scenario": "3", "precision": "bfloat16"},
        {"class_conditional": True, "p_x_y_weight": 0.5, "n_labelled": 0, "compile": "yes"},
        {"data": "mnist", "image_size": 14, "action": "rollback", "finer_steps": True},
        {"energy_l2": 0.1, "clip_norm": 1.0, "activation": "silu", "norm": "layer"},
        {"optimizer": "sgd", "weight_decay": 5e-4, "dropout": 0.3, "unconditional": True},
        {"labels_per_class": 4, "n_labelled": 64, "features": "runs/other", "seed": 3},
    ],
)
def test_command_line_makes_the_same_settings(settings):
    config = at("runs/a b", **settings)
    words = shlex.split(config.command())
    assert words[:3] == ["ebmguard", "train", "jem"]
    assert tyro.cli(from_words, args=words[3:]) == config


def test_a_run_folder_cannot_name_code_that_resuming_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_script(torch.nn.Identity(), "features.pt")
    opened: list[str] = []
    load = torch.jit.load

    def noted(file, **options):
        opened.append(file)
        return load(file, **options)

    monkeypatch.setattr(torch.jit, "load", noted)
    stored = at(features="features.pt", quality_samples=8).to_json()
    with pytest.raises(ConfigError, match=r"features .*features\.pt.*these --features if"):
        at(resume=True).resumed(stored).check()
    assert not opened
    at(resume=True, features="features.pt").resumed(stored).check()
    assert opened == ["features.pt"]
