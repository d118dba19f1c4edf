"""The JEM trainer with an adaptive sampler and a steered β*."""

from __future__ import annotations

import statistics

import pytest

from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.reference_training.jem.trainer import Trainer, make_network
from tests.reference_training.jem.parts import SMALL


def trainer_of(folder, **settings):
    config = JemConfig(out=folder, device="cpu", **(SMALL | settings))
    config.check()
    data = config.load_data()
    return Trainer(config, make_network(config, data), data, log_dir=None)


def test_a_lost_sampler_runs_more_steps_and_goes_on_with_them_when_resumed(tmp_path):
    settings = {"beta_star": 50.0, "most_steps": 4}  # so large that no chain competes at first
    trainer = trainer_of(tmp_path, **settings)
    guard = trainer.loss_fn.guard
    evaluations, scales = [], []
    for step in range(5):
        expected = guard.sgld_steps
        trainer.step(step)
        evaluations.append(guard.last["sampler/evaluations"])
        scales.append(guard.last["grad_scale"])
        assert evaluations[-1] == expected
    steps = 2
    for ran, scale in zip(evaluations, scales, strict=True):
        assert ran == steps
        steps = min(2 * steps, 8) if scale < 0.8 else steps
    assert steps == 8
    resumed = trainer_of(tmp_path, **settings)
    resumed.loss_fn.guard.load_state_dict(guard.state_dict())
    assert resumed.loss_fn.guard.sgld_steps == guard.sgld_steps == 8


def test_beta_star_moves_by_what_the_rows_of_a_window_say(tmp_path):
    trainer = trainer_of(tmp_path, beta_star=0.5, steer_beta=True)
    rows = []
    for step in range(21):
        trainer.step(step)
        rows.append(trainer.loss_fn.guard.last)
    assert [row["beta_star"] for row in rows[:20]] == [0.5] * 20
    ess, scale = (statistics.median(row[tag] for row in rows[:20]) for tag in ("ess", "grad_scale"))
    assert ess > 0.8
    assert scale > 0.5
    assert rows[20]["beta_star"] == pytest.approx(0.625)
