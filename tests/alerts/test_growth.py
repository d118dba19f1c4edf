"""energy_blowup: what growth is, what witnesses it, who absorbs it; and what must not matter."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebmguard.alerts import Bands, GrowthRule, Judge, Level, Remedy
from ebmguard.errors import ConfigError

from .parts import GROWTH, Row, excerpt, feed, grown, levels, make_row, noise

WARN, ERROR = Level.WARN, Level.ERROR
# For what follows from the rule's definition, so that the shipped numbers may change.
RULE = replace(GROWTH, warn=0.5, growth=0.8, growth_alone=1.4, apart=0.2, steeper=0.4, start=100.0)
APART = {"energy_overlap": 0.0}
# f_neg deep below the rest, while half of the pairs still compete: beta* = 2 absorbs this.
ABSORBED: dict[str, Any] = {"beta_star": 2.0, "energy_overlap": 0.4, "f_neg__min": -200.0}
ENERGIES = ("energy_gap", "f_pos/median", "f_pos/std", "f_neg/median", "f_neg/min", "f_neg/q95")
SETTLED = max(GROWTH.settle, GROWTH.lag, GROWTH.window)
STANDING = [make_row()] * SETTLED


def found(rule: GrowthRule, rows: Iterable[Row]) -> list[Level | None]:
    """The level of each row, without the judge's memory."""
    watcher = rule.watcher()
    return [watcher.read(row).level for row in rows]


def scaled(rows: Iterable[Row], unit: float) -> list[Row]:
    """The same run with energies in other units; beta* takes its inverse."""
    return [
        {tag: v * unit if tag in ENERGIES else v for tag, v in row.items()}
        | {"beta_star": row["beta_star"] / unit}
        for row in rows
    ]


# -- shapes of runs --------------------------------------------------------------------------------


def tails(count: int, seed: int) -> list[Row]:
    """Student's t with 5 degrees of freedom: outliers of 8 sigma come along now and then."""
    draw = random.Random(seed)
    student = (draw.gauss(0, 0.1) / math.sqrt(draw.gammavariate(2.5, 0.4)) for _ in range(count))
    return [make_row(energy_gap=gap) for gap in student]


def beginning(factor: float, final: float = 20.0) -> list[Row]:
    """All energies grow by a factor a step for 30 steps, and then stand."""
    draw = random.Random(0)
    sizes = [final * factor ** min(0, t - 30) for t in range(200)]
    gaps = [size * math.exp(draw.gauss(0, 0.05)) for size in sizes]
    return [
        make_row(energy_gap=gap, f_pos__std=size / 2, sampler__grad_norm=size, **APART)
        for gap, size in zip(gaps, sizes, strict=True)
    ]


def ramp(slope: float, spread: float) -> list[Row]:
    return [make_row(energy_gap=slope * t, f_pos__std=spread) for t in range(400)]


QUIET = {
    **{f"noise {seed}": noise(1000, seed) for seed in range(5)},
    **{f"noise around {gap}": noise(500, gap=gap) for gap in (-30.0, 2.0, 90.0)},
    **{f"a beginning by factors of {x}": beginning(x) for x in (1.25, 1.5, 2.0, 10.0)},
    "wild first steps": [*[make_row(energy_gap=x) for x in (60, -90, 5, 40)], *noise(200)],
    "a harmless surge": [*noise(200), *noise(1, gap=0.5 * grown(GROWTH.warn)), *noise(50)],
    "energies that close in": [make_row(energy_gap=80 * 0.9**t) for t in range(200)],
}


@pytest.mark.parametrize("unit", [1e-3, 1.0, 1e6])
@pytest.mark.parametrize("name", QUIET)
def test_a_healthy_run_is_quiet_in_any_unit(name, unit):
    assert feed(replace(GROWTH, unit=GROWTH.unit * unit), scaled(QUIET[name], unit)) == []


@pytest.mark.parametrize("unit", [1.0, 1e3, 1e6])
def test_energies_that_are_large_need_no_unit(unit):
    assert feed(GROWTH, scaled(noise(1000), unit)) == []


