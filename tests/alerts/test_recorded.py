"""Every rule on excerpts of real runs: fires on what was lost, quiet on what lived."""

from __future__ import annotations

import pytest

from ebmguard.alerts import Judge, Level

from .parts import GROWTH, excerpt, feed


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
    failed = next(alert.step for alert in alerts if alert.level is Level.ERROR)
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
    assert Level.ERROR in {alert.level for alert in feed(Judge(), rows)}


def test_a_starved_run_fails_by_grad_scale_after_a_patience():
    recorded = excerpt("starved")
    failing = [a for a in alerts_of(recorded) if a.rule == "sampler_failing"]
    assert [(a.level, a.step) for a in failing] == [(Level.WARN, 275), (Level.ERROR, 455)]
    # The energies had come apart before: more SGLD steps are among the remedies of that.
    assert [a.follows for a in failing] == ["energy_blowup"] * 2
    degenerate = [a for a in alerts_of(recorded) if a.rule == "weights_degenerate"]
    assert [(a.level, a.tag) for a in degenerate] == [(Level.WARN, "ess")]


def test_an_alert_names_its_value_its_limit_and_its_window():
    recorded = excerpt("blowup_a")
    (alert,) = [a for a in alerts_of(recorded) if a.level is Level.ERROR]
    row = recorded.rows[alert.step - recorded.first_step]
    assert alert.tag == "energy_gap"
    assert alert.value == row["energy_gap"] > alert.limit > 0
    assert alert.window == 5 * GROWTH.rows // 2
    assert alert.remedies[0].startswith("go back")
