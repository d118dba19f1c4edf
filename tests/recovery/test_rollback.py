"""A rollback in a plain loop: the bits it restores, what it changes, what it refuses."""

from __future__ import annotations

import copy
import logging
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ebmguard import BudgetSpentError, Level, Recovery, guard
from ebmguard.errors import ConfigError
from ebmguard.recovery import Change
from ebmguard.recovery.changes import reseed
from ebmguard.samplers import sgld
from tests.parts import Energy, gradient_at
from tests.recovery.parts import Run, Scripted

SAME: dict[str, Any] = {"ladder": (Change(),), "reseed": False}
QUICK: dict[str, Any] = {"every": 4, "certify_after": 4, "relapse_within": 6}


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def run_until(run: Run, judgements: int) -> list[dict[str, Any]]:
    """States after each training step."""
    states = []
    for _ in range(judgements):
        run.step()
        states.append(run.state())
    return states


@torch.no_grad()
def scale_last_layer(model: Any, factor: float) -> None:
    for p in model.net[-1].parameters():
        p.mul_(factor)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("judge_in_loss", [True, False])
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


def test_without_an_error_nothing_of_the_run_changes() -> None:
    watched = run_until(Run(Recovery(**QUICK), detector=Scripted([])), 20)
    assert watched == run_until(Run(None, detector=Scripted([])), 20)


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


def test_the_first_snapshot_is_the_last_resort() -> None:
    run = Run(Recovery(**SAME, **QUICK), detector=Scripted([2]))
    run_until(run, 8)
    (rollback,) = run.guard.rollbacks
    assert not rollback.certified
    assert rollback.restored_step == 0


def test_an_error_in_the_first_step_goes_back_to_before_it() -> None:
    run = Run(Recovery(**SAME, **QUICK), detector=Scripted([0]))
    before = run.state()["model"]
    run.step()
    assert run.guard.rollbacks[0].restored_step == run.guard.step == 0
    assert run.state()["model"] == before


@pytest.mark.parametrize(
    ("kind", "lr"),
    [(torch.optim.Adam, 3.0), (torch.optim.RMSprop, 0.3), (torch.optim.Adam, 10.0)],
)
def test_a_rate_that_ruins_the_first_update_is_lowered_from_the_initial_weights_on(
    kind: Any, lr: float
) -> None:
    """The README's ring: its first update is the damage, and a smaller rate trains."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(2, 64), torch.nn.SiLU(), torch.nn.Linear(64, 64), torch.nn.SiLU()
    f = torch.nn.Sequential(*layers, torch.nn.Linear(64, 1))
    optimizer, chains = kind(f.parameters(), lr=lr), torch.randn(128, 2)
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
    assert first.changes["lr"] == pytest.approx((lr, lr / 10))
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


@pytest.mark.parametrize("factor", [1e6, 1e-6, float("nan")])
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


def test_trouble_after_a_snapshot_keeps_it_from_being_certified() -> None:
    trouble = {i: {"energy_blowup": Level.WARN} for i in range(13, 15)}
    run = Run(Recovery(**SAME, **QUICK), detector=Scripted([18], trouble))
    run_until(run, 20)
    # The snapshot of step 12 saw the warning at 13; that of 8 had been quiet for four steps.
    assert run.guard.rollbacks[0].restored_step == 8


def test_a_lasting_warning_of_a_slow_rule_does_not_keep_snapshots_away() -> None:
    lasting = {i: {"weights_degenerate": Level.WARN} for i in range(100)}
    run = Run(Recovery(**SAME, **QUICK), detector=Scripted([18], lasting))
    run_until(run, 20)
    assert run.guard.rollbacks[0].restored_step == 12


def test_a_network_that_has_become_a_constant_is_not_gone_back_to() -> None:
    run = Run(Recovery(**SAME, **QUICK), detector=Scripted([90]))
    spreads: list[float] = []
    while not run.guard.rollbacks:
        if len(spreads) > 30:
            scale_last_layer(run.model, 0.6)
            run.optimizer.param_groups[0]["lr"] = 0.0  # which would make up for it
        run.step()
        spreads.append(run.guard.last["f_pos/std"])
    (rollback,) = run.guard.rollbacks
    assert rollback.certified
    assert 12 <= rollback.restored_step < 60
    assert spreads[90] < 1e-4 * max(spreads) < spreads[rollback.restored_step]


def test_a_checkpoint_of_the_guard_remembers_what_was_changed() -> None:
    ladder = (Change(beta_star=2.0, sgld_steps=2.0, lr=0.5),)
    run = Run(Recovery(ladder=ladder, **QUICK), detector=Scripted([10]))
    run_until(run, 15)
    other = Run(Recovery(ladder=ladder, **QUICK), detector=Scripted([]))
    other.guard.load_state_dict(run.guard.state_dict())
    assert other.guard.attempt == 1
    other.step()
    assert other.sgld_steps == [6]
    assert other.guard.last["beta_star"] == 2.0


# -- state that a trainer keeps in its own way ---------------------------------------------------


class Counter(torch.nn.Module):
    """A module whose extra state is the very object that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = {"steps": 0}

    def get_extra_state(self) -> dict[str, int]:
        return self.seen

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state