@pytest.mark.parametrize(
    "rows",
    [
        *[ramp(slope, 1.0) for slope in (0.01, 0.1, 1.0, 3.0)],
        ramp(100.0, 300.0),
        beginning(1.1),
        [*noise(200), *[make_row(energy_gap=0.01 * t) for t in range(400)]],
        *[tails(5000, seed) for seed in range(3)],
    ],
)
def test_a_ramp_or_an_outlier_is_no_error(rows):
    alerts = feed(GROWTH, rows)
    assert [alert for alert in alerts if alert.level is ERROR] == []
    assert len(alerts) <= 5


def creeping(rate: float, **changes: float) -> list[Row]:
    """A gap that has stood, and then grows by so much a step, in logarithms, until it is 1e4."""
    steps = range(int(math.log(1e5) / rate))
    gaps = [0.1 * math.exp(rate * t) for t in steps]
    return [*noise(200), *[make_row(energy_gap=gap, **changes) for gap in gaps]]


def test_slow_growth_of_energies_that_touch_is_no_error():
    assert ERROR not in found(GROWTH, creeping(0.04, energy_overlap=GROWTH.touch))


@pytest.mark.parametrize("overlap", [0.0, 0.14, 0.86, 1.0])
@pytest.mark.parametrize("rate", [0.003, 0.02, GROWTH.growth / GROWTH.lag / 2])
def test_slow_growth_of_energies_that_are_apart_is_an_error_at_a_factor(rate, overlap):
    rows = creeping(rate, energy_overlap=overlap)
    levels = found(GROWTH, rows)
    sizes = [abs(row["energy_gap"]) + row["f_pos/std"] for row in rows]
    limit = (max(sizes[200 - GROWTH.window : 200]) + GROWTH.unit) * math.exp(GROWTH.slow)
    outgrown = next(i for i, size in enumerate(sizes) if size + GROWTH.unit > limit)
    assert levels.index(ERROR) == max(outgrown, 200 + GROWTH.slow_steps - 1)


@pytest.mark.parametrize("before", [GROWTH.window - 1, GROWTH.window])
def test_energies_that_have_not_touched_for_a_whole_window_are_a_start(before):
    rows = [make_row()] * before + creeping(0.05, energy_overlap=0.0)[200:]
    first = found(replace(GROWTH, settle=10**6), rows).index(ERROR)
    assert (abs(rows[first]["energy_gap"]) < 5) == (before == GROWTH.window)


@pytest.mark.parametrize("unit", [1e-3, 1.0, 1e6])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
@pytest.mark.parametrize("past", [0.0, 20.0])
def test_a_gap_that_doubles_is_an_error_soon_after_it_left_its_range(past, steps, sign, unit):
    """The negatives fall under all data, or rise over it: nothing overlaps as it should."""
    before = noise(SETTLED, gap=sign * past)
    base = 0.1 + past
    doubling = [base * 2 ** (t / steps) for t in range(1, 14 * steps)]
    overlap = 0.0 if sign > 0 else 1.0
    rows = [make_row(energy_gap=sign * gap, energy_overlap=overlap) for gap in doubling]
    alerts = feed(replace(GROWTH, unit=GROWTH.unit * unit), scaled([*before, *rows], unit))
    error = next(alert for alert in alerts if alert.level is ERROR)
    left = next(t for t, gap in enumerate(doubling, SETTLED) if gap > base + 1)
    assert left <= error.step <= left + 4 * steps + 2
    assert alerts[0].step >= left  # a WARN is no guess either
    assert error.tag == "energy_gap"
    assert error.value * sign > error.limit * sign > 0


# -- growth, and its witnesses ---------------------------------------------------------------------


@pytest.mark.parametrize("past", [0.0, 7.0, -7.0])
@pytest.mark.parametrize(
    ("growth", "changes", "level"),
    [
        (0.45, APART, None),
        (0.55, {}, WARN),
        (0.75, APART | {"sampler__grad_norm": 9.0}, WARN),
        (0.85, {}, WARN),
        (0.85, {"energy_overlap": 0.21}, WARN),
        (0.85, {"energy_overlap": 0.19}, ERROR),
        (0.85, {"energy_overlap": 0.79}, WARN),
        (0.85, {"energy_overlap": 0.81}, ERROR),
        (0.85, {"sampler__grad_norm": 0.2 * math.exp(0.39)}, WARN),
        (0.85, {"sampler__grad_norm": 0.2 * math.exp(0.41)}, ERROR),
        (1.35, {}, WARN),
        (1.45, {}, ERROR),
        (1.45, {"energy_overlap": math.nan, "sampler__grad_norm": math.nan}, ERROR),
        # What is unknown witnesses nothing.
        (0.85, {"energy_overlap": math.nan}, WARN),
        (0.85, {"sampler__grad_norm": math.nan}, WARN),
    ],
)
def test_growth_is_an_error_where_a_witness_agrees(past, growth, changes, level):
    standing = [make_row(energy_gap=past)] * SETTLED
    gap = math.copysign(grown(growth, abs(past)), past)
    assert found(RULE, [*standing, make_row(**changes | {"energy_gap": gap})])[-1] is level


