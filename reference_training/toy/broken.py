"""Ways in which a sampler is broken, and that people meet."""

from __future__ import annotations

from dataclasses import dataclass

GOOD = "good"
"""The sampler of the scenario as it is."""


@dataclass(frozen=True)
class Fault:
    """What is wrong with a sampler that is otherwise the scenario's.

    Attributes:
        step: factor of the Langevin step: that of the step size, and of the noise's variance.
        away: how far the start points lie from where they belong, in standard deviations of the
            Gaussian that they come from, in each coordinate.
    """

    step: float = 1.0
    away: float = 0.0


SAMPLERS = {
    GOOD: Fault(),
    "exploding": Fault(step=100.0),  # leaves the data, the further the steeper the energy
    "lost": Fault(away=10.0),  # starts so far away that its steps do not reach the data
    "stuck": Fault(step=0.01),  # delivers its start points
}
"""Samplers of the toys by name."""
