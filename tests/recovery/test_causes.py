"""A rollback changes what the cause asks for, and only what the run can bear."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ebmguard import Recovery
from ebmguard.alerts import Alert, FloorRule, Judge, Level, Remedy, Situation
from ebmguard.errors import ConfigError
from ebmguard.ranks import Ranks
from ebmguard.recovery import Change, Recoverer, Rollback
from ebmguard.recovery.policy import BY_CAUSE
from ebmguard.trainer import Trainer
from tests.recovery.parts import QUICK, Run, Scripted

R = Remedy


def changes_of(run: Run, steps: int) -> list[dict[str, tuple[float, ...]]]:
    for _ in range(steps):
        run.step()
    assert torch.isfinite(torch.tensor(run.guard.last["energy_gap"]))
    return [
        {name: tuple(round(x, 6) for x in pair) for name, pair in each.changes.items()}
        for each in run.guard.rollbacks
    ]


LR = {"lr": (0.009, 0.0009)}  # 1e-2, once times 0.9, and a tenth of that


@pytest.mark.parametrize(
    ("remedies", "options", "expected"),
    [
        ((R.LOWER_LR, R.RAISE_BETA), {}, LR),
        ((R.RAISE_BETA, R.LOWER_LR), {}, {"beta_star": (0.5, 2.0)}),
        ((R.LOWER_BETA,), {}, {"beta_star": (0.5, 0.25)}),
        ((R.TOWARDS_ZERO,), {"beta_star": torch.tensor(-0.5)}, {"beta_star": (-0.5, -0.25)}),
        ((R.MORE_STEPS,), {}, {"sgld_steps": (3.0, 6.0)}),
        ((R.FEWER_STEPS,), {}, {"sgld_steps": (3.0, 2.0)}),
        # As words that a record holds, and with what no change belongs to.
        (("a wider clamp", "lower the learning rate"), {}, LR),
        # Never over to the side where all is reversed.
        ((R.RAISE_BETA,), {"beta_star": -0.5}, LR),
        # Without a word of the cause: the order of the fallback.
        ((), {}, LR),
        # Textbook Langevin: half of o, or what comes next where beta* is there already.
        ((R.RAISE_BETA,), {"output_scale": 1.0, "beta_star": 0.0}, {"beta_star": (0.0, 0.5)}),
        ((R.RAISE_BETA,), {"output_scale": 1.0, "beta_star": 0.5}, LR),
        ((R.RAISE_BETA,), {"beta_star": 2.0}, LR),
        # Where none was given it is 0.
        ((R.LOWER_BETA,), {"beta_star": None}, LR),
        # A schedule: as it is where the run goes on.
        ((R.LOWER_BETA,), {"beta_star": lambda step: 0.1 * step}, {"beta_star": (0.8, 0.4)}),
    ],
)
def test_the_cause_says_what_changes(
    remedies: Sequence[str], options: dict[str, Any], expected: dict[str, Any]
) -> None:
    detector = Scripted([12], remedies=remedies)
    run = Run(Recovery(**QUICK), detector=detector, **options)
    assert changes_of(run, 20) == [expected]
    if "beta_star" in expected and not callable(options.get("beta_star")):
        assert run.guard.last["beta_star"] == pytest.approx(expected["beta_star"][1])


@pytest.mark.parametrize("kind", [np.float32, np.int64])
def test_a_ladder_takes_numbers_of_every_kind(kind: Any, tmp_path: Path) -> None:
    detector = Scripted([12, 20, 28], remedies=[R.RAISE_BETA])
    ladder = Change(beta_star=kind(2)), Change(sgld_steps=kind(2)), Change(kind(4), lr=kind(1))
    quick: dict[str, Any] = {name: np.int64(value) for name, value in QUICK.items()}
    run = Run(Recovery(ladder=ladder, **quick), detector=detector, beta_star=0.0)
    found = changes_of(run, 40)
    assert [each.get("beta_star") for each in found] == [(0, 2), None, (2, 4)]
    assert run.guard.last["beta_star"] == 4
    # What an audit log and a checkpoint that is loaded as torch.load does by default take.
    assert json.loads(json.dumps([each.record() for each in run.guard.rollbacks]))
    torch.save(run.guard.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True)


def test_relapses_take_the_remedies_of_the_cause_in_turn_and_then_the_others() -> None:
    detector = Scripted([24, 27, 30, 33], remedies=[R.MORE_STEPS, R.LOWER_BETA])
    run = Run(Recovery(**QUICK), detector=detector)
    found = changes_of(run, 36)
    assert [each.relapse for each in run.guard.rollbacks] == [False, True, True, True]
    assert [sorted(each) for each in found] == [
        ["sgld_steps"],
        ["beta_star"],
        ["lr"],
        ["sgld_steps"],  # never β* up, the opposite of what is advised
    ]
    assert [found[0]["sgld_steps"], found[3]["sgld_steps"]] == [(3, 6), (6, 12)]
    assert found[1]["beta_star"] == (0.5, 0.25)


def test_steps_become_as_much_finer_as_is_said() -> None:
    assert f" {BY_CAUSE[R.SUBSTEPS].substeps} times finer" in R.SUBSTEPS


def test_advice_undoes_what_no_alert_has_named_and_no_earlier_advice() -> None:
    detector = Scripted([12, 15, 18, 21])
    run = Run(Recovery(**QUICK), detector=detector, beta_star=4.0)
    for count, remedy in enumerate((R.LOWER_LR, R.LOWER_LR, R.LOWER_BETA, R.RAISE_BETA), 1):
        detector.remedies = (remedy,)
        while len(run.guard.rollbacks) < count:
            run.step()
    # What changes nothing, as raising beta* here, has not been tried.
    expected = [{"sgld_steps": (3, 6)}, {"beta_star": (4, 2)}, {"lr": (1e-3, 1e-4)}]
    assert changes_of(run, 3) == [LR, *expected]


def test_what_has_held_for_long_is_not_taken_farther() -> None:
    """Only a relapse repeats a change: no chain of late ERRORs lowers the rate to nothing."""
    detector = Scripted([12, 60, 120, 200, 203], remedies=[R.LOWER_LR, R.MORE_STEPS])
    run = Run(Recovery(**QUICK), detector=detector)
    found = changes_of(run, 206)
    assert [each.relapse for each in run.guard.rollbacks] == [False] * 4 + [True]
    assert [sorted(each) for each in found] == [["lr"], ["sgld_steps"], ["beta_star"], [], ["lr"]]


@pytest.mark.parametrize(
    ("gap", "expected"),
    [(9.0, ["lr", "beta_star", "sgld_steps", "lr", "beta_star"]), (-9.0, ["lr"] * 5)],
)
def test_where_samples_lie_above_the_data_neither_beta_star_nor_steps_are_raised(
    gap: float, expected: list[str]
) -> None:
    course = Course()
    found: list[str] = []
    for _ in expected:
        course.go(course.step + 10)
        found += course.error(gap).changes
    assert found == expected


def test_what_was_tried_goes_through_a_checkpoint() -> None:
    remedies = [R.LOWER_BETA, R.MORE_STEPS]
    run = Run(Recovery(**QUICK), detector=Scripted([12], remedies=remedies))
    changes_of(run, 14)
    state = json.loads(json.dumps(run.guard.state_dict()))
    other = Run(Recovery(**QUICK), detector=Scripted([5], remedies=remedies))
    other.guard.load_state_dict(state)
    found = changes_of(other, 8)
    assert other.guard.rollbacks[0].relapse
    assert found == [{"sgld_steps": (3, 6)}]
    assert other.guard.last["beta_star"] == 0.25
    del state["recovery"]["tried"]
    with pytest.raises(ConfigError, match="Not a state of a recovery"):
        other.guard.load_state_dict(state)


def test_a_floor_that_was_waited_for_is_waited_for_again() -> None:
    """GradScale of 8 negatives is 8/9 at most: under this floor from the first step on."""
    rule = FloorRule(floor=0.95, warn_patience=5, error_patience=15)
    run = Run(Recovery(**QUICK), detector=Judge([rule]))
    for _ in range(40):
        run.step()
    first, second = run.guard.rollbacks[:2]
    assert (first.alert.step, first.restored_step) == (14, 0)
    assert second.alert.step == first.restored_step + 14


# -- which snapshot ------------------------------------------------------------------------------


class Course:
    """A recoverer told what a run's rows would say, beside a model that nobody trains."""

    def __init__(self, **settings: Any) -> None:
        self.recoverer = Recoverer(Recovery(**settings), Ranks(None))
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.trainer = Trainer().extended(model=model, optimizer=optimizer, sgld_steps=5)
        self.step = 0

    def go(
        self,
        to: int,
        scale: float = 0.9,
        beta_star: float = 0.5,
        active: Mapping[str, Level] = {},
        gap: float = 0.0,
        spread: float = 1.0,
    ) -> list[int]:
        """Certified snapshots after steps up to this one."""
        row = {"beta_star": beta_star, "grad_scale": scale, "energy_gap": gap, "f_pos/std": spread}
        while self.step < to:
            self.recoverer.read(row)
            self.step += 1
            self.recoverer.certify(self.step, active)
            if self.recoverer.is_due(self.step, self.trainer):
                self.recoverer.keep(self.step, self.trainer, None)
        return [each.step for each in self.recoverer._snapshots.certified]

    def error(self, gap: float = 9.0) -> Rollback:
        alert = Alert("energy_blowup", Level.ERROR, self.step, "energy_gap", gap, 1.0, 0)
        rollback, _ = self.recoverer.restore(self.step + 1, self.trainer, alert)
        self.step = rollback.restored_step
        now = Situation(beta_star=0.0, sgld_steps=5)
        return self.recoverer.change(rollback, self.trainer, now, knows_steps=True)


