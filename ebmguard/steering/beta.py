"""How strong the weights should be: β* as large as the effective number of negatives allows.

"Dynamic adjustments of β during training" are proposed in the discussion of the paper, and by
Appendix I.1, "as long as it is fixed for all negative examples within each batch". The trade-off
there: a larger β* filters unreliable negatives and makes the likelihoods count, but leaves fewer
effective negatives, and is of no use where none is competitive.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ConfigError
from .row import finite

__all__ = ["BetaController", "BetaState", "SteerBeta", "decide", "next_state"]

# β* of a row is float32 as often as not.
_SAME = 1e-5


@dataclass(frozen=True)
class SteerBeta:
    """Settings of the steered β*; all default values are those measured.

    Medians of ``window`` rows decide, and each decision starts a new window: one step of a blow-up
    moves nothing, and β* changes by at most ``rate`` in so many steps. That is slow on purpose. A
    blow-up takes five steps; those it takes are the weights' own business and the detector's.

    =========== =========== ======= ================================================================
    ESS         GradScale   β*      why
    =========== =========== ======= ================================================================
    above band  above floor raised  the weights are nearly uniform: they neither filter nor tell
                                    likelihoods apart, and more strength costs few negatives
    in its band above floor held    what is asked for
    below band  above floor lowered few of the negatives that compete carry the weight: the gradient
                                    is theirs, and the others are pushed nowhere, so that the
                                    sampler finds them again (Appendix J)
    any         below floor held    no negative competes: the sampler's matter, see
                                    :class:`AdaptiveSteps`. A lower β* would raise GradScale in this
                                    step, and the gap in the next ones: measured, it grew with 1/β*
                                    until GradScale was 0 again
    =========== =========== ======= ================================================================

    At the same energies a larger β* makes GradScale and ESS smaller; where they end up after
    training with it is for a measurement to say: see ``docs/results/steering.md``.

    Attributes:
        least, most: bounds of β*, positive; None: a sixteenth and 16 times the starting value.
        ess: the band of ESS, as a fraction of the negatives.
        floor: GradScale below which β* stays as it is. Its healthy value is M/(M+1) for M
            negatives.
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
        for name in ("least", "most"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and value > 0):
                raise ConfigError(
                    f"SteerBeta: {name}={value!r}; expected a positive number. β* is steered by "
                    "factors, which never reach 0."
                )
        if self.least is not None and self.most is not None and not self.least < self.most:
            raise ConfigError(f"SteerBeta: least={self.least} is not below most={self.most}.")
        if len(self.ess) != 2 or not 0 < self.ess[0] < self.ess[1] < 1:
            raise ConfigError(
                f"SteerBeta: ess={self.ess!r}; expected a band (low, high) with 0 < low < high < 1."
            )
        if not 0 < self.floor < 1:
            raise ConfigError(f"SteerBeta: floor={self.floor!r}; expected a value between 0 and 1.")
        if isinstance(self.window, bool) or not isinstance(self.window, int) or self.window < 1:
            raise ConfigError(f"SteerBeta: window={self.window!r}; expected a number of rows.")
        if not (_is_number(self.rate) and self.rate > 1):
            raise ConfigError(f"SteerBeta: rate={self.rate!r}; expected a factor above 1.")

    def start(self, base: float) -> BetaController:
        """A controller that starts at β* = base, or at ``least`` where base is 0.

        Raises:
            ConfigError: a negative β*, one that is no single number, 0 without ``least``, or one
                outside the bounds.
        """
        if not _is_number(base) or base < 0:
            raise ConfigError(
                f"SteerBeta: the starting beta_star is {base!r}; expected one positive number. "
                "A schedule sets β* itself, an ensemble has several, and a negative one is for "
                "samplers that over-shoot."
            )
        if base == 0 and self.least is None:
            raise ConfigError(
                "SteerBeta: beta_star=0 is never left by factors. Start above 0, or name the "
                "smallest value: SteerBeta(least=0.05, ...)."
            )
        start = float(base or self.least or 0)
        least, most = self.least or start / 16, self.most or start * 16
        if not least <= start <= most:
            raise ConfigError(
                f"SteerBeta: the starting beta_star {start:g} lies outside its bounds, "
                f"{least:g} to {most:g}."
            )
        return BetaController(replace(self, least=least, most=most), start)


