"""The steered β*: bounds, the table, slow windows, and a closed-form plant."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebmguard.errors import ConfigError
from ebmguard.steering import SteerBeta

NUMBERS = st.floats(0, 1) | st.just(math.nan)
QUICK = SteerBeta(least=0.1, most=8.0, ess=(0.3, 0.8), floor=0.5, window=3, rate=2.0)


def run(controller, rows):
    """β* after each row of (ess, grad_scale), measured at the β* in use."""
    values = []
    for ess, scale in rows:
        controller.observe({"ess": ess, "grad_scale": scale, "beta_star": controller.value})
        values.append(controller.value)
    return values


@pytest.mark.parametrize(
    ("ess", "scale", "expected"),
    [
        (0.9, 0.95, 1),  # nearly uniform weights of competitive negatives
        (0.5, 0.95, 0),  # inside the band
        (0.1, 0.95, -1),  # a few negatives carry the weight
        (0.9, 0.2, 0),  # none competes: the sampler's matter
        (0.02, 0.0, 0),
    ],
)
def test_the_table(ess, scale, expected):
    assert QUICK.direction(ess, scale) == expected
    controller = QUICK.start(1.0)
    assert run(controller, [(ess, scale)] * 3) == [1.0, 1.0, 2.0**expected]


@given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=300), st.floats(0.1, 8))
def test_beta_star_stays_in_its_bounds_and_moves_by_the_rate(rows, start):
    values = [start, *run(QUICK.start(start), rows)]
    assert all(0.1 <= value <= 8 for value in values)
    for a, b in itertools.pairwise(values):
        assert max(a, b) / min(a, b) <= 2 * (1 + 1e-12)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_ess_never_lowers_beta_star_more(scale, one, other):
    assert QUICK.direction(min(one, other), scale) <= QUICK.direction(max(one, other), scale)


@given(st.lists(st.tuples(st.floats(0.3, 0.8), st.floats(0, 1)), max_size=100))
def test_inside_the_band_nothing_changes(rows):
    assert set(run(QUICK.start(1.0), rows)) <= {1.0}


@given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=100))
def test_rows_without_a_number_change_nothing(rows):
    plain, dotted = QUICK.start(1.0), QUICK.start(1.0)
    known = [pair for pair in rows if not any(math.isnan(x) for x in pair)]
    values = run(plain, known)
    for pair in rows:
        run(dotted, [pair, (math.nan, 0.9), (0.9, math.inf)])
        dotted.observe({"energy_gap": 1.0})
    assert dotted.value == (values or [1.0])[-1]


@given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=40), st.lists(st.tuples(NUMBERS, NUMBERS)))
def test_the_state_goes_through_json(before, after):
    controller, resumed = QUICK.start(1.0), QUICK.start(0.3)
    run(controller, before)
    resumed.load_state_dict(json.loads(json.dumps(controller.state_dict())))
    assert run(resumed, after) == run(controller, after)


def test_a_few_odd_rows_move_nothing():
    controller = SteerBeta(window=20).start(0.5)
    healthy, blow_up = (0.5, 0.95), (1 / 64, 0.9)
    assert set(run(controller, ([healthy] * 11 + [blow_up] * 9) * 5)) == {0.5}


def test_rows_of_the_value_before_a_change_are_passed_over():
    """Rows reach the host some steps late on a GPU, and their β* is float32."""
    controller = QUICK.start(0.7)
    run(controller, [(0.9, 0.9)] * 3)
    assert controller.value == 1.4
    for _ in range(10):
        controller.observe({"ess": 0.01, "grad_scale": 0.9, "beta_star": 0.69999999})
    assert controller.value == 1.4
    for _ in range(3):
        controller.observe({"ess": 0.01, "grad_scale": 0.9, "beta_star": 1.39999998})
    assert controller.value == 0.7


def test_it_goes_on_from_the_value_of_a_recovery_within_its_bounds():
    controller = QUICK.start(1.0)
    run(controller, [(0.9, 0.9)] * 2)
    controller.move_to(4.0)
    assert run(controller, [(0.9, 0.9)] * 3) == [4.0, 4.0, 8.0]
    controller.move_to(100.0)
    assert controller.value == 8.0


def gaussian_ess(beta_star: float, spread: float) -> float:
    """Of many weights exp(β* f) with f ~ N(., spread²): 1/E[w²] of w with mean 1."""
    return math.exp(-((beta_star * spread) ** 2))


@pytest.mark.parametrize("start", [8.0, 0.1])
@pytest.mark.parametrize("spread", [0.2, 1.0, 3.0])
def test_a_plant_of_gaussian_energies_settles_in_the_band(start, spread):
    """From either side β* ends where ESS is inside the band, or at a bound, and stays there."""
    controller = SteerBeta(least=0.1, most=8.0, ess=(0.3, 0.8), rate=1.25, window=20).start(start)
    values = []
    for step in range(4_000):
        noise = 0.05 * math.sin(1.7 * step)  # a batch's own
        ess = min(max(gaussian_ess(controller.value, spread) + noise, 0.0), 1.0)
        controller.observe({"ess": ess, "grad_scale": 0.95, "beta_star": controller.value})
        values.append(controller.value)
    end = values[-1]
    assert set(values[2_000:]) == {end}
    assert 0.3 <= gaussian_ess(end, spread) <= 0.8 or end in (0.1, 8.0)
    changes = [b / a for a, b in itertools.pairwise(values) if a != b]
    assert all(change < 1 for change in changes) or all(change > 1 for change in changes)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"least": 0.0}, "least=0.0"),
        ({"most": -1.0}, "most=-1.0"),
        ({"least": 2.0, "most": 1.0}, "least=2.0 is not below"),
        ({"ess": (0.8, 0.3)}, "0 < low < high < 1"),
        ({"floor": 1.0}, "floor=1.0"),
        ({"window": 0}, "window=0"),
        ({"rate": 1.0}, "rate=1.0"),
        ({"rate": math.inf}, "rate=inf"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(wrong, named):
    with pytest.raises(ConfigError, match=named):
        SteerBeta(**wrong)


@pytest.mark.parametrize("start", [-0.5, math.nan, "0.5", True, [0.5, 1.0]])
def test_a_start_that_is_no_positive_number_is_refused(start):
    with pytest.raises(ConfigError, match="one positive number"):
        SteerBeta(least=0.1).start(start)


def test_beta_star_0_needs_a_least_value_to_start_from():
    with pytest.raises(ConfigError, match="never left by factors"):
        SteerBeta().start(0.0)
    assert SteerBeta(least=0.05).start(0.0).value == 0.05


def test_bounds_that_were_not_given_are_16_times_away_and_a_start_outside_is_refused():
    controller = SteerBeta().start(0.5)
    assert controller.bounds == (0.5 / 16, 8.0)
    with pytest.raises(ConfigError, match="outside its bounds"):
        SteerBeta(most=0.3).start(0.5)


def test_states_of_others_are_refused_and_change_nothing():
    controller = QUICK.start(1.0)
    with pytest.raises(ConfigError, match="expected the keys"):
        controller.load_state_dict({"beta_star": 1.0})
    with pytest.raises(ConfigError, match="outside the bounds"):
        controller.load_state_dict({"beta_star": 100.0, "ess": [], "grad_scale": []})
    assert controller.value == 1.0
