"""An alert as markdown."""

from __future__ import annotations

from dataclasses import replace

from ebmguard.alerts import Alert, Level
from ebmguard.sinks.text import alert_markdown

ALERT = Alert("energy_blowup", Level.ERROR, 7, "energy_gap", 3.5, 3.0, 64, ("a", "b"))


def test_the_heading_names_the_member_of_an_ensemble():
    def heading(alert: Alert) -> str:
        return alert_markdown(alert.record()).splitlines()[0]

    assert heading(ALERT) == "**ERROR energy_blowup** at step 7"
    assert heading(replace(ALERT, member=0)) == "**ERROR energy_blowup** at step 7, member 0"
