"""A run: that the loop is JEM's, what is written, how it is lost, taken back and resumed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ebmguard.reference_training.engine.run_folder import series
from ebmguard.reference_training.jem import samples as kept_samples
from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.reference_training.jem.runs import load_run
from ebmguard.reference_training.jem.train import Jem, run
from ebmguard.reference_training.jem.trainer import Trainer
from ebmguard.reference_training.sweep.cell import Run
from ebmguard.sinks import read_jsonl
from tests.reference_training.parts import (
    JEM,
    Silent,
    assert_same_run,
    nan_samples,
    results_of,
    saved,
    steps_of,
)

config_for, go = JEM.config_for, JEM.go


def test_run_folder_holds_the_run(tmp_path):
    out = tmp_path / "run"
    results = go(config_for(out, valid_images=30, quality_samples=12))
    assert steps_of(out, "metrics.jsonl") == list(range(8))
    assert steps_of(out, "accuracy.jsonl") == [0, 3, 6, 8]
    evaluations = read_jsonl(out / "evaluations.jsonl")
    assert [row["step"] for row in evaluations] == [0, 3, 6, 8]
    per_epoch = (1437 - 30) // 8
    for row, accuracy in zip(evaluations, read_jsonl(out / "accuracy.jsonl"), strict=True):
        assert row["epoch"] == row["step"] / per_epoch
        assert row["test_accuracy"] == accuracy["test_accuracy"]
        assert 0 <= row["valid_accuracy"] <= 1
        assert row["buffer_samples"] == 12
        assert row["buffer_is"] >= 1
        assert row["buffer_fid"] > 0
    assert list(out.glob("events.out.tfevents.*"))
    assert list((out / "trainer").glob("events.out.tfevents.*"))
    stored = json.loads((out / "config.json").read_text())
    assert (stored["scenario"], stored["settings"]["n_neg"]) == ("digits", 6)
    written = json.loads((out / "results.json").read_text())
    assert written.keys() == results.keys()
    assert (written["steps"], written["iterations_per_epoch"]) == (8, per_epoch)
    assert written["diverged_at"] is None
    assert written["device"] == "cpu"
    assert written["accuracy"] == evaluations[-1]["test_accuracy"]
    # Inception score and FID are of features that change with the run: none is the best.
    best = max(evaluations, key=lambda row: row["valid_accuracy"])
    assert written["best_evaluations"] == {"valid_accuracy": best}
    with np.load(out / "figures" / "samples.npz") as samples:
        assert set(samples.files) == {"data", "start", "healthy", "end"}
        assert samples["end"].shape == (6, 1, 8, 8)
    # What the trainer measured stands in the guard's row of the same step.
    rows = read_jsonl(out / "metrics.jsonl")
    assert all(row["cross_entropy"] > 0 for row in rows)
    for row in evaluations[:-1]:
        for name in ("test_accuracy", "valid_accuracy", "buffer_fid"):
            assert rows[row["step"]][name] == row[name]
    assert sum("test_accuracy" in row for row in rows) == 3


def test_samples_around_a_divergence_are_written(tmp_path, monkeypatch):
    """Those of the last five even steps before it, and of every even one after it."""
    batches = {}
    step_of, see = Trainer.step, Jem.see

    def seen(self, step):
        batches[step] = step_of(self, step)
        return batches[step]

    def lost_at_11(self, step, row):
        return see(self, step, row | ({"energy_gap": math.inf} if step == 11 else {}))

    monkeypatch.setattr(Trainer, "step", seen)
    monkeypatch.setattr(Jem, "see", lost_at_11)
    monkeypatch.setattr(kept_samples, "EVERY", 2)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    settings = {"iterations": 30, "stop_after": 7, "eval_every": 1000, "n_neg": 70}
    results = go(config_for(whole, **settings))
    assert (results["diverged_at"], results["steps"]) == (11, 19)
    written = {int(file.stem): np.load(file) for file in (whole / "samples").iterdir()}
    assert sorted(written) == [0, 2, 4, 6, 8, 10, 12, 14, 16, 18]
    for step, array in written.items():
        shown = (batches[step][:64].clamp(-1, 1) + 1) * 127.5
        assert array.shape == (64, 1, 8, 8)
        assert np.abs(array - shown.numpy()).max() <= 0.5
    # They are remembered across an interruption.
    assert go(config_for(cut, **settings), Silent(interrupt_after=8)) is None
    go(JemConfig(out=cut, resume=True))
    assert_same_run(whole, cut)


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


def test_a_run_goes_back_and_evaluations_that_come_again_say_so(rolled_back):
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
    rows = read_jsonl(rolled_back / "evaluations.jsonl")
    steps = [(row["step"], row.get("attempt", 0)) for row in rows]
    again = [(step, 1) for step in range(0, STEPS + 1, 3)]
    assert steps == [*((step, 0) for step in (0, 3, 6, 9)), *again]
    last = {row["step"]: row for row in read_jsonl(rolled_back / "metrics.jsonl")}
    counted, values = series(rolled_back, ["energy_gap", "cross_entropy"])
    assert counted.tolist() == list(range(STEPS))
    for name, found in values.items():
        assert found.tolist() == [last[step][name] for step in range(STEPS)]


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
