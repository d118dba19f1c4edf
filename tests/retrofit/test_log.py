"""A trainer's own numbers in the guard's row, and one of them as what the run is able to do."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ebmguard import Guard, guard
from ebmguard.errors import ConfigError
from ebmguard.report.folder import RecordedRun
from ebmguard.retrofit.rows import Rows
from tests.parts import Memory, energies
from tests.runs import Training


def train(steps: int, own: Any, **options: Any) -> Guard:
    """A guarded energy whose trainer logs ``own(step)`` before each optimizer step."""
    training = Training(**options)
    g = training.g
    training.go(steps, lambda: g.log(own(g.step)))
    return g


def test_own_numbers_stand_in_the_row_of_their_step(tmp_path):
    sink, total = Memory(), torch.zeros(())

    def own(step):
        total.add_(1)  # an accumulator that goes on counting
        return {"accuracy": 0.1 * step, "loss/sum": total, "steps": step, "bad": math.nan}

    g = train(3, own, sinks=[sink], log_dir=tmp_path / "run")
    g.close()
    assert sink.steps == [0, 1, 2]
    for step, row in sink.rows:
        found = row["accuracy"], row["loss/sum"], row["steps"], math.isnan(row["bad"])
        assert found == (0.1 * step, step + 1.0, float(step), True)
        assert "grad_scale" in row
    assert g.last["accuracy"] == 0.2
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["accuracy"] for line in lines] == [0.0, 0.1, 0.2]


def test_what_is_logged_after_a_step_is_the_next_ones_and_the_last_of_a_name_counts():
    sink = Memory()
    g = train(1, lambda _: {"x": 1.0}, sinks=[sink])
    g.log({"x": 2.0, "y": True})
    g.log({"x": torch.tensor([3.0])})
    with g.paused():
        g.log({"x": 4.0})
    g.close()
    assert [(step, row["x"]) for step, row in sink.rows] == [(0, 1.0), (1, 3.0)]
    assert sink.rows[-1][1] == {"x": 3.0, "y": 1.0}


def test_no_rule_sees_them_and_alerts_are_those_of_the_same_run_without():
    numbers = [train(60, own).alerts for own in (lambda _: {}, lambda _: {"x": math.nan})]
    assert numbers[0] == numbers[1]


def test_they_travel_with_the_state():
    sink = Memory()
    g = train(1, lambda _: {"x": 5.0}, judge_in_loss=False)
    again = Training(judge_in_loss=False, sinks=[sink]).g
    again.load_state_dict(json.loads(json.dumps(g.state_dict())))
    again.close()
    assert sink.column("x") == [5.0]


def test_what_a_device_has_is_not_read_before_its_row_is():
    rows = Rows(torch.Size(), in_loss=False)
    rows.log({"x": torch.ones((), device="meta"), "y": 2.0})  # reading it would raise
    with pytest.raises(NotImplementedError):
        list(rows.end_step())


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        *(({x: 1.0}, "the guard writes it itself") for x in ("ref/ess", "step", "sampler/mine")),
        ({"": 1.0}, "empty"),
        *(({x: 1.0}, "no text") for x in ("a\nb", "\ud800", 1)),
        ({"x": "0.93"}, "is a str"),
        ({"x": torch.zeros(3)}, "a mean"),
        ({"x": torch.zeros((), dtype=torch.complex64)}, "complex64"),
        ([("x", 1.0)], "by name"),
    ],
)
def test_what_is_no_number_of_the_trainers_is_refused_before_anything_is_kept(numbers, words):
    sink = Memory()
    g = guard(None, None, beta_star=0.5, sinks=[sink])
    with pytest.raises(ConfigError, match=words):
        g.log({"good": 1.0} | numbers if isinstance(numbers, dict) else numbers)
    g.close()
    assert not sink.rows


# -- skill -----------------------------------------------------------------------------------------


def run(numbers: Iterable[float | None], *, log: str = "accuracy", **options: Any) -> Guard:
    """A run that loses what it could do is to be looked at, in every place."""
    given: dict[str, Any] = {"beta_star": 0.5, "skill": "accuracy"} | options
    g = guard(None, None, **given)
    go_on(g, numbers, log)
    return g


def go_on(g: Guard, numbers: Iterable[float | None], log: str = "accuracy") -> None:
    for number in numbers:
        g.loss_fn(*energies())
        if number is not None:
            g.log({log: number})
    g.flush()


def binomial(p: float, batch: int, steps: int) -> Iterator[float]:
    chance = random.Random(0)
    return (sum(chance.random() < p for _ in range(batch)) / batch for _ in range(steps))


LEARNS = [0.1, 0.4, 0.7, 0.8, 0.9, 0.9, 0.9, 0.9, 0.9]
# What is logged, and since when it is low.
RUNS: dict[str, tuple[list[float | None], int | None]] = {
    "learns": ([*LEARNS], None),
    "loses a third": ([*LEARNS, *[0.6] * 5], len(LEARNS) + 2),
    "loses a tenth": ([*LEARNS, *[0.8] * 20], None),
    "one bad value": ([*LEARNS, 0.1, 0.1, *[0.9] * 9], None),
    "seldom": ([x for each in [*LEARNS, *[0.6] * 5] for x in (None, each)], 2 * len(LEARNS) + 5),
    "recovers": ([*LEARNS, *[0.6] * 5, *[0.9] * 15], None),
    "noise of batches": ([0.1, 0.2, 0.3, *binomial(0.7, 64, 1500)], None),
    "not a number": ([*LEARNS, *[float("nan")] * 20], None),
    "never above 0": ([-1.0, -2.0, *[-9.0] * 20], None),
}


@pytest.mark.parametrize(("name", "by"), [*((x, 1) for x in RUNS), ("loses a third", 100)])
def test_a_fifth_that_is_lost_is_said_in_the_verdict(name: str, by: float, tmp_path: Path) -> None:
    numbers, since = RUNS[name]
    g = run([x if x is None else by * x for x in numbers], log_dir=tmp_path)
    expected = "healthy" if since is None else f"look since step {since} (skill accuracy)"
    assert str(g.verdict) == expected
    g.close()
    assert str(RecordedRun.read(tmp_path).verdict) == expected
    assert since is None or str(run([*numbers], skill=None).verdict) == "healthy"


def test_it_goes_through_a_checkpoint_and_a_new_name_begins_anew() -> None:
    state = json.loads(json.dumps(run(LEARNS).state_dict()))
    for skill, verdict in (("accuracy", "look"), ("f1", "healthy"), (None, "healthy")):
        second = guard(None, None, beta_star=0.5, skill=skill)
        second.load_state_dict(state)
        go_on(second, [0.6] * 5, skill or "accuracy")
        assert second.verdict.name == verdict


def test_a_name_that_was_never_logged_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    for log, count in (("acc", 1), ("accuracy", 0)):
        caplog.clear()
        g = run(LEARNS, log=log)
        g.close()
        g.close()
        said = [x for x in caplog.messages if "given no such number" in x]
        assert len(said) == count
        assert all("skill='accuracy'" in x for x in said)


@pytest.mark.parametrize("name", ["", "a\nb", 3, "energy_gap", "guard/x"])
def test_what_g_log_would_not_take_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"no name of a number|expected a text"):
        guard(None, None, skill=name)
