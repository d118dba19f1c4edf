"""Rules on excerpts and on shapes of runs: loud on what was lost, quiet on the rest."""

from __future__ import annotations

import math
import random

import pytest

from ebmguard.alerts import Judge, Level

from .parts import (
    APART,
    GROWTH,
    SETTLED,
    STANDING,
    beginning,
    excerpt,
    feed,
    found,
    grown,
    levels,
    make_row,
    noise,
)

ERROR = Level.ERROR


def alerts_of(recorded):
    return feed(Judge(), recorded.rows, recorded.first_step)


# name, least accuracy after the update before the ERROR's step: what withholding that step saves.
LOST = [
    ("blowup_a", 0.96),
    ("blowup_b", 0.97),
    ("blowup_c", 0.98),
    ("near_blowup", 0.95),
    ("weak_beta", 0.96),
    ("steep_lr", 0.94),
    # It doubles at every step, and the past still holds the first steps of the run: late.
    ("early_blowup", 0.76),
]


@pytest.mark.parametrize(("name", "saved"), LOST)
def test_a_lost_run_is_an_error_before_the_accuracy_goes(name, saved):
    recorded = excerpt(name)
    alerts = alerts_of(recorded)
    assert {alert.rule for alert in alerts} == {"energy_blowup"}
    failed = next(alert.step for alert in alerts if alert.level is ERROR)
    assert recorded.accuracy_after(failed - 1) >= saved
    # Nothing was said long before.
    assert alerts[0].step >= failed - 5
    # The excerpt is of a run that did lose accuracy: the alarm is not a false one.
    lost = min(recorded.accuracy[failed - recorded.first_step :])
    assert lost < recorded.accuracy_after(failed - 1) - 0.04


@pytest.mark.parametrize("name", ["healthy_start", "healthy_late"])
def test_a_healthy_run_is_quiet(name):
    assert alerts_of(excerpt(name)) == []


def test_a_network_that_begins_to_learn_is_a_warning_at_most():
    """All energies and the gradient grow twentyfold in 60 steps; the gap stays under 2."""
    alerts = alerts_of(excerpt("short_run_start"))
    assert [(a.rule, a.level) for a in alerts] == [("energy_blowup", Level.WARN)] * len(alerts)
    assert len(alerts) <= 1


@pytest.mark.parametrize("name", ["absorbed_onset", "absorbed_surge"])
def test_a_gap_that_the_weights_absorb_is_one_warning_at_most(name):
    recorded = excerpt(name)
    alerts = alerts_of(recorded)
    assert {(a.rule, a.level, a.tag) for a in alerts} <= {
        ("energy_blowup", Level.WARN, "energy_gap")
    }
    assert len(alerts) <= 1
    assert min(recorded.accuracy) > 0.95


def test_the_same_surge_is_an_error_where_no_weights_absorb_it():
    rows = [row | {"beta_star": 0.0} for row in excerpt("absorbed_surge").rows]
    assert ERROR in {alert.level for alert in feed(Judge(), rows)}


def test_a_starved_run_fails_by_grad_scale_after_a_patience():
    recorded = excerpt("starved")
    failing = [a for a in alerts_of(recorded) if a.rule == "sampler_failing"]
    assert [(a.level, a.step) for a in failing] == [(Level.WARN, 275), (ERROR, 455)]
    # The energies had come apart before: more SGLD steps are among the remedies of that.
    assert [a.follows for a in failing] == ["energy_blowup"] * 2
    degenerate = [a for a in alerts_of(recorded) if a.rule == "weights_degenerate"]
    assert [(a.level, a.tag) for a in degenerate] == [(Level.WARN, "ess")]


# -- shapes of runs --------------------------------------------------------------------------------


QUIET = {
    **{f"noise {seed}": noise(1000, seed) for seed in range(2)},
    **{f"noise around {gap}": noise(500, gap=gap) for gap in (-25.0, 2.0, 25.0)},
    **{f"a beginning by factors of {x}": beginning(x) for x in (1.1, 1.5, 10.0)},
    "wild first steps": [*[make_row(energy_gap=x) for x in (20, -25, 5, 28)], *noise(200)],
    "a harmless surge": [*noise(200), *noise(1, gap=0.5 * grown(GROWTH.growth)), *noise(50)],
    "energies that close in": [make_row(energy_gap=25 * 0.9**t) for t in range(200)],
}


@pytest.mark.parametrize("name", QUIET)
def test_a_run_of_a_healthy_shape_is_quiet(name):
    assert feed(GROWTH, QUIET[name]) == []


@pytest.mark.parametrize(("overlap", "rate", "power"), [(0.0, 0.003, 2), (0.5, 0.028, 1)])
def test_slow_growth_is_seen_where_it_is_out_of_line_with_the_data(overlap, rate, power):
    """At a lowered learning rate gaps doubled every 25 rows, from 1 to millions."""
    gaps = [math.exp(rate * t) for t in range(int(9 / rate))]
    rows = [*noise(200), *[make_row(energy_gap=gap, energy_overlap=overlap) for gap in gaps]]
    of_rows = found(GROWTH, rows)
    seen = next(row for row, level in zip(rows, of_rows, strict=True) if level)["energy_gap"]
    lost = rows[of_rows.index(ERROR)]["energy_gap"]
    assert seen < 1.5 * GROWTH.spreads
    assert 1 < lost / GROWTH.spreads**power < 1.5


@pytest.mark.parametrize(
    ("past", "steps", "sign"), [(0.0, 1, 1), (0.0, 4, -1), (20.0, 1, -1), (20.0, 4, 1)]
)
def test_a_gap_that_doubles_is_an_error_soon_after_it_left_its_range(past, steps, sign):
    before = noise(SETTLED, gap=sign * past)
    base = 0.1 + past
    doubling = [base * 2 ** (t / steps) for t in range(1, 14 * steps)]
    rows = [
        make_row(
            energy_gap=sign * gap,
            energy_overlap=0.0 if sign > 0 else 1.0,
            sampler__grad_norm=0.2 * gap / base,
        )
        for gap in doubling
    ]
    alerts = feed(GROWTH, [*before, *rows])
    error = next(alert for alert in alerts if alert.level is ERROR)
    left = next(t for t, gap in enumerate(doubling, SETTLED) if gap > base + 1)
    assert left <= error.step <= left + 4 * steps + 2
    assert alerts[0].step >= left  # a WARN is no guess either
    assert error.tag == "energy_gap"
    assert error.value * sign > error.limit * sign > 0


# -- episodes --------------------------------------------------------------------------------------


def test_a_run_that_limps_is_an_error_once_or_twice():
    """4,000 rows whose gap wanders from 24 to 210, at no overlap: it had 42 ERRORs."""
    draw = random.Random(0)
    limping = [
        make_row(energy_gap=24 * (210 / 24) ** (t / 4000) * math.exp(draw.gauss(0, 0.3)), **APART)
        for t in range(4000)
    ]
    errors = [a for a in feed(GROWTH, [*noise(100), *limping]) if a.level is ERROR]
    assert 1 <= len(errors) <= 3


def test_samples_that_shoot_over_and_then_under_the_data_are_one_episode():
    rows = [*STANDING, make_row(energy_gap=-50.0), *[make_row()] * 3, make_row(energy_gap=140.0)]
    assert levels(feed(GROWTH, rows)) == [(ERROR, SETTLED)]