def test_the_energies_are_no_witness_where_the_overlap_is_missing():
    row = {"energy_gap": grown(0.85), "f_pos/std": 1.0}
    assert found(RULE, [*STANDING, row])[-1] is WARN
    assert found(RULE, [*STANDING, row | {"sampler/grad_norm": 9.0}])[-1] is ERROR


def test_a_sampler_without_a_gradient_is_no_witness():
    still = [make_row(energy_gap=0.0, sampler__grad_norm=0.0)] * SETTLED
    assert found(RULE, [*still, still[0] | {"energy_gap": grown(0.85)}])[-1] is WARN


@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0])
def test_the_spread_of_the_data_counts_as_the_gap_does(spread):
    standing = [make_row(f_pos__std=spread)] * SETTLED
    for growth, level in [(0.45, None), (0.55, WARN), (1.45, ERROR)]:
        gap = grown(growth, spread=spread)
        of_gap = make_row(energy_gap=gap, f_pos__std=spread)
        of_spread = make_row(f_pos__std=spread + gap)
        for row in (of_gap, of_spread):
            assert found(RULE, [*standing, row])[-1] is level
    alert = feed(RULE, [*standing, of_spread])[-1]
    assert (alert.tag, alert.value) == ("f_pos/std", spread + gap)
    assert spread < alert.limit < alert.value


def test_the_past_ends_some_steps_before():
    """So that a blow-up is compared with what was before it."""
    growing = [make_row(energy_gap=0.1 * t, **APART) for t in range(1, RULE.lag)]
    last = make_row(energy_gap=grown(0.85), **APART)
    assert found(RULE, [*STANDING, *growing, last])[-1] is ERROR
    # What is as old as that belongs to the range: and is part of it for a window. No ERROR ever is.
    for wait, level in [(1, WARN), (RULE.lag, None), (RULE.window - 1, None), (RULE.window, WARN)]:
        for growth, found_at in ((0.75, level), (0.85, ERROR)):
            bump = [make_row(energy_gap=grown(growth), **APART)]
            rows = [*STANDING, *bump, *STANDING[: wait - 1], *bump]
            assert found(RULE, rows)[-1] is found_at


# -- the beginning ---------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [0.2, 1.0, 30.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_before_the_run_has_settled_only_a_large_gap_is_an_error(sign, spread):
    start = GROWTH.start if sign > 0 else GROWTH.start_negative
    for count in range(1, GROWTH.settle + 1):
        past = [make_row(f_pos__std=spread)] * count
        for share in (0.99, 1.01):
            gap = sign * share * start * max(1.0, spread)
            level = found(GROWTH, [*past, make_row(energy_gap=gap, f_pos__std=spread)])[-1]
            assert level is (ERROR if share > 1 or count == GROWTH.settle else None)


def test_energies_that_start_large_have_room():
    """A tenth of the first median, as someone starts whose energies are in thousands."""
    rows = [make_row(f_pos__median=-5e3, energy_gap=0.9 * 500 * GROWTH.start)]
    assert found(GROWTH, [make_row(f_pos__median=-5e3), *rows]) == [None, None]


def test_a_new_scale_has_to_settle_again():
    """A gap that grew tenfold, and was no ERROR, is judged by factors when it has stood a while."""
    assert set(found(RULE, [*STANDING, *[make_row(energy_gap=30.0)] * 200])[SETTLED:]) == {ERROR}
    risen = [make_row(**ABSORBED | {"energy_gap": 30.0})] * 200
    twice = make_row(energy_gap=grown(2.0, 30.0), **APART)
    assert twice["energy_gap"] > RULE.start
    within = make_row(energy_gap=grown(1.0, 30.0), **APART)
    assert within["energy_gap"] < RULE.start
    for count in range(RULE.lag, RULE.settle):
        assert found(RULE, [*STANDING, *risen[:count], within])[-1] is None
        assert found(RULE, [*STANDING, *risen[:count], twice])[-1] is ERROR
    assert found(RULE, [*STANDING, *risen[: RULE.settle], within])[-1] is ERROR


