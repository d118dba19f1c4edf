"""The remedies, in the field's words, and which of them make sense for a run as it is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest
from typing import Any, Self

from ..errors import typed

__all__ = ["MOVES", "Remedies", "Remedy", "Situation", "WordedRemedy", "agreeing", "contradict"]
__all__ += ["names_of", "recorded"]


class Remedy(StrEnum):
    """A remedy, by its phrase; with what it moves, and 1 for up or -1 for down."""

    what: str
    way: int

    def __new__(cls, phrase: str, what: str = "", way: int = 0) -> Self:
        """Make a member with this phrase."""
        member = str.__new__(cls, phrase)
        member._value_, member.what, member.way = phrase, what, way
        return member

    ROLL_BACK = "go back to your own checkpoint"
    LOWER_LR = "lower the learning rate"
    RAISE_BETA = "raise beta_star", "beta_star", 1
    LOWER_BETA = "lower beta_star", "beta_star", -1
    BELOW_ZERO = "a lower beta_star, below 0", "beta_star", -1
    TOWARDS_ZERO = "move beta_star towards 0", "beta_star", 1  # from below
    MORE_STEPS = "more SGLD steps", "steps", 1
    FEWER_STEPS = "fewer SGLD steps", "steps", -1
    FINER_STEPS = "a smaller SGLD step size", "step size", -1
    SUBSTEPS = "SGLD steps 4 times finer, and 4 times as many", "step size", -1
    LONGER_STEPS = "a larger SGLD step size", "step size", 1
    MORE_NOISE = "more noise", "noise", 1
    LESS_NOISE = "less noise", "noise", -1
    MORE_NEGATIVES = "more negatives per step", "negatives", 1
    FEWER_NEGATIVES = "fewer negatives per step", "negatives", -1
    LARGER_BUFFER = "a larger replay buffer"
    MORE_FRESH = "raise the reinitialisation rate (JEM: 0.05)"
    FRESH_STARTS = "draw fresh start points"
    LOOK_AT_SAMPLER = "look for a sampler that returns what it kept, or takes steps of size 0"
    WIDER_CLAMP = "a wider clamp, or none as in JEM"


MOVES: dict[str, tuple[str, int]] = {
    remedy: (remedy.what, remedy.way) for remedy in Remedy if remedy.way
}
"""The thing that a remedy moves, and which way; those without an opposite are not there."""


def contradict(one: str, other: str) -> bool:
    """Return whether two remedies move the same thing in opposite directions."""
    a, b = MOVES.get(one), MOVES.get(other)
    return a is not None and b is not None and a[0] == b[0] and a[1] != b[1]


class WordedRemedy(str):
    """A remedy in the words of one run."""

    remedy: Remedy

    @classmethod
    def of(cls, remedy: Remedy, words: str) -> WordedRemedy:
        """Return the words, with this member."""
        text = cls(words)
        text.remedy = remedy
        return text


def names_of(remedies: Iterable[str]) -> list[str | None] | None:
    """The members behind a run's words, for a record; None where there are no such words."""
    names = [text.remedy.name if isinstance(text, WordedRemedy) else None for text in remedies]
    return names if any(names) else None


def recorded(record: Mapping[str, Any]) -> Iterator[str]:
    """The remedies of a record, with their members."""
    texts, names = record["remedies"], record.get("named")
    for text, name in zip_longest(texts, names[: len(texts)] if isinstance(names, list) else ()):
        member = Remedy.__members__.get(str(name))
        yield text if member is None else WordedRemedy.of(member, text)


def agreeing(remedies: Iterable[str], moved: dict[str, int]) -> tuple[str, ...]:
    """The remedies that go against nothing in ``moved``, by names as in :data:`MOVES`.

    What they move themselves is added. A run goes back once: the first that says so stays.
    """
    kept = []
    for remedy in dict.fromkeys(remedies):
        what, way = MOVES.get(remedy, (remedy, 1))
        if getattr(remedy, "remedy", remedy) == Remedy.ROLL_BACK:
            what, way = Remedy.ROLL_BACK, 0 if Remedy.ROLL_BACK in moved else 1
        if moved.setdefault(what, way) == way:
            kept.append(remedy)
    return tuple(kept)