class Own(dict[str, Any]):
    """A container of the trainer's own, which torch takes for one plain value."""


class Average:
    """An average outside of torch that keeps what it is given."""

    def __init__(self) -> None:
        self.x, self.y = np.zeros(3), torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"x": self.x, "own": Own(y=self.y)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.x, self.y = state["x"], state["own"]["y"]


def test_a_snapshot_that_is_restored_twice_gives_the_same_twice() -> None:
    settings = {**SAME, **QUICK, "every": 12, "relapse_within": 0}
    # The second comes more than twice as late as the first: no relapse.
    run = Run(Recovery(**settings), detector=Scripted([18, 33]))
    counter, average = Counter(), Average()
    run.model.add_module("counter", counter)
    run.guard.attach(ema=average)
    found: list[tuple[Any, ...]] = []
    for _ in range(34):
        run.step()
        if len(run.guard.rollbacks) > len(found):
            assert average.y.tolist() == average.x.tolist()
            found.append((counter.seen["steps"], average.x.tolist(), {**run.state(), "ema": None}))
        counter.seen["steps"] += 1
        average.x += 1
        average.y += 1
    first, second = run.guard.rollbacks
    assert first.restored_step == second.restored_step == 12
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("late", "names"),
    [
        ({"scaler": torch.amp.GradScaler("cpu")}, "scaler"),
        ({"generators": [torch.Generator(), torch.Generator()]}, "generators"),
    ],
)
def test_what_no_snapshot_holds_is_refused_before_anything_changes(
    late: dict[str, Any], names: str
) -> None:
    run = Run(Recovery(**SAME, **QUICK), detector=Scripted([18]), judge_in_loss=False)
    run_until(run, 20)
    run.guard.attach(**late)
    with pytest.raises(ConfigError, match=f"taken with other parts for {names}. Attach the same"):
        run.step()
    quiet = run_until(Run(None, detector=Scripted([])), 21)[-1]
    assert all(run.state()[part] == quiet[part] for part in ("model", "buffer", "rng"))
    assert run.guard.attempt == 0


def test_a_list_that_has_grown_is_cut_again() -> None:
    run = Run(Recovery(**SAME, **QUICK), detector=Scripted([18]))
    rows = [torch.zeros(2)]
    first = rows[0]
    run.guard.attach(buffer=rows)
    for i in range(19):
        run.step()
        if not run.guard.rollbacks:
            rows.append(torch.full((2,), float(i)))
    assert run.guard.rollbacks[0].restored_step == 12
    assert [float(x[0]) for x in rows] == [0.0, *map(float, range(11))]
    assert first[0] == 0


def test_a_list_of_tensors_stays_the_same_tensors() -> None:
    run = Run(Recovery(**SAME, **QUICK), detector=Scripted([18]))
    rows = [torch.zeros(2), torch.zeros(3)]
    first, second = rows
    run.guard.attach(buffer=rows)
    for _ in range(19):
        first.add_(1)
        run.step()
    assert rows[0] is first
    assert rows[1] is second
    assert first.tolist() == [12.0, 12.0]


