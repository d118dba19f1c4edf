"""The remedies, in the field's words. Numbers live in :mod:`.defaults`.

What helps depends on the sign of beta*: at 0 the weights are uniform and absorb nothing; below 0
the sampler over-shoots, and a vanishing GradScale means that negatives are *too* likely.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Remedies"]

Pair = tuple[str, str]

_ROLL_BACK = "roll back to the last good snapshot"
_ABOVE_ZERO = "train with beta_star above 0 (try 2)"
_LOWER_LR = "lower the learning rate"
_MORE_STEPS = "more SGLD steps"
_MORE_NEGATIVES = "more negatives per step"
_TOWARDS_ZERO = "move beta_star towards 0"


@dataclass(frozen=True)
class Remedies:
    """The two likeliest remedies, likeliest first, by the sign of beta*."""

    zero: Pair
    positive: Pair
    negative: Pair

    def at(self, beta_star: float) -> Pair:
        """The pair for this beta*; an unknown (NaN) beta* counts as positive."""
        if beta_star == 0:
            return self.zero
        return self.negative if beta_star < 0 else self.positive


def _always(first: str, second: str) -> Remedies:
    return Remedies((first, second), (first, second), (first, second))


NONFINITE = _always(_ROLL_BACK, _LOWER_LR)
# Of what the field uses, these two held on every seed (docs/results/remedies.md): not another seed
# alone, gradient clipping or smooth activations; a third of the learning rate held on most.
_RAISE = ("raise beta_star", _MORE_STEPS)
_BACK_AND_RAISE = (f"{_ROLL_BACK} and raise beta_star", _MORE_STEPS)
BLOWUP_WARN = Remedies((_ABOVE_ZERO, _MORE_STEPS), _RAISE, _RAISE)
BLOWUP_ERROR = Remedies(
    (f"{_ROLL_BACK} and {_ABOVE_ZERO}", _MORE_STEPS), _BACK_AND_RAISE, _BACK_AND_RAISE
)
SAMPLER = Remedies(
    zero=(_MORE_STEPS, "a smaller SGLD step size"),
    positive=(_MORE_STEPS, "lower beta_star"),
    negative=("fewer SGLD steps", _TOWARDS_ZERO),
)
WEIGHTS = Remedies(
    zero=(_MORE_STEPS, _MORE_NEGATIVES),
    positive=("lower beta_star", _MORE_NEGATIVES),
    negative=(_TOWARDS_ZERO, _MORE_NEGATIVES),
)
HUNG = _always(
    "look for a sampler that returns what it kept, or takes steps of size 0",
    "draw fresh start points",
)
OVERSHOOT = Remedies(
    zero=("fewer SGLD steps or a smaller step size", "a negative beta_star"),
    positive=("fewer SGLD steps or a smaller step size", "lower beta_star, below 0 if need be"),
    negative=("fewer SGLD steps or a smaller step size", "a more negative beta_star"),
)
CROWDED = _always("a larger replay buffer", "fewer negatives per step")
OLD = _always("raise the reinitialisation rate (JEM: 0.05)", "a larger replay buffer")
SATURATED = _always("a smaller SGLD step size", "a wider clamp, or none as in JEM")
TOO_LONG = _always("a smaller SGLD step size", "more noise")
TOO_SHORT = _always("a larger SGLD step size", "less noise")