def test_a_rule_that_needs_no_settling_waits_for_a_past():
    rule = replace(RULE, settle=0)
    gap = grown(1.45)
    for count in range(1, RULE.lag + 1):
        rows = [*STANDING[:count], make_row(energy_gap=gap)]
        assert found(rule, rows)[-1] is (ERROR if count == RULE.lag else None)
        rows = [*STANDING[:count], make_row(energy_gap=1.01 * RULE.start)]
        assert found(rule, rows)[-1] is ERROR


# -- what the weights absorb -----------------------------------------------------------------------


@pytest.mark.parametrize(("gap", "level"), [(40.0, WARN), (90.0, WARN), (1e4, ERROR)])
def test_an_excess_that_the_weights_absorb_is_a_warning_but_not_without_end(gap, level):
    surge = make_row(**ABSORBED | {"energy_gap": gap, "sampler__grad_norm": 9.0})
    past = noise(SETTLED, **ABSORBED)
    assert levels(feed(GROWTH, [*past, *[surge] * 50])) == [(level, SETTLED)]
    # Where no weights take it out, the same is an ERROR.
    linear = [row | {"beta_star": 0.0} for row in [*past, surge]]
    assert levels(feed(GROWTH, linear)) == [(ERROR, SETTLED)]


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
        {"f_neg__min": math.nan},
        {"energy_gap": -40.0},
        {"f_pos__std": 400.0},  # the data's energies have grown as well
    ],
)
def test_what_the_weights_do_not_absorb_is_an_error(change):
    past = noise(SETTLED, f_neg__min=-200.0)
    surge = make_row(**ABSORBED | {"energy_gap": 40.0} | change)
    assert levels(feed(GROWTH, [*past, surge])) == [(ERROR, SETTLED)]
    without = {
        "beta_star": 2.0,
        "energy_gap": 40.0,
        "f_pos/std": 1.0,
    }  # tags that are missing absorb nothing
    assert levels(feed(GROWTH, [*past, without])) == [(ERROR, SETTLED)]
    absorbed = make_row(**ABSORBED | {"energy_gap": 40.0})
    del absorbed["energy_overlap"]
    assert levels(feed(GROWTH, [*past, absorbed])) == [(ERROR, SETTLED)]


@pytest.mark.parametrize(("nats", "level"), [(0.9, ERROR), (1.1, WARN)])
def test_absorption_needs_a_deep_tail_for_the_share_that_competes(nats, level):
    # Half of the pairs compete at beta* = 1, so the tail's depth counts half.
    lowest = 3.5 - 2 * nats * GROWTH.absorb_nats
    surge = make_row(beta_star=1.0, energy_overlap=0.5, energy_gap=40.0, f_neg__min=lowest)
    assert levels(feed(GROWTH, [*noise(SETTLED), surge])) == [(level, SETTLED)]


@pytest.mark.parametrize(
    ("sign", "growth", "remedies"),
    [
        (1, 1.1 * GROWTH.warn, (Remedy.LOWER_LR, Remedy.RAISE_BETA)),
        (-1, 1.1 * GROWTH.warn, (Remedy.LOWER_LR, Remedy.FINER_STEPS)),
        (1, 2 * GROWTH.growth_alone, (Remedy.ROLL_BACK, Remedy.LOWER_LR)),
        (-1, 2 * GROWTH.growth_alone, (Remedy.ROLL_BACK, Remedy.LOWER_LR)),
    ],
)
def test_the_remedies_follow_level_and_side(sign, growth, remedies):
    (alert,) = feed(GROWTH, [*STANDING, make_row(energy_gap=sign * grown(growth))])
    assert alert.remedies[:2] == remedies
    assert (Remedy.RAISE_BETA in alert.remedies) == (sign > 0)


# -- what it does not know, and what must not matter -----------------------------------------------