def _is_number(value: object) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class BetaState:
    """What the next decision rests on.

    Attributes:
        beta_star: the value in use.
        ess, grad_scale: of the rows since the last decision.
    """

    beta_star: float
    ess: tuple[float, ...] = ()
    grad_scale: tuple[float, ...] = ()


def decide(settings: SteerBeta, ess: float, grad_scale: float) -> int:
    """1 to raise β*, -1 to lower it, 0 to hold it: the table of :class:`SteerBeta`."""
    if grad_scale < settings.floor:
        return 0
    low, high = settings.ess
    return (ess > high) - (ess < low)


def next_state(settings: SteerBeta, state: BetaState, row: Mapping[str, float]) -> BetaState:
    """The state after a row; one that lacks a number or was measured at another β* changes none.

    Args:
        settings: with both bounds.
        state: the state before.
        row: a judged row of diagnostics, tag to value; ``ess``, ``grad_scale`` and
            ``beta_star`` are read.
    """
    ess, scale = finite(row, "ess"), finite(row, "grad_scale")
    measured_at = row.get("beta_star", state.beta_star)
    if ess is None or scale is None:
        return state
    if not math.isclose(measured_at, state.beta_star, rel_tol=_SAME):
        return state  # of steps before the last change, which reach the host later
    state = replace(state, ess=(*state.ess, ess), grad_scale=(*state.grad_scale, scale))
    if len(state.ess) < settings.window:
        return state
    direction = decide(settings, statistics.median(state.ess), statistics.median(state.grad_scale))
    assert settings.least is not None
    assert settings.most is not None
    beta_star = state.beta_star * settings.rate**direction
    return BetaState(min(max(beta_star, settings.least), settings.most))


class BetaController:
    """The steered β* of one run: a settings object and a state.

    Deterministic: equal rows on all ranks give equal values.

    Attributes:
        settings: with both bounds filled in.
        state: replaced by each row.
    """

    def __init__(self, settings: SteerBeta, start: float) -> None:
        self.settings = settings
        self.state = BetaState(start)

    def observe(self, row: Mapping[str, float]) -> None:
        """Take one judged row."""
        self.state = next_state(self.settings, self.state, row)

    @property
    def value(self) -> float:
        """β* of the steps from now on."""
        return self.state.beta_star

    def move_to(self, beta_star: float) -> None:
        """Go on from another β*, that of a recovery; the bounds hold it."""
        assert self.settings.least is not None
        assert self.settings.most is not None
        self.state = BetaState(min(max(beta_star, self.settings.least), self.settings.most))

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON-able data."""
        state = self.state
        return {
            "beta_star": state.beta_star,
            "ess": list(state.ess),
            "grad_scale": list(state.grad_scale),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ConfigError: not such a state, or of a β* outside this controller's bounds.
        """
        if set(state) != {"beta_star", "ess", "grad_scale"}:
            raise ConfigError(
                "Not a state of SteerBeta: expected the keys beta_star, ess and grad_scale; got "
                f"{', '.join(sorted(map(str, state)))}."
            )
        beta_star = float(state["beta_star"])
        assert self.settings.least is not None
        assert self.settings.most is not None
        if not self.settings.least <= beta_star <= self.settings.most:
            raise ConfigError(
                f"The state of SteerBeta is at beta_star={beta_star:g}, outside the bounds "
                f"{self.settings.least:g} to {self.settings.most:g}; start the run with the "
                "settings of the saved one."
            )
        self.state = BetaState(
            beta_star,
            tuple(float(x) for x in state["ess"]),
            tuple(float(x) for x in state["grad_scale"]),
        )