@pytest.mark.parametrize(
    ("low_from", "low_to", "beta_star", "newest"),
    [
        (900, 901, 0.5, 300),  # never
        (256, 900, 0.5, 200),  # the 50 steps after 250 are low
        (290, 900, 0.5, 250),  # 40 of them are not
        (228, 252, 0.5, 300),  # low before 250 alone: 200 and 300 stay
        (256, 900, 0.0, 300),  # the weights say nothing
    ],
)
def test_no_snapshot_is_certified_while_no_negative_competes(
    low_from: int, low_to: int, beta_star: float, newest: int
) -> None:
    course = Course(keep=20)
    course.go(min(low_from, 360), beta_star=beta_star)
    course.go(min(low_to, 360), scale=0.01, beta_star=beta_star)
    steps = course.go(360, beta_star=beta_star)
    assert steps[-1] == newest
    assert (250 in steps) == (newest != 200 and low_from != 228)


@pytest.mark.parametrize(
    ("rows", "newest"),
    [
        ({"spread": 1.0}, 350),
        ({"spread": 1e-2}, 350),
        # A constant, by the measure of this run; 250 has some of it in the rows that certify it.
        ({"spread": 1e-4}, 250),
        ({"spread": 1e-4, "gap": 1.0}, 350),  # which tells data and samples apart
    ],
)
def test_no_snapshot_of_a_constant_is_certified(rows: dict[str, Any], newest: int) -> None:
    course = Course(keep=20)
    course.go(290)
    assert course.go(400, **rows)[-1] == newest
    assert course.error().restored_step == newest
    # What the run was before it was taken back is still the measure.
    assert course.go(500, spread=1e-4)[-1] == newest