@pytest.mark.parametrize("value", [math.nan, None])
@pytest.mark.parametrize("tag", ["energy_gap", "f_pos/std", "sampler/grad_norm", "energy_overlap"])
def test_what_is_unknown_is_another_rule_s_business(tag, value):
    broken = make_row()
    del broken[tag]
    broken |= {} if value is None else {tag: value}
    surge = make_row(energy_gap=2 * grown(GROWTH.growth_alone), **APART)
    rows = [*noise(60), *[broken] * 60, *noise(60, seed=1), surge]
    # Neither an alarm nor a hole in the past: the later blow-up is found as ever.
    assert levels(feed(GROWTH, rows)) == [(ERROR, 180)]


def test_a_row_without_a_gap_changes_nothing_and_numbers_of_json_stay():
    watcher = GROWTH.watcher()
    for row in noise(40):
        watcher.read(row)
    before = watcher.state_dict()
    for row in ({}, make_row(energy_gap=math.nan), {"f_pos/std": 3.0, "sampler/grad_norm": 9.0}):
        reading = watcher.read(row)
        assert (reading.level, reading.calm) == (None, None)
    assert watcher.state_dict() == before
    watcher.read(make_row(f_pos__std=math.nan, sampler__grad_norm=math.inf))
    json.dumps(watcher.state_dict(), allow_nan=False)


# Sizes as powers of two, so that every order of magnitude comes along, on both sides.
GAPS = st.lists(st.tuples(st.floats(-6, 12), st.booleans()), min_size=1, max_size=40)
TAILS = st.tuples(GAPS, st.floats(-3, 8), st.sampled_from([0.0, 0.5, 1.0]), st.booleans())


def story(drawn: Any, seed: int = 0) -> list[Row]:
    """A settled past and what is drawn; at beta* = 2 in part, where the weights absorb."""
    gaps, spread, overlap, absorbed = drawn
    changes = dict(ABSORBED) if absorbed else {"energy_overlap": overlap}
    return [
        *noise(40, seed),
        *[
            make_row(energy_gap=2**x if up else -(2**x), f_pos__std=2**spread, **changes)
            for x, up in gaps
        ],
        *noise(20, seed + 1),
    ]


@settings(max_examples=60)
@given(drawn=TAILS, exponent=st.integers(-40, 40))
def test_the_unit_of_the_energies_does_not_matter(drawn, exponent):
    unit = 2.0**exponent  # exact
    rows, rule = story(drawn), replace(GROWTH, unit=GROWTH.unit * unit)
    told, expected = feed(rule, scaled(rows, unit)), feed(GROWTH, rows)
    assert [(a.level, a.step, a.value, a.limit) for a in told] == [
        (a.level, a.step, a.value * unit, a.limit * unit) for a in expected
    ]
    assert found(rule, scaled(rows, unit)) == found(GROWTH, rows)


@settings(max_examples=30)
@given(drawn=TAILS, shift=st.floats(-3e3, 3e3))
def test_a_constant_added_to_all_energies_does_not_matter(drawn, shift):
    """The loss is invariant to it, and so are the alerts once the run has begun."""
    rows = [row for row in story(drawn) if abs(row["energy_gap"]) < GROWTH.start]
    shifted = [
        {tag: v + shift if tag in ENERGIES[1:] and "std" not in tag else v for tag, v in r.items()}
        for r in rows
    ]
    assert feed(GROWTH, shifted) == feed(GROWTH, rows)


@settings(max_examples=30)
@given(drawn=TAILS)
def test_the_sign_of_the_gap_matters_to_the_weights_alone(drawn):
    rule = replace(GROWTH, start_negative=GROWTH.start)
    rows = [row | {"beta_star": 0.0} for row in story(drawn)]
    mirrored = [
        row | {"energy_gap": -row["energy_gap"], "energy_overlap": 1 - row["energy_overlap"]}
        for row in rows
    ]
    assert found(rule, mirrored) == found(rule, rows)


STORIES = {
    **{name: excerpt(name).rows for name in ("blowup_b", "absorbed_surge", "starved", "steep_lr")},
    "a beginning": beginning(1.5),
    "a doubling": [*noise(60), *[make_row(energy_gap=2.0**t, **APART) for t in range(12)]] * 2,
    "unknown": [*noise(30), {}, make_row(f_pos__std=math.nan), *noise(9, gap=9.0), *noise(9)],
}


