"""What a run keeps: when it looks, who is lost, and means that hide nothing."""

from __future__ import annotations

import io
import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebmguard.alerts import Alert, Level
from ebmguard.reference_training.engine.run_folder import RunFolder
from ebmguard.reference_training.toy.record import Record
from ebmguard.sinks import read_jsonl
from tests.reference_training.toy.parts import config_for

CPU = torch.device("cpu")


def record_of(tmp_path, members=4, **settings) -> Record:
    config = config_for(tmp_path / "run", betas=("0", "0.5"), **settings)
    folder = RunFolder(config.out, {})
    folder.figures.mkdir(parents=True, exist_ok=True)
    return Record(config, folder, members, CPU)


class Script:
    """Stands for an evaluator, and says what it is told."""

    def __init__(self, evaluations) -> None:
        self.evaluations = iter(evaluations)
        self.grid = SimpleNamespace(axis=torch.linspace(-1, 1, 3), shape=(3,))
        self.sampled_at: list[int] = []

    def log_density(self, network: Any) -> torch.Tensor:
        return torch.arange(12.0).reshape(4, 3)

    def samples(self, network: Any, step: int) -> torch.Tensor:
        self.sampled_at.append(step)
        return torch.full((4, 5, 1), float(step))

    def measure(self, log_density: torch.Tensor) -> list[dict[str, float]]:
        return [{"kl": value} for value in next(self.evaluations)]

    def measure_samples(self, samples: torch.Tensor) -> list[dict[str, float]]:
        return [{"kl_sgld": value} for value in samples[:, 0, 0].tolist()]


def run_through(record: Record, evaluator: Any, updates: int) -> None:
    for _ in range(updates):
        record.after_update(torch.zeros(4, 1), torch.zeros(4, 1))
        if record.is_due:
            record.evaluate(evaluator, None, [])


@given(st.integers(1, 60), st.data())
def test_evaluations_are_evenly_spread_and_the_last_is_at_the_end(tmp_path_factory, n, data):
    evaluations = data.draw(st.integers(1, n))
    folder = tmp_path_factory.mktemp("run")
    record = record_of(folder, iterations=n, evaluations=evaluations)
    due = []
    for _ in range(n):
        record.after_update(torch.zeros(4, 1), torch.zeros(4, 1))
        if record.is_due:
            due.append(record.next_step)
    assert due == [math.ceil(k * n / evaluations) for k in range(1, evaluations + 1)]


@pytest.mark.parametrize("gap", [1.1e4, -1.1e4, math.nan, math.inf, -math.inf])
def test_a_member_is_lost_at_its_first_wide_gap(tmp_path, gap):
    record = record_of(tmp_path, members=3)
    f_neg = torch.zeros(3, 2)
    for own in (1e4, -1e4, gap, 0.0, gap):
        # Two positives that say so in their mean alone; the members beside stay.
        f_pos = torch.tensor([[0.0, 0.0], [2 * own, 0.0], [1.0, -1.0]])
        record.after_update(f_pos, f_neg)
    assert record.diverged_at.tolist() == [-1, 2, -1]


def test_a_lost_negative_counts_too(tmp_path):
    record = record_of(tmp_path, members=2)
    record.after_update(torch.zeros(2, 3), torch.tensor([[0.0], [math.nan]]))
    assert record.diverged_at.tolist() == [-1, 0]


def test_means_are_over_the_last_five_and_keep_what_is_not_finite(tmp_path):
    record = record_of(tmp_path, iterations=13, evaluations=7)
    evaluations = [[100.0, math.nan, 1.0, 1.0], [100.0, math.inf, 2.0, 2.0]]
    evaluations += [[float(k), float(k), float(k), math.inf] for k in range(4)]
    evaluations.append([4.0, 4.0, math.nan, math.inf])
    evaluator = Script(evaluations)
    run_through(record, evaluator, 13)
    assert evaluator.sampled_at == [6, 8, 10, 12, 13]
    record.diverged_at = torch.tensor([-1, 7, -1, 5])
    results = record.finish(evaluator, None, "cpu")
    # What the first two evaluations saw is past; what the last five saw stays.
    kl = [member["kl"] for member in results["members"]]
    assert kl == pytest.approx([2.0, 2.0, math.nan, math.inf], nan_ok=True)
    assert {member["kl_sgld"] for member in results["members"]} == {(6 + 8 + 10 + 12 + 13) / 5}
    assert [member["diverged_at"] for member in results["members"]] == [None, 7, None, 5]
    assert (results["diverged_at"], results["iterations"]) == (5, 13)
    assert all(set(m).isdisjoint({"step", "member"}) for m in results["members"])
    who = [(m["beta"], m["variant"], m["seed"]) for m in results["members"]]
    assert who == [(b, "default", s) for b in ("0", "0.5") for s in (0, 1)]
    stored = json.loads((record.folder.path / "results.json").read_text())
    assert [member["kl"] for member in stored["members"]] == [2.0, 2.0, "NaN", "Infinity"]
    rows = read_jsonl(record.folder.path / "members.jsonl")
    assert [row["member"] for row in rows] == [0, 1, 2, 3] * 7
    with np.load(record.folder.figures / "grids.npz") as grids:
        np.testing.assert_array_equal(grids["axis"], [-1.0, 0.0, 1.0])
        np.testing.assert_array_equal(grids["negative_energy"], np.arange(12.0).reshape(4, 3))
        assert grids["negative_energy"].dtype == grids["samples"].dtype == np.float32
        assert (grids["samples"] == 13).all()


def test_a_run_without_a_loss_says_so(tmp_path):
    record = record_of(tmp_path, iterations=2, evaluations=1)
    evaluator = Script([[1.0] * 4])
    run_through(record, evaluator, 2)
    assert record.finish(evaluator, None, "cpu")["diverged_at"] is None


def alert(level: Level) -> Alert:
    return Alert("energy_blowup", level, 3, "energy_gap", 50.0, 20.0, 100, ("a", "b"))


def test_what_is_shown(tmp_path):
    record = record_of(tmp_path, iterations=1, evaluations=1)
    assert record.shown({}) == {"alerts": "none"}
    for level in (Level.WARN, Level.ERROR, Level.WARN):
        record.on_alert(alert(level))
    # A lost member ranks last; it does not shuffle the others.
    run_through(record, Script([[3.0, math.nan, 1.0, 2.0]]), 1)
    assert record.shown({"grad_scale": 0.9}) == {
        "median KL": 3.0,
        "mean GradScale": 0.9,
        "alerts": "2 WARN, 1 ERROR",
    }


def test_state_survives_a_file(tmp_path):
    record = record_of(tmp_path, iterations=8, evaluations=4)
    run_through(record, Script([[1.0, 2.0, 3.0, 4.0]] * 2), 3)
    record.on_alert(alert(Level.WARN))
    record.after_update(torch.full((4, 1), 2e4), torch.zeros(4, 1))
    file = io.BytesIO()
    torch.save(record.state_dict(), file)
    file.seek(0)
    # What happens after the state was taken is not in it.
    record.on_alert(alert(Level.ERROR))
    other = record_of(tmp_path, iterations=8, evaluations=4)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.next_step == 4
    assert other.diverged_at.tolist() == [3] * 4
    assert other.is_due
    assert other.shown({}) == {"median KL": 3.0, "alerts": "1 WARN"}


def test_time_before_a_resume_counts(tmp_path):
    record = record_of(tmp_path)
    record.load_state_dict(record.state_dict() | {"elapsed": 1000.0})
    assert record.elapsed() >= 1000.0
    assert record.state_dict()["elapsed"] >= 1000.0
