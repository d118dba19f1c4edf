"""The population of recorded runs: fates, verdicts, choice of thresholds, what rules find."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import benchmarks.population.__main__ as main
from benchmarks.population import judged
from benchmarks.population.__main__ import verdicts_of
from benchmarks.population.detectors import BASELINES, errors_of, shipped
from benchmarks.population.families import KINDS, Run, population
from benchmarks.population.fates import fate_of
from benchmarks.population.judged import Recorded, load, scores, verdict
from benchmarks.population.record import pack, record, rows_of
from ebmguard.alerts import Judge, Level
from ebmguard.tags import SAMPLER_UNIT

QUIET = np.random.default_rng(0).normal(size=400) * 0.1
LEARNING = np.minimum(95, 10 + np.arange(400.0))


def trace_of(gap=QUIET, skill=LEARNING, overlap=0.5, beta_star=0.0, scale=0.98, spread=0.5):
    whole = {"energy_overlap": overlap, "beta_star": beta_star, "grad_scale": scale}
    columns = {name: np.full(len(gap), value) for name, value in whole.items()}
    columns |= {"energy_gap": gap, "skill": skill, "f_pos/std": np.broadcast_to(spread, len(gap))}
    return {name: np.asarray(x, np.float32) for name, x in columns.items()}


def recorded(**columns):
    trace = trace_of(**columns)
    return Recorded(Run("family", 0, "digits", 1e-3), trace, fate_of(trace))


BREAKS = np.where(np.arange(400) < 300, QUIET, 2.0 ** np.minimum(np.arange(400) - 300.0, 60))
VISITS = np.where(np.abs(np.arange(400) - 300) < 5, 5e3, QUIET)
ENDS = np.where(np.arange(400) < 300, 0.5, 0.001)
FORGETS = np.where(np.arange(400) < 300, LEARNING, 60)
STRAGGLERS = {"gap": QUIET + 30, "beta_star": 2.0}
FATES: dict[str, Any] = {
    "a quiet run that learns": ({}, "healthy", None),
    "a gap that doubles": ({"gap": BREAKS}, "dead", 310),
    "an infinite gap": ({"gap": np.where(np.arange(400) < 300, QUIET, np.inf)}, "dead", 300),
    "a visit": ({"gap": VISITS}, "healthy", None),
    "nothing learned": ({"skill": np.full(400, 10.0)}, "limping", None),
    "forgotten": ({"skill": np.where(np.arange(400) < 300, LEARNING, 60)}, "limping", None),
    "a sampler that lags": ({"gap": QUIET + 30}, "limping", None),
    "a sampler that never gets there": ({"overlap": 0.0}, "limping", None),
    "stragglers without a weight": (STRAGGLERS | {"scale": 0.9}, "healthy", None),
    "a constant": ({"gap": ENDS, "skill": FORGETS, "spread": ENDS + 0.001}, "collapsed", 310),
    "a constant that still tells": ({"gap": ENDS, "spread": ENDS + 0.001}, "healthy", None),
    "and no other negatives": (STRAGGLERS | {"scale": 0.1}, "limping", None),
}


@pytest.mark.parametrize("name", FATES)
def test_a_fate_is_told_by_what_happened_in_any_units(name):
    columns, *expected = FATES[name]
    for scale in (1.0, 1e-3, 1e3):
        trace = trace_of(**columns)
        scaled = {x: trace[x] * np.float32(scale) for x in ("energy_gap", "f_pos/std")}
        found = fate_of(trace | scaled, scale=scale)
        assert [found.name, found.death] == expected


def test_an_error_is_true_if_the_run_breaks_or_loses_points_soon():
    dying = recorded(gap=BREAKS, skill=np.where(np.arange(400) < 304, LEARNING, 10))
    found = verdict(dying, [50, 302])
    assert (found.false, found.in_time, found.ahead, found.lost) == ((50,), True, 8, 0)
    assert found.is_possible
    late = verdict(dying, [309])
    assert (late.in_time, late.lost) == (True, 85)
    assert not verdict(dying, [310]).in_time
    forgets = recorded(skill=np.where(np.arange(400) < 300, LEARNING, 60))
    assert verdict(forgets, [150, 250]).false == (150,)
    step = np.arange(400)
    recovers = recorded(skill=np.where((step < 300) | (step >= 350), LEARNING, 60))
    healthy = [verdict(recorded(), [7]), verdict(recorded(), []), verdict(recovers, [250])]
    total = scores([found, *healthy])
    assert total["healthy, false"] == (1, 3)
    assert total["per 1,000 steps"] == (1, 1.2)
    assert total["in time"] == total["under 5 points"] == (1, 1)
    gone = recorded(gap=ENDS, skill=FORGETS, spread=ENDS)
    assert [verdict(gone, [step]).in_time for step in (150, 250, 399)] == [False, True, True]


@pytest.mark.parametrize("family", ["waves-gru", "energy-scales", "sets-lion"])
def test_a_run_is_recorded_as_the_guard_saw_it(family, tmp_path, monkeypatch):
    """A few steps: the rows are the guard's, to 12 bits, and a packed file has them again."""
    run = replace(population({family: KINDS[family]}, 1)[0], steps=6)
    seen = record(run, tmp_path)
    assert seen["steps"] == 6
    with np.load(tmp_path / f"{run.name}.npz") as archive:
        kept = dict(archive)
    pack(tmp_path, tmp_path / "packed" / "first.npz")
    monkeypatch.setattr(judged, "group_of", lambda _: [run])
    (found,) = load("first", folder=tmp_path / "packed")
    assert found.trace.keys() == kept.keys() | {SAMPLER_UNIT}
    for tag, values in kept.items():
        np.testing.assert_array_equal(found.trace[tag], values)
    assert found.rows[0]["beta_star"] == pytest.approx(run.beta_star / run.scale, rel=2**-12)
    assert min(row["energy_overlap"] for row in found.rows) >= 0


