"""What every rule keeps to, those that are shipped and one of a user's own."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebmguard.alerts import DEFAULT_RULES, Alert, Judge, Level, Rule, error_for
from ebmguard.errors import (
    CollapsedError,
    ConfigError,
    DivergenceError,
    EnergyBlowupError,
    NonFiniteError,
    SamplerFailingError,
    WeightsDegenerateError,
)

from .parts import FAILED, WARNED, Row, Slump, SlumpError, excerpt, feed, make_row, noise

WARN, ERROR = Level.WARN, Level.ERROR
BLOW_UP = [make_row(energy_gap=gap) for gap in (WARNED, *[FAILED] * 9)]


CONSTANT = {"energy_gap": 0.0, "f_pos__std": 1e-7, "f_neg__std": 0.0, "f_pos__median": 2.3}


class Case(NamedTuple):
    """Rows on which a rule fires, with level, step and tag; and its error class."""

    fired: list[tuple[Level, int, str]]
    rows: list[Row]
    error: type[DivergenceError] = DivergenceError


def at(beta_star: float, count: int, **changes: float) -> list[Row]:
    return [make_row(beta_star=beta_star, **changes)] * count


CASES = {
    "nonfinite": Case(
        [(ERROR, 60, "energy_gap")],
        [*noise(60), *at(0.0, 9, energy_gap=math.nan)],
        NonFiniteError,
    ),
    "energy_blowup": Case(
        [(WARN, 60, "energy_gap"), (ERROR, 61, "energy_gap")],
        [*noise(60), *BLOW_UP, *noise(90, seed=1)],
        EnergyBlowupError,
    ),
    "collapsed": Case(
        [(ERROR, 99, "f_pos/std")],
        [*noise(70), *at(0.0, 40, **CONSTANT), *noise(20)],
        CollapsedError,
    ),
    "sampler_failing": Case(
        [(WARN, 49, "grad_scale"), (ERROR, 229, "grad_scale")],
        [*at(2.0, 30), *at(2.0, 220, grad_scale=0.05), *at(2.0, 30)],
        SamplerFailingError,
    ),
    "weights_degenerate": Case(
        [(WARN, 75, "ess")],
        [*at(2.0, 50), *at(2.0, 50, ess=0.05)],
        WeightsDegenerateError,
    ),
    "overshoot": Case([(WARN, 49, "energy_overlap")], at(2.0, 60, energy_overlap=0.99)),
    "stale_chains": Case([(WARN, 4, "sampler/repeated")], at(2.0, 9, sampler__repeated=1.0)),
    "saturated": Case([(WARN, 49, "sampler/clamped")], at(2.0, 60, sampler__clamped=1.0)),
    "step_size": Case(
        [(Level.INFO, 49, "sampler/drift_to_noise")], at(0.0, 60, sampler__drift_to_noise=500.0)
    ),
    "slump": Case(
        [(ERROR, 12, "accuracy")],
        [*at(0.0, 10, accuracy=0.9), *at(0.0, 9, accuracy=0.2), *at(0.0, 9, accuracy=0.8)],
        SlumpError,
    ),
}
RULES: tuple[Rule, ...] = (*DEFAULT_RULES, Slump())
HEALTHY = {
    "sampler/grad_norm_max": 0.3,
    "sampler/repeated": 0.0,
    "sampler/clamped": 0.3,
    "sampler/drift_to_noise": 2.0,
    "sampler/acceptance": 0.7,
    "buffer/duplicates": 0.1,
    "buffer/age": 19.0,
    "accuracy": 0.9,
}
# Every rule fires somewhere in these.
STORY = [
    *[row for case in CASES.values() for row in case.rows],
    *[row for name in ("absorbed_onset", "starved", "blowup_a") for row in excerpt(name).rows],
]

every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
each_and_all = pytest.mark.parametrize(
    ("rules", "rows"),
    [*[((rule,), CASES[rule.name].rows) for rule in RULES], (RULES, STORY)],
    ids=[*[rule.name for rule in RULES], "all"],
)


def texts(alerts: Iterable[Alert]) -> list[str]:
    """To compare alerts by: one whose value is NaN equals itself alone, from Python 3.13 on."""
    return [repr(alert) for alert in alerts]


def strict_json(state: Any) -> Any:
    return json.loads(json.dumps(state, allow_nan=False))


@every_rule
def test_it_fires_at_its_step_under_any_name_and_with_its_error(rule):
    case = CASES[rule.name]
    alerts = feed(rule, case.rows)
    assert [(a.level, a.step, a.tag) for a in alerts] == case.fired
    assert {a.rule for a in alerts} == {rule.name}
    renamed = replace(rule, name="another")
    assert texts(feed(renamed, case.rows)) == texts(replace(a, rule="another") for a in alerts)
    for alert in alerts:
        error = error_for(alert, RULES)(alert)
        assert type(error) is case.error
        assert (error.alert, str(error)) == (alert, alert.message)
        assert all(alert.remedies)


@every_rule
@pytest.mark.parametrize("beta_star", [2.0, -0.5])
def test_it_is_quiet_on_a_healthy_run_and_of_what_it_does_not_know(rule, beta_star):
    healthy = [row | HEALTHY for row in noise(300, beta_star=beta_star)]
    assert feed(rule, healthy) == []
    assert feed(rule, [{}, {"beta_star": beta_star}, {"loss": -3.0}] * 100) == []
    unknown = dict.fromkeys(
        ("sampler/grad_norm", "sampler/grad_norm_max", "grad_scale", "ess", "pareto_k"), math.nan
    )
    assert feed(rule, [row | unknown for row in healthy]) == []


@each_and_all
def test_restored_or_unpickled_it_gives_the_same_alerts(rules, rows):
    assert pickle.loads(pickle.dumps(rules)) == rules
    for cut in range(0, len(rows), max(1, len(rows) // 3)):
        through, resumed = Judge(rules), Judge(rules)
        feed(through, rows[:cut])
        state = through.state_dict()
        text = json.dumps(state)
        copy = pickle.loads(pickle.dumps(through))
        feed(resumed, STORY[:50])
        resumed.load_state_dict(strict_json(state))
        assert resumed.state_dict() == copy.state_dict() == state
        assert resumed.active == copy.active == through.active
        alerts = texts(feed(through, rows[cut:], cut))
        assert texts(feed(resumed, rows[cut:], cut)) == alerts
        assert texts(feed(copy, rows[cut:], cut)) == alerts
        assert json.dumps(state) == text  # a copy


@each_and_all
def test_rows_that_tell_it_nothing_change_nothing(rules, rows):
    whole, holes = Judge(rules), Judge(rules)
    for i, row in enumerate(rows):
        whole.observe(i, row)
        holes.observe(2 * i, row)
        # At the same beta*: rules on weights forget when it moves to or from 0.
        assert holes.observe(2 * i + 1, {"loss": 0.0, "beta_star": row["beta_star"]}) == []
    assert watchers(whole) == watchers(holes)


def watchers(judge: Judge) -> dict[str, Any]:
    return {name: part["watcher"] for name, part in judge.state_dict()["rules"].items()}


ANY = st.sampled_from([0.0, 0.05, 0.5, 1.0, -3.0, 200.0, 2e4, math.nan, math.inf])
PARTIAL = st.dictionaries(st.sampled_from(sorted(make_row() | HEALTHY)), ANY, max_size=6)


@each_and_all
@settings(max_examples=8)
@given(data=st.data())
def test_a_row_that_grows_within_its_step_is_one_observation(rules, rows, data):
    """Rows of a step may come again: memory advances once, and nothing is said twice."""
    first = data.draw(st.integers(0, max(0, len(rows) - 60)))
    once, often = Judge(rules), Judge(rules)
    apart = data.draw(st.sampled_from([1, 3, 45]))  # steps that come again
    feed(once, rows[:first])
    feed(often, rows[:first])
    for step in range(first, min(first + 60, len(rows))):
        told = []
        if step % apart == 0 and data.draw(st.booleans()):
            for part in data.draw(st.lists(PARTIAL, max_size=3)):
                told += often.observe(step, rows[step] | part)
        expected = once.observe(step, rows[step])
        told += often.observe(step, rows[step])
        assert often.state_dict() == once.state_dict()
        said = [(alert.rule, alert.level) for alert in told]
        # Nothing twice, but for a higher level; and nothing is held back.
        assert said == sorted(set(said), key=said.index)
        for alert in expected:
            heard = [level for name, level in said if name == alert.rule]
            assert heard == sorted(heard)
            assert heard[-1] >= alert.level


@every_rule
def test_a_damaged_state_is_refused_and_changes_nothing(rule):
    judge = Judge(RULES)
    feed(judge, STORY[:200])
    before = judge.state_dict()
    state = Judge(RULES).state_dict()
    state["rules"] |= {rule.name: {"watcher": 3, "latch": {}}}
    with pytest.raises(ConfigError, match=f"'{rule.name}' is damaged"):
        judge.load_state_dict(state)
    assert judge.state_dict() == before
