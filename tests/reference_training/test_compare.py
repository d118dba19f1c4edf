from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from matplotlib.lines import Line2D

from ebmguard.alerts import Alert, Level
from ebmguard.errors import ConfigError
from ebmguard.reference_training.compare import CompareConfig, compare, draw, load, table


def write_run(path: Path, *, beta_star: float, diverged_at: int | None) -> Path:
    """A run folder by hand, of 40 steps, as a trainer and the guard would write it."""
    (path / "figures").mkdir(parents=True)
    steps = range(40)
    lost = [diverged_at is not None and step >= diverged_at for step in steps]
    rows = [
        {
            "step": step,
            "beta_star": beta_star,
            "energy_gap": "NaN" if gone and step > 35 else (1e6 if gone else 0.1),
            "grad_scale": 0.98,
            "ref/grad_scale": 0.0 if gone else 0.97,
        }
        for step, gone in zip(steps, lost, strict=True)
    ]
    alerts = []
    if diverged_at is not None:
        said = ("energy_gap", 1e6, 1e4, 64, ("a lower lr",))
        alerts = [
            Alert("energy_blowup", level, diverged_at - early, *said).record()
            for level, early in ((Level.WARN, 3), (Level.ERROR, 2))
        ]
    accuracy = [{"step": s, "test_accuracy": 0.1 if lost[s] else 0.975} for s in (30, 0, 10, 20)]
    for name, lines in (("metrics", rows), ("alerts", alerts), ("accuracy", accuracy)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "config.json").write_text(json.dumps({"beta_star": beta_star}))
    results = {
        "steps": 40,
        "diverged_at": diverged_at,
        "accuracy": 0.975 if diverged_at is None else 0.1,
        "best_accuracy": 0.975,
        "median_abs_gap_last_100": 0.1 if diverged_at is None else "Infinity",
        "grad_scale": 0.98,
        "ess": 0.5,
        "reference_grad_scale": 0.0,
        "reference_ess": 0.016,
        "wall_seconds": 12.0,
    }
    (path / "results.json").write_text(json.dumps(results))
    samples = np.zeros((16, 1, 8, 8), dtype=np.float32)
    np.savez(path / "figures" / "samples.npz", start=samples, healthy=samples, end=samples)
    return path


@pytest.fixture
def pair(tmp_path):
    return (
        write_run(tmp_path / "unguarded", beta_star=0.0, diverged_at=25),
        write_run(tmp_path / "guarded", beta_star=2.0, diverged_at=None),
    )


def steps_of(line: Line2D) -> list[float]:
    steps: list[float] = np.asarray(line.get_xdata()).tolist()
    return steps


def test_the_table_says_what_happened(pair):
    text = table([load(path) for path in pair])
    assert max(map(len, text.splitlines())) > 80
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "DIVERGED at step 25" in lines["outcome"]
    assert "finished 40 steps" in lines["outcome"]
    assert "step 22: energy_blowup, accuracy then 97.5%" in lines["first WARN"]
    assert lines["first ERROR"].endswith("none")
    assert "∞" in lines["|energy gap|, median of last 100"]
    # At β* = 0 the weights are those of the reference exponent.
    assert "0.016" in lines["ESS / M, final (likewise)"]
    assert "0.5" in lines["ESS / M, final (likewise)"]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_table_folds_and_loses_no_word(pair, width):
    runs = [load(path) for path in pair]
    folded = table(runs, width)
    assert max(map(len, folded.splitlines())) <= width

    def words(text):
        return sorted(text.replace("-", "").split())

    assert words(folded) == words(table(runs))


def test_the_picture_shows_gap_accuracy_scale_alerts_and_samples(pair):
    figure = draw([load(path) for path in pair])
    gap, accuracy, scale = figure.subfigs[0].axes
    labels = gap.get_legend_handles_labels()[1]
    assert "β* = 0: DIVERGED at step 25" in labels
    assert "β* = 2: finished 40 steps" in labels
    assert gap.get_yscale() == "symlog"
    # The reader sees accuracy in the order of steps, though it is written out of order.
    assert steps_of(accuracy.lines[0]) == [0, 10, 20, 30]
    # The diverging run's GradScale is the reference exponent's, the guarded one's its own.
    assert np.min(np.asarray(scale.lines[0].get_ydata())) == 0.0
    markers = [steps_of(line) for line in gap.lines if line.get_marker() == "X"]
    assert [steps for steps in markers if steps] == [[23]]
    assert len(figure.subfigs[1].axes) == 6


def test_what_a_rollback_took_back_is_not_compared(tmp_path):
    path = write_run(tmp_path / "rescued", beta_star=2.0, diverged_at=None)
    # After step 24 it went back to step 15, and ended with step 29: 40 rows of 30 steps.
    steps = [(s, 0) for s in range(25)] + [(s, 1) for s in range(15, 30)]
    rows = [
        {"step": s, "recovery/attempt": n, "energy_gap": n - s, "grad_scale": n} for s, n in steps
    ]
    accuracy = [
        {"step": s, "attempt": n, "test_accuracy": n} for s, n in ((10, 0), (20, 0), (20, 1))
    ]
    for name, lines in (("metrics", rows), ("accuracy", accuracy)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    gap, evaluations, scale = draw([load(path)]).subfigs[0].axes
    assert steps_of(scale.lines[0]) == list(range(30))
    assert np.asarray(scale.lines[0].get_ydata()).tolist() == [0] * 15 + [1] * 15
    assert steps_of(gap.lines[0]) == [0, 10, 20]
    assert np.asarray(evaluations.lines[0].get_xydata()).tolist() == [[10, 0], [20, 1]]


def test_compare_writes_the_picture_and_prints_the_table(pair, tmp_path, capsys):
    out = tmp_path / "picture.png"
    assert compare(CompareConfig(pair, out)) == 0
    assert out.stat().st_size > 10_000
    assert "DIVERGED at step 25" in capsys.readouterr().out


def test_compare_refuses_what_it_cannot_compare(pair, tmp_path):
    with pytest.raises(ConfigError, match="2 to 6 folders; got 1"):
        compare(CompareConfig(pair[:1]))
    (pair[0] / "results.json").unlink()
    with pytest.raises(ConfigError, match=r"results\.json missing"):
        compare(CompareConfig(pair, tmp_path / "x.png"))


def test_a_pipe_in_place_of_samples_is_refused_and_not_waited_for(pair, tmp_path):
    file = pair[0] / "figures" / "samples.npz"
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ConfigError, match=r"samples\.npz cannot be read: it is not a file"):
        compare(CompareConfig(pair, tmp_path / "x.png"))


def test_a_run_of_another_kind_is_refused(tmp_path):
    path = write_run(tmp_path / "toy", beta_star=0.0, diverged_at=None)
    (path / "config.json").write_text(json.dumps({"betas": ["0", "0.5"]}))
    with pytest.raises(ConfigError, match=r"without one beta_star.*ebmguard figure"):
        load(path)
