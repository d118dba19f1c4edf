"""sampler_failing on synthetic shapes."""

from __future__ import annotations

import math

import pytest

from ebmguard.alerts import FloorRule, Level
from ebmguard.errors import ConfigError

from .parts import feed, levels, make_row


def test_grad_scale_under_its_floor_warns_and_then_fails():
    rows = [make_row(beta_star=2.0)] * 30 + [make_row(beta_star=2.0, grad_scale=0.05)] * 300
    alerts = feed(FloorRule(), rows)
    assert levels(alerts) == [(Level.WARN, 30 + 19), (Level.ERROR, 30 + 199)]
    assert [alert.window for alert in alerts] == [20, 200]
    assert alerts[0].limit == 0.1
    assert alerts[0].tag == "grad_scale"


def test_a_competitive_negative_now_and_then_is_enough():
    low, high = make_row(beta_star=2.0, grad_scale=0.0), make_row(beta_star=2.0, grad_scale=0.3)
    assert feed(FloorRule(), ([low] * 19 + [high]) * 30) == []


def test_between_floor_and_clear_the_count_stands():
    low = make_row(beta_star=2.0, grad_scale=0.05)
    middle = make_row(beta_star=2.0, grad_scale=0.15)
    assert levels(feed(FloorRule(), [low] * 19 + [middle] * 100 + [low])) == [(Level.WARN, 119)]


def test_at_beta_zero_the_reference_is_read_and_only_warns():
    alerts = feed(FloorRule(), [make_row(ref__grad_scale=0.0)] * 500)
    assert levels(alerts) == [(Level.WARN, 19)]
    assert alerts[0].tag == "ref/grad_scale"
    # GradScale itself is M/(M+1) there whatever the sampler does, and is not looked at.
    assert feed(FloorRule(), [make_row(grad_scale=0.0)] * 500) == []


def test_for_negative_beta_the_remedies_turn_round():
    row = make_row(beta_star=-0.5, grad_scale=0.01)
    alerts = feed(FloorRule(), [row] * 200)
    assert [a.level for a in alerts] == [Level.WARN, Level.ERROR]
    assert alerts[0].remedies == ("fewer SGLD steps", "move beta_star towards 0")


def test_a_schedule_that_leaves_zero_starts_counting_anew():
    at_zero = [make_row(ref__grad_scale=0.0)] * 19
    after = [make_row(beta_star=1.0, grad_scale=0.0)] * 20
    assert levels(feed(FloorRule(), at_zero + after)) == [(Level.WARN, 38)]


def test_an_unknown_grad_scale_neither_counts_nor_resets():
    low = make_row(beta_star=2.0, grad_scale=0.05)
    unknown = make_row(beta_star=2.0, grad_scale=math.nan)
    rows = [low] * 10 + [unknown, {}] * 50 + [low] * 10
    assert levels(feed(FloorRule(), rows)) == [(Level.WARN, len(rows) - 1)]


def test_recovery_ends_the_episode_and_the_cool_down_holds():
    low, high = make_row(beta_star=2.0, grad_scale=0.05), make_row(beta_star=2.0)
    once = [low] * 30 + [high] * 30
    assert levels(feed(FloorRule(), once * 3)) == [(Level.WARN, 19)]
    assert levels(feed(FloorRule(), once + [high] * 500 + once)) == [
        (Level.WARN, 19),
        (Level.WARN, 579),
    ]


def test_rules_that_contradict_themselves_are_refused():
    with pytest.raises(ConfigError, match="floor <= clear"):
        FloorRule(clear=0.05)
    with pytest.raises(ConfigError, match="warn_patience"):
        FloorRule(error_patience=1)
