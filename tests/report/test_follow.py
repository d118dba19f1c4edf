from __future__ import annotations

import json
import math
import os

import numpy as np
import pytest

from ebmguard.alerts import DEFAULT_RULES, FloorRule, Judge, Level, MedianRule
from ebmguard.errors import ConfigError
from ebmguard.report.advice import advice, before_last_rollback, outcome
from ebmguard.report.charts import CHARTS, MORE_CHARTS, Bands, value_of
from ebmguard.report.follow import Followed
from ebmguard.sinks import JsonlSink, read_jsonl

from .folders import BACK_TO, LOST_AT, rows, write

TAGS = [chart.tag for chart in (*CHARTS, *MORE_CHARTS)]


def follow(path):
    run = Followed(path, TAGS)
    run.update()
    return run


def test_attempts_are_kept_apart_and_the_surviving_one_is_whole(tmp_path):
    run = follow(write(tmp_path / "run"))
    assert [(a.number, a.first, a.last) for a in run.attempts] == [
        (0, 0, LOST_AT + 11),
        (1, BACK_TO, 299),
    ]
    (kept, undone), (again, nothing) = run.pieces("energy_gap")
    assert [own.step for own in kept] == list(range(BACK_TO))
    assert [own.step for own in undone] == list(range(BACK_TO, LOST_AT + 12))
    assert [own.step for own in again] == list(range(BACK_TO, 300))
    assert nothing == []
    recorded = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    expected = {row["step"]: row["energy_gap"] for row in recorded}
    assert {o.step: o.low for o in run.surviving("energy_gap")} == expected
    assert undone[-1].is_gap
    assert undone[-2].bad_at == LOST_AT + 10


