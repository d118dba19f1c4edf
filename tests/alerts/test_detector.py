"""The detector as a whole: state, silence on missing tags, errors, and what it may import."""

from __future__ import annotations

import ast
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ebmguard.alerts
from ebmguard import errors
from ebmguard.alerts import DEFAULT_RULES, Alert, Detector, FloorRule, Level, error_for
from ebmguard.errors import ConfigError

# Every rule fires somewhere in these.
STORY = ("healthy_start", "absorbed_onset", "starved", "near_blowup", "blowup_a")


@pytest.fixture(scope="session")
def story(excerpt):
    rows = [row for name in STORY for row in excerpt(name).rows]
    hung = [row | {"sampler/repeated": 1.0} for row in rows[:10]]
    wild = {"energy_overlap": 0.99, "sampler/clamped": 1.0, "sampler/drift_to_noise": 500.0}
    rushed = [row | wild for row in rows[:60]]
    return [*rows, rows[-1] | {"energy_gap": math.nan}, *hung, *rushed, *rows[:60]]


def feed(detector, rows, start=0):
    return [a for i, row in enumerate(rows, start) for a in detector.observe(i, row)]


def test_the_story_needs_every_rule(story):
    fired = {alert.rule for alert in feed(Detector(), story)}
    assert fired == {rule.name for rule in DEFAULT_RULES}


@pytest.mark.parametrize("rule", DEFAULT_RULES, ids=lambda rule: rule.name)
def test_a_rule_left_out_is_silent_and_the_others_do_not_notice(story, rule):
    others = [other for other in DEFAULT_RULES if other is not rule]
    assert feed(Detector(others), story) == [
        alert for alert in feed(Detector(), story) if alert.rule != rule.name
    ]


@settings(max_examples=25)
@given(data=st.data())
def test_a_restored_detector_gives_the_same_alerts(story, data):
    cut = data.draw(st.integers(0, len(story)))
    through = Detector()
    feed(through, story[:cut])
    # allow_nan=False: the state is strict JSON.
    state = json.loads(json.dumps(through.state_dict(), allow_nan=False))
    resumed = Detector()
    feed(resumed, story[: data.draw(st.integers(0, 50))])
    resumed.load_state_dict(state)
    assert resumed.state_dict() == through.state_dict()
    assert (resumed.level, resumed.active) == (through.level, through.active)
    assert feed(resumed, story[cut:], cut) == feed(through, story[cut:], cut)


def test_a_state_is_a_copy(story):
    detector = Detector()
    feed(detector, story[:100])
    state = detector.state_dict()
    before = json.dumps(state)
    feed(detector, story[100:400])
    assert json.dumps(state) == before


def test_rows_that_lack_tags_are_no_alarm(story):
    assert feed(Detector(), [{}] * 300) == []
    assert feed(Detector(), [{"beta_star": 2.0, "loss": -3.0}] * 300) == []
    assert feed(Detector(), [{"beta_star": 0.0, "energy_gap": 0.1}] * 300) == []


def test_rows_that_lack_tags_change_nothing(story):
    """What the rules remember of a run does not depend on rows that tell them nothing."""
    whole, holes = Detector(), Detector()
    for step, row in enumerate(story):
        whole.observe(step, row)
        holes.observe(step, row)
        # At the same beta*: rules on weights forget when it moves to or from 0.
        assert holes.observe(step, {"loss": 0.0, "beta_star": row["beta_star"]}) == []
    for name, part in whole.state_dict().items():
        assert holes.state_dict()[name]["watcher"] == part["watcher"]


def test_unknown_numbers_do_not_fire(story):
    unknown = dict.fromkeys(("sampler/grad_norm", "grad_scale", "ess", "pareto_k"), math.nan)
    alerts = feed(Detector(), [row | unknown for row in story])
    assert alerts
    assert all(alert.tag not in unknown for alert in alerts)


def test_the_level_is_that_of_the_episodes_and_not_of_the_reports(make_row):
    detector = Detector()
    feed(detector, [make_row()] * 60)
    assert (detector.level, detector.active) == (None, {})
    detector.observe(60, make_row(energy_gap=1.6))
    assert detector.observe(61, make_row(energy_gap=1.6)) == []
    assert detector.active == {"energy_blowup": Level.WARN}
    detector.observe(62, make_row(nonfinite__energies=0.1))
    assert detector.level is Level.ERROR


def test_steps_may_rewind(make_row):
    detector = Detector()
    feed(detector, [make_row()] * 60, start=1000)
    (alert,) = detector.observe(5, make_row(energy_gap=9.0))
    assert alert.step == 5


def test_two_rules_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="different names"):
        Detector([FloorRule(), replace(FloorRule(), floor=0.01)])
    Detector([FloorRule(), replace(FloorRule(), name="strict", floor=0.2)])


def test_something_that_is_no_rule_is_refused():
    with pytest.raises(ConfigError, match="got str"):
        Detector(["nonfinite"])  # type: ignore[list-item]


def test_a_state_of_other_rules_is_refused(story):
    detector = Detector()
    with pytest.raises(ConfigError, match="same rules"):
        detector.load_state_dict(Detector(DEFAULT_RULES[:2]).state_dict())


@pytest.mark.parametrize("rule", [rule.name for rule in DEFAULT_RULES])
@pytest.mark.parametrize("damage", [{}, {"watcher": {}, "latch": {}}, 3])
def test_a_damaged_state_is_refused_and_changes_nothing(story, rule, damage):
    detector = Detector()
    feed(detector, story[:200])
    before = detector.state_dict()
    with pytest.raises(ConfigError, match=f"'{rule}' is damaged"):
        detector.load_state_dict(Detector().state_dict() | {rule: damage})
    assert detector.state_dict() == before


@pytest.mark.parametrize(
    ("rule", "cls"),
    [
        ("nonfinite", errors.NonFiniteError),
        ("energy_blowup", errors.EnergyBlowupError),
        ("sampler_failing", errors.SamplerFailingError),
        ("weights_degenerate", errors.WeightsDegenerateError),
        ("my own", errors.DivergenceError),
    ],
)
def test_each_rule_has_its_error(rule, cls):
    alert = Alert(rule, Level.ERROR, 7, "energy_gap", 1.0, 0.5, 64, ("a", "b"))
    assert error_for(alert) is cls
    error = error_for(alert)(alert)
    assert error.alert is alert
    assert str(error) == alert.message


def test_the_alert_room_imports_no_torch():
    folder = Path(ebmguard.alerts.__file__).parent
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            elif isinstance(node, ast.ImportFrom) and node.level == 2:
                # From the rest of the package: the errors only.
                assert node.module == "errors", path.name
                continue
            else:
                continue
            assert not any(name.split(".")[0] in ("torch", "numpy") for name in names), path.name