@dataclass(frozen=True)
class Situation:
    """The state of a run at a step. NaN and None mean unknown.

    Attributes:
        beta_star, most: the exponent, NaN where it is no single number, and the highest allowed.
        samples_above: whether samples lie above the data by more than its own spread.
        sgld_steps, noise_std, learning_rate: those of a sampler call; the optimizer's largest.
        rolls_back: whether the guard rolls back by itself.
        substeps, most_substeps: those of a step of the sampler, now and at most.
        is_sharp: whether the drifts of the chains turned round not long ago.
    """

    beta_star: float = math.nan
    most: float = math.inf
    samples_above: bool = False
    sgld_steps: int | None = None
    noise_std: float | None = None
    learning_rate: float = math.nan
    rolls_back: bool = False
    substeps: int = 1
    most_substeps: int = 1
    is_sharp: bool = False

    def allows(self, remedy: str) -> bool:
        """Return whether a remedy makes sense here."""
        forbidden: dict[str, bool] = {
            Remedy.ROLL_BACK: self.rolls_back,
            # What is left must be a change: see `is_like`. A row's β* may be rounded.
            Remedy.RAISE_BETA: self.beta_star >= 0.9 * self.most or self.samples_above,
            Remedy.LOWER_BETA: self.beta_star <= 0,
            Remedy.TOWARDS_ZERO: self.beta_star >= 0,
            Remedy.MORE_STEPS: self.samples_above,
            Remedy.FEWER_STEPS: self.sgld_steps == 1,
            Remedy.SUBSTEPS: not self.is_sharp,
            Remedy.LESS_NOISE: self.noise_std == 0,
        }
        return not forbidden.get(remedy, False)

    def is_like(self, other: Iterable[float]) -> bool:
        """Return whether nothing that advice moves has changed by more than a tenth since."""
        return all(math.isclose(a, b, rel_tol=0.1) for a, b in zip(self.moved, other, strict=True))

    @property
    def moved(self) -> tuple[float, ...]:
        """β*, SGLD steps and learning rate, 0 where unknown."""
        known = self.beta_star, float(self.sgld_steps or 0), self.learning_rate
        return tuple(x if math.isfinite(x) else 0.0 for x in known)


@typed
@dataclass(frozen=True)
class Remedies:
    """The remedies, likeliest first, by the sign of beta*: below 0 negatives are too likely."""

    zero: tuple[str, ...]
    positive: tuple[str, ...]
    negative: tuple[str, ...]

    def at(self, beta_star: float) -> tuple[str, ...]:
        """The remedies for this beta*; an unknown (NaN) beta* counts as positive."""
        nonzero = self.negative if beta_star < 0 else self.positive
        return self.zero if beta_star == 0 else nonzero


def _always(*remedies: Remedy) -> Remedies:
    return Remedies(remedies, remedies, remedies)


_R = Remedy
LOST = _always(_R.ROLL_BACK, _R.SUBSTEPS, _R.LOWER_LR)
CONSTANT = _always(_R.ROLL_BACK, _R.SUBSTEPS, _R.LOWER_LR, _R.LOWER_BETA)
# Measured on the population (docs/results/population.md). Where samples lie above the data a higher
# beta* alone saved 3 of 15.
BLOWUP_WARN = _always(_R.SUBSTEPS, _R.LOWER_LR, _R.RAISE_BETA, _R.MORE_STEPS)
BLOWUP_ERROR = _always(_R.ROLL_BACK, _R.SUBSTEPS, _R.LOWER_LR, _R.RAISE_BETA, _R.MORE_STEPS)
ABOVE_DATA_WARN = _always(_R.SUBSTEPS, _R.LOWER_LR, _R.FINER_STEPS)
ABOVE_DATA_ERROR = _always(_R.ROLL_BACK, _R.SUBSTEPS, _R.LOWER_LR, _R.FINER_STEPS)
SAMPLER = Remedies(
    zero=(_R.MORE_STEPS, _R.FINER_STEPS, _R.LOWER_LR),
    positive=(_R.MORE_STEPS, _R.LOWER_BETA, _R.LOWER_LR),
    negative=(_R.FEWER_STEPS, _R.TOWARDS_ZERO, _R.LOWER_LR),
)
WEIGHTS = Remedies(
    zero=(_R.MORE_STEPS, _R.MORE_NEGATIVES),
    positive=(_R.LOWER_BETA, _R.MORE_NEGATIVES),
    negative=(_R.TOWARDS_ZERO, _R.MORE_NEGATIVES),
)
HUNG = _always(_R.LOOK_AT_SAMPLER, _R.FRESH_STARTS)
OVERSHOOT = Remedies(
    zero=(_R.FEWER_STEPS, _R.BELOW_ZERO, _R.FINER_STEPS),
    positive=(_R.FEWER_STEPS, _R.LOWER_BETA, _R.FINER_STEPS),
    negative=(_R.FEWER_STEPS, _R.BELOW_ZERO, _R.FINER_STEPS),
)
CROWDED = _always(_R.LARGER_BUFFER, _R.FEWER_NEGATIVES)
OLD = _always(_R.MORE_FRESH, _R.LARGER_BUFFER)
SATURATED = _always(_R.FINER_STEPS, _R.WIDER_CLAMP)
TOO_LONG = _always(_R.FINER_STEPS, _R.MORE_NOISE)
TOO_SHORT = _always(_R.LONGER_STEPS, _R.LESS_NOISE)
