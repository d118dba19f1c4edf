"""What a run is advised: what it allows, two remedies at most, and nothing that contradicts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from ebmguard import Guard, guard
from ebmguard.alerts import Alert, Level, Remedy
from tests.parts import Memory, Script, energies

R = Remedy
WARN = Level.WARN


class Advising(Script):
    """Warns at given steps, each time with remedies of its own."""

    def __init__(self, advice: Mapping[int, tuple[str, ...]], member: int | None = None) -> None:
        super().__init__({})
        self.advice, self.member = advice, member

    def observe(self, step: int, row: Any, members: Any = ()) -> list[Alert]:
        if step not in self.advice:
            return []
        what = "energy_gap", 9.0, 1.0, 5, self.advice[step], self.member
        return [Alert("energy_blowup", WARN, step, *what)]


def advised(g: Guard, steps: int = 4, shift: float = 0.0, optimizer: Any = None) -> list[Any]:
    for _ in range(steps):
        pos, neg = energies()
        if g.trainer.model is not None:
            pos = pos + 0 * sum(p.sum() for p in g.trainer.model.parameters())
        g.loss_fn(pos + shift, neg).backward()
        if optimizer is not None:
            optimizer.step()
    return [alert.remedies for alert in g.alerts]


def make(advice: Mapping[int, tuple[str, ...]], **options: Any) -> Guard:
    g = guard(None, None, **({"beta_star": 0.5} | options))
    detector: Any = Advising(advice)
    g._loop.judge = detector
    return g


BACK = 'begin again, as no checkpoint is of before step 0; action="rollback" next time'
LONG = (R.ROLL_BACK, R.RAISE_BETA, R.LOWER_LR, R.MORE_STEPS)


@pytest.mark.parametrize(
    ("options", "shift", "expected"),
    [
        ({}, 9.0, (BACK, R.RAISE_BETA)),
        ({"output_scale": 1.0}, 9.0, (BACK, R.LOWER_LR)),
        ({"output_scale": 1.0, "beta_star": 0.2}, 9.0, (BACK, R.RAISE_BETA)),
        ({"output_scale": 1.0, "sampler_scale": 0.5}, 9.0, (BACK, R.LOWER_LR)),
        ({"output_scale": 1.4, "beta_star": lambda _: torch.tensor(0.7)}, 9.0, (BACK, R.LOWER_LR)),
    ],
)
def test_two_at_most_that_the_run_allows(options, shift, expected):
    memory = Memory()
    g = make({0: LONG}, sinks=[memory], **options)
    assert advised(g, 1, shift) == [expected]
    (record,) = memory.alerts
    assert record["remedies"] == [str(remedy) for remedy in expected]
    assert record["message"].endswith(f"{expected[0]}; {expected[1]}.")


@pytest.mark.parametrize(("shift", "expected"), [(9.0, (R.MORE_STEPS,)), (-9.0, ())])
def test_no_more_steps_for_samples_that_lie_above_the_data(shift, expected):
    assert advised(make({0: (R.MORE_STEPS,)}), 1, shift) == [expected]


def test_a_guard_that_rolls_back_does_not_say_so():
    model = torch.nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    g = make({0: LONG}, action="rollback", model=model, optimizer=sgd)
    assert advised(g, 1, 9.0, sgd) == [(R.RAISE_BETA, R.LOWER_LR)]


UP_AND_DOWN = {0: (R.RAISE_BETA,), 2: (R.LOWER_BETA, R.LOWER_LR), 3: (R.RAISE_BETA,)}


def schedule(step: int) -> float:
    return 0.5 if step < 2 else 1.0


def crept(step: int) -> float:
    return 0.5 + 0.002 * step


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [(R.RAISE_BETA,), (R.LOWER_LR,), (R.RAISE_BETA,)]),
        # Something has changed in between.
        ({"beta_star": schedule}, [(R.RAISE_BETA,), (R.LOWER_BETA, R.LOWER_LR), ()]),
        # By a hundredth only.
        ({"beta_star": crept}, [(R.RAISE_BETA,), (R.LOWER_LR,), (R.RAISE_BETA,)]),
    ],
)
def test_no_advice_contradicts_another_until_the_run_changes(options, expected):
    assert advised(make(UP_AND_DOWN, **options)) == expected
    # Through a checkpoint.
    first = make(UP_AND_DOWN, **options)
    before = advised(first, 1)
    state = json.loads(json.dumps(first.state_dict()))
    second = make(UP_AND_DOWN, **options)
    second.load_state_dict(state)
    assert before + advised(second, 3) == expected


def test_a_rate_that_changes_is_a_change():
    model = torch.nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    g = make(UP_AND_DOWN, model=model, optimizer=sgd)
    advised(g, 1, 9.0, sgd)
    sgd.param_groups[0]["lr"] = 0.01
    found = advised(g, 3, 9.0, sgd)
    assert found == [(R.RAISE_BETA,), (R.LOWER_BETA, R.LOWER_LR), ()]


def test_members_are_advised_apart():
    g = guard(None, None, beta_star=torch.tensor([0.0, 2.0]))
    detector: Any = Advising({})
    detector.observe = lambda step, row, members=(): [
        Alert("energy_blowup", WARN, step, "ess", 1.0, 2.0, 5, (R.LOWER_BETA, R.RAISE_BETA), member)
        for member in (0, 1)
    ]
    g._loop.judge = detector
    pos, neg = torch.randn(2, 4), torch.randn(2, 4)
    g.loss_fn(pos, neg)
    # At 0 there is nothing to lower; the other may do so, and is not told both.
    assert [alert.remedies for alert in g.alerts] == [(R.RAISE_BETA,), (R.LOWER_BETA,)]


def test_a_member_at_half_of_the_output_scale_is_not_told_to_raise_it():
    """0.7 in float32 is less than half of 1.4."""
    g = guard(None, None, beta_star=torch.tensor([0.7, 0.2]), output_scale=1.4)
    detector: Any = Advising({})
    detector.observe = lambda step, row, members=(): [
        Alert("energy_blowup", WARN, step, "ess", 1.0, 2.0, 5, (R.RAISE_BETA, R.LOWER_LR), member)
        for member in (0, 1)
    ]
    g._loop.judge = detector
    g.loss_fn(torch.randn(2, 4), torch.randn(2, 4))
    assert [alert.remedies for alert in g.alerts] == [(R.LOWER_LR,), (R.RAISE_BETA, R.LOWER_LR)]
