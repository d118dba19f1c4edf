"""A rollback in a plain loop: the bits it restores, and what it changes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ebmguard import BudgetSpentError, Level, Recovery, guard
from ebmguard.recovery import Change
from ebmguard.recovery.changes import LearningRate, reseed
from ebmguard.retrofit.optimizer import OptimizerHooks
from ebmguard.samplers import sgld
from tests.recovery.parts import QUICK, SAME, Loop, Run, Scripted, run_until, scale_last_layer


@pytest.mark.parametrize(("fused", "judge_in_loss"), [(False, True), (True, False)])
def test_a_rollback_restores_bits(fused: bool, judge_in_loss: bool) -> None:
    """After a rollback the run goes on exactly as it once went on from the snapshot."""
    lag = 0 if judge_in_loss else 2
    run = Run(
        Recovery(**SAME, **QUICK), detector=Scripted([18]), fused=fused, judge_in_loss=judge_in_loss
    )
    states = run_until(run, 19 + lag + 8)
    (rollback,) = run.guard.rollbacks
    restored, at = rollback.restored_step, 18 + lag
    assert rollback.step == at
    assert restored == 12
    assert rollback.certified
    # states[i] is that after training step i + 1, scheduler and average included.
    assert states[at] == states[restored - 1]
    for later in range(1, 6):
        assert states[at + later] == states[restored - 1 + later]


def test_the_policy_changes_what_it_says() -> None:
    ladder = (Change(beta_star=2.0), Change(sgld_steps=2.0, lr=0.25))
    run = Run(Recovery(ladder=ladder, **QUICK), detector=Scripted([12, 40]))
    used: list[float] = []
    run.optimizer.register_step_pre_hook(
        lambda optimizer, args, kwargs: used.append(optimizer.param_groups[0]["lr"])
    )
    run_until(run, 60)
    first, second = run.guard.rollbacks
    assert first.changes == {"beta_star": (0.5, 2.0)}
    (steps,), (lr,) = ([second.changes[x]] for x in ("sgld_steps", "lr"))
    assert steps == (3.0, 6.0)
    assert lr[1] == pytest.approx(lr[0] / 4)
    assert lr[0] in [1e-2 * 0.9**n for n in range(10)]  # the scheduler's, as it was there
    assert f"SGLD steps 3 -> 6, learning rate {lr[0]:.3g} -> {lr[1]:.3g}" in second.message
    assert run.guard.last["beta_star"] == 2.0
    assert run.sgld_steps[:13] == [3] * 13
    assert run.sgld_steps[-1] == 6
    assert run.guard.sgld_steps == 6
    # What the scheduler says is what it always said; what the optimizer used is a quarter.
    assert used[-1] == pytest.approx(0.25 * run.optimizer.param_groups[0]["lr"], rel=1e-12)
    assert run.memory.column("recovery/attempt")[-1] == 2.0
    assert run.memory.column("sampler/steps")[-1] == 6.0
    assert [record["attempt"] for record in run.memory.recoveries] == [1, 2]
    assert all(torch.isfinite(p).all() for p in run.model.parameters())


def test_new_random_numbers_follow_from_the_seed() -> None:
    def after(seed: int, reseed: bool) -> Any:
        settings = {**SAME, **QUICK, "reseed": reseed}
        run = Run(Recovery(**settings), detector=Scripted([12]), seed=seed)
        return run_until(run, 20)[-1]

    assert after(0, True) == after(0, True)
    assert after(0, True) != after(0, False)
    assert after(0, True)["rng"] != after(1, True)["rng"]


@pytest.mark.parametrize("at", [0, 2])
def test_the_first_snapshot_is_the_last_resort(at: int, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(Recovery(**SAME, **QUICK), detector=Scripted([at]))
    before = run.state()["model"]
    run_until(run, at + 1)
    (rollback,) = run.guard.rollbacks
    assert caplog.messages.count(rollback.message) == 1
    assert not rollback.certified
    assert rollback.restored_step == run.guard.step == 0
    assert run.state()["model"] == before


def test_a_rate_that_ruins_the_first_update_is_lowered_from_the_initial_weights_on() -> None:
    """The README's ring: its first update is the damage, and a smaller rate trains."""
    torch.manual_seed(0)
    f = Loop(torch.nn.Linear(16, 16), torch.nn.SiLU()).f
    optimizer, chains = torch.optim.Adam(f.parameters(), lr=3.0), torch.randn(128, 2)
    loss_fn, sample = g = guard(
        None,
        lambda f, x: sgld(f, x, steps=20, step_size=0.01, noise_std=0.02**0.5),
        model=f,
        optimizer=optimizer,
        buffer=chains,
        beta_star=0.5,
        output_scale=1,
        action="rollback",
    )
    before, taken_back = [p.clone() for p in f.parameters()], 0
    while g.step < 100:
        angle = 2 * torch.pi * torch.rand(128)
        x = torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(128, 2)
        chains.copy_(sample(f, chains))
        loss = loss_fn(f(x), f(chains))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if len(g.rollbacks) > taken_back and g.step == 0:
            assert all(map(torch.equal, f.parameters(), before))
            taken_back = len(g.rollbacks)
    first = g.rollbacks[0]
    assert first.restored_step == 0
    assert first.changes["lr"] == pytest.approx((3, 0.3))
    assert 0.5 < float(chains.norm(dim=1).median()) < 1.5