def made_anew(box: list[Any], x: torch.Tensor) -> None:
    box[0] = torch.cat([x, box[0]])[:64]


def in_place(box: list[Any], x: torch.Tensor) -> None:
    box[0][:4] = x


def through_data(box: list[Any], x: torch.Tensor) -> None:
    box[0].data[:4] = x


def list_made_anew(box: list[Any], x: torch.Tensor) -> None:
    box[0] = [*x, *box[0]][:64]


def into_a_list(box: list[Any], x: torch.Tensor) -> None:
    box[0][7:11] = [*x]


BUFFERS: dict[str, tuple[Any, Any, int]] = {  # the buffer, how samples get into it, words of it
    "made anew": (torch.randn(64, 2), made_anew, 1),
    "in place": (torch.randn(64, 2), in_place, 0),
    "through .data": (torch.randn(64, 2), through_data, 0),
    "a list made anew": ([*torch.randn(64, 2)], list_made_anew, 1),
    "into the middle of a list": ([*torch.randn(64, 2)], into_a_list, 0),
    "a list that stays empty": ([], list_made_anew, 1),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer_that_is_no_longer_written_to_is_told_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    buffer, keep, times = BUFFERS[name]
    f, box = Energy(), [copy.deepcopy(buffer)]

    def sampler(f: Any) -> torch.Tensor:
        x = torch.randn(4, 2)
        x = x + gradient_at(f, x) + 0.1 * torch.randn(4, 2)
        keep(box, x)
        return x

    optimizer = torch.optim.SGD(f.parameters(), lr=1e-3)
    told: Any = {"model": f, "optimizer": optimizer, "buffer": box[0], "action": "rollback"}
    loss, sample = guard(None, sampler, **told)
    caplog.set_level(logging.WARNING, "ebmguard")
    for _ in range(150):
        loss(f(torch.randn(4, 2)), f(sample(f))).backward()
        optimizer.step()
    said = [each for each in caplog.messages if "no longer the one that the loop" in each]
    assert len(said) == times
    assert all("buffer[:] = new" in each and "state_dict()" in each for each in said)


def test_loading_a_state_forgets_an_error_of_the_course_that_is_left() -> None:
    run = Run(Recovery(**SAME, **QUICK), detector=Scripted([10]))
    run_until(run, 9)
    state = run.guard.state_dict()
    run.step()
    loss_fn, sample_q = run.guard
    x = sample_q(run.model, run.buffer)
    loss_fn(run.model(x), run.model(x))  # the ERROR waits for the optimizer
    run.guard.load_state_dict(state)
    run_until(run, 3)
    assert not run.guard.rollbacks


def test_a_row_on_its_way_is_the_snapshots_own() -> None:
    """With every=1 a row that was put back can be on its way a second time."""
    settings: dict[str, Any] = {"every": 1, "certify_after": 4, "relapse_within": 0, "keep": 8}
    run = Run(Recovery(**SAME, **settings), detector=Scripted([18]), judge_in_loss=False)
    run_until(run, 24)
    assert run.guard.rollbacks
    recoverer = run.guard._loop.actions.recoverer
    assert recoverer is not None
    for each in recoverer._snapshots.certified:
        assert not any("alert_level" in row for _, row, *_ in each.state["guard"]["rows"])


# -- changes that add up -----------------------------------------------------------------------


def test_a_rollbacks_number_of_steps_goes_through_a_checkpoint() -> None:
    def make(errors: list[int]) -> Run:
        recovery = Recovery(ladder=(Change(sgld_steps=2.0),), **QUICK)
        return Run(recovery, detector=Scripted(errors))

    run, other = make([10]), make([])
    run_until(run, 15)
    other.guard.load_state_dict(run.guard.state_dict())
    assert other.guard.sgld_steps == run.guard.sgld_steps == 6


@pytest.mark.parametrize(
    ("beta_star", "changes"),
    [
        (torch.tensor(0.5), {"beta_star": (0.5, 2.0)}),
        (-0.5, {"sgld_steps": (3.0, 6.0)}),  # never over to the side where all is reversed
        (lambda step: 0.125 * step, {"beta_star": (1.0, 2.0)}),  # as it is where the run goes on
    ],
)
def test_beta_star_is_raised_where_it_is_lower(beta_star: Any, changes: dict[str, Any]) -> None:
    ladder = Change(beta_star=2.0), Change(sgld_steps=2.0)
    run = Run(Recovery(ladder=ladder, **QUICK), detector=Scripted([12]), beta_star=beta_star)
    run_until(run, 20)
    assert run.guard.rollbacks[0].changes == changes


def test_a_schedule_that_has_come_further_goes_on() -> None:
    detector = Scripted([12], remedies=["raise beta_star"])
    run = Run(Recovery(**QUICK), detector=detector, beta_star=lambda step: 0.125 * step)
    seen: dict[int, float] = {}
    for _ in range(40):
        step = run.guard.step
        run.step()
        seen[step] = run.guard.last["beta_star"]
    assert seen[10] == 2.0
    assert seen[24] == 3.0


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
            reseed(attempt, ())
        return random.random(), float(np.random.rand())

    first = after(0, 1)
    assert first == after(0, 1)
    for other in (after(1, 1), after(0, 2), after(0, 0)):  # a rank, an attempt, the attempt before
        assert first[0] != other[0]
        assert first[1] != other[1]


# -- what is refused ---------------------------------------------------------------------------


def test_what_is_missing_is_named_before_the_first_step() -> None:
    model = torch.nn.Linear(2, 1)
    g = guard(None, None, beta_star=0.5, action="rollback")
    f = model(torch.ones(3, 2)).squeeze(1)
    with pytest.raises(ConfigError, match=r"g\.attach\(model=\.\.\., optimizer=\.\.\.\)"):
        g.loss_fn(f, f.clone())
    assert g.step == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recovery": Recovery(), "action": "warn"}, "settings of action"),
        ({"action": "rollback", "beta_star": torch.ones(2)}, "one member of an ensemble"),
        ({"action": "rollback", "recovery": 5}, "expected ebmguard.recovery.Recovery"),
    ],
)
def test_arguments_that_cannot_be_meant(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        guard(None, None, **({"beta_star": 0.5} | options))


@pytest.mark.parametrize(
    "settings",
    [
        {"budget": -1},
        {"every": 0},
        {"keep": True},
        {"ladder": ()},
        {"ladder": (1,)},
        {"certify_after": 1.5},
    ],
)
def test_settings_out_of_range(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Recovery"):
        Recovery(**settings)


@pytest.mark.parametrize(
    "change",
    [
        {"lr": 0.0},
        {"sgld_steps": -1.0},
        {"beta_star": 0.0},
        {"beta_factor": -0.5},
        {"substeps": 0},
    ],
)
def test_changes_out_of_range(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Change"):
        Change(**change)


def test_a_sampler_without_that_parameter_cannot_be_given_its_steps() -> None:
    model = torch.nn.Linear(2, 1)
    g = guard(None, lambda f: torch.ones(3, 2), beta_star=0.5, action="rollback")
    g.attach(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="no parameter of that name"):
        g.attach(steps_argument="n_steps", sgld_steps=3).sampler(model)


def test_schedulers_in_a_list_with_a_state_are_taken_back() -> None:
    """As the adapter of Lightning attaches them: a list is a buffer's state, not a scheduler's."""

    class Schedulers(list[Any]):
        def state_dict(self) -> list[Any]:
            return [each.state_dict() for each in self]

        def load_state_dict(self, states: list[Any]) -> None:
            for each, state in zip(self, states, strict=True):
                each.load_state_dict(state)

    run = Run(Recovery(**SAME, **QUICK), detector=Scripted([18]))
    run.guard.attach(scheduler=Schedulers([run.scheduler]))
    steps = []
    for _ in range(19):
        run.step()
        steps.append(run.scheduler.last_epoch)
    (rollback,) = run.guard.rollbacks
    assert steps[:18] == list(range(1, 19))
    assert steps[18] == rollback.restored_step  # taken before the scheduler's own step


# -- where nobody has asked for it ---------------------------------------------------------------


class Plain:
    """A loop whose guard is told a model and its optimizer, and no action."""

    def __init__(self, **told: Any) -> None:
        torch.manual_seed(0)
        self.f = Energy()
        self.optimizer = torch.optim.Adam(self.f.parameters(), lr=1e-3)
        told = {"model": self.f, "optimizer": self.optimizer, "beta_star": 0.5, **told}
        self.g = guard(None, gradient_at, output_scale=1, **told)

    def step(self, factor: float = 1.0) -> None:
        loss_fn, sample = self.g
        f_neg = self.f(sample(self.f, torch.randn(16, 2)))
        self.optimizer.zero_grad()
        loss_fn(factor * self.f(torch.randn(16, 2)), f_neg).backward()
        self.optimizer.step()

    def steps(self, count: int, factor: float = 1.0) -> None:
        for _ in range(count):
            self.step(factor)


class Broken:
    """A buffer that cannot be copied."""

    def state_dict(self) -> Any:
        raise RuntimeError("it is on another machine")

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


def test_a_run_that_can_be_taken_back_is() -> None:
    plain, asked = Plain(), Plain(action="rollback")
    for each in (plain, asked):
        each.steps(60)
        each.step(1e9)
        each.steps(10)
        assert [x.step for x in each.g.rollbacks] == [60]
    assert all(map(torch.equal, plain.f.parameters(), asked.f.parameters()))


def test_a_batch_that_is_no_number_is_left_out_and_what_stays_is_taken_back() -> None:
    plain = Plain()
    plain.steps(60)
    before = copy.deepcopy(plain.f.state_dict())
    plain.step(math.nan)
    assert all(map(torch.equal, before.values(), plain.f.state_dict().values()))
    plain.steps(10)
    assert plain.g.attempt == 0
    scale_last_layer(plain.f, math.nan)
    plain.steps(3)
    assert plain.g.attempt == 1
    assert all(bool(p.isfinite().all()) for p in plain.f.parameters())


CANNOT: dict[str, tuple[dict[str, Any], str]] = {
    "no optimizer": ({"optimizer": None}, ""),
    "an ensemble": ({"beta_star": torch.tensor([0.5])}, ""),
    "asked not to": ({"action": "warn"}, ""),
    "what cannot be copied": ({"buffer": Broken()}, "it is on another machine"),
}


@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_be_taken_back_goes_on(name: str, caplog: pytest.LogCaptureFixture) -> None:
    told, said = CANNOT[name]
    caplog.set_level(logging.WARNING)
    if name == "an ensemble":
        assert guard(None, gradient_at, **told).attempt == 0
        return
    plain = Plain(**told)
    plain.steps(20)
    assert ("no ERROR takes the run back" in caplog.text) == bool(said)
    assert said in caplog.text
    plain.step(1e9)
    plain.steps(10)
    assert plain.g.attempt == 0
    assert any(alert.level is Level.ERROR for alert in plain.g.alerts)


def test_parameters_of_no_optimizer_and_a_second_guard_end_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    plain = Plain()
    plain.f.register_parameter("more", nn.Parameter(torch.ones(1)))
    plain.steps(3)
    assert "no attached optimizer has these parameters of the model" in caplog.text
    one, caplog_text = Plain(), caplog.text
    other = guard(None, gradient_at, beta_star=0.5, model=one.f, optimizer=one.optimizer)
    one.steps(3)
    assert "another guard has the optimizer, too" in caplog.text.replace(caplog_text, "")
    del other


def test_a_spent_budget_ends_no_run_that_did_not_ask() -> None:
    plain = Plain()
    for _ in range(8):
        plain.steps(60)
        plain.step(1e9)
    scale_last_layer(plain.f, 1e12)
    plain.steps(120)
    assert plain.g.attempt == Recovery().budget