def test_a_network_that_never_told_samples_apart_has_snapshots() -> None:
    """As one whose last layer starts at 0."""
    course = Course()
    course.go(200, spread=1e-9)
    assert course.go(400)[-1] == 350


def test_a_relapse_goes_deeper_and_never_forward() -> None:
    course = Course(keep=20, budget=20)
    course.go(256)
    course.go(276, scale=0.01)
    found = []
    low: dict[str, Any] = {"scale": 0.01, "active": {"sampler_failing": Level.WARN}}
    # After 301 it had broken 255 steps after 200: nothing before is farther, though 100 have
    # passed. 320 is farther than it had come, but within twice that: a relapse still, and no step
    # back. 480 is more than twice as far: healthy.
    for to, settings in ((455, low), (301, {}), (290, {}), (320, {}), (480, {})):
        course.go(to, **settings)
        rollback = course.error()
        found.append((rollback.restored_step, rollback.relapse, rollback.condemned))
    assert found[:2] == [(200, False, ()), (150, True, (200, 250))]
    assert [each[:2] for each in found[2:]] == [(100, True), (250, True), (400, False)]


def test_a_relapse_from_the_oldest_snapshot_does_not_go_forward() -> None:
    course = Course(keep=2)
    course.go(160)
    assert course.error().restored_step == 100
    course.go(110)
    assert course.error().restored_step == 1
    course.go(101)  # a newer one is certified, but the run has not come as far as it had
    again = course.error()
    assert (again.restored_step, again.relapse, again.condemned) == (1, True, (50,))