SPENT: dict[str, Any] = {**SAME, **QUICK, "budget": 2}


def test_a_run_that_lives_goes_on_once_the_budget_is_spent() -> None:
    run = Run(Recovery(**SPENT), detector=Scripted([10, 20, 30, 45, 80]))
    run_until(run, 30)
    at = run.guard.step
    run_until(run, 70)
    assert run.guard.step == at + 70
    assert [each["message"].endswith("not taken back.") for each in run.memory.recoveries] == [0, 1]
    errors = [each for each in run.memory.alerts if each["level"] == "ERROR"]
    assert [each.get("action") for each in errors] == ["rollback", "rollback", None, None, None]


@pytest.mark.parametrize("factor", [1e6, 1e-6])
def test_a_run_that_is_lost_ends_with_a_typed_error_once_the_budget_is_spent(
    factor: float,
) -> None:
    run = Run(Recovery(**SPENT), detector=Scripted([10, 20, *range(70, 110)]))
    run_until(run, 70)
    scale_last_layer(run.model, factor)
    run.optimizer.param_groups[0]["lr"] = 0.0  # or the small one would grow again
    with pytest.raises(BudgetSpentError, match="budget of rollbacks is spent") as caught:
        run_until(run, 40)
    assert caught.value.rollbacks == 2
    assert caught.value.alert.rule == "energy_blowup"


@pytest.mark.parametrize(
    ("rule", "rows", "restored"),
    [
        # The snapshot of step 12 saw the warning at 13; that of 8 had been quiet for four steps.
        ("energy_blowup", (13, 14), 8),
        ("weights_degenerate", range(100), 12),  # of a slow rule
    ],
)
def test_trouble_after_a_snapshot_keeps_it_from_being_certified(
    rule: str, rows: Sequence[int], restored: int
) -> None:
    trouble = {i: {rule: Level.WARN} for i in rows}
    run = Run(Recovery(**SAME, **QUICK), detector=Scripted([18], trouble))
    run_until(run, 20)
    assert run.guard.rollbacks[0].restored_step == restored


# -- changes that add up -----------------------------------------------------------------------


def test_trouble_in_the_very_next_step_keeps_a_snapshot_from_being_certified() -> None:
    trouble = {12: {"energy_blowup": Level.WARN}}
    settings: dict[str, Any] = {"every": 4, "certify_after": 1}
    run = Run(Recovery(**SAME, **settings), detector=Scripted([], trouble))
    run_until(run, 15)
    recoverer = run.guard._loop.actions.recoverer
    assert recoverer is not None
    assert [each.step for each in recoverer._snapshots.certified] == [0, 4, 8]


def test_ranks_that_only_numpy_or_python_tell_apart_stay_apart() -> None:
    def after(rank: int, attempt: int) -> tuple[float, float]:
        torch.manual_seed(0)
        random.seed(rank)
        np.random.seed(rank)
        if attempt:
            assert reseed(attempt, ()) == 3
        return random.random(), float(np.random.rand())

    first = after(0, 1)
    assert first == after(0, 1)
    for other in (after(1, 1), after(0, 2), after(0, 0)):  # a rank, an attempt, the attempt before
        assert first[0] != other[0]
        assert first[1] != other[1]


# -- the factor on the learning rate, which is there inside a step and nowhere else ----------------


class Broken(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("out of memory")


def parameter() -> torch.nn.Parameter:
    p = torch.nn.Parameter(torch.zeros(1))
    p.grad = torch.ones(1)
    return p


def watch(optimizer: torch.optim.Optimizer) -> None:
    rate = LearningRate()
    rate.factor = 0.5
    OptimizerHooks(optimizer, None, lambda *_: None, lambda: False, lambda *_: None, None, rate)


def test_a_step_that_raises_does_not_add_up() -> None:
    optimizer = Broken([parameter()], lr=0.01)
    watch(optimizer)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="memory"):
            optimizer.step()
        assert optimizer.param_groups[0]["lr"] == 0.005
    optimizer.param_groups[0]["lr"] = 0.3  # the trainer's next assignment
    with pytest.raises(RuntimeError, match="memory"):
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.15


def test_an_optimizer_without_a_rate_of_its_own() -> None:
    optimizer = torch.optim.SGD([parameter()], lr=0.1)
    optimizer.param_groups[0]["lr"] = None
    rate = LearningRate()
    rate.factor = 0.5
    rate.scale(optimizer)
    assert optimizer.param_groups[0]["lr"] is None
