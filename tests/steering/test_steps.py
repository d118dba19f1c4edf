"""The adaptive number of SGLD steps: bounds, hysteresis, patience, and a closed-form plant."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebmguard.errors import ConfigError
from ebmguard.steering import AdaptiveSteps

SCALES = st.floats(0, 1) | st.just(math.nan)
QUICK = AdaptiveSteps(most=16, floor=0.5, clear=0.8, rise_after=2, fall_after=4, longest=64)


def row(scale, beta_star=0.5):
    return {"grad_scale": scale, "ref/grad_scale": 0.123, "beta_star": beta_star}


def run(controller, scales):
    """The number of steps after each row."""
    values = []
    for scale in scales:
        controller.observe(row(scale))
        values.append(controller.value)
    return values


@given(st.lists(SCALES, max_size=200), st.integers(1, 7), st.sampled_from([1, 2, 8]))
def test_steps_stay_between_the_base_and_its_most_and_move_by_factors_of_two(scales, base, most):
    controller = AdaptiveSteps(most=most, rise_after=1, fall_after=3).start(base)
    values = [controller.value, *run(controller, scales)]
    assert values[0] == base
    assert set(values) <= {base * 2**i for i in range(most.bit_length())}
    assert all(max(a, b) <= 2 * min(a, b) for a, b in itertools.pairwise(values))


@given(st.lists(st.floats(0, 1), max_size=100), st.floats(0, 1))
def test_a_lower_grad_scale_never_asks_for_fewer_steps(scales, last):
    """Of two runs with the same past, the one with the lower GradScale runs no fewer steps."""
    numbers = []
    for scale in sorted((last, last / 2)):
        controller = QUICK.start(1)
        numbers.append(run(controller, [*scales, scale])[-1])
    assert numbers[0] >= numbers[1]


@given(st.lists(st.floats(0.5, 0.8), max_size=100), st.integers(0, 4))
def test_between_floor_and_clear_nothing_changes(scales, level):
    controller = QUICK.start(3)
    run(controller, [0.0] * 2 * level)
    assert set(run(controller, scales)) <= {3 * 2**level}


@given(st.lists(SCALES, max_size=100))
def test_rows_without_the_number_decide_nothing(scales):
    plain, dotted = QUICK.start(1), QUICK.start(1)
    values = run(plain, [scale for scale in scales if not math.isnan(scale)])
    for scale in scales:
        dotted.observe(row(scale))
        dotted.observe(row(math.nan))
        dotted.observe(row(math.inf))
        dotted.observe({"energy_gap": 1.0})
    assert dotted.value == (values or [1])[-1]


@given(st.lists(SCALES, max_size=60), st.lists(SCALES, max_size=60))
def test_the_state_goes_through_json(before, after):
    controller, resumed = QUICK.start(2), QUICK.start(2)
    run(controller, before)
    resumed.load_state_dict(json.loads(json.dumps(controller.state_dict())))
    assert run(resumed, after) == run(controller, after)
    assert resumed.extra_compute == controller.extra_compute


def test_rising_is_quick_and_falling_is_slow():
    controller = AdaptiveSteps(most=16, rise_after=2, fall_after=100).start(1)
    assert run(controller, [0.0] * 10) == [1, 2, 2, 4, 4, 8, 8, 16, 16, 16]
    assert run(controller, [0.95] * 99) == [16] * 99
    assert run(controller, [0.95]) == [8]


def test_one_row_under_the_floor_is_not_enough_and_one_over_clear_does_not_end_it():
    controller = QUICK.start(1)
    assert run(controller, [0.0, 0.9, 0.0, 0.6, 0.0, 0.9]) == [1] * 6
    assert run(controller, [0.0, math.nan, 0.0]) == [1, 1, 2]


def test_a_fall_that_is_taken_back_doubles_the_patience_of_the_next():
    controller = QUICK.start(1)
    waits = []
    for _ in range(7):
        run(controller, [0.0] * 2)
        assert controller.value == 2
        wait = 0
        while controller.value == 2:
            run(controller, [0.9])
            wait += 1
        waits.append(wait)
    assert waits == [4, 8, 16, 32, 64, 64, 64]  # and no longer than `longest`


def test_a_fall_that_lasted_as_long_as_it_was_waited_for_was_right():
    controller = QUICK.start(1)
    run(controller, [0.0] * 2 + [0.9] * 4)
    assert controller.value == 1
    run(controller, [0.9] * 5 + [0.0] * 2)
    assert run(controller, [0.9] * 4) == [2, 2, 2, 1]


def test_at_beta_star_0_the_reference_is_read_and_below_it_nothing():
    for beta_star, reference, expected in ((0.0, 0.1, 2), (0.0, 0.9, 1), (-0.5, 0.1, 1)):
        controller = QUICK.start(1)
        for _ in range(3):
            controller.observe(
                {"grad_scale": 0.1, "ref/grad_scale": reference, "beta_star": beta_star}
            )
        assert controller.value == expected


def test_what_does_not_help_is_given_up_until_the_sampler_is_well_again():
    settings = AdaptiveSteps(most=4, rise_after=1, fall_after=4, give_up_after=3)
    controller = settings.start(1)
    assert run(controller, [0.0] * 4) == [2, 4, 4, 4]
    assert run(controller, [0.85] + [0.0] * 50) == [4] + [1] * 50
    assert run(controller, [0.85] * 5 + [0.0] * 5) == [1] * 10  # not yet over `clear`
    assert run(controller, [0.95, 0.0, 0.0]) == [1, 2, 4]


def test_what_was_spent_is_reported_over_what_the_base_would_have_spent():
    controller = QUICK.start(5)
    assert controller.extra_compute == 1.0
    spent = 0
    for scale in [0.9] * 3 + [0.0] * 6 + [math.nan] + [0.9] * 10:
        spent += controller.value  # what ran in the step of this row
        controller.observe(row(scale))
    assert controller.extra_compute == pytest.approx(spent / (20 * 5))


@pytest.mark.parametrize("need", [1, 3, 5, 16])
def test_a_plant_whose_grad_scale_follows_the_steps_settles(need):
    """GradScale = k^4 / (k^4 + need^4): half at `need` steps. The count settles around the need.

    Where a count is healthy and the one below is not, the controller must stop trying the lower
    one: ever more rarely, and never by more than one level.
    """
    controller = AdaptiveSteps(
        most=16, floor=0.5, clear=0.8, rise_after=2, fall_after=20, longest=2000
    ).start(1)
    values = []
    for _ in range(20_000):
        k = controller.value
        controller.observe(row(k**4 / (k**4 + need**4)))
        values.append(k)
    late = values[2_000:]
    enough = min(k for k in (1, 2, 4, 8, 16) if k**4 / (k**4 + need**4) >= 0.5)
    assert min(late) >= enough // 2
    assert max(late) <= 2 * enough
    assert sum(k < enough for k in late) < 0.01 * len(late)
    changes = [i for i, (a, b) in enumerate(itertools.pairwise(values)) if a != b]
    first, second = (
        sum(lo <= i < hi for i in changes) for lo, hi in ((0, 10_000), (10_000, 20_000))
    )
    assert second <= first // 2


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"most": 12}, "power of two"),
        ({"most": 0}, "most=0"),
        ({"rise_after": 1.5}, "rise_after= is 1.5; expected a whole number"),
        ({"floor": 0.9, "clear": 0.8}, "0 < floor <= clear < 1"),
        ({"floor": math.nan}, "floor=nan"),
        ({"fall_after": 100, "longest": 50}, "longest=50"),
        ({"give_up_after": 0}, "give_up_after=0"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(wrong, named):
    with pytest.raises(ConfigError, match=named.replace("*", r"\*")):
        AdaptiveSteps(**wrong)


@pytest.mark.parametrize("base", [0, -1, 2.0, True, None])
def test_a_base_that_is_no_count_is_refused(base):
    with pytest.raises(ConfigError, match=r"AdaptiveSteps.*base.*a whole number"):
        AdaptiveSteps().start(base)


def test_states_of_others_are_refused_and_change_nothing():
    controller = QUICK.start(1)
    run(controller, [0.0] * 10)
    state = controller.state_dict()
    smaller = AdaptiveSteps(most=2).start(1)
    with pytest.raises(ConfigError, match="most=2"):
        smaller.load_state_dict(state)
    with pytest.raises(ConfigError, match="expected the keys"):
        smaller.load_state_dict({"level": 1})
    assert smaller.value == 1
