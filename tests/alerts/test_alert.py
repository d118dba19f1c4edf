"""The alert as data and in words; and the limits of single values, as rules say them."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from ebmguard.alerts import (
    DEFAULT_RULES,
    Alert,
    Bands,
    FloorRule,
    Level,
    Limits,
    Remedy,
)

from .parts import GROWTH, Slump, make_row

ALERT = Alert(
    rule="energy_blowup",
    level=Level.ERROR,
    step=653,
    tag="energy_gap",
    value=3.6391,
    limit=3.1634,
    window=64,
    remedies=("roll back", "raise beta_star"),
)


def test_the_message_says_what_where_how_much_and_what_helps():
    assert ALERT.message == (
        "ERROR energy_blowup at step 653: energy_gap = 3.639 (limit 3.163 over the last 64 "
        "steps). Likeliest remedies: roll back; raise beta_star."
    )
    assert [int(level) for level in (Level.INFO, Level.WARN, Level.ERROR)] == [0, 1, 2]


def test_a_member_of_an_ensemble_is_named():
    alert = replace(ALERT, member=3)
    assert alert.message == ALERT.message.replace("step 653:", "step 653, member 3:")
    for each in (ALERT, alert, replace(ALERT, member=0)):
        record = json.loads(json.dumps(each.record()))
        assert (record["message"], record.get("member")) == (each.message, each.member)
        told = record | {"level": Level.ERROR, "remedies": tuple(record["remedies"])}
        assert Alert(**{name: x for name, x in told.items() if name != "message"}) == each
    assert "member" not in ALERT.record()


@pytest.mark.parametrize(
    ("change", "end"),
    [
        ({"remedies": (Remedy.LOWER_LR, "x")}, " Likeliest remedies: lower the learning rate; x."),
        ({"remedies": ()}, ""),
        ({"remedies": (), "follows": "nonfinite", "member": 2}, " Follows nonfinite."),
    ],
)
def test_what_helps_in_words_and_through_a_record(change, end):
    alert = replace(ALERT, **change)
    assert alert.message.endswith("(limit 3.163 over the last 64 steps)." + end)
    record = json.loads(json.dumps(alert.record()))
    assert record["remedies"] == [*alert.remedies]
    assert record.get("follows") == alert.follows
    assert ("follows" in record) == ("follows" in change)


# -- limits ---------------------------------------------------------------------------------------


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
    narrow = replace(GROWTH, name="narrow", growth=GROWTH.growth / 2)
    one, both = Bands((narrow,)), Bands((GROWTH, narrow, GROWTH))
    for t in range(3 * GROWTH.rows):
        row = make_row(energy_gap=0.1 * (t % 3), sampler__grad_norm=0.2 + 0.1 * (t % 2))
        assert both.read(row) == one.read(row)
    assert math.isfinite(both.limits["energy_gap"].high)
