"""Runs whose guard takes them back, or ends them: what they leave, and what a resume finds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ebmguard.reference_training.engine.run_folder import series
from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.reference_training.jem.runs import load_run
from ebmguard.reference_training.jem.train import run
from ebmguard.reference_training.sweep.cell import Run
from ebmguard.sinks import read_jsonl
from tests.reference_training.jem.parts import (
    Silent,
    assert_same_run,
    config_for,
    go,
    nan_samples,
    results_of,
    saved,
)

STEPS, AT = 15, 10


def rollback_config(out: Path, **settings: Any) -> JemConfig:
    own = {"action": "rollback", "iterations": STEPS, "dropout": 0.1}
    return config_for(out, **{**own, **settings})


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory):
    """The folder of a run with a NaN at step 10, which went back to step 1."""
    out = tmp_path_factory.mktemp("runs") / "rolled-back"
    with nan_samples(AT):
        go(rollback_config(out))
    return out


def test_a_run_goes_back_and_comes_to_its_end(rolled_back):
    results = results_of(rolled_back)
    (rollback,) = results["rollbacks"]
    assert (rollback["step"], rollback["restored_step"], rollback["attempt"]) == (AT, 0, 1)
    assert rollback["rule"] == "nonfinite"
    assert rollback in read_jsonl(rolled_back / "recovery.jsonl")
    assert results["steps"] == STEPS
    # The gap of step 10 was NaN; that step came again.
    assert results["diverged_at"] is results["ended"] is None
    assert math.isfinite(results["median_abs_gap_last_100"])
    state = saved(rolled_back)
    assert all(torch.isfinite(value).all() for value in state["network"].values())


def test_evaluations_that_come_again_say_so(rolled_back):
    rows = read_jsonl(rolled_back / "evaluations.jsonl")
    steps = [(row["step"], row.get("attempt", 0)) for row in rows]
    again = [(step, 1) for step in range(0, STEPS + 1, 3)]
    assert steps == [*((step, 0) for step in (0, 3, 6, 9)), *again]
    last = {row["step"]: row for row in read_jsonl(rolled_back / "metrics.jsonl")}
    counted, values = series(rolled_back, ["energy_gap", "cross_entropy"])
    assert counted.tolist() == list(range(STEPS))
    for name, found in values.items():
        assert found.tolist() == [last[step][name] for step in range(STEPS)]


def test_the_accuracy_around_an_alert_is_that_of_its_own_course(rolled_back):
    error = results_of(rolled_back)["first_error"]
    assert error["step"] == AT
    assert "attempt" not in error
    rows = read_jsonl(rolled_back / "accuracy.jsonl")
    before = {row["step"]: row["test_accuracy"] for row in rows if "attempt" not in row}
    around = dict(error["accuracy_around"])
    assert {AT - 1, AT} <= set(around)  # two copies of parameters are kept
    assert around == {step: before[step] for step in around}


def test_tensorboard_shows_the_course_that_counts(rolled_back):
    events = EventAccumulator(str(rolled_back))
    events.Reload()
    (tag,) = (tag for tag in events.Tags()["scalars"] if tag.endswith("cross_entropy"))
    assert [scalar.step for scalar in events.Scalars(tag)] == list(range(STEPS))
    images = EventAccumulator(str(rolled_back / "trainer"))
    images.Reload()
    shown = [image.step for image in images.Images("samples")]
    assert shown == sorted(set(shown))


@pytest.mark.parametrize("stopped", [AT + 2, 4])
def test_a_run_stopped_after_its_rollback_resumes_to_the_same_bits(tmp_path, rolled_back, stopped):
    class After(Silent):
        """Presses Ctrl-C at a step of the second course."""

        def step(self, done, state):
            if self.states and done < self.states[-1][0]:
                self.interrupt_after = stopped
            super().step(done, state)

    out = tmp_path / "cut"
    with nan_samples(AT):
        assert go(rollback_config(out), After()) is None
    assert saved(out)["guards"]["p_x"]["recovery"]["attempt"] == 1
    assert go(JemConfig(out=out, resume=True)) is not None
    assert_same_run(rolled_back, out)


def test_the_guard_ends_a_run_that_it_cannot_save(tmp_path, capsys):
    # So large a rate that no tenth of it trains.
    hopeless: dict[str, Any] = {"lr": 1e6, "iterations": 100}
    assert run(rollback_config(tmp_path / "run", **hopeless)) == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert len(results["rollbacks"]) == 5
    assert "budget of rollbacks is spent" in results["ended"]
    assert results["steps"] < 100
    printed = capsys.readouterr().out
    assert printed.count("Rollback ") == 5
    assert "ENDED by the guard" in printed
    found = load_run(tmp_path / "run")
    assert found.complete
    assert found.state().startswith("diverged at step 1 ")
    # A sweep that asks for more does not try again.
    longer = rollback_config(tmp_path / "run", **hopeless | {"iterations": 200})
    over = Run(tmp_path / "run", ("unused",), longer).over()
    assert over is not None
    assert over.startswith("ended by its guard after ")


def test_raise_ends_a_run_at_its_first_error(tmp_path):
    with nan_samples(AT):
        results = go(rollback_config(tmp_path, action="raise"))
    assert results is not None
    assert (results["steps"], results["rollbacks"]) == (AT + 1, [])
    assert results["ended"] == results["first_error"]["message"]
    assert results["accuracy"] is not None
    assert load_run(tmp_path).state().startswith("ended by its guard after ")
    # With warn nothing but the alert comes of it.
    with nan_samples(AT):
        warned = go(rollback_config(tmp_path / "warn", action="warn"))
    assert warned is not None
    assert warned["first_error"]["step"] == AT
    assert warned["ended"] is None
