"""energy_blowup: what is out of line, what witnesses growth, what absorbs it, what is no matter."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebmguard.alerts import Bands, Level, Remedy
from ebmguard.errors import ConfigError

from .parts import (
    APART,
    ENERGIES,
    GROWTH,
    SETTLED,
    STANDING,
    Row,
    beginning,
    excerpt,
    feed,
    found,
    grown,
    levels,
    make_row,
    noise,
    scaled,
)

WARN, ERROR = Level.WARN, Level.ERROR
# For what follows from the rule's definition, so that the shipped numbers may change.
RULE = replace(GROWTH, spreads=20.0, growth=0.8, rows=20, unit=1.0, edge=0.2, part=0.01)
STEEP = {"sampler__grad_norm": 9.0}


# -- growth and its witness ------------------------------------------------------------------------


@pytest.mark.parametrize("past", [0.0, -7.0])
@pytest.mark.parametrize(
    ("growth", "changes", "level"),
    [
        (0.75, APART | STEEP, None),
        (0.85, APART, WARN),
        (0.85, {"sampler__grad_norm": 0.2 * math.exp(0.39)}, WARN),
        (0.85, {"sampler__grad_norm": 0.2 * math.exp(0.41)}, ERROR),
        # What is unknown witnesses nothing.
        (1.55, {"energy_overlap": math.nan, "sampler__grad_norm": math.nan}, WARN),
        (1.65, {"energy_overlap": math.nan, "sampler__grad_norm": math.nan}, ERROR),
    ],
)
def test_growth_is_an_error_where_the_samplers_gradient_agrees(past, growth, changes, level):
    rule, standing = replace(RULE, spreads=1e3), [make_row(energy_gap=past)] * SETTLED
    gap = math.copysign(grown(growth, abs(past)), past)
    assert found(rule, [*standing, make_row(**changes | {"energy_gap": gap})])[-1] is level


def test_the_past_ends_some_rows_before_and_never_takes_in_an_error():
    last = make_row(energy_gap=grown(0.85), **STEEP)
    growing = [make_row(energy_gap=0.1 * t) for t in range(1, RULE.rows // 2)]
    assert found(RULE, [*STANDING, *growing, last])[-1] is ERROR
    warned = make_row(energy_gap=grown(0.85))
    for wait, level in [(1, WARN), (RULE.rows // 2, WARN), (RULE.rows // 2 + 1, None), (99, WARN)]:
        for bump, again in ((warned, level), (last, ERROR)):
            assert found(RULE, [*STANDING, bump, *STANDING[:1] * (wait - 1), bump])[-1] is again


def test_growth_counts_once_energies_have_touched_on_rows_that_set_no_record():
    after = make_row(energy_gap=grown(0.85), **STEEP)
    for count, level in ((RULE.rows, None), (RULE.rows + 1, ERROR)):  # the first sets one
        assert found(RULE, [*[make_row()] * count, after])[-1] is level
    for overlap, level in ((0.19, None), (0.21, ERROR), (0.79, ERROR), (0.81, None)):
        past = [make_row(energy_overlap=overlap)] * 60
        assert found(RULE, [*past, after])[-1] is level
    rising = [make_row(f_pos__std=1 + 0.01 * t) for t in range(60)]
    assert found(RULE, [*rising, make_row(f_pos__std=4.0, **STEEP)])[-1] is None


# -- out of line with the spread of the data -------------------------------------------------------


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("past", "now", "limit"),
    [
        (9.0, 9.0, 180.0),
        (9.0, 1.0, 180.0),  # the usual one counts where it is the larger
        (1.0, 9.0, 60.0),  # and where it is not, the geometric mean
        (0.01, 0.01, 20.0),  # a spread has a floor
    ],
)
def test_a_gap_is_measured_in_spreads_of_the_data(past, now, limit, sign):
    """From the second row on, on either side: -228 at a spread of 8.7 was a run that was lost."""
    for count in (1, 5, 15):
        rows = [make_row(f_pos__std=past, **APART)] * count
        for share, level in ((0.99, None), (1.01, ERROR)):
            row = make_row(energy_gap=sign * share * limit, f_pos__std=now, **APART)
            assert found(RULE, [*rows, row])[-1] is level


def test_a_gap_that_is_usual_is_not_out_of_line():
    """Some energies live as far apart; they are lost only where they move on from there."""
    rows = [make_row(energy_gap=0.2 * t, **APART) for t in range(125)]
    assert found(RULE, [*rows, *[rows[-1]] * 99]) == [None] * 101 + [WARN] * 123
    assert found(RULE, [*rows, *[make_row(energy_gap=80.0, **APART)]])[-1] is ERROR


# -- what the weights absorb -----------------------------------------------------------------------

ABSORBED: dict[str, Any] = {"beta_star": 2.0, "energy_overlap": 0.4}


@pytest.mark.parametrize("spread", [1.0, 9.0])
@pytest.mark.parametrize(("gap", "level"), [(390.0, WARN), (410.0, ERROR)])
def test_an_excess_that_the_weights_absorb_is_a_warning_but_not_without_end(gap, level, spread):
    """In spreads that are usual: else one that grows with its gap absorbs without end."""
    surge = make_row(**ABSORBED | STEEP, energy_gap=gap, f_pos__std=spread)
    past = noise(SETTLED, **ABSORBED)
    assert levels(feed(RULE, [*past, *[surge] * 9])) == [(level, SETTLED)]
    # From the usual limit on.
    assert found(RULE, [*past, make_row(**ABSORBED | {"energy_gap": grown(1.2)})])[-1] is WARN
    # Where no weights take it out, the same is an ERROR.
    linear = [row | {"beta_star": 0.0} for row in [*past, surge]]
    assert levels(feed(RULE, linear)) == [(ERROR, SETTLED)]


@pytest.mark.parametrize(
    "change",
    [
        {"beta_star": 0.0},
        {"beta_star": -2.0},
        {"energy_overlap": 0.005},
        {"energy_gap": -40.0},
        {"f_pos__std": 400.0},  # the data's energies have grown as well
    ],
)
def test_what_the_weights_do_not_absorb_is_an_error(change):
    past, changed = noise(SETTLED), ABSORBED | {"energy_gap": 40.0} | change
    assert levels(feed(RULE, [*past, make_row(**changed)])) == [(ERROR, SETTLED)]
    absorbed = make_row(**ABSORBED | {"energy_gap": 40.0})
    for tag in ("beta_star", "energy_overlap"):  # tags that are missing absorb nothing
        without = {name: x for name, x in absorbed.items() if name != tag}
        assert levels(feed(RULE, [*past, without])) == [(ERROR, SETTLED)]


@pytest.mark.parametrize(
    ("gap", "remedies"),
    [
        (grown(1.5 * GROWTH.growth), (Remedy.SUBSTEPS, Remedy.LOWER_LR, Remedy.RAISE_BETA)),
        (-grown(1.5 * GROWTH.growth), (Remedy.SUBSTEPS, Remedy.LOWER_LR, Remedy.FINER_STEPS)),
        (grown(3 * GROWTH.growth), (Remedy.ROLL_BACK, Remedy.SUBSTEPS, Remedy.LOWER_LR)),
        (-0.1, (Remedy.ROLL_BACK, Remedy.SUBSTEPS, Remedy.LOWER_LR)),
    ],
)
def test_the_remedies_follow_level_and_side(gap, remedies):
    """Neither a higher beta* nor more steps, where samples lie above the data."""
    spread = 1.0 if abs(gap) > 1 else 100.0
    (alert,) = feed(GROWTH, [*STANDING, make_row(energy_gap=gap, f_pos__std=spread)])
    assert alert.remedies[:3] == remedies
    assert (Remedy.RAISE_BETA in alert.remedies) == (gap > 0)
    assert (Remedy.MORE_STEPS in alert.remedies) == (gap > 0)


# -- a gap that one of few negatives carries -------------------------------------------------------


def of_few(jump: float, share: float, negatives: int = 4, **changes: float) -> Row:
    """A row whose gap of the given size is carried by a share of the negatives."""
    beside = {"grad_scale": negatives / (negatives + 1), "f_neg__mean": 2 - jump}
    side = "f_neg__min" if jump > 0 else "f_neg__max"
    return make_row(**beside | {side: 2 - jump / share, "energy_gap": jump} | changes)


@pytest.mark.parametrize("jump", [50.0, -50.0])
def test_one_of_few_negatives_makes_no_error_in_a_single_row(jump):
    one = of_few(jump, 1 / 4)
    assert found(GROWTH, [*STANDING, one, make_row(), one, make_row()]) == [None] * SETTLED + [
        *(WARN, None, WARN, None)
    ]
    assert found(GROWTH, [*STANDING, one, one, one])[-3:] == [WARN, ERROR, ERROR]


@pytest.mark.parametrize(
    "row",
    [
        of_few(50.0, 1.0),  # all of them
        of_few(50.0, 1 / 64, negatives=64),  # of many
        of_few(50.0, 1 / 4, beta_star=-1.0),  # how many there are is not known
        of_few(5000.0, 1 / 2),  # the rest alone is over the limit
        of_few(50.0, 1 / 4) | {"energy_gap": 2e300, "f_pos/std": math.inf},
        *[{k: x for k, x in of_few(50.0, 1 / 4).items() if k != tag}
          for tag in ("grad_scale", "f_neg/min", "f_neg/mean", "beta_star")],
    ],
)  # fmt: skip
def test_any_other_gap_out_of_line_is_an_error_at_once(row):
    assert found(GROWTH, [*STANDING, row])[-1] is ERROR


# -- what it does not know, and what must not matter -----------------------------------------------


@pytest.mark.parametrize("value", [math.nan, None])
@pytest.mark.parametrize("tag", ["energy_gap", "f_pos/std", "sampler/grad_norm", "energy_overlap"])
def test_what_is_unknown_is_another_rule_s_business(tag, value):
    broken = make_row()
    del broken[tag]
    broken |= {} if value is None else {tag: value}
    surge = make_row(energy_gap=grown(3 * GROWTH.growth), **APART)
    rows = [*noise(60), *[broken] * 60, *noise(60, seed=1), surge]
    # Neither an alarm nor a hole in the past: the later blow-up is found as ever.
    assert levels(feed(GROWTH, rows)) == [(ERROR, 180)]


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
    assert [(a.level, a.step, a.value) for a in told] == [
        (a.level, a.step, a.value * unit) for a in expected
    ]


@settings(max_examples=30)
@given(drawn=TAILS, shift=st.floats(-3e3, 3e3))
def test_a_constant_added_to_all_energies_does_not_matter(drawn, shift):
    """The loss is invariant to it, and so are the alerts."""
    rows = story(drawn)
    shifted = [
        {tag: v + shift if tag in ENERGIES[1:] and "std" not in tag else v for tag, v in r.items()}
        for r in rows
    ]
    assert feed(GROWTH, shifted) == feed(GROWTH, rows)


STORIES = {
    **{name: excerpt(name).rows for name in ("blowup_b", "absorbed_surge", "starved", "steep_lr")},
    "a beginning": beginning(1.5),
    "a doubling": [*noise(60), *[make_row(energy_gap=2.0**t, **APART) for t in range(12)]] * 2,
    "unknown": [*noise(30), {}, make_row(f_pos__std=math.nan), *noise(9, gap=9.0), *noise(9)],
}


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


# -- bad arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        *({"spreads": 0.5}, {"growth": 0.0}, {"growth": math.nan}, {"rows": 1}, {"unit": -1.0}),
        *({"edge": 0.5}, {"part": 0.0}),
    ],
)
def test_a_rule_that_contradicts_itself_is_refused(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError, match=f"Rule 'energy_blowup': expected .*{name}={value}"):
        replace(RULE, **wrong)
