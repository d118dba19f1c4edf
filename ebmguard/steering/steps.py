"""How many SGLD steps the sampler should run: more while no negative is competitive.

Appendix H: where GradScale is near 0, "proactive measures should be taken. This involves adjusting
the procedure for generating negative examples". A sampler gets lost where its step has become too
long for the energy. In r steps of a step size divided by r, and noise_std by the root of r, the
same diffusion runs for the same time, with the same output scale, 2 step_size / noise_std**2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, Stateful, typed
from ..tags import BETA_STAR, GRAD_SCALE, weight_tag

__all__ = ["AdaptiveSteps", "StepsController"]


@typed
@dataclass(frozen=True)
class AdaptiveSteps:
    """Settings of the adaptive number of SGLD steps; all default values are those measured.

    The number is base * 2**level, and each step finer by 2**level: powers of two keep the CUDA
    graphs of a captured sampler few. It rises fast, since an energy that is trained on grows as
    steep as a level just bears (``docs/results/steering.md``). A halving that had to be taken back
    doubles the patience of the next, so that the number settles.

    It reads ``grad_scale``, or ``ref/grad_scale`` where β* = 0. At a negative β* nothing changes: a
    low GradScale there means negatives that are too likely.

    Attributes:
        most: largest multiple of the base number of steps; a power of two.
        floor, clear: GradScale under which more steps are run, and over which the sampler counts
            as healthy. It is M/(M+1) for M negatives: below 10, lower both by that factor.
        rise_after: rows in a row under the floor that double the number.
        fall_after: rows over ``clear`` since the last change that halve it.
        longest: rows to which the patience may grow.
        give_up_after: rows under the floor with the most steps, after which the base is run until a
            row over ``clear``: such a run needs a rollback.

    Raises:
        ConfigError: names a setting out of range and what was expected.
    """

    most: int = 16
    floor: float = 0.8
    clear: float = 0.9
    rise_after: int = 1
    fall_after: int = 100
    longest: int = 10_000
    give_up_after: int = 100

    def __post_init__(self) -> None:
        for name in ("most", "rise_after", "fall_after", "longest", "give_up_after"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"AdaptiveSteps: {name}={value!r}; expected a whole number >= 1.")
        if self.most & (self.most - 1):
            raise ConfigError(f"AdaptiveSteps: most={self.most}; expected a power of two.")
        if not 0 < self.floor <= self.clear < 1:
            raise ConfigError(
                f"AdaptiveSteps: floor={self.floor!r} and clear={self.clear!r}; expected "
                "0 < floor <= clear < 1, as GradScale lies between 0 and 1."
            )
        if self.longest < self.fall_after:
            raise ConfigError(
                f"AdaptiveSteps: longest={self.longest} is less than fall_after={self.fall_after}."
            )

    @typed
    def start(self, base: int) -> StepsController:
        """A controller at the base number of steps, 1 or more, else a ``ConfigError``."""
        if base < 1:
            raise ConfigError(
                f"AdaptiveSteps: the base number of steps (sgld_steps= of attach) is {base!r}; "
                "expected a whole number of 1 or more."
            )
        return StepsController(self, base)


class StepsController(Stateful):
    """The adaptive number of steps of one run; recovery may change ``base``, its usual number."""

    _owner = "AdaptiveSteps"

    def __init__(self, settings: AdaptiveSteps, base: int) -> None:
        self.settings = settings
        self.base = base
        self._level = 0  # the number of steps is base * 2**level
        self._low = 0  # rows under the floor since the last doubling or row over it
        self._healthy = 0  # rows over ``clear`` since the last halving or row under the floor
        self._patience = 0  # healthy rows that the next halving waits for; 0 for ``fall_after``
        self._since_fall: int | None = None  # rows since the last halving, until it proved right
        self._in_vain = 0  # rows under the floor with the most steps; at give_up_after none rises
        self._rows = 0
        self._factors = 0  # sum of 2**level over all rows

    def observe(self, row: Mapping[str, float]) -> None:
        """Take one judged row; one in which GradScale is unknown only counts as spent."""
        settings = self.settings
        self._rows += 1
        self._factors += self.factor
        beta_star = row.get(BETA_STAR, 1.0)
        scale = row.get(weight_tag(GRAD_SCALE, beta_star), math.nan)
        if not math.isfinite(scale) or not beta_star >= 0:
            return
        if self._since_fall is not None:
            # A halving has proved right once it has lasted as long as it had been waited for.
            proved = self._since_fall >= (self._patience or settings.fall_after)
            self._since_fall = None if proved else self._since_fall + 1
        if scale >= settings.floor:
            self._low = 0
            if scale > settings.clear:
                self._healthy, self._in_vain = self._healthy + 1, 0
                if self._level and self._healthy >= (self._patience or settings.fall_after):
                    self._level, self._healthy, self._since_fall = self._level - 1, 0, 0
            return
        self._low, self._healthy = self._low + 1, 0
        if self.factor >= settings.most:
            self._in_vain += 1
            if self._in_vain >= settings.give_up_after:
                self._level, self._low, self._since_fall = 0, 0, None
        elif self._low >= settings.rise_after and self._in_vain < settings.give_up_after:
            self._patience = self._patience or settings.fall_after
            if self._since_fall is not None:
                self._patience = min(2 * self._patience, settings.longest)
            self._level, self._low, self._since_fall = self._level + 1, 0, None

    @property
    def factor(self) -> int:
        """By how much the base is multiplied, and each step to be finer: a power of two."""
        return int(2**self._level)

    @property
    def value(self) -> int:
        """SGLD steps to run now, between base and base * most."""
        return self.base * self.factor

    @property
    def extra_compute(self) -> float:
        """All steps so far over those that the base would have taken; 1 where none was added."""
        return self._factors / self._rows if self._rows else 1.0

    def _saved(self) -> dict[str, Any]:
        counts = ("_level", "_low", "_healthy", "_patience", "_in_vain", "_rows", "_factors")
        return dict.fromkeys(counts, int) | {"_since_fall": int | None}

    def _read(self, state: Mapping[str, Any]) -> dict[str, Any]:
        read = super()._read(state)
        if not 1 <= 2 ** read["_level"] <= self.settings.most:
            raise ConfigError(
                f"The state of AdaptiveSteps runs {2 ** read['_level']} times the base, but "
                f"most={self.settings.most}; start with the settings of the saved run."
            )
        return read
