"""How much finer than its own the sampler's steps are taken, by the sharpness of its drifts."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from statistics import median
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from ..alerts import Alert, Level
from ..errors import ConfigError, Stateful
from ..sampling import Moves, Recording, Substeps
from ..tags import SHARPNESS, SUBSTEPS, SUBSTEPS_MISSED
from .strength import Settings
from .watches import is_compiled

__all__ = ["Fineness", "Times", "check_times"]

Times: TypeAlias = "int | Literal['auto']"

_log = logging.getLogger("ebmguard")

MOST = 16
_FROM = 10  # the first row that is read
_ROWS = 5  # of a median
_TURNS = 1.0  # the sharpness at which drifts turn round
_UP = 4
_ENDS = 4  # evaluations that are kept at either end of a call
_LOOKS = 5  # calls that are looked at before it is given up
_MISSED = 0.3  # share of the entries above which the sampler does not move as it was seen to


class Fineness(Stateful):
    """Keeps N, by which each of the sampler's steps is divided, and how the sampler moves.

    Args:
        asked: N, or "auto": 1 until the median sharpness of five rows is over 1, where drifts turn
            round; then 4, and 16 where that is not enough.
    """

    _owner = "the finer steps"

    def __init__(self, asked: Times, settings: Settings) -> None:
        self.times = 1 if asked == "auto" else asked
        self.moves: Moves | None = None
        self.least = 1  # that a rollback has asked for
        self._is_auto, self._settings = asked == "auto", settings
        self._recent: list[float] = []  # the sharpness of rows at this N
        self._looks = _LOOKS  # that are left
        self._has_said = False
        self._call = (-1, 0)  # the step, and its sampler calls

    @property
    def sharpness(self) -> float:
        """The median of the last rows at this N; NaN where it is not known."""
        return median(self._recent) if self._recent else math.nan

    @property
    def can(self) -> bool:
        """Whether steps may become finer than they are."""
        return self._is_auto and self._looks > 0 and self.in_force < MOST

    @property
    def in_force(self) -> int:
        """N now."""
        return min(MOST, max(self.times, self.least)) if self._is_auto else self.times

    def of_call(self, step: int, attempt: int, parts: Iterable[object]) -> Substeps | None:
        """The finer steps of a sampler call of ``parts``; None where nothing is touched."""
        n = self.in_force
        if not self._looks or (n == 1 and self.moves is None):
            return None
        if self.moves is None:
            if any(map(is_compiled, parts)):
                self._give_up("it is compiled by torch.compile")
                return None
            return Substeps(None)
        if n == 1 and self.moves.bound == math.inf:
            return None
        self._call = step, self._call[1] + 1 if self._call[0] == step else 0
        # The trainer's seed, so that runs differ; a resumed run has all of these again.
        of = torch.initial_seed(), *self._call, attempt, self._settings.ranks.index
        return Substeps(self.moves, n, seed=hash(of) & (1 << 62) - 1)

    def recording(self, looking: Substeps) -> Recording:
        """What records the call that is looked at."""
        # Where both ends do not tell it, the whole chain.
        ends = _ENDS if self._looks == _LOOKS else None
        return Recording(ends=ends, on_evaluation=looking.look)

    def looked(self, recording: Recording, looking: Substeps, result: object) -> None:
        """Take what a recorded call has shown."""
        seen, end = recording.evaluations, result if isinstance(result, Tensor) else None
        own: Moves | str = looking.why or Moves.of(seen, recording.draws.log, end)
        moves: Moves | str = self._settings.ranks.from_all(own)[0]
        if isinstance(moves, str):
            self._looks -= 1
            if not self._looks:
                self._give_up(moves)
            return
        self.moves = moves
        # A drift that the sampler clips turns less than the gradient that was read until now.
        if moves.bound < math.inf and self._is_auto and self.least == 1:
            drifts = [moves.drift(*each.point) for each in seen]
            same = sum(float((a * b).sum()) for a, b in pairwise(drifts))
            if not 1 - same / sum(float((a * a).sum()) for a in drifts[:-1]) > _TURNS:
                self.times, self._recent = 1, []

    def _give_up(self, why: str) -> None:
        self._looks, self.times, self.least = 0, 1, 1
        if self._settings.ranks.is_first:
            _log.warning(
                "The sampler's steps cannot be made finer from outside: %s. Take N times as many "
                "steps in the sampler, with step_size / N and noise_std / sqrt(N), such as N = 4.",
                why,
            )

    def read(self, step: int, row: Mapping[str, float]) -> list[Alert]:
        """Take the row of a step that is over; the first finer steps are an alert."""
        if row.get(SUBSTEPS_MISSED, 0.0) > _MISSED:
            self.moves, self._looks = None, self._looks - 1
            if not self._looks:
                self._give_up("its steps change from call to call")
        sharpness = row.get(SHARPNESS, math.nan)
        # What is read late may be of another N.
        if not math.isfinite(sharpness) or row.get(SUBSTEPS, 1.0) != self.in_force:
            return []
        self._recent = [*self._recent, sharpness][-_ROWS:]
        now = self.sharpness
        if not self._is_auto or not self._looks or step < _FROM or len(self._recent) < _ROWS:
            return []
        n = self.in_force
        if now > _TURNS and n < MOST:
            return self._set(min(MOST, _UP * n), step, now)
        return []

    def _set(self, times: int, step: int, sharpness: float) -> list[Alert]:
        self.times, self._recent = times, []
        if self._settings.ranks.is_first:
            _log.info(
                "Step %d: the sharpness of the sampler's steps is %.2f; from now on each is taken "
                "as %d finer ones.",
                *(step, sharpness, self.in_force),
            )
        if self._has_said:
            return []
        self._has_said = True
        what = "substeps", Level.INFO, step, SHARPNESS, sharpness, _TURNS, _ROWS
        return [Alert(*what, remedies=("a smaller SGLD step size",))]

    def _saved(self) -> Mapping[str, Any]:
        names = {"times": int, "least": int, "_looks": int, "_has_said": bool}
        return names | {"moves": Moves | None, "_recent": list[float], "_call": tuple[int, int]}


def check_times(asked: object) -> None:
    """Refuse, with a ``ConfigError``, what is neither "auto" nor a whole number of 1 or more."""
    is_whole = isinstance(asked, int) and not isinstance(asked, bool) and asked >= 1
    if not is_whole and asked != "auto":
        raise ConfigError(
            f'substeps={asked!r}; expected "auto", or the number of finer steps, 1 or more, that '
            "each of the sampler's is taken as; 1 leaves it as it is."
        )
