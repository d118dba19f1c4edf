"""β*, the output scale, and whether both fit the sampler's step and noise."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..alerts import Level
from .problem import Problem, error, warn
from .setup import Setup

__all__ = ["TYPED_IN", "implied_scale", "of_exponents"]

# Rounding of a scale that was typed in, such as 2e4 for 2 / 0.01**2.
TYPED_IN = 0.02
_LITTLE = 0.05


def implied_scale(step_size: float, noise_std: float) -> float:
    """o = 2 step_size / noise_std**2, for x += step_size * df/dx + noise_std * randn.

    Infinite for a sampler without noise.
    """
    return 2 * step_size / noise_std**2 if noise_std**2 else math.inf


def of_exponents(setup: Setup) -> Iterator[Problem]:
    """The guard's numbers against the sampler's."""
    steps, scale = setup.trainer.steps, setup.output_scale
    implied = None if steps is None else implied_scale(**steps)
    if steps and implied and scale and not math.isclose(implied, scale, rel_tol=TYPED_IN):
        if math.isinf(implied):
            said = "there is none for a sampler with no noise"
            fix = "beta_star alone, without output_scale."
        else:
            step, noise = steps.values()
            said = f"step {step:g} and noise {noise:g} mean 2 * step / noise**2 = {implied:g}"
            fix = f"output_scale={implied:g}, or the step and noise that the sampler really has."
        yield error("output_scale", "guard(output_scale=)", f"It is {scale:g}, but {said}.", fix)
    if not any(setup.beta_star):
        return
    if setup.has_sampler and not setup.tempers and implied != math.inf:
        known = "" if implied is None else f": output_scale={implied:g}"
        yield Problem(
            Level.WARN if implied is not None else Level.INFO,
            "no_output_scale",
            "guard(output_scale=)",
            "Without it the sampler stays as it is: the weights act, but the samples are not drawn "
            "from the tempered energy that they belong to.",
            f"output_scale = 2 * step_size / noise_std**2{known}; nothing, without noise.",
        )
    lowest = min(setup.factor)
    if lowest <= 0:
        yield error(
            "sampler_factor",
            "guard(beta_star=)",
            f"1 - beta_star / output_scale is {lowest:g}: the sampler would not follow the energy.",
            "a lower beta_star (0.5 to 4 for JEM), or output_scale = 2 * step_size / noise_std**2.",
        )
    elif lowest < _LITTLE:
        yield warn(
            "sampler_factor",
            "guard(beta_star=)",
            f"The sampler runs on {lowest:.1%} of the energy, hardly more than noise.",
            "a lower beta_star, or the right output_scale.",
        )
