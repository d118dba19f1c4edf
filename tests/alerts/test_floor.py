"""sampler_failing on synthetic shapes."""

from __future__ import annotations

import math

import pytest

from ebmguard.alerts import FloorRule, Level
from ebmguard.errors import ConfigError

from .parts import feed, levels, make_row

WARN, ERROR = Level.WARN, Level.ERROR
HIGH, LOW = make_row(beta_star=2.0), make_row(beta_star=2.0, grad_scale=0.05)
UNKNOWN, BETWEEN = (make_row(beta_star=2.0, grad_scale=x) for x in (math.nan, 0.15))
ONCE = [LOW] * 30 + [HIGH] * 30


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([HIGH] * 30 + [LOW] * 300, [(WARN, 49), (ERROR, 229)]),
        (([LOW] * 19 + [HIGH]) * 30, []),
        # Between floor and clear the count stands; what is unknown neither counts nor resets.
        ([LOW] * 19 + [BETWEEN] * 100 + [LOW], [(WARN, 119)]),
        ([LOW] * 10 + [UNKNOWN, {}] * 50 + [LOW] * 10, [(WARN, 119)]),
        # At beta* = 0 GradScale is M/(M+1) whatever the sampler does: the reference is read.
        ([make_row(grad_scale=0.0)] * 500, []),
        ([make_row(ref__grad_scale=0.0)] * 500, [(WARN, 19)]),
        ([make_row(ref__grad_scale=0.0)] * 19 + [LOW] * 20, [(WARN, 38)]),
        # Recovery ends the episode; the cool-down holds.
        (ONCE * 3, [(WARN, 19)]),
        (ONCE + [HIGH] * 500 + ONCE, [(WARN, 19), (WARN, 579)]),
    ],
)
def test_it_fires_after_its_patience(rows, expected):
    assert levels(feed(FloorRule(), rows)) == expected


@pytest.mark.parametrize(
    ("beta_star", "tag", "first"),
    [
        (2.0, "grad_scale", "more SGLD steps"),
        (0.0, "ref/grad_scale", "more SGLD steps"),
        (-0.5, "grad_scale", "fewer SGLD steps"),
    ],
)
def test_the_alert_names_what_was_read_and_what_helps_at_its_beta(beta_star, tag, first):
    row = make_row(beta_star=beta_star) | {tag: 0.01}
    alerts = feed(FloorRule(), [row] * 200)
    assert [alert.window for alert in alerts] == ([20, 200] if beta_star else [20])
    for alert in alerts:
        assert (alert.tag, alert.value, alert.limit) == (tag, 0.01, 0.1)
        assert alert.remedies[0] == first


def test_rules_that_contradict_themselves_are_refused():
    with pytest.raises(ConfigError, match="floor <= clear"):
        FloorRule(clear=0.05)
    with pytest.raises(ConfigError, match="warn_patience"):
        FloorRule(error_patience=1)
