"""How strong the weights should be: β* as large as the effective number of negatives allows.

A larger β* filters unreliable negatives and makes the likelihoods count, but leaves fewer effective
negatives (the paper's discussion and Appendix I.1).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, Stateful, typed
from ..tags import BETA_STAR, ESS, GRAD_SCALE

__all__ = ["BetaController", "SteerBeta"]

# β* of a row is float32 as often as not.
_SAME = 1e-5


@typed
@dataclass(frozen=True)
class SteerBeta:
    """Settings of the steered β*; all default values are those measured.

    Above its band of ESS β* is raised: the weights are nearly uniform and tell little apart. Below
    it β* is lowered: few of the negatives that compete carry the gradient, and the sampler finds
    the others again (Appendix J). Where GradScale is under ``floor`` β* is held: no negative
    competes, which the sampler has to mend, and of a lower β* the gap grows with 1/β*
    (``docs/results/steering.md``).

    Attributes:
        least, most: bounds of β*, positive; None: a sixteenth and 16 times the starting value.
        ess: the band of ESS, as a fraction of the negatives.
        floor: GradScale below which β* is held; its healthy value is M/(M+1) for M negatives.
        window: rows whose medians decide, so that one step of a blow-up moves nothing.
        rate: factor of one change.

    Raises:
        ConfigError: names a setting out of range and what was expected.
    """

    least: float | None = None
    most: float | None = None
    ess: tuple[float, float] = (0.3, 0.8)
    floor: float = 0.5
    window: int = 20
    rate: float = 1.25

    def __post_init__(self) -> None:
        least, most, (low, high) = self.least, self.most, self.ess
        are_apart = least is None or most is None or least < most
        for is_kept, problem in (
            (least is None or 0 < least < math.inf, f"{least=}; expected a positive number"),
            (most is None or 0 < most < math.inf, f"{most=}; expected a positive number"),
            (are_apart, f"{least=} is not below {most=}"),
            (0 < low < high < 1, f"ess={self.ess}; expected (low, high) with 0 < low < high < 1"),
            (0 < self.floor < 1, f"floor={self.floor}; expected a value between 0 and 1"),
            (self.window >= 1, f"window={self.window}; expected a number of rows"),
            (1 < self.rate < math.inf, f"rate={self.rate}; expected a factor above 1"),
        ):
            if not is_kept:
                raise ConfigError(f"SteerBeta: {problem}.")

    def start(self, base: float) -> BetaController:
        """A controller that starts at β* = base, or at ``least`` where base is 0.

        Raises:
            ConfigError: β* is negative, no single number, 0 without ``least``, or out of bounds.
        """
        is_number = isinstance(base, float | int) and not isinstance(base, bool)
        if not is_number or not 0 <= base < math.inf:
            raise ConfigError(
                f"SteerBeta: the starting beta_star is {base!r}; expected one positive number, no "
                "schedule and no ensemble's."
            )
        start = float(base or self.least or 0)
        if not start:
            raise ConfigError(
                "SteerBeta: beta_star=0 is never left by factors. Start above 0, or set least."
            )
        least, most = self.least or start / 16, self.most or start * 16
        if not least <= start <= most:
            raise ConfigError(
                f"SteerBeta: beta_star={start:g} lies outside its bounds, {least:g} to {most:g}."
            )
        return BetaController(self, start, (least, most))

    def direction(self, ess: float, grad_scale: float) -> int:
        """1 to raise β*, -1 to lower it, 0 to hold it."""
        return 0 if grad_scale < self.floor else (ess > self.ess[1]) - (ess < self.ess[0])


class BetaController(Stateful):
    """The steered β* of one run.

    Attributes:
        bounds: the least and the largest β*.
        beta_star, value: β* of the steps from now on.
    """

    _owner = "SteerBeta"

    def __init__(self, settings: SteerBeta, start: float, bounds: tuple[float, float]) -> None:
        self.settings = settings
        self.bounds = bounds
        self.move_to(start)

    @property
    def value(self) -> float:
        """β* of the steps from now on."""
        return self.beta_star

    def observe(self, row: Mapping[str, float]) -> None:
        """Take one judged row; one that lacks ESS or GradScale, or is of an earlier β*, is late."""
        ess, scale = row.get(ESS, math.nan), row.get(GRAD_SCALE, math.nan)
        beta_star = row.get(BETA_STAR, self.beta_star)
        is_of_now = math.isclose(beta_star, self.beta_star, rel_tol=_SAME)
        if not (math.isfinite(ess) and math.isfinite(scale) and is_of_now):
            return
        self._ess.append(ess)
        self._grad_scale.append(scale)
        if len(self._ess) >= self.settings.window:
            medians = statistics.median(self._ess), statistics.median(self._grad_scale)
            self.move_to(self.beta_star * self.settings.rate ** self.settings.direction(*medians))

    def move_to(self, beta_star: float) -> None:
        """Go on from another β*, such as that of a recovery, within the bounds."""
        least, most = self.bounds
        self.beta_star = min(max(beta_star, least), most)
        self._ess: list[float] = []  # of the rows since the last decision
        self._grad_scale: list[float] = []

    def _saved(self) -> dict[str, Any]:
        return {"beta_star": float, "_ess": list[float], "_grad_scale": list[float]}

    def _read(self, state: Mapping[str, Any]) -> dict[str, Any]:
        read, (least, most) = super()._read(state), self.bounds
        if not least <= read["beta_star"] <= most:
            raise ConfigError(
                f"The state of SteerBeta is at beta_star={read['beta_star']:g}, outside the bounds "
                f"{least:g} to {most:g}; start with the settings of the saved run."
            )
        return read
