"""energy_blowup: shapes, shares, caps, episodes, new baselines; and what must not matter to it."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebmguard.alerts import DEFAULT_RULES, BandRule, Judge, Level, Series
from ebmguard.errors import ConfigError

from .parts import Row, excerpt, feed, levels, make_row, noise

SHIPPED = next(rule for rule in DEFAULT_RULES if isinstance(rule, BandRule))
BAND = replace(SHIPPED, begins=0)  # of a run that is under way
GAP, ERROR_AT_1 = "energy_gap", [(Level.ERROR, 1)]
# f_neg deep below the rest, while half of the pairs still compete: beta* = 2 absorbs this.
ABSORBED: dict[str, Any] = {"beta_star": 2.0, "energy_overlap": 0.4, "f_neg__min": -200.0}


def run(rows, what=BAND):
    return feed(what, rows)


OPENING = [
    make_row(
        energy_gap=2 * (1 - math.exp(-t / 10)),
        f_pos__median=2.3 + 3 * math.exp(-((t - 15) ** 2) / 50),
        f_pos__std=0.003 + min(t / 100, 1),
        sampler__grad_norm=0.008 + min(t / 50, 0.5),
    )
    for t in range(100)
]
RAMP = [make_row(energy_gap=0.5 * t, sampler__grad_norm=0.2 + 0.01 * t) for t in range(300)]
WIDE = [make_row(energy_gap=0.0 if t % 2 else 90.0) for t in range(20)]
LARGE = make_row(f_pos__median=2300.0)
DRAW = random.Random(0)
JITTER = [{"f_pos/median": 1e6 + (0.06 if DRAW.random() < 0.2 else 0.0)} for _ in range(100)]
STANDING = [make_row()] * 60
SURGE = make_row(**ABSORBED, energy_gap=40.0, sampler__grad_norm=9.0)
STORIES: dict[str, tuple[list[Row], list[tuple[Level, int]]]] = {
    **{f"noise {seed}": (noise(1000, seed), []) for seed in range(5)},
    "first steps that move quickly": (OPENING, []),
    "a ramp": (RAMP, []),
    "weights that absorb an excess keep it a warning": (
        [*noise(50, **ABSORBED), SURGE],
        [(Level.WARN, 50)],
    ),
    "but not beyond the cap": ([make_row(**ABSORBED, energy_gap=1.1e4)], [(Level.ERROR, 0)]),
    "a cap holds from the first step": ([make_row(), make_row(energy_gap=-110.0)], ERROR_AT_1),
    "of the positives": ([make_row(), make_row(f_pos__median=-1.1e4)], ERROR_AT_1),
    "within the early cap": ([make_row(), make_row(energy_gap=-90.0)], []),
    "within the cap of the positives": ([make_row(), make_row(f_pos__median=-9e3)], []),
    "the early cap ends where the band begins": ([*WIDE, make_row(energy_gap=110.0)], []),
    "and not before": ([*WIDE[1:], make_row(energy_gap=110.0)], [(Level.ERROR, 19)]),
    "the cap grows with the energies of the first row": ([LARGE, LARGE | {GAP: 2.2e4}], []),
    "so many times": ([LARGE, LARGE | {GAP: 2.4e4}], ERROR_AT_1),
    "a gradient norm of zero is unknown": (
        [*noise(60), *[make_row(sampler__grad_norm=0.0)] * 60],
        [],
    ),
    # MAD 0: the floor is a tenth of the spread of f_pos (1.0), so the limit is at 0.8.
    "ripples of a series that stands still": ([*STANDING, make_row(energy_gap=0.79)], []),
    "more than a ripple": ([*STANDING, make_row(energy_gap=0.81)], [(Level.WARN, 60)]),
    "float32 jitter of a large offset": (JITTER, []),
}


@pytest.mark.parametrize("name", STORIES)
def test_a_story_has_its_alerts(name):
    rows, expected = STORIES[name]
    alerts = run(rows)
    assert levels(alerts) == expected
    limits = {"a cap holds from the first step": 100, "of the positives": 1e4}
    limits["more than a ripple"] = 0.8
    for alert in alerts:
        assert alert.limit == pytest.approx(limits.get(name, alert.limit))


def test_growth_from_nothing_is_a_warning_until_the_gap_is_large():
    """Energies that double every five steps, as in a network that has just begun to learn."""
    rows = [
        make_row(
            energy_gap=0.001 * 2 ** (t / 5),
            f_pos__median=0.0,
            f_pos__std=0.0005 * 2 ** (t / 5),
            f_neg__min=-0.002 * 2 ** (t / 5),
            sampler__grad_norm=0.01 * (1 + 0.1 * 2 ** (t / 5)),
        )
        for t in range(90)
    ]
    alerts = run(rows, SHIPPED)
    assert alerts[-1].level is Level.ERROR
    reached = next(t for t, row in enumerate(rows) if row["energy_gap"] >= SHIPPED.begins_gap)
    assert alerts[-1].step == reached
    assert min(alert.step for alert in run(rows) if alert.level is Level.ERROR) < reached


def test_after_its_beginning_a_small_gap_is_an_error_too():
    rows = noise(SHIPPED.begins + 1)
    jump = make_row(energy_gap=SHIPPED.begins_gap - 0.01, sampler__grad_norm=2.0)
    assert levels(run([*rows[:-2], jump], SHIPPED)) == [(Level.WARN, SHIPPED.begins - 1)]
    assert levels(run([*rows[:-1], jump], SHIPPED)) == [(Level.ERROR, SHIPPED.begins)]


@pytest.mark.parametrize(
    ("changes", "level", "tag"),
    [
        ({"energy_gap": 4.0}, Level.ERROR, "energy_gap"),
        ({"energy_gap": -4.0}, Level.ERROR, "energy_gap"),
        ({"energy_gap": 1.6}, Level.WARN, "energy_gap"),
        ({"f_pos__median": 9.0}, Level.WARN, "f_pos/median"),
        ({"f_pos__median": -5.0}, Level.WARN, "f_pos/median"),
        ({"f_pos__median": 4.2}, Level.WARN, "f_pos/median"),
        ({"f_neg__min": -9.0}, Level.WARN, "f_neg/min"),
        ({"f_neg__min": -1e3}, Level.WARN, "f_neg/min"),
        ({"sampler__grad_norm": 0.75}, Level.WARN, "sampler/grad_norm"),
        ({"sampler__grad_norm": 9.0}, Level.ERROR, "sampler/grad_norm"),
        # The harmless side.
        ({"f_neg__min": 1.9}, None, ""),
        ({"sampler__grad_norm": 1e-4}, None, ""),
        # What several series say adds up, but for one that only warns.
        ({"energy_gap": 1.6, "sampler__grad_norm": 0.75}, Level.ERROR, "sampler/grad_norm"),
        ({"energy_gap": 1.6, "f_neg__min": -100.0}, Level.WARN, "f_neg/min"),
        (
            {"energy_gap": 1.6, "sampler__grad_norm": 0.75, "f_neg__min": -100.0},
            Level.ERROR,
            "sampler/grad_norm",
        ),
        # A shift of all energies is a WARN: half of an ERROR at most is the positives' own.
        ({"f_pos__median": 40.0}, Level.WARN, "f_pos/median"),
        ({"f_pos__median": 40.0, "energy_gap": 1.2}, Level.ERROR, "energy_gap"),
    ],
)
def test_a_row_after_many_healthy_ones(changes, level, tag):
    row = make_row(**changes)
    alerts = run([*noise(50), row])
    assert [(a.level, a.step, a.tag) for a in alerts] == ([(level, 50, tag)] if level else [])
    for alert in alerts:
        low, middle, high = sorted((make_row()[tag], alert.limit, row[tag]))
        assert low < middle == alert.limit < high


def test_shares_of_an_error_add_up_to_one():
    # A constant past: the scale is the floor, 0.1 of a spread of 1, so a distance is 10 times x.
    past = [{"energy_gap": 0.0, "f_pos/median": 0.0, "f_pos/std": 1.0}] * 50

    def level_of(gap, pos):
        alerts = run([*past, {"energy_gap": gap, "f_pos/median": pos, "f_pos/std": 1.0}])
        return alerts[0].level if alerts else None

    gap, pos = (series.error for series in BAND.series[:2])
    assert level_of(0.0501 * gap, 0.05 * pos) is Level.ERROR
    assert level_of(0.0499 * gap, -0.05 * pos) is not Level.ERROR
    # No series needs to have left its band by itself.
    assert BAND.series[1].warn >= 0.5 * pos


def test_the_limit_is_where_the_sum_would_reach_one():
    past = [{"energy_gap": 0.0, "f_pos/median": 0.0, "f_pos/std": 1.0}] * 50
    (alert,) = run([*past, {"energy_gap": 1.5, "f_pos/median": 0.8, "f_pos/std": 1.0}])
    # 0.8 is a share of 8 / 16; half a share of the gap, 10 of its 20, is missing.
    assert (alert.tag, alert.limit) == ("energy_gap", pytest.approx(1.0))


@pytest.mark.parametrize(
    "change",
    [
        {"beta_star": 0.0},
        {"beta_star": -2.0},
        {"beta_star": 1e-6},
        {"beta_star": math.nan},
        {"energy_overlap": 0.0},
        {"energy_overlap": 0.005},
        {"energy_overlap": math.nan},
        {"f_neg__min": 3.0},
        {"energy_gap": -40.0},
        {"energy_overlap": 0.0, "f_pos__median": 40.0, "energy_gap": 38.0},
    ],
)
def test_what_the_weights_do_not_absorb_is_an_error(change):
    surge = make_row(**(ABSORBED | {"energy_gap": 40.0} | change))
    past = noise(50, f_neg__min=-200.0)
    assert levels(run([*past, surge])) == [(Level.ERROR, 50)]
    without = {"beta_star": 2.0, "energy_gap": 40.0}  # tags that are missing absorb nothing
    assert levels(run([*past, without])) == [(Level.ERROR, 50)]


@pytest.mark.parametrize(("tail", "level"), [(1.8, Level.ERROR), (2.4, Level.WARN)])
def test_absorption_needs_a_deep_tail_for_the_share_that_competes(tail, level):
    # Half of the pairs compete, so beta* times the tail's depth must be 2 nats.
    surge = make_row(beta_star=1.0, energy_overlap=0.5, energy_gap=40.0, f_neg__min=3.5 - tail)
    assert levels(run([*noise(50), surge])) == [(level, 50)]


def test_a_doubling_is_an_error_long_before_the_cap():
    growing = [make_row(energy_gap=0.01 * 2 ** max(0, t - 60)) for t in range(80)]
    alerts = run(growing)
    assert [a.level for a in alerts] == [Level.WARN, Level.ERROR]
    # Long before 1e4 is reached, at step 80.
    assert alerts[-1].step < 72


def test_heavy_tails_do_not_make_errors():
    draw = random.Random(1)
    rows = [
        # Student's t with 5 degrees of freedom: outliers of 8 sigma come along now and then.
        make_row(energy_gap=0.1 * draw.gauss(0, 1) / math.sqrt(draw.gammavariate(2.5, 0.4)))
        for _ in range(5000)
    ]
    alerts = run(rows)
    assert [a for a in alerts if a.level is Level.ERROR] == []
    assert len(alerts) <= 5


@pytest.mark.parametrize(
    ("gap", "first"), [(1.6, "raise beta_star"), (9.0, "roll back to the last good snapshot")]
)
def test_the_remedies_follow_the_level(gap, first):
    (alert,) = run([*noise(50), make_row(energy_gap=gap, f_neg__min=3.5)])
    assert alert.remedies[0] == first
    assert "lower the learning rate" in alert.remedies


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("tag", ["energy_gap", "f_pos__median", "sampler__grad_norm"])
def test_non_finite_values_are_another_rule_s_business(tag, value):
    broken = [make_row(**{tag: value, "f_pos__std": value})] * 60
    alerts = run([*noise(60), *broken, *noise(60, seed=1), make_row(energy_gap=4.0)])
    # Neither an alarm nor a hole in the band: the later blow-up is found as ever.
    assert levels(alerts) == [(Level.ERROR, 180)]


def test_a_blow_up_does_not_widen_its_own_band():
    rows = [*noise(60), *[make_row(energy_gap=5.0 + t) for t in range(30)], *noise(64, seed=1)]
    judge = Judge([BAND])
    run(rows, judge)
    assert judge.level is None
    # The same again, and again an ERROR: the band is as narrow as it was.
    assert levels(run([make_row(energy_gap=5.0)], judge)) == [(Level.ERROR, 0)]


def test_a_lasting_shift_becomes_the_new_band():
    judge = Judge([BAND])
    run(noise(100), judge)
    alerts = run(noise(200, seed=1, gap=5.0), judge)
    assert levels(alerts) == [(Level.ERROR, 0)]
    assert judge.level is None
    # And the new level is guarded as the old one was.
    (alert,) = run([*noise(200, seed=1, gap=5.0), *noise(1, gap=0.0)])
    assert alert.level is Level.ERROR


def test_the_shift_is_adopted_after_rebaseline_steps_and_not_before():
    rule = replace(BAND, rebaseline=40)
    for count, active in [(39 + 9, True), (40 + 10, False)]:
        judge = Judge([rule])
        run([*noise(100), *noise(count, seed=1, gap=5.0)], judge)
        assert (judge.level is not None) is active


def test_values_beyond_the_cap_never_become_normal():
    judge = Judge([BAND])
    run([*noise(100), *[make_row(energy_gap=2e4)] * 500], judge)
    assert judge.level is Level.ERROR
    # So that the run is back in its old band at once when it comes back.
    run([make_row()] * 10, judge)
    assert judge.level is None


def test_the_episode_lasts_until_the_tighter_band():
    judge = Judge([BAND])
    # The scale is the floor, 0.1: WARN at 0.8, calm below 0.4.
    run([*[make_row()] * 60, make_row(energy_gap=1.0)], judge)
    run([make_row(energy_gap=0.6)] * 30, judge)
    assert judge.level is Level.WARN
    run([make_row(energy_gap=0.3)] * 10, judge)
    assert judge.level is None


def test_an_old_outlier_does_not_hasten_the_adoption_of_a_shift():
    judge = Judge([BAND])
    outlier = make_row(energy_gap=5.0)
    run([*noise(100), outlier, *noise(15, seed=1)], judge)
    assert judge.level is None
    run(noise(49, seed=2, gap=5.0), judge)
    assert judge.level is Level.ERROR


def test_a_blow_up_does_not_raise_the_floor():
    judge = Judge([BAND])
    wide = make_row(energy_gap=5.0, f_pos__std=100.0)
    run([*[make_row()] * 60, *[wide] * 45], judge)
    assert judge.level is Level.ERROR


@settings(max_examples=20)
@given(exponent=st.integers(-20, 20))
def test_the_unit_of_the_energies_does_not_matter(exponent):
    """f in other units: same alerts at the same steps, with values and limits in these units."""
    unit = 2.0**exponent
    # Caps follow the unit through the run's very first row, which these excerpts do not have.
    rule = replace(
        BAND, series=tuple(replace(s, cap=math.inf, early_cap=math.inf) for s in BAND.series)
    )
    energies = ("energy_gap", "f_pos/median", "f_pos/std", "f_neg/min", "f_neg/q95")
    for name in ("blowup_b", "weak_beta", "absorbed_surge"):
        recorded = excerpt(name).rows[:-4]
        scaled = [
            {
                tag: v * unit if tag in energies or tag == "sampler/grad_norm" else v
                for tag, v in row.items()
            }
            | {"beta_star": row["beta_star"] / unit}
            for row in recorded
        ]
        expected, found = run(recorded, rule), run(scaled, rule)
        assert [(a.level, a.step, a.tag) for a in found] == [
            (a.level, a.step, a.tag) for a in expected
        ]
        assert len(found) >= 1
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.value == theirs.value * unit
            assert mine.limit == pytest.approx(theirs.limit * unit)


@settings(max_examples=20)
@given(shift=st.floats(-3e3, 3e3))
def test_a_constant_added_to_all_energies_does_not_matter(shift):
    """The loss is invariant to it, and so are the alerts."""
    for name in ("blowup_b", "weak_beta", "absorbed_surge"):
        recorded = excerpt(name).rows
        shifted = [
            {
                tag: v + shift if tag in ("f_pos/median", "f_neg/min", "f_neg/q95") else v
                for tag, v in row.items()
            }
            for row in recorded
        ]
        assert levels(run(shifted)) == levels(run(recorded))


def test_rules_that_contradict_themselves_are_refused():
    with pytest.raises(ConfigError, match="warn <= error"):
        Series("energy_gap", warn=9, error=8)
    with pytest.raises(ConfigError, match="min_count"):
        replace(BAND, min_count=60)
    with pytest.raises(ConfigError, match="absorb_nats"):
        replace(BAND, absorb_nats=0.0)
    with pytest.raises(ConfigError, match="one series a tag"):
        replace(BAND, series=BAND.series[:1] * 2)
