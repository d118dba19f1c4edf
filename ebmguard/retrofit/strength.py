"""The fixed settings of ``guard()``, and its strength at a step.

The strength is the exponent β* of the loss and the factor on the sampler.
The sampler runs on ``sampler_scale * f``: on (1 - β*/o) f if the output scale o is known (Eq. 7; o
of Appendix G and M.2), else on f itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ConfigError
from ..ranks import Ranks, refuse_shards
from ..sampling import Measured
from ..trainer import TYPED_IN, Trainer, TrainerParts, check_takes, finite_number, implied_scale
from .ensemble import Variants

__all__ = [
    "Action",
    "Schedulable",
    "Settings",
    "Strength",
    "StrengthAt",
    "checked_trainer",
    "numbers_of",
]

Action: TypeAlias = Literal["auto", "warn", "raise", "rollback"]
Schedulable: TypeAlias = float | Tensor | Callable[[int], float | Tensor]

_NO_MODELS = torch.Size()
_SMALLEST_BETA_STAR = 1e-30  # 1/β* must stay finite in float32
_ROUNDING = 1e-6  # β = 1 may come out so far above it, as β* is float32 in many tensors
_NEGLIGIBLE = 1e-3  # share of the energy that no sampler shows: JEM's β* is 2, o 20,000
_NEEDS_SCALE = (
    "beta= needs the output scale: add output_scale= (20_000 for JEM), or step_size= and "
    "noise_std= of the sampler, or give beta_star= = beta * output_scale instead."
)


@dataclass(frozen=True)
class Settings:
    """The arguments of :func:`ebmguard.guard` that hold for the whole run."""

    sign: int  # 1 where the network's output is high on data, -1 where it is low
    variant: Variants
    models: torch.Size  # model dimensions of an ensemble; none for a single model
    reference_beta_star: float
    action: Action
    judge_in_loss: bool | None
    process_group: dist.ProcessGroup | None
    has_sampler: bool
    compiles: bool
    block: int = 1  # rows of a healthy run that are read at once
    skill: str | None = None  # the trainer's number that the verdict reads

    @property
    def ranks(self) -> Ranks:
        """The ranks that train together."""
        return Ranks(self.process_group)


def checked_trainer(trainer: Trainer, parts: TrainerParts, sampler: object) -> Trainer:
    """The trainer with the parts that are attached now; a ``ConfigError`` if they do not fit."""
    trainer = trainer.extended(**parts)
    if trainer.optimizer is not None:
        refuse_shards(p for group in trainer.optimizer.param_groups for p in group["params"])
    if trainer.model is not None:
        refuse_shards(trainer.model.parameters())
    if trainer.steps_argument is not None:
        check_takes(sampler, trainer.steps_argument)
    return trainer


@dataclass(frozen=True)
class StrengthAt:
    """The values of one step."""

    beta_star: float | Tensor  # exponent on raw outputs, or one for every member of an ensemble
    factor: float | Tensor  # of the energy during sampling; the number 1.0 leaves it untouched
    output_scale: float | None = None  # o, where it is known
    is_measured: bool = False  # whether o was measured, not asked for

    @cached_property
    def factor_of_samples(self) -> float | Tensor:
        """The factor; for an ensemble ``(*models, 1)``, to broadcast against its energies."""
        factor = self.factor
        return factor[..., None] if isinstance(factor, Tensor) and factor.ndim else factor

    @cached_property
    def must_temper(self) -> bool:
        """Tell whether it is a mistake if a sampler call is not tempered by the factor.

        It is none with a factor that no sampler shows, if the scale was measured, not asked for.
        """
        unseen = _NEGLIGIBLE if self.is_measured else 0.0
        return isinstance(self.factor, Tensor) or abs(self.factor - 1) > unseen

    @cached_property
    def is_off(self) -> bool:
        """Tell if this step leaves the caller's loss untouched (β* = 0 as a number)."""
        return not isinstance(self.beta_star, Tensor) and self.beta_star == 0


