"""From the strength arguments to beta* and the sampler's factor, at every step."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from ebmguard.errors import ConfigError
from ebmguard.retrofit.strength import Strength

JEM = 20_000.0


def at(step: int = 0, **arguments):
    values = Strength.of(**arguments).at(step)
    return values.beta_star, values.factor


@pytest.mark.parametrize(
    ("arguments", "beta_star", "factor"),
    [
        ({"beta_star": 2}, 2.0, 1.0),
        ({"beta_star": 2, "output_scale": JEM}, 2.0, 1 - 2 / JEM),
        ({"beta": 1e-4, "output_scale": JEM}, 2.0, 1 - 1e-4),
        ({"beta": 0.25, "step_size": 1.0, "noise_std": 0.01}, 5000.0, 0.75),
        ({"beta_star": 2, "step_size": 10.0, "noise_std": 0.005}, 2.0, 1 - 2 / 8e5),  # IGEBM
        ({"beta_star": 1, "step_size": 0.005, "noise_std": 0.1}, 1.0, 0.0),
        ({"beta_star": 0, "output_scale": JEM}, 0.0, 1.0),
        ({"beta_star": -2, "output_scale": 10}, -2.0, 1.2),
        ({"beta_star": 2, "sampler_scale": 0.5}, 2.0, 0.5),
        ({}, 0.0, 1.0),
        ({"output_scale": JEM}, 0.0, 1.0),
        ({"output_scale": 0.01}, 0.0, 1.0),
        ({"output_scale": 3, "sampler_scale": 0.25}, 0.0, 0.25),
        ({"beta_star": 2, "output_scale": JEM, "sampler_scale": 0.5}, 2.0, 0.5),
        ({"beta_star": 2, "sampler_scale": 0}, 2.0, 0.0),
        ({"beta_star": 2, "sampler_scale": 1}, 2.0, 1.0),
        ({"beta_star": np.float32(0.5)}, 0.5, 1.0),
        ({"beta_star": np.int64(2)}, 2.0, 1.0),
        ({"beta_star": Fraction(1, 4), "output_scale": np.float64(2)}, 0.25, 0.875),
    ],
)
def test_numbers(arguments, beta_star, factor):
    star, actual = at(**arguments)
    assert star == pytest.approx(beta_star, rel=1e-12)
    assert actual == pytest.approx(factor, rel=1e-15)


def test_schedules():
    def ramp(step):
        return 0.1 * step

    for step in (0, 7):
        assert at(step, beta_star=ramp, output_scale=10) == (
            0.1 * step,
            pytest.approx(1 - 0.01 * step),
        )
        star, factor = at(step, beta=ramp, output_scale=10)
        assert (star, factor) == (pytest.approx(step), pytest.approx(1 - 0.1 * step))
        assert at(step, beta_star=1, sampler_scale=ramp) == (1.0, 0.1 * step)


def test_tensors_keep_beta_to_double_precision():
    star, factor = at(beta_star=torch.tensor([0.0, 0.5]), output_scale=JEM)
    assert star.tolist() == [0.0, 0.5]
    # In float32 the small difference from 1 would have lost three of its digits.
    assert (1 - factor).tolist() == pytest.approx([0.0, 2.5e-5], rel=1e-10)
    star, factor = at(beta=torch.tensor(2.5e-5, dtype=torch.float64), output_scale=JEM)
    assert (star.item(), 1 - factor.item()) == pytest.approx((0.5, 2.5e-5), rel=1e-10)
    scheduled = at(3, beta_star=lambda step: torch.tensor(float(step)), output_scale=10)
    assert scheduled[0].item() == 3
    assert scheduled[1].item() == pytest.approx(0.7)
    assert at(beta_star=torch.tensor(1.0))[1] == 1.0


@pytest.mark.parametrize(
    ("arguments", "off", "tempers"),
    [
        ({"beta_star": 0}, True, False),
        ({"beta_star": 0.0, "output_scale": 5}, True, True),
        ({"beta_star": 1e-30}, False, False),
        ({"beta_star": torch.tensor(0.0)}, False, False),  # reading it would wait for a device
        ({"beta_star": 1, "sampler_scale": 0.5}, False, True),
    ],
)
def test_off_and_tempering(arguments, off, tempers):
    strength = Strength.of(**arguments)
    assert strength.at(0).is_off is off
    assert strength.tempers is tempers


NAN_TENSOR = torch.tensor([1.0, math.nan])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"beta": 0.1, "beta_star": 1.0}, "Pass one of beta_star= and beta=, or none"),
        ({"beta_star": math.nan}, "beta_star=nan; expected a finite number"),
        ({"beta_star": -math.inf}, "beta_star=-inf; expected a finite number"),
        ({"beta_star": "0.5"}, "beta_star='0.5' is a str; expected a number"),
        ({"beta_star": True}, "beta_star=True is a bool"),
        ({"beta_star": [1.0]}, r"beta_star=\[1.0\] is a list"),
        ({"beta_star": 1 + 2j}, "is a complex"),
        ({"beta_star": 1e-31}, "too small for its inverse"),
        (
            {"beta_star": NAN_TENSOR},
            r"are not finite at step 0: \[1.0, nan\]",
        ),
        ({"beta_star": torch.tensor([1, 2])}, "dtype torch.int64 .* expected floating point"),
        ({"beta_star": torch.ones(0)}, r"shape \(0,\); expected .* one entry for each model"),
        ({"beta_star": lambda step: None}, r"beta_star\(step=0\)=None is a NoneType"),
        ({"beta": 0.1}, r"beta= needs the output scale: add output_scale=.*beta_star="),
        ({"beta": "a", "output_scale": 5}, "beta='a' is a str"),
        (
            {"beta": 1.5, "output_scale": 5},
            "= 1.5 at step 0 is above 1: the sampler would run",
        ),
        ({"beta_star": 6, "output_scale": 5}, "beta = beta_star / output_scale = 6 / 5 = 1.2 at"),
        (
            {"beta": torch.tensor([0.5, 1.5]), "output_scale": 4},
            "6 / 4 = 1.5 at step 0 is",
        ),
        (
            {"beta_star": 1, "sampler_scale": torch.tensor(-0.5)},
            "sampler_scale=-0.5 at step 0",
        ),
        ({"beta_star": 1, "output_scale": 0}, "output_scale=0; it must be positive"),
        ({"beta_star": 1, "output_scale": -2}, "output_scale=-2; it must be positive"),
        ({"beta_star": 1, "output_scale": math.inf}, "output_scale=inf; expected a finite"),
        ({"beta_star": 1, "output_scale": "JEM"}, "output_scale='JEM' is a str"),
        (
            {"beta_star": 1, "output_scale": 2, "step_size": 1, "noise_std": 0.01},
            "output_scale=2 contradicts step_size and noise_std, which mean .* = 20000",
        ),
        ({"beta_star": 1, "step_size": 1}, "step_size= and noise_std= go together"),
        ({"beta_star": 1, "noise_std": 1}, "step_size= and noise_std= go together"),
        ({"beta_star": 1, "step_size": 1, "noise_std": 0}, "without noise has no output scale"),
        ({"beta_star": 1, "sampler_scale": -0.5}, "sampler_scale=-0.5 at step 0"),
        ({"beta_star": 1, "sampler_scale": math.nan}, "sampler_scale=nan"),
        (
            {"beta_star": torch.ones(3), "sampler_scale": torch.ones(2)},
            r"shape \(2,\), but beta_star has model dimensions \(3,\)",
        ),
        ({"beta_star": 1, "sampler_scale": torch.ones(2)}, r"has model dimensions \(\)"),
        ({"beta_star": 1, "sampler_scale": lambda step: "x"}, r"sampler_scale\(step=0\)='x'"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Strength.of(**arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_beta_of_one_may_be_rounded_up(dtype):
    for scale in (0.3, 7.7, 200.0, JEM):
        stars = torch.tensor([scale], dtype=dtype)
        assert at(beta_star=stars, output_scale=scale)[1].item() == pytest.approx(0, abs=1e-6)
        assert at(beta_star=scale * (1 + 1e-12), output_scale=scale)[1] == 0.0


def test_schedule_that_goes_wrong_later_says_when():
    strength = Strength.of(beta_star=lambda step: math.nan if step == 7 else 1.0)
    assert strength.at(6).beta_star == 1.0
    with pytest.raises(ConfigError, match=r"beta_star\(step=7\)=nan"):
        strength.at(7)


# -- schedules after step 0 --------------------------------------------------------------------


def asked(schedule: Any) -> tuple[list[int], Any]:
    """A schedule, and the steps that it has been asked for."""
    steps: list[int] = []

    def recorded(step: int) -> Any:
        steps.append(step)
        return schedule(step)

    return steps, recorded


@pytest.mark.parametrize("change", [{}, {"at_least": 3.0}, {"times": 3.0}])
def test_schedules_are_asked_once_per_step_and_for_that_step(change):
    """Once β* was rolled back, step 0 was asked for again in every step."""
    steps, scale = asked(lambda step: 0.5)
    _, beta_star = asked(lambda step: 1.0)
    strength = Strength.of(beta_star=beta_star, sampler_scale=scale)
    steps.clear()
    for step in (5, 6, 7):
        assert strength.at(step, **change).beta_star == (3.0 if change else 1.0)
    assert steps == [5, 6, 7]


@pytest.mark.parametrize(
    ("at_three", "message"),
    [
        (torch.tensor(50.0), "beta = .*50 / 10 = 5 at step 3 is above 1"),
        (torch.tensor([1.0, 50.0]), "above 1"),
        (torch.tensor(math.nan), "not finite at step 3"),
        (50.0, "above 1"),
        (math.nan, r"beta_star\(step=3\)=nan"),
    ],
)
def test_a_schedule_that_goes_astray_after_step_0_is_refused(at_three, message):
    """The factor 1 - β became -4, and the sampler ran away from the data; NaN gave a loss of 0."""
    fine = torch.ones_like(at_three) if isinstance(at_three, torch.Tensor) else 1.0
    strength = Strength.of(beta_star=lambda step: at_three if step == 3 else fine, output_scale=10)
    strength.at(2)
    with pytest.raises(ConfigError, match=message):
        strength.at(3)


def test_what_a_device_knows_is_refused_with_its_row():
    """On the device `meta` nothing can be read: the factor is there, but not looked at."""
    schedule = torch.tensor(50.0, device="meta")
    strength = Strength.of(beta_star=lambda step: schedule if step else 1.0, output_scale=10)
    factor = strength.at(3).factor
    assert isinstance(factor, torch.Tensor)
    assert factor.device.type == "meta"
    strength.check_measured(3, 10.0)
    for beta_star, message in ((50.0, "at step 3 is above 1"), (math.nan, "beta_star is nan at")):
        with pytest.raises(ConfigError, match=message):
            strength.check_measured(3, beta_star)
