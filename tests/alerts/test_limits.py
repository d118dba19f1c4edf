"""The limits of single values, as the rules themselves say them."""

from __future__ import annotations

import math
from dataclasses import replace

from ebmguard.alerts import DEFAULT_RULES, Bands, FloorRule, GrowthRule, Level, Limits

from .parts import Slump, make_row


def test_a_rule_of_ones_own_has_its_limits_drawn():
    bands = Bands((*DEFAULT_RULES, Slump(share=0.5)))
    assert bands.limits["accuracy"] == Limits(low=0.1)
    assert bands.level("accuracy", 0.4) is None
    # Half of the best so far, where that is more than the fixed limit.
    assert bands.read(make_row(accuracy=0.9))["accuracy"] == Limits(low=0.45)
    assert bands.limits["accuracy"] == Limits(low=0.45)
    assert bands.level("accuracy", 0.4) is Level.WARN
    assert bands.level("accuracy", math.nan) is Level.ERROR
    assert Bands((Slump(),)).read(make_row(accuracy=0.15))["accuracy"] == Limits(low=0.1)


def test_of_several_rules_the_narrowest_limits_hold():
    strict = replace(FloorRule(), name="strict", floor=0.15)
    for rules in ((FloorRule(), strict), (strict, FloorRule())):
        assert Bands(rules).limits == {"grad_scale": Limits(low=0.15)}
    wide = next(rule for rule in DEFAULT_RULES if isinstance(rule, GrowthRule))
    narrow = replace(wide, name="narrow", growth=wide.growth / 2)
    one, both = Bands((narrow,)), Bands((wide, narrow, wide))
    for t in range(3 * wide.rows):
        row = make_row(energy_gap=0.1 * (t % 3), sampler__grad_norm=0.2 + 0.1 * (t % 2))
        assert both.read(row) == one.read(row)
    assert math.isfinite(both.limits["energy_gap"].high)


def test_a_rule_without_limits_has_none():
    class Bare:
        name = "bare"

        def watcher(self):
            return object()

    assert Bands((Bare(),)).limits == {}
