"""The JEM trainer with an adaptive sampler."""

from __future__ import annotations

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
