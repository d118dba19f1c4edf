"""Hysteresis, cool-down, escalation."""

from __future__ import annotations

import json

from ebmguard.alerts import Level
from ebmguard.alerts.latch import Latch

WARN, ERROR = Level.WARN, Level.ERROR


def reports(latch, steps):
    """Indices of the observations that were reported; a step is (level, calm)."""
    return [i for i, (level, calm) in enumerate(steps) if latch.update(level, calm)]


def test_a_lasting_level_is_reported_once():
    assert reports(Latch(3, 100), [(WARN, False)] * 1000) == [0]


def test_an_escalation_is_reported_at_once_and_only_upwards():
    latch = Latch(3, 100)
    steps = [(WARN, False), (ERROR, False), (WARN, False), (ERROR, False), (ERROR, False)]
    assert reports(latch, steps) == [0, 1]
    assert latch.active is ERROR


def test_an_episode_ends_only_after_enough_calm_steps_in_a_row():
    latch = Latch(calm_steps=3, cooldown=0)
    latch.update(WARN, False)
    # Back inside the limit, but not in the tighter band: the episode goes on.
    assert reports(latch, [(None, False)] * 10 + [(WARN, False)]) == []
    assert reports(latch, [(None, True), (None, True), (None, False), (None, True)]) == []
    assert latch.state_dict()["active"] == "WARN"
    assert reports(latch, [(None, True), (None, True)]) == []
    assert latch.state_dict()["active"] is None
    assert reports(latch, [(WARN, False)]) == [0]


def test_a_new_alarm_resets_the_calm_count():
    latch = Latch(calm_steps=2, cooldown=0)
    steps = [(WARN, False), (None, True), (WARN, False), (None, True)]
    assert reports(latch, steps) == [0]
    assert latch.active is WARN


def test_an_unknown_observation_changes_nothing():
    latch = Latch(calm_steps=2, cooldown=0)
    reports(latch, [(WARN, False), (None, True), (None, None), (None, True)])
    assert latch.active is None


def test_the_cool_down_holds_back_a_new_episode_and_then_reports_it_late():
    latch = Latch(calm_steps=1, cooldown=10)
    steps = [(WARN, False), (None, True)] + [(WARN, False)] * 20
    assert reports(latch, steps) == [0, 10]


def test_an_episode_that_ends_within_the_cool_down_is_not_reported():
    latch = Latch(calm_steps=1, cooldown=10)
    assert reports(latch, [(WARN, False), (None, True), (WARN, False), (None, True)]) == [0]


def test_an_escalation_does_not_wait_for_the_cool_down():
    latch = Latch(calm_steps=1, cooldown=100)
    episode = [(WARN, False), (ERROR, False), (None, True)]
    assert reports(latch, episode + episode) == [0, 1, 4]


def test_an_error_never_waits_for_the_cool_down():
    latch = Latch(calm_steps=1, cooldown=100)
    assert reports(latch, [(ERROR, False), (ERROR, False), (None, True)] * 2) == [0, 3]


def test_the_cool_down_of_an_error_covers_warnings():
    latch = Latch(calm_steps=1, cooldown=10)
    steps = [(ERROR, False), (None, True), (WARN, False), (None, True)]
    assert reports(latch, steps) == [0]


def test_state_goes_through_json():
    steps = [(WARN, False), (None, True), (None, True), (WARN, False)] + [(ERROR, False)] * 3
    for cut in range(len(steps)):
        whole, resumed = Latch(2, 3), Latch(2, 3)
        reports(whole, steps[:cut])
        resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
        assert reports(resumed, steps[cut:]) == reports(whole, steps[cut:])
