"""How strong the guard acts at a step: the exponent β* of the loss and the factor on the sampler.

β* alone enters the loss; the sampler runs on ``sampler_scale * f``, which is (1 - β*/o) f where the
output scale o is known (Eq. 7; o of Appendix G and M.2), and f itself where it is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..energies import ONE_MODEL, exponents, model_dimensions
from ..errors import ConfigError

__all__ = ["Schedulable", "Strength", "StrengthAt", "number"]

Schedulable: TypeAlias = "float | Tensor | Callable[[int], float | Tensor]"

# 1/β* must stay finite in float32.
_SMALLEST_BETA_STAR = 1e-30
# β = 1 may come out so far above it, as β* is float32 in many tensors.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class StrengthAt:
    """Values of one step.

    Attributes:
        beta_star: exponent(s) on raw outputs; a tuple means that their losses are averaged. Its
            entries all have the model dimensions, or none has.
        factor: what multiplies the energy during sampling; the number 1.0 leaves it untouched.
    """

    beta_star: float | Tensor | tuple[float | Tensor, ...]
    factor: float | Tensor

    @property
    def models(self) -> torch.Size:
        """Model dimensions of the energies; none for one model."""
        return model_dimensions(self.beta_star)

    @property
    def is_off(self) -> bool:
        """Whether the loss of this step is the caller's own, untouched (β* = 0 as a number)."""
        return not isinstance(self.beta_star, Tensor | tuple) and self.beta_star == 0


@dataclass(frozen=True)
class Strength:
    """The checked strength arguments of :func:`ebmguard.guard`.

    Attributes:
        models: model dimensions of the energies, the same at every step; none for one model.
    """

    beta: Schedulable | None
    beta_star: Schedulable | None
    beta_stars: tuple[Schedulable, ...] | None
    output_scale: float | None
    sampler_scale: Schedulable | None
    models: torch.Size = ONE_MODEL

    @classmethod
    def of(
        cls,
        *,
        beta_star: Schedulable | None = None,
        beta: Schedulable | None = None,
        beta_stars: Sequence[Schedulable] | None = None,
        output_scale: float | None = None,
        step_size: float | None = None,
        noise_std: float | None = None,
        sampler_scale: Schedulable | None = None,
    ) -> Strength:
        """Check the arguments of ``guard`` and what they give at step 0.

        Raises:
            ConfigError: a value that is not a finite number, or a combination without meaning.
        """
        given = [
            name
            for name, value in (
                ("beta_star", beta_star),
                ("beta", beta),
                ("beta_stars", beta_stars),
            )
            if value is not None
        ]
        if len(given) != 1:
            what = " and ".join(given) + " were all given" if given else "none was given"
            raise ConfigError(
                f"Pass exactly one of beta_star=, beta= and beta_stars=; {what}. beta_star is the "
                "exponent on raw outputs (0.5 to 4 for JEM); beta = beta_star / output_scale."
            )
        scale = _output_scale(output_scale, step_size, noise_std)
        if beta is not None and scale is None:
            raise ConfigError(
                "beta= needs the output scale: add output_scale= (20_000 for JEM), or step_size= "
                "and noise_std= of the sampler, or give beta_star= = beta * output_scale instead."
            )
        if beta_stars is not None:
            if not isinstance(beta_stars, list | tuple) or not beta_stars:
                raise ConfigError(
                    "beta_stars= takes a non-empty list of exponents, e.g. [0.5, 1, 2]."
                )
            if sampler_scale is None:
                raise ConfigError(
                    "beta_stars= averages several exponents and so has no single factor for the "
                    "sampler; add sampler_scale= (1.0 leaves the sampler as it is)."
                )
            beta_stars = tuple(beta_stars)
        strength = cls(beta, beta_star, beta_stars, scale, sampler_scale)
        return replace(strength, models=strength._at(0).models)

    @property
    def tempers(self) -> bool:
        """Whether the sampler's side is defined at all (otherwise it is left as it is)."""
        return self.output_scale is not None or self.sampler_scale is not None

    def at(self, step: int) -> StrengthAt:
        """The values that sampler and loss of this step share.

        Raises:
            ConfigError: a schedule returned something that cannot be used.
        """
        values = self._at(step)
        if values.models != self.models:
            raise ConfigError(
                f"beta_star has model dimensions {tuple(values.models)} at step {step}, but "
                f"{tuple(self.models)} at step 0; a schedule must keep them. Return a tensor of "
                "that shape."
            )
        return values

    def overridden(self, beta_star: float | None) -> Strength:
        """This with another β*, one number for all steps; None gives this very one.

        Raises:
            ConfigError: as :meth:`of`.
        """
        if beta_star is None:
            return self
        changed = replace(self, beta=None, beta_star=beta_star, beta_stars=None)
        changed.at(0)
        return changed

    def _at(self, step: int) -> StrengthAt:
        star: float | Tensor | tuple[float | Tensor, ...]
        if self.beta_stars is not None:
            star = exponents([_value("beta_stars", each, step) for each in self.beta_stars])
        elif self.beta is not None:
            assert self.output_scale is not None
            star = _value("beta", self.beta, step) * self.output_scale
        else:
            assert self.beta_star is not None
            star = _value("beta_star", self.beta_star, step)
        for each in star if isinstance(star, tuple) else (star,):
            if not isinstance(each, Tensor) and 0 < abs(each) < _SMALLEST_BETA_STAR:
                raise ConfigError(
                    f"beta_star = {each:g} is too small for its inverse to exist in float32; use 0 "
                    f"or at least {_SMALLEST_BETA_STAR:g}."
                )
        return StrengthAt(star, self._factor(star, step))

    def _factor(
        self, star: float | Tensor | tuple[float | Tensor, ...], step: int
    ) -> float | Tensor:
        if self.sampler_scale is not None:
            scale = _value("sampler_scale", self.sampler_scale, step)
            lowest = _lowest(scale, step)
            if lowest < 0:
                raise ConfigError(
                    f"sampler_scale={lowest:g}; a negative factor would make the sampler run away "
                    "from the data. 1.0 leaves it as it is; (1 - beta) is the robust objective's."
                )
            models = model_dimensions(star)
            if isinstance(scale, Tensor) and scale.shape not in (ONE_MODEL, models):
                raise ConfigError(
                    f"sampler_scale has shape {tuple(scale.shape)}, but beta_star has model "
                    f"dimensions {tuple(models)}; expected these, or one number."
                )
            return scale
        if self.output_scale is None or isinstance(star, tuple):
            return 1.0
        if isinstance(star, Tensor) and star.device.type != "mps":
            star = star.double()  # β is the small difference between the factor and 1
        factor = 1.0 - star / self.output_scale
        lowest = _lowest(factor, step)
        if lowest < -_ROUNDING:
            beta = 1 - lowest
            raise ConfigError(
                f"beta = beta_star / output_scale = {beta * self.output_scale:g} / "
                f"{self.output_scale:g} = {beta:g} is above 1: the sampler would run away from the "
                "data. Lower beta_star, or check output_scale (2 * step_size / noise_std**2)."
            )
        return factor if isinstance(factor, Tensor) else max(factor, 0.0)


