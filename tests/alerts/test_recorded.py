"""Every rule on excerpts of real runs: fires on what was lost, quiet on what lived."""

from __future__ import annotations

import pytest

from ebmguard.alerts import Judge, Level

from .parts import excerpt, feed


def alerts_of(recorded):
    return feed(Judge(), recorded.rows, recorded.first_step)


# name, step of the first WARN (None where the first alert is the ERROR), step of the ERROR,
# least accuracy after the update before the ERROR's step: what withholding that step saves.
LOST = [
    ("blowup_a", None, 653, 0.98),
    ("blowup_b", 876, 877, 0.97),
    ("blowup_c", 1359, 1362, 0.98),
    ("near_blowup", None, 660, 0.96),
    ("weak_beta", None, 1024, 0.96),
    ("steep_lr", 157, 158, 0.92),
    # Doubling at every step while the band still holds the first steps of the run: late.
    ("early_blowup", 81, 82, 0.76),
]


@pytest.mark.parametrize(("name", "warned", "failed", "saved"), LOST)
def test_a_lost_run_is_an_error_before_the_accuracy_goes(name, warned, failed, saved):
    recorded = excerpt(name)
    blowups = [a for a in alerts_of(recorded) if a.rule == "energy_blowup"]
    expected = [(Level.ERROR, failed)]
    if warned is not None:
        expected.insert(0, (Level.WARN, warned))
    assert [(a.level, a.step) for a in blowups] == expected
    assert recorded.accuracy_after(failed - 1) >= saved
    # The excerpt is of a run that did lose accuracy: the alarm is not a false one.
    lost = min(recorded.accuracy[failed - recorded.first_step :])
    assert lost < recorded.accuracy_after(failed - 1) - 0.04


@pytest.mark.parametrize("name", ["healthy_start", "healthy_late"])
def test_a_healthy_run_is_quiet(name):
    assert alerts_of(excerpt(name)) == []


def test_a_network_that_begins_to_learn_is_a_warning_at_most():
    """All energies and the gradient grow twentyfold in 60 steps; the gap stays under 2."""
    recorded = excerpt("short_run_start")
    alerts = alerts_of(recorded)
    assert [(a.rule, a.level) for a in alerts] == [("energy_blowup", Level.WARN)] * len(alerts)
    assert len(alerts) <= 1
    # Later than in its beginning the same rows would be an ERROR.
    later = replace(recorded, first_step=1000)
    assert Level.ERROR in {a.level for a in alerts_of(later)}


@pytest.mark.parametrize(("name", "step"), [("absorbed_onset", 818), ("absorbed_surge", 1726)])
def test_a_gap_that_the_weights_absorb_is_one_warning(name, step):
    recorded = excerpt(name)
    assert [(a.level, a.step, a.tag) for a in alerts_of(recorded)] == [
        (Level.WARN, step, "energy_gap")
    ]
    assert min(recorded.accuracy) > 0.95


def test_the_same_surge_is_an_error_where_no_weights_absorb_it():
    rows = [row | {"beta_star": 0.0} for row in excerpt("absorbed_surge").rows]
    assert Level.ERROR in {alert.level for alert in feed(Judge(), rows)}


def test_a_starved_run_fails_by_grad_scale_after_a_patience():
    recorded = excerpt("starved")
    failing = [a for a in alerts_of(recorded) if a.rule == "sampler_failing"]
    assert [(a.level, a.step) for a in failing] == [(Level.WARN, 275), (Level.ERROR, 455)]
    assert failing[0].remedies[:2] == ("more SGLD steps", "lower beta_star")
    degenerate = [a for a in alerts_of(recorded) if a.rule == "weights_degenerate"]
    assert [(a.level, a.tag) for a in degenerate] == [(Level.WARN, "ess")]


def test_an_alert_names_its_value_its_limit_and_its_window():
    recorded = excerpt("blowup_a")
    (alert,) = [a for a in alerts_of(recorded) if a.level is Level.ERROR]
    row = recorded.rows[alert.step - recorded.first_step]
    assert alert.tag == "energy_gap"
    assert alert.value == row["energy_gap"] > alert.limit > 0
    assert alert.window == 64
    assert alert.remedies[0].startswith("roll back")
