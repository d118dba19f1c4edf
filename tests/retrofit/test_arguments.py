"""What ``guard()`` is told, and measures: from the strength to β* and the sampler's factor."""

from __future__ import annotations

import inspect
import math
from enum import Enum
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ebmguard import Guard, guard
from ebmguard.errors import ConfigError
from ebmguard.retrofit.strength import Strength
from ebmguard.samplers import sgld
from tests.parts import Energy, energies
from tests.runs import Run, begin, train
from tests.sampling.loops import LOOPS, network, starts

JEM = 20_000.0
STEPS: Any = {"step_size": 0.02, "noise_std": 0.1}


def at(step: int = 0, **arguments: Any) -> Any:
    values = Strength.of(**arguments).at(step)
    return values.beta_star, values.factor


@pytest.mark.parametrize(
    ("arguments", "beta_star", "factor"),
    [
        ({"beta_star": 2, "output_scale": JEM}, 2.0, 1 - 2 / JEM),
        ({"beta": 0.25, "step_size": 1.0, "noise_std": 0.01}, 5000.0, 0.75),
        ({"beta_star": 2, "step_size": 10.0, "noise_std": 0.005}, 2.0, 1 - 2 / 8e5),  # IGEBM
        ({"beta_star": 1, "step_size": 0.005, "noise_std": 0.1}, 1.0, 0.0),
        ({"beta_star": -2, "output_scale": 10}, -2.0, 1.2),
        ({}, 0.0, 1.0),
        ({"output_scale": 3, "sampler_scale": 0.25}, 0.0, 0.25),
        ({"beta_star": 2, "output_scale": JEM, "sampler_scale": 0.5}, 2.0, 0.5),
        ({"beta_star": 2, "sampler_scale": 0}, 2.0, 0.0),
        ({"beta_star": np.int64(2)}, 2.0, 1.0),
        ({"beta_star": Fraction(1, 4), "output_scale": np.float64(2)}, 0.25, 0.875),
        ({"beta_star": 2.0 * (1 + 1e-12), "output_scale": 2.0}, 2.0, 0.0),  # β = 1, rounded up
    ],
)
def test_numbers(arguments, beta_star, factor):
    star, actual = at(**arguments)
    assert float(star) == pytest.approx(beta_star, rel=1e-11)
    assert float(actual) == pytest.approx(factor, rel=1e-15)


def test_schedules():
    def ramp(step):
        return 0.1 * step

    for step in (0, 7):
        for arguments, star, factor in (
            ({"beta_star": ramp, "output_scale": 10}, 0.1 * step, 1 - 0.01 * step),
            ({"beta": ramp, "output_scale": 10}, step, 1 - 0.1 * step),
            ({"beta_star": 1, "sampler_scale": ramp}, 1.0, 0.1 * step),
            ({"beta_star": lambda t: torch.tensor(0.1 * t)}, 0.1 * step, 1.0),
        ):
            assert [*map(float, at(step, **arguments))] == pytest.approx([star, factor])


def test_tensors_keep_beta_to_double_precision():
    star, factor = at(beta_star=torch.tensor([0.0, 0.5]), output_scale=JEM)
    assert star.tolist() == [0.0, 0.5]
    # In float32 the small difference from 1 would have lost three of its digits.
    assert (1 - factor).tolist() == pytest.approx([0.0, 2.5e-5], rel=1e-10)
    star, factor = at(beta=torch.tensor(2.5e-5, dtype=torch.float64), output_scale=JEM)
    assert (star.item(), 1 - factor.item()) == pytest.approx((0.5, 2.5e-5), rel=1e-10)
    for dtype in (torch.float32, torch.float64):
        for scale in (0.3, 7.7, 200.0, JEM):  # of β = 1, which may be rounded up
            _, factor = at(beta_star=torch.tensor([scale], dtype=dtype), output_scale=scale)
            assert factor.item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("change", [{}, {"times": 3.0}])
def test_schedules_are_asked_once_per_step_and_for_that_step(change):
    """Once β* was rolled back, step 0 was asked for again in every step."""
    steps: list[int] = []

    def scale(step: int) -> float:
        steps.append(step)
        return 0.5

    strength = Strength.of(beta_star=lambda step: 1.0, sampler_scale=scale)
    steps.clear()
    for step in (5, 6, 7):
        assert strength.at(step, **change).beta_star == (3.0 if change else 1.0)
    assert steps == [5, 6, 7]


@pytest.mark.parametrize(
    ("at_three", "message"),
    [
        (torch.tensor(50.0), "beta = .*50 / 10 = 5 at step 3 is above 1"),
        (torch.tensor(math.nan), "not finite at step 3"),
        (math.nan, r"beta_star\(step=3\)=nan"),
    ],
)
def test_a_schedule_that_goes_astray_after_step_0_is_refused(at_three, message):
    """The factor 1 - β became -4, and the sampler ran away from the data; NaN gave a loss of 0."""
    fine = torch.ones_like(at_three) if isinstance(at_three, Tensor) else 1.0
    strength = Strength.of(beta_star=lambda step: at_three if step == 3 else fine, output_scale=10)
    strength.at(2)
    with pytest.raises(ConfigError, match=message):
        strength.at(3)


def test_what_a_device_knows_is_refused_with_its_row():
    """On the device `meta` nothing can be read: the factor is there, but not looked at."""
    schedule = torch.tensor(50.0, device="meta")
    strength = Strength.of(beta_star=lambda step: schedule if step else 1.0, output_scale=10)
    factor = strength.at(3).factor
    assert isinstance(factor, Tensor)
    assert factor.device.type == "meta"
    strength.check_measured(3, 10.0)
    for beta_star, message in ((50.0, "at step 3 is above 1"), (math.nan, "beta_star is nan at")):
        with pytest.raises(ConfigError, match=message):
            strength.check_measured(3, beta_star)


