"""Problems of run folders, `ebmguard check RUN`, how runs ended, and what helps."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ebmguard.alerts import DEFAULT_RULES, Alert, Judge, Level, MedianRule
from ebmguard.report.folder import RecordedRun
from ebmguard.report.problems import advice, problems_of_run
from ebmguard.sinks import JsonlSink
from tests.sinks.parts import RECOVERY

from .folders import BACK_TO, record
from .folders import write as write_run

STEPS = 300
HEALTHY = {
    "beta_star": 0.5,
    "grad_scale": 0.98,
    "ref/grad_scale": 0.98,
    "ess": 0.6,
    "ref/ess": 0.6,
    "energy_gap": 0.2,
    "energy_gap_scaled": 4000.0,
    "energy_overlap": 0.45,
    "f_neg/std": 0.5,
    "sampler/drift_to_noise": 1.5,
    "sampler/clamped": 0.01,
    "sampler/acceptance": 0.7,
    "sampler/repeated": 0.0,
    "buffer/reinit": 0.05,
    "optim/amplification": 1.0,
    "nonfinite/energies": 0.0,
    "nonfinite/samples": 0.0,
    "nonfinite/gradients": 0.0,
    "scaler/skipped": 0.0,
}
CONFIG = {"iterations": STEPS, "settings": {"step_size": 1.0, "noise_std": 0.01}}
ALERT = Alert("energy_blowup", Level.ERROR, 200, "energy_gap", 9.0, 3.0, 64, ("one", "two"))
ROLLBACK = RECOVERY | {
    "step": 200,
    "restored_step": 150,
    "value": 9.0,
    "certified": True,
    "changes": {"beta_star": [0.0, 2.0]},
    "message": "Rollback 1 at step 200.",
}


def write(path, rows=None, *, alerts=(), rollbacks=(), config=CONFIG, results=None, accuracy=()):
    record(path, [(row["step"], row) for row in (rows_with() if rows is None else rows)])
    sink = JsonlSink(path)
    for alert in alerts:
        sink.write_alert(alert.record())
    for rollback in rollbacks:
        sink.write_recovery(rollback)
    sink.flush()
    for name, content in (("config", config), ("results", results or {"diverged_at": None})):
        (path / f"{name}.json").write_text(json.dumps(content))
    lines = [json.dumps({"step": step, "test_accuracy": value}) for step, value in accuracy]
    (path / "accuracy.jsonl").write_text("\n".join(lines))
    return path


def rows_with(**changes: Any) -> list[dict[str, Any]]:
    """Rows with other values, or functions of the step, under tags written with two underscores."""
    found = []
    for step in range(STEPS):
        own = {
            tag.replace("__", "/"): value(step) if callable(value) else value
            for tag, value in changes.items()
        }
        found.append(HEALTHY | {"step": step} | own)
    return found


@pytest.mark.parametrize(
    ("changes", "name", "level", "words"),
    [
        ({"ess": 0.02}, "weights_degenerate", Level.WARN, "2.0% of the negatives"),
        ({"beta_star": 0.0, "ref__ess": 0.02}, "weights_degenerate", Level.WARN, "2.0%"),
        ({"grad_scale": 0.01}, "sampler_failing", Level.ERROR, "for 300 steps, to the end"),
        (
            {"grad_scale": lambda step: 0.01 if step < 250 else 0.9},
            "sampler_failing",
            Level.WARN,
            "for 250 steps:",
        ),
        (
            {"grad_scale": lambda step: 0.01 if step < 200 else 0.9},
            "sampler_failing",
            Level.WARN,
            "for 200 steps:",
        ),
        ({"grad_scale": lambda step: 0.01 if step < 199 else 0.9}, None, None, ""),
        (
            {"beta_star": 0.0, "ref__grad_scale": 0.01},
            "sampler_failing",
            Level.WARN,
            "ref/grad_scale stayed under",
        ),
        ({"energy_gap_scaled": 400.0}, "output_scale", Level.ERROR, "output_scale = 2000"),
        ({"sampler__clamped": 0.98}, "saturated", Level.WARN, "98% of the samples"),
        ({"buffer__reinit": 0.0}, "stale_chains", Level.INFO, "whole run"),
        (
            {"optim__amplification": lambda step: 1e-6 * (1 + step * step)},
            "amplification",
            Level.WARN,
            "Appendix H",
        ),
        (
            {"nonfinite__samples": lambda step: float(step in (7, 9))},
            "nonfinite",
            Level.ERROR,
            "Samples were NaN or infinite in 2 steps",
        ),
        (
            {"nonfinite__gradients": lambda step: float(step == 3)},
            "nonfinite",
            Level.ERROR,
            "Gradients",
        ),
        (
            {"scaler__skipped": lambda step: float(step % 5 == 0)},
            "scaler_skips",
            Level.WARN,
            "20% of the steps",
        ),
    ],
)
def test_rows_with_one_thing_wrong(changes, name, level, words, tmp_path):
    problems = problems_of_run(write(tmp_path, rows_with(**changes)))
    assert [problem.name for problem in problems] == ([name] if name else [])
    for problem in problems:
        assert problem.severity is level
        assert words in problem.what


@pytest.mark.parametrize("factor", [1 - 1e-3, 1 + 1e-3])
@pytest.mark.parametrize(
    ("rule", "bound"),
    [
        pytest.param(rule, bound, id=f"{bound.tag} {bound.side} {bound.limit:g}")
        for rule in DEFAULT_RULES
        if isinstance(rule, MedianRule)
        for bound in rule.bounds
    ],
)
def test_a_run_has_the_problems_that_its_rules_see_and_no_other(rule, bound, factor, tmp_path):
    rows = rows_with(**{bound.tag: bound.limit * factor})
    detector = Judge()
    alerts = [alert for row in rows for alert in detector.observe(row["step"], row)]
    is_out = (factor > 1) == (bound.side == "above")
    assert [(each.rule, each.level) for each in alerts] == [(rule.name, bound.level)] * is_out
    problems = problems_of_run(write(tmp_path, rows))
    assert [(each.name, each.severity) for each in problems] == [(rule.name, bound.level)] * is_out
    assert [each.what for each in problems if f"limit is {bound.limit:g}." not in each.what] == []
    # Fewer values than the rule's window are no median.
    few = problems_of_run(write(tmp_path / "few", rows[: bound.window - 1], config={}))
    assert bound.tag not in [each.where for each in few]


def test_the_suggested_exponent_is_one_over_the_spread(tmp_path):
    (problem,) = problems_of_run(write(tmp_path, rows_with(ess=0.02, f_neg__std=8.0)))
    assert problem.fix.endswith("; beta_star of about 0.12, one over f_neg/std.")
    (other,) = problems_of_run(write(tmp_path / "small", rows_with(ess=0.02, f_neg__std=1.5)))
    assert "f_neg/std" not in other.fix  # the exponent of 0.5 is under it


def test_how_it_ended(tmp_path):
    accuracy = [(100, 0.97), (290, 0.4)]
    problems = problems_of_run(write(tmp_path, results={"diverged_at": 280}, accuracy=accuracy))
    assert [problem.name for problem in problems] == ["diverged", "accuracy_lost"]
    assert "from 97.0% (step 100) to 40.0%" in problems[1].what


def test_a_run_that_is_not_over(tmp_path):
    path = write(tmp_path, rows_with()[:120])
    (path / "results.json").unlink()
    (problem,) = problems_of_run(path)
    assert problem.name == "not_over"
    assert "120 of 300 steps" in problem.what


def test_what_a_rollback_has_answered_is_told_once(tmp_path):
    (problem,) = problems_of_run(write(tmp_path, alerts=[ALERT], rollbacks=[ROLLBACK]))
    assert (problem.name, problem.severity) == ("rollbacks", Level.INFO)
    assert "beta_star 2" in problem.fix
    later = replace(ALERT, step=180, value=8.0)
    path = tmp_path / "later"
    problems = problems_of_run(write(path, alerts=[ALERT, later], rollbacks=[ROLLBACK]))
    assert [each.name for each in problems] == ["energy_blowup", "rollbacks"]


def test_rollbacks_that_did_not_hold(tmp_path):
    two = write(tmp_path / "two", rollbacks=[ROLLBACK, ROLLBACK | {"step": 210}])
    assert [each.severity for each in problems_of_run(two)] == [Level.WARN]
    spent = ROLLBACK | {"step": 210, "relapse": True, "certified": False, "budget_left": 0}
    problems = problems_of_run(write(tmp_path, rollbacks=[ROLLBACK, spent]))
    assert [(each.name, each.severity) for each in problems] == [
        ("rollbacks", Level.WARN),
        ("uncertified", Level.WARN),
        ("relapse", Level.WARN),
    ]


def test_steps_that_a_rollback_took_back_do_not_count(tmp_path):
    rows = rows_with()[:200]
    rows += [row | {"nonfinite/energies": 1.0} for row in rows_with()[200:210]]
    rows += rows_with()[150:]
    assert problems_of_run(write(tmp_path, rows)) == []


# -- how it ended, and what helps ------------------------------------------------------------------


def test_advice_is_of_the_alerts_that_no_rollback_has_answered(tmp_path):
    lost = RecordedRun.read(write_run(tmp_path / "lost", rescued=False))
    found = advice(lost)
    assert [entry.rule for entry in found] == ["energy_blowup", "nonfinite"]
    assert found[0].remedies == tuple(lost.alerts[0]["remedies"])
    rescued = RecordedRun.read(write_run(tmp_path / "rescued"))
    assert rescued.answered == len(rescued.alerts) == 2
    assert advice(rescued) == []
    # The same again at an earlier step of the next attempt is news.
    rescued.alerts.append(rescued.alerts[0] | {"value": 99.0, "step": BACK_TO + 9})
    rescued.alerts.append(rescued.alerts[0] | {"level": "WARN", "remedies": ["drink tea", "rest"]})
    (entry,) = advice(rescued)
    assert (entry.level, entry.count, entry.first) == ("ERROR", 2, BACK_TO + 9)
    assert entry.remedies[-2:] == ("drink tea", "rest")


def test_a_loss_that_an_alert_reports_is_reported_once(tmp_path):
    path = write_run(tmp_path, rescued=False, finished=False)
    names = [each.name for each in problems_of_run(path)]
    assert "energy_blowup" in names
    assert "diverged" not in names
