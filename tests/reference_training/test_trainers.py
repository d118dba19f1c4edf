"""What holds of every trainer: exact resume, seeds, and settings that are refused before a run."""

from __future__ import annotations

import math
import re
import shlex
import shutil
from typing import Any

import pytest

from ebmguard.cli import main
from ebmguard.errors import ConfigError
from ebmguard.reference_training.engine import loop
from ebmguard.sinks import read_jsonl
from tests.reference_training.parts import (
    TRAINERS,
    Silent,
    assert_same_run,
    newest,
    results_of,
    same,
    saved,
    small_evaluations,
)

EVERY = {"jem": 4, "shortrun": 9, "toy": 7, "rbm": 17, "deep": 8}
"""Steps between checkpoints."""
TOYS = {
    "gmm-default": ("0:0.9", "0.3"),
    "mixture1d-restricted": ("0.1+0.5+0.9", "0.3"),
    "gmm-good+exploding": ("0", "0.5"),
}
KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "jem": {
        "no guard": {"beta_star": 0.0},
        "a classifier": {"p_x_weight": 0.0, "n_labelled": 5, "valid_images": 30},
        "all": {"p_x_y_weight": 0.5, "class_conditional": True, "n_labelled": 5},
        "quality": {"quality_samples": 20, "valid_images": 30},
        "epochs": {
            "scenario": "2",
            "depth": 10,
            "width": 1,
            "n_labelled": 5,
            "train_images": 40,
        },
    },
    "shortrun": {
        "random K": {"most_sgld_steps": 7},
        "persistent": {"init": "persistent", "buffer_size": 20, "optimizer": "sgd"},
        "bfloat16": {"precision": "bfloat16", "sample_every": 1, "checkpoint_every": 100},
    },
    "toy": {name: {"scenario": name, "betas": betas} for name, betas in TOYS.items()},
    "rbm": {
        "bidsm": {},
        "vnce": {"method": "vnce"},
    },
    "deep": {
        "bimdsm": {},
        "unrolled": {"unrolled_steps": 2},
        "pcd2": {"model": "wide", "method": "pcd2"},
        "cold": {"method": "sr3"},
    },
}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    small_evaluations(monkeypatch)


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name, own in KINDS.items() for kind in own]
)
def test_a_run_goes_on_from_a_checkpoint_to_the_same_bits(tmp_path, name, kind):
    """Ctrl-C writes one as it does every so many steps: see test_fourth_task.py."""
    trainer, whole, cut = TRAINERS[name], tmp_path / "whole", tmp_path / "cut"
    longer = {"iterations": 12} if name == "shortrun" else {}
    settings = {**longer, **KINDS[name][kind], "checkpoint_every": EVERY[name]}
    assert trainer.run(whole, **settings) is not None
    shutil.copytree(whole, cut)
    newest(cut).unlink()
    (cut / "results.json").unlink()
    resumed = Silent()
    assert trainer.go(trainer.config(out=cut, resume=True), resumed) is not None
    assert 0 < resumed.started[1] < resumed.started[2]
    assert_same_run(whole, cut)


@pytest.mark.parametrize("name", TRAINERS)
def test_the_same_seed_is_the_same_bits_and_another_one_others(tmp_path, name):
    for run, seed in (("a", 3), ("b", 3), ("c", 4)):
        TRAINERS[name].run(tmp_path / run, seed=seed)
    assert_same_run(tmp_path / "a", tmp_path / "b")
    a, c = saved(tmp_path / "a"), saved(tmp_path / "c")
    for part in a.keys() & {"network", "model", "optimizer", "update", "buffer", "draws"}:
        assert not same(a[part], c[part]), part


