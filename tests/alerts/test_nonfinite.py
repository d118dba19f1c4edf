"""nonfinite on synthetic shapes."""

from __future__ import annotations

import math

import pytest

from ebmguard.alerts import Level, NonFiniteRule

from .parts import feed, levels, make_row

NAN = math.nan


@pytest.mark.parametrize(
    ("tag", "value"),
    [
        ("nonfinite/energies", 1 / 128),
        ("nonfinite/energies", NAN),
        ("nonfinite/samples", 0.5),
        ("nonfinite/pos", 1.0),
        ("nonfinite/neg", 1.0),
        ("nonfinite/gradients", 1.0),
        ("energy_gap", NAN),
        ("energy_gap", math.inf),
        ("f_pos/median", NAN),
        ("f_neg/median", -math.inf),
        ("sampler/grad_norm", math.inf),
        ("sampler/grad_norm_max", math.inf),
    ],
)
def test_anything_not_finite_is_an_error_at_once(tag, value):
    (alert,) = feed(NonFiniteRule(), [make_row() | {tag: value}])
    assert (alert.level, alert.step, alert.tag) == (Level.ERROR, 0, tag)
    assert alert.value == pytest.approx(value, nan_ok=True)
    assert alert.window == 0
    assert alert.remedies[0].startswith("roll back")


@pytest.mark.parametrize("tag", ["sampler/grad_norm", "sampler/grad_norm_max", "pareto_k", "ess"])
def test_what_is_merely_unknown_is_no_alarm(tag):
    assert feed(NonFiniteRule(), [make_row() | {tag: NAN}] * 50) == []


def test_a_run_of_nan_is_one_error_and_a_later_one_another():
    bad, good = [make_row(energy_gap=NAN)] * 100, [make_row()] * 250
    assert levels(feed(NonFiniteRule(), bad + good + bad)) == [(Level.ERROR, 0), (Level.ERROR, 350)]