@dataclass(frozen=True)
class Strength:
    """The checked strength arguments of :func:`ebmguard.guard`."""

    name: str  # which exponent was given: "beta_star" or "beta"
    given: Schedulable
    output_scale: float | None  # o, where it is known
    sampler_scale: Schedulable | None  # the sampler's factor, where it is set apart
    is_measured: bool = False  # whether o is measured, and unknown until then
    models: torch.Size = _NO_MODELS  # model dimensions of the energies, the same at every step

    @classmethod
    def of(
        cls,
        *,
        output_scale: float | None = None,
        step_size: float | None = None,
        noise_std: float | None = None,
        sampler_scale: Schedulable | None = None,
        has_sampler: bool = False,
        **exponent: Any,
    ) -> Strength:
        """Check these arguments of ``guard`` at step 0; at most one of the exponents is given."""
        exponents = {name: value for name, value in exponent.items() if value is not None}
        if len(exponents) > 1:
            raise ConfigError(
                "Pass one of beta_star= and beta=, or none: beta_star is the exponent on raw "
                "outputs, and beta = beta_star / output_scale."
            )
        name, value = next(iter(exponents.items()), ("beta_star", 0.0))
        scale = _output_scale(output_scale, step_size, noise_std)
        is_measured = has_sampler and scale is None
        if name == "beta" and scale is None and not is_measured:
            raise ConfigError(_NEEDS_SCALE)
        strength = cls(name, value, scale, sampler_scale, is_measured)
        # Where β alone is known, β* and the factor are checked as those of o = 1.
        known = strength if name != "beta" or scale else replace(strength, output_scale=1.0)
        star = known._beta_star(0)
        known._factor(star, 0)
        return replace(strength, models=_models_of(star))

    @property
    def tempers(self) -> bool:
        """Tell whether the sampler's factor is known (otherwise the sampler is left as it is)."""
        return any(x is not None for x in (self.output_scale, self.sampler_scale))

    @cached_property
    def is_scheduled(self) -> bool:
        """Tell whether a value may change from step to step: a tensor's, too."""
        values = self.given, self.sampler_scale
        return not all(x is None or isinstance(x, Real) for x in values)

    @property
    def awaits_scale(self) -> bool:
        """Tell whether the output scale is still to be measured."""
        return self.is_measured and self.output_scale is None

    @property
    def most_raised(self) -> float:
        """The highest β*: half of the output scale, where that is known."""
        return math.inf if self.output_scale is None else self.output_scale / 2

    def at(self, step: int, at_least: float | None = None, times: float = 1.0) -> StrengthAt:
        """The values that sampler and loss of this step share. This asks every schedule once.

        The β* is ``times`` the schedule's value, but ``at_least`` this.
        """
        if self.name == "beta" and self.output_scale is None:
            # The sampler's side is known; the loss is refused until β* is: see ``check_known``.
            known = replace(replace(self, output_scale=1.0).at(step), output_scale=None)
            return known if known.is_off else replace(known, beta_star=known.beta_star * math.nan)
        star = self._beta_star(step)
        if times != 1:
            star = star * times
        if at_least is not None:
            star = max(star, at_least) if isinstance(star, float) else star.clamp(min=at_least)
        models = _models_of(star)
        if models != self.models:
            raise ConfigError(
                f"beta_star has model dimensions {tuple(models)} at step {step}, but "
                f"{tuple(self.models)} at step 0; a schedule must keep them. Return a tensor of "
                "that shape."
            )
        return StrengthAt(star, self._factor(star, step), self.output_scale, self.is_measured)

    def knowing(self, measured: Measured | None, step: int) -> Strength:
        """This strength with what was measured, if it still waits for an output scale.

        Raises a ConfigError if β* is above it.
        """
        if not self.awaits_scale or measured is None or not measured.is_exact:
            return self
        strength = replace(self, output_scale=measured.output_scale)
        strength.at(step)
        return strength

    def check_known(self, measured: object) -> None:
        """Refuse a loss with unknown β*, because measuring the sampler gave this result."""
        if self.name == "beta" and self.output_scale is None:
            raise ConfigError(f"{_NEEDS_SCALE} {measured or 'The sampler was not called yet.'}")

    def check_measured(self, step: int, beta_star: float) -> None:
        """Check a row's β*, if a schedule returned it as a tensor that was not read then."""
        if not math.isfinite(beta_star):
            raise ConfigError(
                f"beta_star is {beta_star} at step {step}; expected finite numbers. Look at the "
                "schedule that returned it."
            )
        if self.output_scale is not None and self.sampler_scale is None:
            _check_factor(1.0 - beta_star / self.output_scale, self.output_scale, step)

    def _beta_star(self, step: int) -> float | Tensor:
        star = _value(self.name, self.given, step)
        if self.name == "beta":
            assert self.output_scale is not None
            star = star * self.output_scale
        if not isinstance(star, Tensor) and 0 < abs(star) < _SMALLEST_BETA_STAR:
            raise ConfigError(
                f"beta_star = {star:g} is too small for its inverse to exist in float32; use 0 "
                f"or at least {_SMALLEST_BETA_STAR:g}."
            )
        return star

    def _factor(self, star: float | Tensor, step: int) -> float | Tensor:
        if self.sampler_scale is not None:
            scale = _value("sampler_scale", self.sampler_scale, step)
            lowest = min(numbers_of(scale, step), default=0.0)
            if lowest < 0:
                raise ConfigError(
                    f"sampler_scale={lowest:g} at step {step}; a negative factor would make the "
                    "sampler run away from the data. 1.0 leaves it as it is; (1 - beta) is the "
                    "robust objective's."
                )
            models = _models_of(star)
            if _models_of(scale) not in (_NO_MODELS, models):
                raise ConfigError(
                    f"sampler_scale has shape {tuple(_models_of(scale))}, but beta_star has model "
                    f"dimensions {tuple(models)}; expected these, or one number."
                )
            return scale
        if self.output_scale is None:
            return 1.0
        if isinstance(star, Tensor) and star.device.type != "mps":
            star = star.double()  # β is the small difference between the factor and 1
        factor = 1.0 - star / self.output_scale
        # What only a device knows is read with its row, some steps later: check_measured.
        _check_factor(min(numbers_of(factor, step), default=1.0), self.output_scale, step)
        return factor.clamp(min=0.0) if isinstance(factor, Tensor) else max(factor, 0.0)