@pytest.mark.parametrize(
    ("name", "unit", "settings"),
    [
        ("jem", "step", {"lr": 0.5, "stop_after": 4, "alert_window": 3, "alert_context": 2}),
        ("shortrun", "update", {"lr": 10.0}),
    ],
)
def test_a_diverging_run_is_recorded_watched_and_stopped(tmp_path, name, unit, settings):
    trainer, reporter = TRAINERS[name], Silent()
    config = trainer.config_for(tmp_path, beta_star=0.0, iterations=60, **settings)
    results = trainer.go(config, reporter)
    lost = results["diverged_at"]
    assert results["steps"] == lost + settings.get("stop_after", 0) + 1 < 60
    gaps = [row["energy_gap"] for row in read_jsonl(tmp_path / "metrics.jsonl")]
    assert not abs(gaps[lost]) <= 1e4
    assert all(abs(gap) <= 1e4 for gap in gaps[:lost])
    assert any(f"diverged at {unit} {lost}: energy gap" in note for note in reporter.notes)
    assert (tmp_path / "figures" / "samples_end.png").is_file()
    # Its alerts are those that the guard wrote.
    first_error = next(a for a in read_jsonl(tmp_path / "alerts.jsonl") if a["level"] == "ERROR")
    assert {k: results["first_error"][k] for k in ("step", "message")} == {
        k: first_error[k] for k in ("step", "message")
    }
    if name == "jem":
        steps = [step for step, _ in results["accuracy_around_divergence"]]
        assert steps == list(range(max(lost - 2, 0), lost + 4))[: len(steps)]
        assert len(steps) >= 5
    before = results_of(tmp_path)
    trainer.go(trainer.config(out=tmp_path, resume=True))  # there is nothing left to do
    assert results_of(tmp_path) == before


WORDS = {
    "jem": "test accuracy ",
    "shortrun": "medians of the last 100 updates: ",
    "toy": "| default",
    "rbm": " nats per sample",
    "deep": "loss on test images ",
}
"""Of what a trainer says at the end of a run."""


@pytest.mark.parametrize("name", TRAINERS)
def test_a_command_says_how_its_run_went_also_when_there_is_nothing_left_to_do(
    tmp_path, monkeypatch, capsys, name
):
    monkeypatch.setattr(loop, "default_reporter", lambda every: Silent())
    config = TRAINERS[name].config_for(tmp_path)
    assert main(shlex.split(config.command())[1:]) == 0
    lines = capsys.readouterr().out.splitlines()
    ended = f"finished {config.total_steps} steps without divergence"
    assert lines[:2] == [f"results in {tmp_path}", ended]
    assert any(WORDS[name] in line for line in lines[2:])
    assert main([*config.words[1:], "--out", str(tmp_path), "--resume"]) == 0
    assert capsys.readouterr().out.splitlines() == lines


# -- settings ----------------------------------------------------------------------------------

REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "jem": [
        ({"scenario": "8"}, r"scenario is '8', expected one of digits, 1, .* 7"),
        ({"variant": "best"}, r"variant is 'best', expected one of default, no_pos, batch, true"),
        ({"p_x_weight": 0.0, "p_y_x_weight": 0.0}, "all three weights are 0"),
        ({"p_x_y_weight": math.inf}, "p_x_y_weight is inf, expected a finite number, 0 or more"),
        ({"p_x_y_weight": 1.0, "variant": "true"}, r"variant is 'true' with p_x_y_weight"),
        ({"class_conditional": True, "p_x_weight": 0.0}, "class_conditional needs the term of p"),
        ({"class_conditional": True, "buffer_size": 33}, "buffer_size is 33, expected a multiple"),
        ({"energy_l2": 0.1, "p_x_weight": 0.0}, r"energy_l2 belongs to the terms of p\(x\) and p"),
        ({"clip_norm": math.nan}, "clip_norm is nan, expected a positive number"),
        ({"action": "raise", "p_x_weight": 0.0}, "action is 'raise' without samples"),
        ({"action": "rollback", "p_x_y_weight": 1.0}, "action is 'rollback' with p_x_y_weight, w"),
        ({"norm": "instance", "image_size": 4}, "norm is 'instance', which needs images of 5x5"),
        ({"labels_per_class": 4}, "n_labelled is 0 with labels_per_class 4: expected a batch of 1"),
        ({"labels_per_class": 4, "n_labelled": 41}, "n_labelled is 41 .* 1 to 40 of the labelled"),
        ({"unconditional": True, "p_x_y_weight": 1.0}, "unconditional .* has no f"),
        ({"unconditional": True, "class_conditional": True}, "unconditional .* has no f"),
        ({"unconditional": True, "p_x_weight": 0.0}, "unconditional needs the term of p"),
        ({"features": "no such thing", "quality_samples": 9}, "features is 'no such thing'"),
        ({"finer_steps": True, "compile": "yes"}, "finer_steps needs samples, and a network that"),
        ({"n_pos": 64, "train_images": 63}, "a batch of 64 images was asked for, digits has 63"),
        ({"image_size": 3}, "image_size is 3, and the images have 8x8 pixels"),
        ({"train_images": 10**6}, "train_images is 1000000, expected at most 1437"),
        ({"data": "cifar10", "data_root": "no"}, "no, which is not a folder"),
        *(
            ({name: value}, f"{name} is {value}, expected")
            for name, values in {
                "lr": (0.0, math.nan),
                "depth": (12, 4),
                "n_pos": (0,),
                "n_labelled": (-1,),
                "step_size": (math.inf,),
                "data_noise": (math.nan,),
                "reinit_rate": (1.1, math.nan),
                "eval_every": (0,),
                "warmup": (-1,),
            }.items()
            for value in values
        ),
    ],
    "shortrun": [
        ({"beta_star": math.inf}, "beta_star is inf, expected a finite number"),
        ({"beta_star": 2e4}, "beta_star is 20000.0, expected less than the output scale, 20000"),
        ({"beta_star": 3.0, "noise_std": 1.0}, "expected less than the output scale, 2: f is"),
        ({"init": "persistent", "buffer_size": 7}, "buffer_size is 7, expected the batch, 8"),
        ({"optimizer": "lion"}, "optimizer is 'lion', expected one of adam, sgd"),
        ({"most_sgld_steps": 2}, "most_sgld_steps is 2, expected sgld_steps, 3, or more"),
        ({"start_from": "no/run"}, "no/run holds no run"),
        *(
            ({name: value}, f"{name} is {value}, expected a positive number")
            for name in ("lr", "step_size", "noise_std")
            for value in (0, math.nan)
        ),
        *(
            ({"data_noise": value}, f"data_noise is {value}, expected a finite number, 0 or more")
            for value in (-0.1, math.nan)
        ),
    ],
    "toy": [
        ({"scenario": "gmm-best"}, "expected one of gmm-default"),
        *(
            ({"betas": (beta,)}, f"beta is '{re.escape(beta)}', expected a number up to 1")
            for beta in ("", "x", "0.5:", "0:1:2", "1.5", "nan", "inf", "-inf", "0.5+", "0:2")
        ),
        ({"betas": ("0", "0")}, "expected different values"),
        ({"betas": ("0.1+0.2", "0.1+0.2+0.3")}, "averages in one ensemble need equally many"),
        ({"variants": ("best",)}, "variant is 'best'"),
        ({"threads": -1}, "threads is -1, expected 0 or more"),
        ({"evaluations": 13}, "at most one for each of the 12 updates"),
    ],
    "rbm": [
        *(({"method": x}, f"method is '{x}', expected dsm, .*, cdK") for x in ("hmc", "cd0")),
        ({"noise_std": 0.0}, "noise_std is 0.0, expected a positive number"),
        ({"noise_range": (0.3, 0.1)}, "noise_range is 0.3 to 0.1, expected 0 < least < most"),
        ({"inner_steps": -1}, "inner_steps is -1, expected 0 or more"),
        ({"lr": math.nan}, "lr is nan"),
        ({"data": "frey", "data_root": "."}, "no frey_rawface.mat.*take the digits"),
        ({"ais_chains": 1}, "ais_chains is 1, expected 2 or more"),
    ],
    "deep": [
        ({"method": "dsm"}, "method is 'dsm', expected bimdsm, bidsm, bissm, srK or psrK"),
        ({"model": "visible", "method": "bidsm"}, "method is 'bidsm', expected mdsm, dsm, ssm"),
        ({"posterior": "bernoulli", "lower": "fisher"}, "lower is 'fisher', expected 'elbo'"),
        ({"method": "sr5", "model": "visible"}, "method is 'sr5', expected mdsm"),
    ],
}


OF_ALL: tuple[tuple[dict[str, Any], str], ...] = (
    ({"device": "abacus"}, "device is 'abacus'"),
    ({"resume": True}, "no run to resume"),
)


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [(name, *case) for name, own in REFUSED.items() for case in (*own, *OF_ALL)],
)
def test_what_cannot_be_meant_is_refused_before_there_is_a_folder(tmp_path, name, settings, says):
    with pytest.raises(ConfigError, match=says):
        TRAINERS[name].config_for(tmp_path / "run", **settings).open()
    assert not (tmp_path / "run").exists()
