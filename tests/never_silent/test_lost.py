"""What was lost and shown as healthy: each line is a run, and what every page says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ebmguard import Guard, Level, guard, runs
from ebmguard.errors import BudgetSpentError, DivergenceError
from ebmguard.recovery import Recovery
from ebmguard.report import RecordedRun
from ebmguard.report.page import page
from ebmguard.report.problems import problems_of_run
from ebmguard.report.watch import WatchConfig, watch
from ebmguard.sinks import TensorBoardSink

# Of each stretch the gap, the spread, and how many rows.
CALM, HUGE, NAN = (0.5, 1.0), (500.0, 1.0), (float("nan"), 1.0)
WIDE, SLOW = (0.5, 500.0), (1.5, 1.0)
MINE = "go back to your own checkpoint of before step 60"


def energies(gap: float, spread: float) -> tuple[Any, Any]:
    """Samples on both sides, so that no weight degenerates."""
    base = torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0, -0.2, 0.2, 0.1])
    pos = spread * base / base.std(correction=0)
    return pos + gap, base


def lived(folder: Path, *stretches: tuple[int, tuple[float, float]], **options: Any) -> Guard:
    """A guard whose loss gets such energies, until an error ends the run."""
    model = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    told: Any = {"beta_star": 0.5, "model": model, "optimizer": sgd} | options
    g = guard(None, None, **{"log_dir": folder, "action": "warn", **told})
    try:
        for gap, spread in (own for count, own in stretches for _ in range(count)):
            pos, neg = energies(gap, spread)
            touched = sum(0 * p.sum() for p in model.parameters())
            g.loss_fn(pos + touched, neg + touched).backward()
            sgd.step()
    except (DivergenceError, BudgetSpentError):
        pass
    g.close()
    # As a reader on another day finds it: the process is gone.
    (folder / ".lock").write_text(json.dumps(json.loads((folder / ".lock").read_text()) | GONE))
    return g


GONE = {"pid": 2**31 - 2}
BACK: dict[str, Any] = {"action": "rollback", "recovery": Recovery(every=10, certify_after=10)}
SPENT: dict[str, Any] = {"action": "rollback", "recovery": Recovery(budget=0)}

# What it is, the run, the verdict's name, and words of the first thing to do.
CASES: dict[str, tuple[list[tuple[int, tuple[float, float]]], dict[str, Any], str, str]] = {
    "a gap that stays huge": ([(60, CALM), (200, HUGE)], {}, "lost", MINE),
    "energies that are no numbers any more": ([(60, CALM), (100, NAN)], {}, "lost", MINE),
    "a gap that comes back": ([(60, CALM), (5, HUGE), (100, CALM)], {}, "recovered", "lower the"),
    "ended by an error": ([(60, CALM), (200, HUGE)], {"action": "raise"}, "ended", MINE),
    "lost with its budget spent": ([(60, CALM), (200, HUGE)], SPENT, "lost", "lower the"),
    "saved": (
        [(60, CALM), (1, HUGE), (100, CALM)],
        BACK,
        "saved",
        "begin the next run with lr 0.01",
    ),
    "calm": ([(160, CALM)], {}, "healthy", ""),
}


@pytest.mark.parametrize("case", CASES)
def test_every_page_says_the_verdict_first_and_then_what_to_do(case, tmp_path, monkeypatch, capsys):
    stretches, options, name, to_do = CASES[case]
    folder = tmp_path / "run"
    g = lived(folder, *stretches, **options)
    verdict = str(g.verdict)
    assert g.verdict.name == name
    assert g.verdict == RecordedRun.read(folder).verdict
    assert runs.load(folder).runs["verdict"].item() == verdict
    monkeypatch.setenv("COLUMNS", "200")
    watch(WatchConfig(folder, once=True))
    _, state, following, *_ = shown = capsys.readouterr().out.splitlines()
    assert state.startswith(f"● {verdict}")
    assert ("in bounds" in state) <= (name not in ("lost", "ended"))
    assert not any("-0 …" in line for line in shown)
    if to_do:
        assert following.startswith(f"next: {to_do}")
    html = page([folder])
    lost = " lost" if g.verdict.is_lost else ""
    assert f'<p class="outcome{lost}">{verdict}</p>' in html
    assert (f"<p>Next: {to_do}" in html.replace("&#34;", '"')) == bool(to_do)
    problems = problems_of_run(folder)
    if lost:
        assert f"Verdict: {verdict}." in problems[0].what
        assert to_do in problems[0].fix
    told = "".join(path.read_text(errors="replace") for path in folder.glob("events*"))
    assert told.rindex(verdict) > told.rindex("guard/verdict")
    assert "last good snapshot" not in "\n".join([*shown, html])
    advised = [following, *(each.fix for each in problems)]
    assert any(MINE in own for own in advised) == (to_do == MINE)


@pytest.mark.parametrize(
    ("calm", "first"), [(60, MINE), (9, "begin again, as no checkpoint is of before step 9")]
)
def test_every_error_of_a_lost_run_names_the_step_at_which_it_began(calm, first, tmp_path):
    worse = [(20, (gap, 1.0)) for gap in (5e2, 5e4, 5e6)]
    g = lived(tmp_path / "run", (calm, CALM), *worse)
    errors = [alert for alert in g.alerts if alert.level is Level.ERROR]
    assert len(errors) == len(worse)
    assert errors[-1].step > errors[0].step == g.verdict.step == calm
    assert [alert.remedies[0].partition(";")[0] for alert in errors] == [first] * len(worse)
    assert all("(limit 0 " not in alert.message for alert in g.alerts)


def test_a_resumed_run_has_the_verdict_of_the_rows_that_count(tmp_path):
    def write(name: str, levels: list[tuple[int, float]], *rollbacks: dict[str, Any]) -> str:
        path = tmp_path / name
        path.mkdir()
        alerts = [{"step": 3, "level": "ERROR", "rule": "energy_blowup"} | ALERT]
        for file, records in (
            ("metrics", [{"step": s, "alert_level": level} | ROW for s, level in levels]),
            ("alerts", alerts),
            ("recovery", [*rollbacks]),
        ):
            (path / f"{file}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in records))
        return str(RecordedRun.read(path).verdict)

    lost: list[tuple[int, float]] = [(0, 0.0), (1, 0.0), (2, 0.0), (3, 2.0), (4, 2.0)]
    assert write("lost", lost) == "lost since step 3 (energy_blowup)"
    assert write("left", [*lost, (5, 0.0)]) == "recovered at step 5 (energy_blowup)"
    assert write("resumed before", [*lost, (2, 0.0), (3, 0.0)]) == "healthy"
    assert write("resumed within", [*lost, (4, 2.0)]) == "lost since step 3 (energy_blowup)"
    back = {"step": 4, "restored_step": 1, "attempt": 1, "rule": "energy_blowup"} | ROLLBACK
    saved = "saved by 1 rollback, the last to step 1 (energy_blowup)"
    assert write("rolled back", lost, back) == saved


ROW = {"energy_gap": 0.5}
ALERT = {"tag": "energy_gap", "value": 9.0, "limit": 1.0, "remedies": [], "message": ""}
ROLLBACK = {"tag": "energy_gap", "value": 9.0, "message": "", "budget_left": 4, "relapse": False}
ROLLBACK |= {"changes": {}}


def fixes(path: Path, changes: dict[str, list[float]]) -> str:
    """Those of a run with an ESS of 0.02 at beta* = 0.5, whose rollback changed something."""
    path.mkdir()
    row = ROW | {"ess": 0.02, "f_neg/std": 10.2, "beta_star": 0.5, "alert_level": 0.0}
    rows = [{"step": step, "recovery/attempt": 1.0} | row for step in range(300)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(own) + "\n" for own in rows))
    back = {"step": 4, "restored_step": 0, "attempt": 1, "rule": "energy_blowup"} | ROLLBACK
    (path / "recovery.jsonl").write_text(json.dumps(back | {"changes": changes}) + "\n")
    return " ".join(each.fix for each in problems_of_run(path))


def test_no_page_advises_against_what_a_rollback_has_done(tmp_path):
    said = fixes(tmp_path / "raised", {"beta_star": [0.2, 0.5]})
    assert "begin the next run with beta_star 0.5" in said
    assert "more negatives per step" in said
    assert "lower beta_star" not in said
    assert "0.098" not in said
    said = fixes(tmp_path / "slowed", {"lr": [0.1, 0.01]})
    assert "lower beta_star; more negatives per step; beta_star of about 0.098" in said


def test_tensorboard_shows_the_latest_verdict_last(tmp_path):
    """Its text page sorts by step, and keeps the texts of steps that a rollback abandoned."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    for step in range(5):
        sink.write_row(step, ROW, {})
    sink.write_verdict(4, "lost")
    sink.write_recovery({"step": 4, "restored_step": 1, "attempt": 1} | ROLLBACK)
    sink.write_verdict(1, "saved")
    sink.flush()
    events = EventAccumulator(str(tmp_path), {"tensors": 0}).Reload()
    texts = sorted(events.Tensors("guard/verdict"), key=lambda event: event.step)
    assert texts[-1].tensor_proto.string_val == [b"saved"]