@pytest.mark.parametrize("name", STORIES)
def test_restored_in_the_middle_it_says_the_same(name):
    rows = STORIES[name]
    for cut in {0, 1, 5, 33, len(rows) // 2, len(rows) - 10}:
        whole, resumed = GROWTH.watcher(), GROWTH.watcher()
        for row in rows[:cut]:
            whole.read(row)
        for row in noise(70, gap=50.0):
            resumed.read(row)
        resumed.load_state_dict(json.loads(json.dumps(whole.state_dict(), allow_nan=False)))
        assert resumed.state_dict() == whole.state_dict()
        for row in rows[cut:]:
            assert resumed.read(row) == whole.read(row)
            if "energy_gap" in row:
                assert resumed.limits() == whole.limits()


@settings(max_examples=60)
@given(drawn=st.one_of(TAILS, st.sampled_from(sorted(STORIES))))
def test_a_row_has_the_level_that_its_limits_say(drawn):
    bands, watcher = Bands((GROWTH,)), GROWTH.watcher()
    for row in STORIES[drawn] if isinstance(drawn, str) else story(drawn):
        reading = watcher.read(row)
        limits = bands.read(row)["energy_gap"]
        assert limits.error_low <= limits.low <= 0 <= limits.high <= limits.error_high
        if (gap := row.get("energy_gap")) is not None:
            assert bands.level("energy_gap", gap) is reading.level
        if reading.tag == "energy_gap":
            assert reading.limit in (limits[2:] if reading.level is ERROR else limits[:2])


def test_the_memory_of_a_run_that_grows_for_ever_is_bounded():
    watcher = GROWTH.watcher()
    for t in range(20_000):
        watcher.read(make_row(energy_gap=float(t)))
    assert len(json.dumps(watcher.state_dict())) < 50_000


# -- an error that comes again ---------------------------------------------------------------------


def test_an_error_that_passed_comes_again_where_it_is_twice_as_large():
    judge = Judge([GROWTH])
    feed(judge, STANDING)
    size = 3 * grown(GROWTH.growth_alone)
    rest = make_row()
    sizes = [size, size, 9 * size, None, size, 1.9 * size, None, 2.1 * size, 9 * size, None, size]
    rows = [rest if gap is None else make_row(energy_gap=gap) for gap in sizes]
    # Not while it lasts, not an equal one, and then one that is worse.
    assert [(a.level, a.value) for a in feed(judge, rows[:3])] == [(ERROR, size)]
    assert feed(judge, rows[3:7]) == []
    assert [(a.level, a.value) for a in feed(judge, rows[7:])] == [(ERROR, 2.1 * size)]
    assert max(judge.active.values()) is ERROR


# -- bad arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"warn": 0.0}, "expected 0 < warn <= growth <= growth_alone <= 100, but got warn=0.0"),
        ({"warn": 0.9}, "but got warn=0.9, growth=0.8, growth_alone=1.4"),
        ({"growth": 1.5}, "growth=1.5, growth_alone=1.4"),
        ({"growth_alone": math.inf}, "growth_alone=inf"),
        ({"growth": math.nan}, "growth=nan"),
        ({"apart": 0.0}, "0 < apart <= 0.5, but got apart=0.0"),
        ({"apart": 0.6}, "apart=0.6"),
        ({"steeper": -1.0}, "0 <= steeper <= 100, but got steeper=-1.0"),
        ({"start": 0.0}, "start > 0, start_negative > 0, unit > 0, but got start=0.0"),
        ({"start_negative": math.nan}, "start_negative=nan"),
        ({"lost": 101.0}, "0 < lost <= 100, but got absorb_nats=1.0, lost=101.0"),
        ({"unit": -1.0}, "unit=-1.0"),
        ({"absorb_nats": 0.0}, "absorb_nats=0.0"),
        ({"absorb_nats": math.nan}, "absorb_nats=nan"),
        ({"settle": -1}, "settle >= 0, slow_steps >= 1, but got settle=-1"),
        ({"slow_steps": 0}, "slow_steps=0"),
        ({"touch": 0.5}, "0 < touch < 0.5, 0 < slow <= 100, but got touch=0.5"),
        ({"slow": math.inf}, "slow=inf"),
        ({"lag": 64}, "1 <= lag < window, but got lag=64, window=64"),
        ({"lag": 0}, "lag=0"),
    ],
)
def test_a_rule_that_contradicts_itself_is_refused(changes, said):
    with pytest.raises(ConfigError, match="Rule 'energy_blowup': expected ") as error:
        replace(RULE, **changes)
    assert said in str(error.value)
