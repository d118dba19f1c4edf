"""Checks whether forward and reverse annealing together determine log Z."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Generator, Tensor

from ebmguard.errors import ConfigError

from .annealing import Estimate, Path, forward, pilot, reverse

__all__ = ["Bracket", "bracket_log_z"]

_LIMITS = {
    "exact": "",
    "long-run": ", if the long chains have forgotten where they started",
    "data": ", if the data are like samples of the model: of other data the upper side is no bound",
}
_LEAST_ESS = 10.0  # fewer chains have no standard error that could be trusted
_ERRORS = 2.0
_FAR = 4.0


@dataclass(frozen=True)
class Bracket:
    """Two estimates of one log Z, from below and from above, and the verdict on them.

    Attributes:
        forward: from the base; too low in expectation.
        reverse: from samples of the model; if they are exact, too high in expectation.
        starts: the kind of these samples: exact, ends of long chains at β = 1, or data.
        within: largest width of the bracket in nats; ConfigError if not above 0.
    """

    forward: Estimate
    reverse: Estimate
    starts: Literal["exact", "long-run", "data"]
    within: float = 1.0

    def __post_init__(self) -> None:
        if self.starts not in [*_LIMITS] or not self.within > 0:
            raise ConfigError(
                f"starts={self.starts!r}, within={self.within}; expected one of "
                f"{', '.join(_LIMITS)}, and a number of nats above 0"
            )

    @property
    def lower(self) -> float:
        """The forward estimate minus two standard errors."""
        return self.forward.log_z - _ERRORS * self.forward.standard_error

    @property
    def upper(self) -> float:
        """The reverse estimate plus two standard errors."""
        return self.reverse.log_z + _ERRORS * self.reverse.standard_error

    @property
    def problems(self) -> list[str]:
        """Reasons why the two do not bracket log Z; empty if none is visible."""
        sides = {"forward": self.forward, "reverse": self.reverse}
        if lost := [name for name, side in sides.items() if not math.isfinite(side.log_z)]:
            return [f"the {name} estimate is {sides[name].log_z}" for name in lost]
        found = [
            f"{name} has {side.ess:.1f} effective chains of {len(side.log_weights)}, and needs "
            f"{_LEAST_ESS:g}: more temperatures"
            for name, side in sides.items()
            if side.ess < _LEAST_ESS
        ]
        apart = self.upper - self.lower
        if apart < 0:
            found.append(f"the reverse side lies {-apart:.2f} nats below the forward one")
        elif apart > self.within:
            found.append(f"they are {apart:.2f} nats apart")
        ahead, back = self.forward, self.reverse
        at_starts, of_model = back.f.mean(), ahead.weights @ ahead.f
        spread = ahead.weights @ (ahead.f - of_model).square() / ahead.ess
        error = (spread + back.f.var(correction=0) / len(back.f)).sqrt()
        if (off := (at_starts - of_model).abs()) > _FAR * error:
            found.append(
                f"the reverse chains' starts are not like samples of the model: their mean f is "
                f"{at_starts:.4g}, the model's {of_model:.4g} ({off / error:.0f} standard errors)"
            )
        return found

    @property
    def verdict(self) -> str:
        """A sentence for people: the range of log Z, or why it is not known."""
        if problems := self.problems:
            return f"they do not bracket log Z within {self.within:g} nats: {'; '.join(problems)}"
        ends, apart = f"{self.lower:.3f}..{self.upper:.3f}", self.upper - self.lower
        return f"these two bracket log Z within {apart:.2g} nats, {ends}{_LIMITS[self.starts]}"


def bracket_log_z(
    path: Path,
    samples: Tensor,
    *,
    starts: Literal["exact", "long-run", "data"],
    temperatures: int,
    chains: int,
    within: float = 1.0,
    generator: Generator | None = None,
) -> Bracket:
    """Run a pilot, anneal forward, and back from `samples`; see these for arguments and errors."""
    schedule = pilot(path, chains=chains, temperatures=temperatures, generator=generator)
    ahead = forward(path, schedule, chains=chains, generator=generator)
    return Bracket(ahead, reverse(path, schedule, samples, generator=generator), starts, within)
