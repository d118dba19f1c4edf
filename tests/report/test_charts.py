"""What a chart reads of a row, and the limits that the rules set it."""

from __future__ import annotations

import math
from statistics import median

import pytest

from ebmguard.alerts import DEFAULT_RULES, Bands, FloorRule, GrowthRule, Judge, Level, MedianRule
from ebmguard.report.folder import value_of
from ebmguard.report.plots import CHARTS, MORE_CHARTS
from ebmguard.sinks import read_jsonl

from .folders import rows, write

TAGS = [chart.name for chart in (*CHARTS, *MORE_CHARTS)]


def test_at_beta_star_zero_weights_are_those_of_the_reference():
    row = {"beta_star": 0.0, "ess": 1.0, "ref/ess": 0.3, "energy_gap": 2.0}
    assert value_of(row, "ess") == 0.3
    assert value_of(row | {"beta_star": 0.5}, "ess") == 1.0
    assert value_of(row, "energy_gap") == 2.0
    assert value_of(row, "pareto_k") is None


def test_a_moving_band_is_growth_over_the_runs_own_past():
    bands, rule = Bands(), next(rule for rule in DEFAULT_RULES if isinstance(rule, GrowthRule))
    assert isinstance(rule, GrowthRule)
    sizes: list[float] = []
    spreads: list[float] = []
    for step, row in rows(range(6 * rule.rows), seed=5):
        limits, spread = bands.read(row)["energy_gap"], row["f_pos/std"]
        start = max(0, step - 5 * rule.rows // 2)
        past = slice(start, max(1, step - rule.rows // 2))
        usual = max(rule.unit, median(spreads[past] or [spread]))
        warn = error = rule.spreads * math.sqrt(usual * max(usual, spread))
        if step > 2 * rule.rows:  # no sampler witnesses a blow-up
            record = max(sizes[past]) + rule.unit
            warn, error = (
                min(error, record * math.exp(x * rule.growth) - rule.unit - spread) for x in (1, 2)
            )
            assert limits == pytest.approx((-warn, warn, -error, error))
        sizes.append(abs(row["energy_gap"]) + spread)
        spreads.append(spread)


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
    path, detector, bands = write(tmp_path / "run", rescued=False), Judge(), Bands()
    reported = []
    for row in read_jsonl(path / "metrics.jsonl"):
        alerts = detector.observe(row["step"], row)
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
