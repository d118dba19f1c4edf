"""At beta* = 0, told or by default, a guarded run is the unguarded one, bit for bit."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from ebmguard import Level, guard
from tests.parts import Script, difference, get_sample_q, gradient_at, rising_difference
from tests.runs import Run, begin, randomness, train

N_STEPS = 52


def begun(
    loss_fn: Any = None,
    *,
    told: Mapping[str, Any] | None = None,
    inline: bool = False,
    reweights: bool = False,
    **options: Any,
) -> Run:
    """A run with a guard.

    Args:
        told: what the guard is told beside the model and the optimizer; None tells it of neither.
        inline: the sampler asks the guard by itself.
        reweights: the loss stays the trainer's own.
    """
    run = begin()
    attach = None if told is None else {"model": run.model, "optimizer": run.optimizer, **told}
    g = run.guard(loss_fn, None if inline else run.sampler, attach=attach, **options)
    run.sampler = get_sample_q(temper=g.temper) if inline else g.sampler
    run.loss_fn = run.loss_fn if reweights else g.loss_fn
    return run


def trained(n: int = N_STEPS, **options: Any) -> Run:
    run = begun(**options)
    more: Any = {"reweight": run.guards[0].reweight} if options.get("reweights") else {}
    return train(run, n, negate=options.get("convention") == "energy", **more)


@pytest.fixture(scope="module")
def unguarded() -> Run:
    return train(begin(), N_STEPS)


SCALE: Any = {"beta_star": 0, "output_scale": 20_000}
JEM: Any = {"step_size": 1.0, "noise_std": 0.01}
ENERGY: Any = {"beta_star": 0, "convention": "energy"}
OFF: dict[str, dict[str, Any]] = {
    "attached": {"told": {}, **SCALE},
    "nothing attached": {"beta_star": 0},
    # Slow steps copy and register hooks, and the run does not notice.
    "all that is known": {"told": {"clamp": (-1, 1), **JEM}, **SCALE},
    "the trainer's own loss": {"loss_fn": difference, "beta": 0, "told": {}, **JEM},
    "energy convention": ENERGY,
    "energy convention, the trainer's own loss": {"loss_fn": rising_difference, **ENERGY},
    "reweighted energies": {"reweights": True, **SCALE},
    "inline sampler": {"inline": True, **SCALE},
    "a schedule": {"beta_star": lambda step: 0.0, "output_scale": 20_000},
}


@pytest.mark.parametrize("name", OFF)
def test_off(unguarded, tmp_path, name):
    run = trained(**OFF[name], log_dir=tmp_path)
    assert run.equals(unguarded)
    assert run.memories[0].steps == list(range(N_STEPS))
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == N_STEPS
    if name == "all that is known":
        watched = {"sampler/clamped", "sampler/drift_to_noise", "optim/grad_norm"}
        assert watched <= set(run.guards[0].last)


def test_alerts_with_warn_change_nothing(unguarded, caplog):
    run = begun(beta_star=0, told={}, action="warn")
    Script(dict.fromkeys(range(N_STEPS), Level.ERROR)).watches(run.guards[0])
    with caplog.at_level(logging.CRITICAL, "ebmguard"):
        assert train(run, N_STEPS).equals(unguarded)
    assert len(run.guards[0].alerts) == N_STEPS


def test_no_global_random_number_is_drawn(tmp_path):
    pos, neg, model = torch.randn(8), torch.randn(8), torch.nn.Linear(2, 1)
    before = randomness()
    g = guard(difference, gradient_at, beta_star=1.0, output_scale=5, log_dir=tmp_path)
    g.attach(model=model, optimizer=torch.optim.Adam(model.parameters()))
    for _ in range(3):
        g.sampler(model, torch.zeros(4, 2))
        g.loss_fn(pos, neg)
        g.reweight(pos, neg)
    g.load_state_dict(g.state_dict())
    g.close()
    assert randomness() == before