def _check_factor(factor: float, output_scale: float, step: int) -> None:
    if factor < -_ROUNDING:
        beta = 1 - factor
        raise ConfigError(
            f"beta = beta_star / output_scale = {beta * output_scale:g} / {output_scale:g} = "
            f"{beta:g} at step {step} is above 1: the sampler would run away from the data. Lower "
            "beta_star, or check output_scale (2 * step_size / noise_std**2)."
        )


def _models_of(star: float | Tensor) -> torch.Size:
    return star.shape if isinstance(star, Tensor) else _NO_MODELS


def _value(name: str, setting: Any, step: int) -> float | Tensor:
    scheduled = not isinstance(setting, Tensor | float | int) and callable(setting)
    value = setting(step) if scheduled else setting
    if isinstance(value, Tensor):
        if not value.is_floating_point() or not value.numel():
            raise ConfigError(
                f"{name} is a tensor of dtype {value.dtype} and shape {tuple(value.shape)}; "
                "expected floating point, and one entry for each model."
            )
        if not all(map(math.isfinite, numbers_of(value, step))):
            raise ConfigError(
                f"{name} holds values that are not finite at step {step}: {value.tolist()}."
            )
        return value
    return finite_number(f"{name}(step={step})" if scheduled else name, value)


def numbers_of(x: float | Tensor, step: int = 0) -> list[float]:
    """The numbers. After step 0 none are read from a device, because nothing may wait."""
    if not isinstance(x, Tensor):
        return [float(x)]
    return x.flatten().tolist() if step == 0 or x.device.type == "cpu" else []


def _output_scale(output_scale: object, step: float | None, noise: float | None) -> float | None:
    implied = None if step is None or noise is None else implied_scale(step, noise)
    if output_scale is None:
        if implied is None and not step is noise is None:
            raise ConfigError(
                "step_size= and noise_std= go together: output_scale = 2 * step_size / "
                "noise_std**2. Pass both, or tell a single one to g.attach()."
            )
        if implied == math.inf:
            raise ConfigError(
                "noise_std=0; a sampler without noise has no output scale. Leave both out: "
                "the weights then act, and the sampler stays as it is. g.attach(step_size=, "
                "noise_std=) tells the guard its steps."
            )
        return implied
    scale = finite_number("output_scale", output_scale)
    if scale <= 0:
        raise ConfigError(
            f"output_scale={scale:g}; it must be positive: 2 * step_size / noise_std**2 when "
            "the sampler's update is x += step_size * df/dx + noise_std * randn."
        )
    if implied is not None and not math.isclose(implied, scale, rel_tol=TYPED_IN):
        raise ConfigError(
            f"output_scale={scale:g} contradicts step_size and noise_std, which mean 2 * step_size "
            f"/ noise_std**2 = {implied:g}. Pass one of the two, or the step and noise that the "
            "sampler really has."
        )
    return scale