def test_evaluations_of_steps_that_were_undone_are_kept_apart(tmp_path):
    path = write(tmp_path / "run")
    at = [(120, 0), (150, 0), (170, 0), (140, 1), (160, 1), (110, 0)]  # late ones out of order
    rows = [{"step": s, "test_accuracy": s / 1000, "attempt": n} for s, n in at]
    (path / "accuracy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = follow(path)
    assert [own.step for own in run.surviving("accuracy")] == [110, 120, 140, 160]
    (_, undone), (kept, _) = run.pieces("accuracy")
    assert [(own.step, own.low) for own in undone] == [(150, 0.15), (170, 0.17)]
    assert [own.step for own in kept] == [140, 160]


def test_at_beta_star_zero_weights_are_those_of_the_reference():
    row = {"beta_star": 0.0, "ess": 1.0, "ref/ess": 0.3, "energy_gap": 2.0}
    assert value_of(row, "ess") == 0.3
    assert value_of(row | {"beta_star": 0.5}, "ess") == 1.0
    assert value_of(row, "energy_gap") == 2.0
    assert value_of(row, "pareto_k") is None


def test_a_moving_band_is_median_and_mad_of_the_runs_own_past():
    bands = Bands()
    past: list[float] = []
    for step, row in rows(range(100), seed=5):
        limits = bands.read(row)["energy_gap"]
        if step < 20:
            assert (limits.low, limits.high) == (-math.inf, math.inf)
        else:
            window = np.array(past[-64:])
            centre = np.median(window)
            scale = max(1.4826 * np.median(abs(window - centre)), 0.1 * row["f_pos/std"])
            assert limits.low == pytest.approx(centre - 8 * scale)
            assert limits.high == pytest.approx(centre + 8 * scale)
            assert limits.error_high == pytest.approx(centre + 20 * scale)
        past.append(row["energy_gap"])


def test_fixed_limits_are_the_rules_own():
    limits = Bands().limits
    for rule in DEFAULT_RULES:
        if isinstance(rule, FloorRule):
            assert limits[rule.tag].low == rule.floor
        if isinstance(rule, MedianRule):
            for bound in rule.bounds:
                if bound.level is Level.WARN:
                    found = limits[bound.tag]
                    assert bound.limit == (found.high if bound.side == "above" else found.low)


def test_a_value_beyond_the_band_is_one_that_the_detector_reports(tmp_path):
    path, judge, bands = write(tmp_path / "run", rescued=False), Judge(), Bands()
    reported = []
    for row in read_jsonl(path / "metrics.jsonl"):
        alerts = judge.observe(row["step"], row)
        bands.read(row)
        for alert in alerts:
            assert bands.level(alert.tag, alert.value) == alert.level
        reported += alerts
        if not reported:
            values = {tag: value_of(row, tag) for tag in TAGS}
            assert not any(bands.level(tag, x) for tag, x in values.items() if x is not None)
    assert [alert.rule for alert in reported] == ["energy_blowup", "nonfinite"]


def test_nan_is_an_alarm_only_where_a_number_is_owed():
    bands = Bands()
    assert bands.level("energy_gap", math.nan) is Level.ERROR
    assert bands.level("pareto_k", math.nan) is None
    assert bands.level("pareto_k", math.inf) is Level.ERROR
    assert bands.level("nonfinite/energies", 0.0) is None
    assert bands.level("nonfinite/energies", 0.1) is Level.ERROR
    assert bands.level("ess", 0.05) is Level.WARN
    assert bands.level("a tag without rules", 1e9) is None


def is_over(run: Followed) -> bool:
    return run.is_over


def test_it_follows_a_run_from_before_it_begins_to_its_end(tmp_path):
    path = tmp_path / "run"
    run = Followed(path, TAGS)
    assert not run.update()
    assert not run.attempts
    sink = JsonlSink(path)
    first = list(rows(range(60), seed=3))
    for step, row in first[:50]:
        sink.write_row(step, row, {})
    sink.flush()
    assert run.update()
    assert (run.step, run.rows) == (49, 50)
    assert not run.update()
    with (path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 50, "energy_g')
    assert not run.update()
    # A trainer that resumes cuts its rows back to its checkpoint, and writes them again.
    lines = (path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    os.truncate(path / "metrics.jsonl", sum(map(len, lines[:40])))
    assert run.update()
    assert (run.step, run.rows, len(run.attempts)) == (39, 40, 1)
    sink = JsonlSink(path)
    for step, row in first[40:]:
        sink.write_row(step, row, {})
    sink.flush()
    assert run.update()
    assert (run.step, run.rows, len(run.attempts)) == (59, 60, 1)
    assert not is_over(run)
    (path / "results.json").write_text('{"steps": ')
    assert follow(path).results is None  # half written
    (path / "results.json").write_text('{"steps": 60}')
    assert run.update()
    assert is_over(run)
    # It goes on: the results are those of an earlier end.
    old = (path / "results.json").stat().st_mtime - 10
    os.utime(path / "results.json", (old, old))
    assert not is_over(run)


def test_a_folder_of_the_guard_alone_is_enough(tmp_path):
    path = write(tmp_path / "run")
    for name in ("config.json", "results.json", "accuracy.jsonl"):
        (path / name).unlink()
    run = follow(path)
    assert (run.config, run.results, run.iterations) == (None, None, None)
    assert run.surviving("accuracy") == []
    assert outcome(run) == "300 steps so far after 1 rollback"


def test_the_outcome_in_words(tmp_path):
    assert outcome(follow(write(tmp_path / "a"))) == "finished 300 steps after 1 rollback"
    assert outcome(follow(write(tmp_path / "b", rescued=False))) == "DIVERGED at step 180"
    running = follow(write(tmp_path / "c", rescued=False, finished=False))
    assert outcome(running) == "192 of 300 steps so far"


def test_advice_is_of_the_alerts_that_no_rollback_has_answered(tmp_path):
    lost = follow(write(tmp_path / "lost", rescued=False))
    found = advice(lost)
    assert [entry.rule for entry in found] == ["energy_blowup", "nonfinite"]
    assert found[0].remedies == tuple(lost.alerts[0]["remedies"])
    rescued = follow(write(tmp_path / "rescued"))
    assert before_last_rollback(rescued) == len(rescued.alerts) == 2
    assert advice(rescued) == []
    # The same again at an earlier step of the next attempt is news.
    rescued.alerts.append(rescued.alerts[0] | {"value": 99.0, "step": BACK_TO + 9})
    rescued.alerts.append(rescued.alerts[0] | {"level": "WARN", "remedies": ["drink tea", "rest"]})
    (entry,) = advice(rescued)
    assert (entry.level, entry.count, entry.first) == ("ERROR", 2, BACK_TO + 9)
    assert entry.remedies[-2:] == ("drink tea", "rest")


def test_severe_rules_come_first(tmp_path):
    run = follow(write(tmp_path / "run", rescued=False))
    warn = run.alerts[0] | {"rule": "sampler_failing", "level": "WARN", "step": 3}
    info = run.alerts[0] | {"rule": "spare", "level": "INFO", "step": 1}
    run.alerts[:0] = [info, warn]
    assert [entry.rule for entry in advice(run)] == [
        "energy_blowup",
        "nonfinite",
        "sampler_failing",
        "spare",
    ]


def test_damaged_files_are_named(tmp_path):
    path = write(tmp_path / "run")
    (path / "config.json").write_text("{broken}")
    with pytest.raises(ConfigError, match=r"config\.json is not JSON"):
        follow(path)
    (path / "config.json").write_text(json.dumps([1]))
    (path / "accuracy.jsonl").write_text('{"step": 3}\n')
    with pytest.raises(ConfigError, match=r"accuracy\.jsonl has no 'test_accuracy'"):
        follow(path)