# -- measured --------------------------------------------------------------------------------------


def trained(**options: Any) -> Run:
    run = begin()
    run.loss_fn, run.sampler = run.guard(None, run.sampler, **{"beta_star": 0.5, **options})
    return train(run, 4)


@pytest.mark.parametrize(("given", "warns"), [(20_000, False), (20_150, False), (800, True)])
def test_a_number_that_was_given_is_checked_once(given: float, warns: bool) -> None:
    run = trained(output_scale=given)
    messages = [alert.message for alert in run.guards[0].alerts if alert.rule == "output_scale"]
    assert len(messages) == warns
    assert not warns or "output_scale=20000" in messages[0]
    assert [record["rule"] for record in run.memories[0].alerts].count("output_scale") == warns


@pytest.mark.parametrize("name", [name for name, loop in LOOPS.items() if loop.step is not None])
def test_a_convention_that_the_sampler_contradicts_is_an_error(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    loop = LOOPS[name]
    f, x = network(loop), starts(loop)
    assert loop.step is not None
    convention: Any = "energy" if loop.step > 0 else "log_density"
    loss_fn, sample = guard(None, loop.sample, beta_star=0.0, convention=convention, model=f)
    x_neg = sample(f, x)
    if name in ("logsumexp of logits", "one logit each"):  # the loss gets their sum: said first
        loss_fn(f(x), f(x_neg))
        assert "and the loss gets the sum of them" in caplog.text
    else:
        with pytest.raises(ConfigError, match=rf"convention='{convention}' contradicts"):
            loss_fn(f(x), f(x_neg))
    assert not f._forward_hooks


# -- the rest of the trainer -----------------------------------------------------------------------


def test_it_takes_what_attach_takes():
    taken, attached = (inspect.signature(x).parameters["parts"] for x in (guard, Guard.attach))
    assert taken == attached
    assert len(str(inspect.signature(guard))) < 1500  # it fits on a screen


def test_the_steps_that_give_the_output_scale_are_known_everywhere():
    """They were forgotten: no drift to noise, no acceptance."""
    f = Energy()
    g = guard(None, lambda f, x: sgld(f, x, steps=3, **STEPS), beta_star=1.0, **STEPS)
    g.sampler(f, torch.ones(5, 2))
    g.loss_fn(*energies())
    assert g.last["energy_gap_scaled"] == pytest.approx(4.0 * g.last["energy_gap"])
    assert g.last["sampler/drift_to_noise"] > 0
    own = 0.01 / (STEPS["step_size"] * STEPS["noise_std"])
    assert g.last["sampler/unit"] == pytest.approx(own)
    assert 0 <= g.last["sampler/acceptance"] <= 1
    assert [problem.name for problem in g.check() if problem.name == "output_scale"] == []


def test_a_sampler_gets_the_number_of_its_steps_by_name():
    seen = []

    def sampler(f: Any, x: Tensor, n_steps: int) -> Tensor:
        seen.append(n_steps)
        f(x)
        return x

    g = guard(None, sampler, beta_star=0.0, sgld_steps=5, steps_argument="n_steps")
    # The usual number is the guard's to change; another one is the caller's.
    calls: Any = [((), {}), ((), {"n_steps": 5}), ((5,), {}), ((), {"n_steps": 99}), ((9,), {})]
    for args, kwargs in calls:
        g.sampler(Energy(), torch.ones(5, 2), *args, **kwargs)
    assert seen == [5, 5, 5, 99, 9]


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"steer": 1}, "steer= is gone. Leave beta_star= out"),
        ({"beta_stars": [0.5, 1.0]}, "beta_stars= is gone. Average the losses of several"),
        ({"beta_star": 1, "optimiser": None}, "'optimiser'; did you mean optimizer="),
    ],
)
def test_a_keyword_that_there_is_not_says_what_to_write(keywords, words):
    with pytest.raises(TypeError, match=words):
        guard(None, None, **keywords)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({}, "Nothing changes until the sampler's steps are too long (beta_star=0, substeps=auto)"),
        (
            {"beta_star": torch.tensor([0.0, 100.0]), "output_scale": 2e4},  # of an ensemble
            "The loss weights the negatives (beta_star=[0, 100], substeps=1, output_scale=20000)",
        ),
        (
            {"beta_star": lambda _: 1.0, "sampler_scale": 1.0, "substeps": 4},
            "The loss weights the negatives (beta_star=a schedule, substeps=4, "
            "output_scale=to be measured)",
        ),
    ],
)
def test_what_a_run_begins_with_in_short_numbers_and_a_nested_functions_own_name(
    given, shown, caplog
):
    def nested(f: Any, x: Tensor) -> Tensor:
        return x

    caplog.set_level("INFO", "ebmguard")
    guard(None, nested, **given)
    first = f"The loss and nested are guarded. {shown}. Pass log_dir= to watch it"
    assert caplog.messages == [first]


class Convention(str, Enum):  # noqa: UP042  as in settings that were written for Python 3.10
    ENERGY = "energy"


def test_words_of_enums_and_settings_left_empty_are_taken() -> None:
    g = guard(None, None, convention=Convention.ENERGY, compile=None, thin_log=None)  # type: ignore[arg-type]
    low, high = torch.zeros(4, requires_grad=True), torch.ones(4, requires_grad=True)
    assert g.loss(low, high) == -1  # energies are low on data
