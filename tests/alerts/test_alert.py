"""The alert as data and in words."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from ebmguard.alerts import Alert, Level
from ebmguard.errors import ConfigError

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


def test_a_rule_without_a_past_does_not_speak_of_one():
    alert = Alert("nonfinite", Level.ERROR, 4, "nonfinite/energies", 0.5, 0.0, 0, ("a", "b"))
    assert "(limit 0)" in alert.message


def test_a_member_of_an_ensemble_is_named():
    alert = replace(ALERT, member=3)
    assert alert.message == ALERT.message.replace("step 653:", "step 653, member 3:")
    record = json.loads(json.dumps(alert.record()))
    assert record["member"] == 3
    assert Alert.from_record(record) == alert
    assert "member" not in ALERT.record()
    assert replace(ALERT, member=0).record()["member"] == 0


def test_levels_are_the_numbers_of_the_scalar():
    assert [int(level) for level in (Level.INFO, Level.WARN, Level.ERROR)] == [0, 1, 2]


def test_a_record_goes_through_json_and_back():
    record = json.loads(json.dumps(ALERT.record()))
    assert record["message"] == ALERT.message
    assert record["level"] == "ERROR"
    assert Alert.from_record(record) == ALERT


def test_non_finite_numbers_stay_floats_in_a_record():
    alert = Alert("nonfinite", Level.ERROR, 4, "energy_gap", math.nan, math.inf, 0, ("a", "b"))
    record = alert.record()
    assert math.isnan(record["value"])
    assert record["limit"] == math.inf
    assert math.isnan(Alert.from_record(record).value)
    assert "nan" in alert.message


@pytest.mark.parametrize(
    "change",
    [
        {"level": "BAD"},
        {"step": "x"},
        {"remedies": ["one"]},
        {"remedies": 3},
        {"value": None},
        {"member": "x"},
    ],
)
def test_a_damaged_record_is_refused(change):
    with pytest.raises(ConfigError, match="not the record of an alert"):
        Alert.from_record(ALERT.record() | change)


def test_a_record_with_a_field_missing_is_refused():
    record = ALERT.record()
    del record["window"]
    with pytest.raises(ConfigError, match="window"):
        Alert.from_record(record)