def number(name: str, value: object) -> float:
    """A finite number, or an error that names the argument.

    Raises:
        ConfigError: anything else.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{name}={value!r} is a {type(value).__name__}; expected a number.")
    if not math.isfinite(value):
        raise ConfigError(f"{name}={value!r}; expected a finite number.")
    return float(value)


def _value(name: str, given: Any, step: int) -> float | Tensor:
    scheduled = not isinstance(given, Tensor | float | int) and callable(given)
    value = given(step) if scheduled else given
    if isinstance(value, Tensor):
        if not value.is_floating_point() or not value.numel():
            raise ConfigError(
                f"{name} is a tensor of dtype {value.dtype} and shape {tuple(value.shape)}; "
                "expected floating point, and one entry for each model."
            )
        # Read on the host at step 0 only: later steps must not wait for a device.
        if step == 0 and not bool(torch.isfinite(value).all()):
            raise ConfigError(f"{name} holds values that are not finite: {value.tolist()}.")
        return value
    return number(f"{name}(step={step})" if scheduled else name, value)


def _lowest(factor: float | Tensor, step: int) -> float:
    if isinstance(factor, Tensor):
        return float(factor.min()) if step == 0 else math.nan  # as in _value
    return factor


def _output_scale(output_scale: object, step_size: object, noise_std: object) -> float | None:
    if output_scale is not None:
        if step_size is not None or noise_std is not None:
            raise ConfigError(
                "Pass output_scale=, or step_size= and noise_std= from which it follows, not both."
            )
        scale = number("output_scale", output_scale)
        if scale <= 0:
            raise ConfigError(
                f"output_scale={scale:g}; it must be positive: 2 * step_size / noise_std**2 when "
                "the sampler's update is x += step_size * df/dx + noise_std * randn."
            )
        return scale
    if step_size is None and noise_std is None:
        return None
    if step_size is None or noise_std is None:
        raise ConfigError(
            "step_size= and noise_std= go together: output_scale = 2 * step_size / noise_std**2."
        )
    step, noise = number("step_size", step_size), number("noise_std", noise_std)
    if step <= 0:
        raise ConfigError(f"step_size={step:g}; it must be positive.")
    if noise <= 0:
        raise ConfigError(
            f"noise_std={noise:g}; a sampler without noise has no output scale. Give beta_star= "
            "alone: the weights then act, and the sampler stays as it is."
        )
    return 2 * step / noise**2
