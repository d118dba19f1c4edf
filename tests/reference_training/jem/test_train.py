"""A run: that the loop is JEM's, what is written, how it is lost, taken back and resumed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ebmguard.reference_training.engine.run_folder import series
from ebmguard.reference_training.jem import samples as kept_samples
from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.reference_training.jem.draws import Draws
from ebmguard.reference_training.jem.runs import load_run
from ebmguard.reference_training.jem.train import Jem, run
from ebmguard.reference_training.jem.trainer import Trainer
from ebmguard.reference_training.sweep.cell import Run
from ebmguard.retrofit.rows import Rows
from ebmguard.sinks import read_jsonl
from tests.reference_training.parts import (
    JEM,
    Silent,
    assert_same_run,
    nan_samples,
    results_of,
    same,
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


def test_the_best_network_by_validation_is_kept(tmp_path, monkeypatch):
    networks, batches = {}, {}
    step_of = Trainer.step

    def seen(self, step):
        networks[step] = {k: v.clone() for k, v in self.network.state_dict().items()}
        batches[step] = step_of(self, step)
        return batches[step]

    monkeypatch.setattr(Trainer, "step", seen)
    go(config_for(tmp_path, valid_images=200, iterations=16, lr=0.01))
    rows = read_jsonl(tmp_path / "evaluations.jsonl")
    best = max(rows[:-1], key=lambda row: row["valid_accuracy"])  # the first of equals
    assert rows[-1]["valid_accuracy"] <= best["valid_accuracy"]  # else another seed is needed
    assert best["step"] > 0
    state = torch.load(tmp_path / "checkpoints" / "best.pt", weights_only=True)
    assert (state["step"], state["valid_accuracy"]) == (best["step"], best["valid_accuracy"])
    assert same(state["network"], networks[best["step"]])
    # The samples of evaluated steps are those that the step trained with, as bytes.
    files = sorted((tmp_path / "samples").iterdir())
    assert [file.name for file in files] == [f"{step:08d}.npy" for step in range(0, 16, 3)]
    for file in files:
        expected = (batches[int(file.stem)].clamp(-1, 1) + 1) * 127.5
        array = np.load(file)
        assert array.dtype == np.uint8
        assert np.abs(array - expected.numpy()).max() <= 0.5


def test_a_classifier_alone_draws_no_samples(tmp_path):
    results = go(config_for(tmp_path, p_x_weight=0.0, quality_samples=10, iterations=30, lr=0.01))
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    losses = [row["cross_entropy"] for row in rows]
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    # The guard watches the optimizer's gradients; energies it has not seen.
    names = ("step", "nonfinite/gradients", "alert_level", "cross_entropy", "test_accuracy", "ece")
    assert {name for row in rows for name in row} == {*names}
    assert not list((tmp_path / "samples").iterdir())
    assert all("buffer_is" not in row for row in read_jsonl(tmp_path / "evaluations.jsonl"))
    assert results["median_abs_gap_last_100"] is results["diverged_at"] is None


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


def test_alerts_of_rows_that_are_still_under_way_at_the_end_are_recorded(tmp_path, monkeypatch):
    """On a GPU rows are judged two steps later."""
    monkeypatch.setattr(Rows, "_set_lag", lambda rows, usual: setattr(rows, "lag", 2))
    batch = Draws.batch

    def spoiled(self, step):
        images, labelled, labels = batch(self, step)
        return images * (math.nan if step == 7 else 1.0), labelled, labels

    monkeypatch.setattr(Draws, "batch", spoiled)
    results = go(config_for(tmp_path, n_labelled=5))
    alerts = read_jsonl(tmp_path / "alerts.jsonl")
    assert [alert["step"] for alert in alerts] == [7] * len(alerts)
    assert results["first_warn"]["step"] == 7
    assert set(steps_of(tmp_path, "accuracy.jsonl")) >= {6, 7}  # alert_context


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


def test_accuracy_and_pictures_are_those_of_the_course_that_counts(rolled_back):
    error = results_of(rolled_back)["first_error"]
    assert error["step"] == AT
    assert "attempt" not in error
    rows = read_jsonl(rolled_back / "accuracy.jsonl")
    before = {row["step"]: row["test_accuracy"] for row in rows if "attempt" not in row}
    around = dict(error["accuracy_around"])
    assert {AT - 1, AT} <= set(around)  # two copies of parameters are kept
    assert around == {step: before[step] for step in around}
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
    assert (results["steps"], results["rollbacks"]) == (AT + 1, [])
    assert results["ended"] == results["first_error"]["message"]
    assert results["accuracy"] is not None
    assert load_run(tmp_path).state().startswith("ended by its guard after ")
    # With warn nothing but the alert comes of it.
    with nan_samples(AT):
        warned = go(rollback_config(tmp_path / "warn", action="warn"))
    assert warned["first_error"]["step"] == AT
    assert warned["ended"] is None
