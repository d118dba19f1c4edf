"""energy_blowup's memory: floors, episodes, new baselines; and what must not matter to it."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebmguard.alerts import DEFAULT_RULES, BandRule, Detector, Level

SHIPPED = next(rule for rule in DEFAULT_RULES if isinstance(rule, BandRule))
BAND = replace(SHIPPED, begins=0)  # of a run that is under way


def run(rows, rule=BAND, detector=None):
    detector = detector or Detector([rule])
    return [alert for step, row in enumerate(rows) for alert in detector.observe(step, row)]


def levels(alerts):
    return [(alert.level, alert.step) for alert in alerts]


def test_a_series_that_stands_still_does_not_make_ripples_alarms(make_row):
    constant = [make_row()] * 60
    # MAD 0: the floor is a tenth of the spread of f_pos (1.0), so the limit is at 0.8.
    assert run([*constant, make_row(energy_gap=0.79)]) == []
    (alert,) = run([*constant, make_row(energy_gap=0.81)])
    assert alert.limit == pytest.approx(0.8)


def test_float32_jitter_of_a_large_offset_is_not_an_alarm():
    draw = random.Random(0)
    rows = [{"f_pos/median": 1e6 + (0.06 if draw.random() < 0.2 else 0.0)} for _ in range(100)]
    assert run(rows) == []


def test_one_blow_up_is_one_warning_and_one_error(noise, make_row):
    blowup = [make_row(energy_gap=1.6 * 3**t) for t in range(40)]
    alerts = run([*noise(60), *blowup, *noise(300, seed=1)])
    assert levels(alerts) == [(Level.WARN, 60), (Level.ERROR, 61)]


def test_a_blow_up_does_not_widen_its_own_band(noise, make_row):
    rows = [*noise(60), *[make_row(energy_gap=5.0 + t) for t in range(30)], *noise(64, seed=1)]
    detector = Detector([BAND])
    run(rows, detector=detector)
    assert detector.level is None
    # The same again, and again an ERROR: the band is as narrow as it was.
    assert levels(run([make_row(energy_gap=5.0)], detector=detector)) == [(Level.ERROR, 0)]


def test_a_lasting_shift_becomes_the_new_band(noise):
    detector = Detector([BAND])
    run(noise(100), detector=detector)
    alerts = run(noise(200, seed=1, gap=5.0), detector=detector)
    assert levels(alerts) == [(Level.ERROR, 0)]
    assert detector.level is None
    # And the new level is guarded as the old one was.
    (alert,) = run(noise(1, seed=2, gap=0.0), detector=Detector([BAND])) or run(
        [*noise(200, seed=1, gap=5.0), *noise(1, gap=0.0)]
    )
    assert alert.level is Level.ERROR


def test_the_shift_is_adopted_after_rebaseline_steps_and_not_before(noise):
    rule = replace(BAND, rebaseline=40)
    for count, active in [(39 + 9, True), (40 + 10, False)]:
        detector = Detector([rule])
        run([*noise(100), *noise(count, seed=1, gap=5.0)], detector=detector)
        assert (detector.level is not None) is active


def test_values_beyond_the_cap_never_become_normal(noise, make_row):
    detector = Detector([BAND])
    run([*noise(100), *[make_row(energy_gap=2e4)] * 500], detector=detector)
    assert detector.level is Level.ERROR
    # So that the run is back in its old band at once when it comes back.
    run([make_row()] * 10, detector=detector)
    assert detector.level is None


def test_the_episode_lasts_until_the_tighter_band(make_row):
    detector = Detector([BAND])
    # The scale is the floor, 0.1: WARN at 0.8, calm below 0.4.
    run([*[make_row()] * 60, make_row(energy_gap=1.0)], detector=detector)
    run([make_row(energy_gap=0.6)] * 30, detector=detector)
    assert detector.level is Level.WARN
    run([make_row(energy_gap=0.3)] * 10, detector=detector)
    assert detector.level is None


def test_an_old_outlier_does_not_hasten_the_adoption_of_a_shift(noise, make_row):
    detector = Detector([BAND])
    outlier = make_row(energy_gap=5.0)
    run([*noise(100), outlier, *noise(15, seed=1)], detector=detector)
    assert detector.level is None
    run(noise(49, seed=2, gap=5.0), detector=detector)
    assert detector.level is Level.ERROR


def test_a_blow_up_does_not_raise_the_floor(make_row):
    detector = Detector([BAND])
    wide = make_row(energy_gap=5.0, f_pos__std=100.0)
    run([*[make_row()] * 60, *[wide] * 45], detector=detector)
    assert detector.level is Level.ERROR


@settings(max_examples=20)
@given(exponent=st.integers(-20, 20))
def test_the_unit_of_the_energies_does_not_matter(excerpt, exponent):
    """f in other units: same alerts at the same steps, with values and limits in these units."""
    unit = 2.0**exponent
    # Caps follow the unit through the run's very first row, which these excerpts do not have.
    rule = replace(
        BAND, series=tuple(replace(s, cap=math.inf, early_cap=math.inf) for s in BAND.series)
    )
    energies = ("energy_gap", "f_pos/median", "f_pos/std", "f_neg/min", "f_neg/q95")
    for name in ("blowup_b", "weak_beta", "absorbed_surge"):
        recorded = excerpt(name).rows[:-4]
        scaled = [
            {
                tag: v * unit if tag in energies or tag == "sampler/grad_norm" else v
                for tag, v in row.items()
            }
            | {"beta_star": row["beta_star"] / unit}
            for row in recorded
        ]
        expected, found = run(recorded, rule), run(scaled, rule)
        assert [(a.level, a.step, a.tag) for a in found] == [
            (a.level, a.step, a.tag) for a in expected
        ]
        assert len(found) >= 1
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.value == theirs.value * unit
            assert mine.limit == pytest.approx(theirs.limit * unit)


@settings(max_examples=20)
@given(shift=st.floats(-3e3, 3e3))
def test_a_constant_added_to_all_energies_does_not_matter(excerpt, shift):
    """The loss is invariant to it, and so are the alerts."""
    for name in ("blowup_b", "weak_beta", "absorbed_surge"):
        recorded = excerpt(name).rows
        shifted = [
            {
                tag: v + shift if tag in ("f_pos/median", "f_neg/min", "f_neg/q95") else v
                for tag, v in row.items()
            }
            for row in recorded
        ]
        assert levels(run(shifted)) == levels(run(recorded))