def test_anyones_detector_is_judged(monkeypatch, capsys):
    """One that knows no labels, named as on the command line, on the same runs as the others."""
    monkeypatch.setattr(sys, "argv", ["population", "--detector", f"{__name__}:at_fifty"])
    monkeypatch.setattr(main, "GROUPS", ("new",))
    some = [each for each in load("new") if each.run.number == 0]
    monkeypatch.setattr(main, "load", lambda _: some)
    main.main()
    (own,) = [line for line in capsys.readouterr().out.splitlines() if ":at_fifty" in line]
    dead = [each.fate.death or 0 for each in some if each.fate.name == "dead"]
    found = sum(50 < death <= 100 for death in dead)
    assert own.split("|")[2].strip() == f"{found} of {len(dead)}"


def at_fifty(rows):
    assert "skill" not in rows
    return [50]


def test_what_the_rules_find_in_the_population():
    """A sixth of the recorded runs through the rules as they are: the page, as a floor."""
    runs = [each for each in load("first", "new") if each.run.number % 6 == 0]
    fates = Counter(each.fate.name for each in runs)
    assert min(fates["dead"], fates["healthy"]) >= 20

    def shares(detect, *names):
        found = scores(verdicts_of(runs, detect))
        return [count / of for count, of in (found[name] for name in names)]

    false, in_time, early = shares(shipped, "healthy, false", "in time", "under 5 points")
    assert false <= 1 / 25
    assert min(in_time, early) >= 0.8
    for title, detect in BASELINES.items():  # none is better in both
        others, found = shares(detect, "healthy, false", "in time")
        assert not (found > in_time and others <= false), title


def test_energies_in_other_units_have_the_same_errors():
    """Whole runs: f times c is the same run where step sizes and beta* are over c."""
    factor = 1e3
    energies = re.compile(r"f_(pos|neg)/|energy_gap|loss|sampler/(grad_norm|unit)|optim/grad")
    runs = [each for each in load("first", "new") if each.run.number % 12 == 1]
    fates = Counter(each.fate.name for each in runs)
    assert min(fates["dead"], fates["healthy"]) >= 7
    for each in runs:
        by = {tag: factor for tag in each.trace if energies.match(tag)} | {"beta_star": 1 / factor}
        rows = [{tag: x * by.get(tag, 1.0) for tag, x in row.items()} for row in each.rows]
        assert errors_of(rows) == errors_of(each.rows), each.run.name


def test_a_healthy_run_leaves_the_error_of_its_first_rows_and_a_dying_one_does_not():
    """Of a run with an ERROR in its third row, and of early deaths, up to the death."""
    runs = load("new")
    (healthy,) = [each for each in runs if each.run.name == "latent-prior-11"]
    early = [each for each in runs if each.fate.name == "dead" and (each.fate.death or 0) <= 60]
    assert len(early) >= 15
    for each in [healthy, *early]:
        judge = Judge()
        was_lost = False
        for step, row in enumerate(each.rows[: each.fate.death]):
            judge.observe(step, row)
            was_lost |= judge.level is Level.ERROR
        assert (judge.level is Level.ERROR) == (was_lost and each is not healthy)
        assert was_lost or each is not healthy


def test_rows_lack_what_was_not_known():
    trace = trace_of() | {"ess": np.asarray([np.nan, *np.ones(399)], np.float32)}
    trace["nonfinite/energies"] = np.full(400, np.nan, np.float32)
    first, second, *_ = rows_of(trace)
    assert "ess" not in first
    assert "skill" not in first
    assert math.isnan(first["nonfinite/energies"])
    assert second["ess"] == 1
