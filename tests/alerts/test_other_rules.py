"""nonfinite and sampler_failing on synthetic shapes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ebmguard.alerts import DEFAULT_RULES, Detector, FloorRule, Level, NonFiniteRule
from ebmguard.errors import ConfigError

NONFINITE = next(rule for rule in DEFAULT_RULES if isinstance(rule, NonFiniteRule))
SAMPLER = next(rule for rule in DEFAULT_RULES if isinstance(rule, FloorRule))
NAN = math.nan


def run(rule, rows):
    detector = Detector([rule])
    return [alert for step, row in enumerate(rows) for alert in detector.observe(step, row)]


def levels(alerts):
    return [(alert.level, alert.step) for alert in alerts]


# -- nonfinite ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tag", "value"),
    [
        ("nonfinite/energies", 1 / 128),
        ("nonfinite/energies", NAN),
        ("nonfinite/samples", 0.5),
        ("nonfinite/pos", 1.0),
        ("nonfinite/neg", 1.0),
        ("nonfinite/gradients", 1.0),
        ("energy_gap", NAN),
        ("energy_gap", math.inf),
        ("f_pos/median", NAN),
        ("f_neg/median", -math.inf),
        ("sampler/grad_norm", math.inf),
        ("sampler/grad_norm_max", math.inf),
    ],
)
def test_anything_not_finite_is_an_error_at_once(make_row, tag, value):
    (alert,) = run(NONFINITE, [make_row() | {tag: value}])
    assert (alert.level, alert.step, alert.tag) == (Level.ERROR, 0, tag)
    assert alert.value == pytest.approx(value, nan_ok=True)
    assert alert.window == 0
    assert alert.remedies[0].startswith("roll back")


@pytest.mark.parametrize("tag", ["sampler/grad_norm", "sampler/grad_norm_max", "pareto_k", "ess"])
def test_what_is_merely_unknown_is_no_alarm(make_row, tag):
    assert run(NONFINITE, [make_row() | {tag: NAN}] * 50) == []


def test_finite_rows_and_rows_without_these_tags_are_quiet(make_row):
    assert run(NONFINITE, [make_row(nonfinite__samples=0.0), {}, {"loss": 1.0}] * 50) == []


def test_a_run_of_nan_is_one_error_and_a_later_one_another(make_row):
    bad, good = [make_row(energy_gap=NAN)] * 100, [make_row()] * 250
    assert levels(run(NONFINITE, bad + good + bad)) == [(Level.ERROR, 0), (Level.ERROR, 350)]


# -- sampler_failing ------------------------------------------------------------------------


def test_grad_scale_under_its_floor_warns_and_then_fails(make_row):
    rows = [make_row(beta_star=2.0)] * 30 + [make_row(beta_star=2.0, grad_scale=0.05)] * 300
    alerts = run(SAMPLER, rows)
    assert levels(alerts) == [(Level.WARN, 30 + 19), (Level.ERROR, 30 + 199)]
    assert [alert.window for alert in alerts] == [20, 200]
    assert alerts[0].limit == 0.1
    assert alerts[0].tag == "grad_scale"


def test_a_competitive_negative_now_and_then_is_enough(make_row):
    low, high = make_row(beta_star=2.0, grad_scale=0.0), make_row(beta_star=2.0, grad_scale=0.3)
    assert run(SAMPLER, ([low] * 19 + [high]) * 30) == []


def test_between_floor_and_clear_the_count_stands(make_row):
    low = make_row(beta_star=2.0, grad_scale=0.05)
    middle = make_row(beta_star=2.0, grad_scale=0.15)
    assert levels(run(SAMPLER, [low] * 19 + [middle] * 100 + [low])) == [(Level.WARN, 119)]


def test_at_beta_zero_the_reference_is_read_and_only_warns(make_row):
    alerts = run(SAMPLER, [make_row(ref__grad_scale=0.0)] * 500)
    assert levels(alerts) == [(Level.WARN, 19)]
    assert alerts[0].tag == "ref/grad_scale"
    # GradScale itself is M/(M+1) there whatever the sampler does, and is not looked at.
    assert run(SAMPLER, [make_row(grad_scale=0.0)] * 500) == []


def test_for_negative_beta_the_remedies_turn_round(make_row):
    row = make_row(beta_star=-0.5, grad_scale=0.01)
    alerts = run(SAMPLER, [row] * 200)
    assert [a.level for a in alerts] == [Level.WARN, Level.ERROR]
    assert alerts[0].remedies == ("fewer SGLD steps", "move beta_star towards 0")


def test_a_schedule_that_leaves_zero_starts_counting_anew(make_row):
    at_zero = [make_row(ref__grad_scale=0.0)] * 19
    after = [make_row(beta_star=1.0, grad_scale=0.0)] * 20
    assert levels(run(SAMPLER, at_zero + after)) == [(Level.WARN, 38)]


def test_an_unknown_grad_scale_neither_counts_nor_resets(make_row):
    low = make_row(beta_star=2.0, grad_scale=0.05)
    unknown = make_row(beta_star=2.0, grad_scale=NAN)
    rows = [low] * 10 + [unknown, {}] * 50 + [low] * 10
    assert levels(run(SAMPLER, rows)) == [(Level.WARN, len(rows) - 1)]


def test_recovery_ends_the_episode_and_the_cool_down_holds(make_row):
    low, high = make_row(beta_star=2.0, grad_scale=0.05), make_row(beta_star=2.0)
    once = [low] * 30 + [high] * 30
    assert levels(run(SAMPLER, once * 3)) == [(Level.WARN, 19)]
    assert levels(run(SAMPLER, once + [high] * 500 + once)) == [(Level.WARN, 19), (Level.WARN, 579)]


def test_rules_that_contradict_themselves_are_refused():
    with pytest.raises(ConfigError, match="floor <= clear"):
        replace(SAMPLER, clear=0.05)
    with pytest.raises(ConfigError, match="warn_patience"):
        replace(SAMPLER, error_patience=1)
