"""The controller of the number of SGLD steps, which is off by default. No torch.

Settings make a controller: ``AdaptiveSteps().start(5)``. It observes every judged row once, in the
order of the steps, and has a ``value``. Equal rows on all ranks give equal values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import ConfigError, Stateful, typed
from .tags import BETA_STAR, GRAD_SCALE, weight_tag

__all__ = ["AdaptiveSteps", "StepsController"]


def _check(settings: object, is_meant: bool, problem: str) -> None:
    if not is_meant:
        raise ConfigError(f"{type(settings).__name__}: {problem}.")


@typed
@dataclass(frozen=True)
class AdaptiveSteps:
    """Settings of the adaptive number of SGLD steps; all default values were measured.

    The number is base * 2**level, and each step is finer by 2**level. Powers of two keep the number
    of captured CUDA graphs small. It rises fast, because with training the energy becomes as steep
    as the level just allows (``docs/results/steering.md``). If a halving has to be undone, the next
    one waits twice as long, so that the number settles.

    It reads ``grad_scale``, or ``ref/grad_scale`` where β* = 0. At a negative β* nothing changes: a
    low GradScale there means negatives that are too likely.

    Attributes:
        most: largest multiple of the base number of steps; a power of two.
        floor, clear: GradScale under which more steps are run, and over which the sampler counts
            as healthy. It is M/(M+1) for M negatives: below 10, lower both by that factor.
        rise_after: rows in a row under the floor that double the number.
        fall_after: rows over ``clear`` since the last change that halve it.
        longest: the most rows that a halving may wait for.
        give_up_after: after so many rows under the floor with the most steps, the base is run until
            a row is over ``clear``: such a run needs a rollback.

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
            value = getattr(self, name)
            _check(self, value >= 1, f"{name}={value}; expected a whole number >= 1")
        floor, clear, most, longest = self.floor, self.clear, self.most, self.longest
        _check(self, not most & (most - 1), f"{most=}; expected a power of two")
        _check(self, 0 < floor <= clear < 1, f"{floor=}, {clear=}; expected 0 < floor <= clear < 1")
        said = f"{longest=} is less than fall_after={self.fall_after}"
        _check(self, longest >= self.fall_after, said)

    @typed
    def start(self, base: int) -> StepsController:
        """A controller at the base number of steps; a ``ConfigError`` if that is below 1."""
        said = f"the base number of steps (sgld_steps= of attach) is {base}"
        _check(self, base >= 1, f"{said}; expected a whole number of 1 or more")
        return StepsController(self, base)


class StepsController(Stateful):
    """The adaptive number of steps of one run. Recovery may change the usual number, ``base``."""

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
        """Take one judged row. If its GradScale is unknown, only its compute counts."""
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
        """The factor on the base number and on the fineness of each step: a power of two."""
        return int(2**self._level)

    @property
    def value(self) -> int:
        """SGLD steps to run now, between base and base * most."""
        return self.base * self.factor

    @property
    def extra_compute(self) -> float:
        """All steps so far, divided by what the base would have taken; 1 if none was added."""
        return self._factors / self._rows if self._rows else 1.0

    def _saved(self) -> dict[str, Any]:
        counts = ("_level", "_low", "_healthy", "_patience", "_in_vain", "_rows", "_factors")
        return dict.fromkeys(counts, int) | {"_since_fall": int | None}

    def _read(self, state: Mapping[str, Any]) -> dict[str, Any]:
        read = super()._read(state)
        factor, most = 2 ** read["_level"], self.settings.most
        said = f"the state runs {factor} times the base, but {most=}"
        is_within = 1 <= factor <= most
        _check(self.settings, is_within, f"{said}; start with the settings of the saved run")
        return read
