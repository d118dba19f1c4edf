"""Recorded runs as data frames."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ebmguard.errors import ConfigError
from ebmguard.runs import load
from tests.sinks import parts


def write(folder: Path, **files: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def row(step: int, attempt: int = 0, **numbers: object) -> dict[str, Any]:
    return {"step": step, "recovery/attempt": float(attempt), "energy_gap": step + 0.5, **numbers}


ALERT = parts.ALERT | {"step": 5, "value": "NaN"}
ROLLBACK = parts.RECOVERY | {"step": 5, "restored_step": 3, "value": "NaN"}


@pytest.fixture
def rescued(tmp_path: Path) -> Path:
    """Went back from step 5 to step 3, and on to step 6."""
    path = write(
        tmp_path / "rescued",
        metrics=[row(s, cross_entropy=s) for s in range(6)]
        + [row(s, 1, loss="Infinity", cross_entropy=-s) for s in range(3, 7)],
        alerts=[ALERT],
        recovery=[ROLLBACK],
        accuracy=[
            {"step": 4, "test_accuracy": 0.2},
            {"step": 4, "attempt": 1, "test_accuracy": 0.9},
            {"step": 0, "test_accuracy": 0.1},
        ],
        evaluations=[{"step": 0, "ece": 0.5}, {"step": 4, "attempt": 1, "ece": 0.25}],
    )
    settings = {"iterations": 7, "lr": 0.1}
    config = {"beta_star": 0.5, "iterations": None, "settings": settings, "members": [1]}
    (path / "config.json").write_text(json.dumps(config))
    (path / "results.json").write_text(json.dumps({"accuracy": 0.9, "median": {"gap": "NaN"}}))
    return path


def test_what_a_rollback_took_back_is_left_out(rescued):
    found = load(rescued)
    rows = found.rows.loc[str(rescued)]
    assert rows.index.tolist() == list(range(7))
    assert rows.attempt.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert rows.energy_gap.tolist() == [step + 0.5 for step in range(7)]  # the guard's own
    assert rows.cross_entropy.tolist() == [0, 1, 2, -3, -4, -5, -6]
    assert rows.loss.isna().tolist() == [True] * 3 + [False] * 4
    evaluations = found.evaluations.loc[str(rescued)]
    assert evaluations.test_accuracy.to_dict() == {0: 0.1, 4: 0.9}
    assert evaluations.ece.to_dict() == {0: 0.5, 4: 0.25}
    assert found.alerts.rule.tolist() == ["energy_blowup"]
    assert found.rollbacks.restored_step.tolist() == [3]


def test_or_marked(rescued):
    found = load(rescued, abandoned=True)
    rows = found.rows.loc[str(rescued)]
    assert rows[rows.abandoned].index.tolist() == [3, 4, 5]
    assert rows[rows.abandoned].cross_entropy.tolist() == [3, 4, 5]
    assert len(rows) == 10
    evaluations = found.evaluations
    assert evaluations[evaluations.abandoned].test_accuracy.tolist() == [0.2]


def test_a_line_per_run_has_settings_results_and_counts(rescued, tmp_path):
    write(tmp_path / "bare", metrics=[row(0)])
    (tmp_path / "empty").mkdir()
    lines = load(tmp_path / "*").runs
    assert lines.index.tolist() == [str(tmp_path / "bare"), str(rescued)]
    line = lines.loc[str(rescued)]
    assert (line.beta_star, line.iterations, line.lr, line.accuracy) == (0.5, 7, 0.1, 0.9)
    assert line["median/gap"] != line["median/gap"]
    assert (line.recorded_steps, line.error_count, line.rollback_count) == (7, 1, 1)
    assert lines.loc[str(tmp_path / "bare")].recorded_steps == 1


def test_without_alerts_or_evaluations_their_frames_are_empty(tmp_path):
    found = load([write(tmp_path / "bare", metrics=[row(0)])])
    assert [len(frame) for frame in (found.alerts, found.rollbacks, found.evaluations)] == [0] * 3


@pytest.mark.parametrize(
    "line", ["{", '{"energy_gap": 1.0}', '{"step": -1}', '{"step": 1, "energy_gap": "high"}', "[]"]
)
def test_what_no_guard_wrote_is_refused(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 0}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl|rows"):
        load(tmp_path)


@pytest.mark.parametrize("paths", ["nowhere/*", []])
def test_no_runs_are_an_error_that_says_where(tmp_path, monkeypatch, paths):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"(nowhere/\*|No folder): nothing there"):
        load(paths)


def test_without_pandas_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"pip install \"\.\[train\]\""):
        load(tmp_path)


@pytest.mark.slow
def test_folders_of_all_three_trainers(tmp_path):
    for trainer, options in {
        "jem": "--iterations 40 --eval-every 20",
        "shortrun": "--data digits --iterations 10",
        "toy": "--betas 0 0.5 --seeds 1 --iterations 60 --evaluations 3",
    }.items():
        command = [sys.executable, "-m", "ebmguard", "train", trainer, "--out", trainer]
        subprocess.run([*command, *options.split()], cwd=tmp_path, check=True)
    found = load(tmp_path / "*")
    by_run = found.rows.groupby(level="run").size().tolist()
    assert by_run == found.runs.iterations.tolist() == [40, 10, 60]
    assert found.evaluations.loc[str(tmp_path / "jem")].index.tolist() == [0, 20, 40]
    toys = found.evaluations.loc[str(tmp_path / "toy")]
    assert sorted(toys.member.unique()) == [0, 1]
    assert toys.kl.notna().all()
