"""How strong the weights should be: β* as large as the effective number of negatives allows.

Proposed by the paper's discussion and Appendix I.1, "as long as it is fixed for all negative
examples within each batch": a larger β* filters unreliable negatives and makes the likelihoods
count, but leaves fewer effective negatives, and is of no use where none is competitive.
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

    Medians of ``window`` rows decide, and each decision starts a new window: one step of a blow-up
    moves nothing, and β* changes by at most ``rate`` in so many steps. A blow-up takes five steps,
    and is left to the weights and to the alerts.

    Above its band of ESS β* is raised: the weights are nearly uniform and tell little apart. Below
    it β* is lowered: few of the negatives that compete carry the gradient, and the others are
    pushed nowhere, so that the sampler finds them again (Appendix J). Where GradScale is under
    ``floor`` β* is held: no negative competes, which the sampler has to mend, see
    :class:`AdaptiveSteps`. A lower β* would raise GradScale in this step, and the gap in the next
    ones: measured (``docs/results/steering.md``), it grew with 1/β* until GradScale was 0 again.

    Attributes:
        least, most: bounds of β*, positive; None: a sixteenth and 16 times the starting value.
        ess: the band of ESS, as a fraction of the negatives.
        floor: GradScale below which β* is held; its healthy value is M/(M+1) for M negatives.
        window: rows whose medians decide.
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
        for name, value in (("least", self.least), ("most", self.most)):
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"SteerBeta: {name}={value!r}; expected a positive number.")
        if self.least is not None and self.most is not None and not self.least < self.most:
            raise ConfigError(f"SteerBeta: least={self.least} is not below most={self.most}.")
        if not 0 < self.ess[0] < self.ess[1] < 1:
            raise ConfigError(
                f"SteerBeta: ess={self.ess!r}; expected a band (low, high) with 0 < low < high < 1."
            )
        if not 0 < self.floor < 1:
            raise ConfigError(f"SteerBeta: floor={self.floor!r}; expected a value between 0 and 1.")
        if self.window < 1:
            raise ConfigError(f"SteerBeta: window={self.window!r}; expected a number of rows.")
        if not 1 < self.rate < math.inf:
            raise ConfigError(f"SteerBeta: rate={self.rate!r}; expected a factor above 1.")

    def start(self, base: float) -> BetaController:
        """A controller that starts at β* = base, or at ``least`` where base is 0.

        Raises:
            ConfigError: β* is negative, no single number, 0 without ``least``, or out of bounds.
        """
        is_number = isinstance(base, float | int) and not isinstance(base, bool)
        if not is_number or not 0 <= base < math.inf:
            raise ConfigError(
                f"SteerBeta: the starting beta_star is {base!r}; expected one positive number. "
                "A schedule sets β* itself, an ensemble has several, and a negative one is for "
                "samplers that over-shoot."
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
        if grad_scale < self.floor:
            return 0
        return (ess > self.ess[1]) - (ess < self.ess[0])


class BetaController(Stateful):
    """The steered β* of one run.

    Attributes:
        settings: what it was started with.
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
        """Take one judged row, whose ``ess``, ``grad_scale`` and ``beta_star`` are read.

        One that lacks a number changes nothing, nor does one of another β*: rows of steps before
        the last change reach the host later.
        """
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
                f"{least:g} to {most:g}; start the run with the settings of the saved one."
            )
        return read
