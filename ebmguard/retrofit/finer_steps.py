"""The fineness of the sampler's steps, which the sharpness of its drifts decides."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import median
from typing import Any, Literal, TypeAlias

import torch

from ..alerts import Alert, Level, Situation
from ..alerts.remedies import Remedy
from ..errors import Stateful
from ..sampling import Drift, SamplerUpdate, Substeps, is_compiled
from ..tags import SHARPNESS, SUBSTEPS, SUBSTEPS_MISSED
from .strength import Settings

__all__ = ["FinerSteps", "Times"]

Times: TypeAlias = int | Literal["auto"]

_log = logging.getLogger("ebmguard")

MOST = 16
_TIMES = 4  # by which N changes
_FROM = 10  # the first row that changes it
_ROWS = 5  # of a median
_TURNS = 1.0  # the sharpness at which drifts turn round
_LATELY = 50  # steps, in which nearly all of what dies has been sharp
_HALF = 0.5  # under which it is not near
# Rows far from it before N falls; after a fall that had to be undone twice as many. The sharpness
# of finer steps hardly tells that of coarser ones, so every fall is a trial.
_WAIT = 100
_ENDS = 4  # evaluations that are kept at either end of a call
_LOOKS = 5  # calls that are looked at before it is given up
_MISSED = 0.3  # share of the entries above which the sampler does not move as it was seen to


class FinerSteps(Stateful):
    """Keep N, by which all steps of the sampler are divided, and how the sampler moves.

    Args:
        asked: N, or "auto": 1 until the median sharpness of five rows is over 1, where drifts turn
            round; then 4, and 16 where that is not enough.
    """

    _owner = "the finer steps"

    def __init__(self, asked: Times, settings: Settings) -> None:
        self.times = 1 if asked == "auto" else asked
        self.moves: SamplerUpdate | None = None
        self.least = 1  # that a rollback has asked for
        self._is_auto, self._settings = asked == "auto", settings
        self._recent: list[float] = []  # the sharpness of rows at this N
        self._looks, self._looked = _LOOKS, -1  # that are left; the step of the last one
        self._why = ""  # it was
        self._sharp: int | None = None  # the last step at which drifts turned round
        self._lost: int | None = None  # the first step of the ERROR that is in force
        self._has_said = self._has_acted = False
        self._calm, self._wait = 0, _WAIT  # rows far from the edge, and how many make N fall
        self._fell = False  # whether N changed so the last time
        self._call = (-1, 0)  # the step, and its sampler calls

    @property
    def sharpness(self) -> float:
        """The median of the last rows at this N; NaN where it is not known."""
        return median(self._recent) if self._recent else math.nan

    @property
    def acts(self) -> bool:
        """Return whether steps are finer, or how the sampler moves is watched for that."""
        return self.in_force > 1 or self.moves is not None

    @property
    def watched(self) -> float:
        """The sharpness over which every row is read at once."""
        return _HALF if self._is_auto and self._looks else math.inf

    @property
    def in_force(self) -> int:
        """The N that applies now."""
        if not self._looks and self.moves is None:
            return 1
        return min(MOST, max(self.times, self.least)) if self._is_auto else self.times

    def known(self, now: Situation, step: int) -> Situation:
        """The situation of a run at this step, with what is known here."""
        most = MOST if self._is_auto and (self.moves or self._looks) else self.in_force
        is_sharp = self._sharp is not None and step - self._sharp <= _LATELY
        return replace(now, substeps=self.in_force, most_substeps=most, is_sharp=is_sharp)

    def of_call(self, step: int, attempt: int, parts: Iterable[object]) -> Substeps | None:
        """The finer steps of a sampler call of ``parts``; None where nothing is touched."""
        n = self.in_force
        if self.moves is None and self._looks:
            if n == 1 and not (self._is_auto and self.sharpness > _HALF):
                return None
            if not any(map(is_compiled, parts)):
                self._looked = step
                return Substeps(None)
            self._give_up("it is compiled by torch.compile")
        if self.moves is None or (n == 1 and self.moves.bound == math.inf):
            return None
        self._call = step, self._call[1] + 1 if self._call[0] == step else 0
        # The trainer's seed, so that runs differ; a resumed run has all of these again.
        key = torch.initial_seed(), *self._call, attempt, self._settings.ranks.index
        return Substeps(self.moves, n, seed=hash(key) & (1 << 62) - 1)

    def drift(self, looking: Substeps | None) -> Drift:
        """Make a recorder of the call that is looked at."""
        # If both ends did not tell it, the whole chain is recorded.
        ends = _ENDS if self._looks == _LOOKS else None
        return Drift(len(self._settings.models), looking, ends)

    def looked(self, drift: Drift, result: object) -> None:
        """Take what a recorded call has shown."""
        why = "" if drift.looking is None else drift.looking.why
        local_moves = why or SamplerUpdate.of(drift.evaluations, drift.draws.log, result)
        moves: SamplerUpdate | str = self._settings.ranks.from_all(local_moves)[0]
        if isinstance(moves, str):
            self._looks -= 1
            if not self._looks:
                self._give_up(moves)
            return
        self.moves = moves
        # A drift that the sampler clips turns less than the gradient that was read until now.
        if moves.bound < math.inf and self._is_auto:
            self.times, self._recent = 1, []

    def _give_up(self, why: str) -> None:
        is_needed = self.times > 1 or self.least > 1
        self._looks, self._why = 0, why
        if is_needed:
            self._warn()

    def _warn(self) -> None:
        if self._settings.ranks.is_first and not self._has_said:
            _log.warning(
                "The sampler's steps cannot be made finer from outside: %s. Take N times as many "
                "steps in the sampler, with step_size / N and noise_std / sqrt(N), such as N = 4.",
                self._why,
            )
        self._has_said = True

    def read(self, step: int, row: Mapping[str, float], *, is_lost: bool = False) -> list[Alert]:
        """Take the row of a step that is over; the first finer steps are an alert.

        A lost run begins none: finer steps from the ERROR on kept 1 of 27. First rows tell little.
        """
        self._lost = (step if self._lost is None else self._lost) if is_lost else None
        may_begin = self._lost is None or self._lost < _FROM
        missed = row.get(SUBSTEPS_MISSED, 0.0)
        if self.moves is not None and step > self._looked:  # else it is of what was seen before
            if missed > _MISSED:
                self.moves, self._looks = None, max(self._looks - 1, 0)
                if not self._looks:
                    self._give_up("its steps change from call to call")
            elif missed <= _MISSED:
                self._looks = min(_LOOKS, self._looks + 1)
        sharpness, n = row.get(SHARPNESS, math.nan), self.in_force
        # What is read late may be of another N.
        if not math.isfinite(sharpness) or row.get(SUBSTEPS, 1.0) != n:
            return []
        self._recent = [*self._recent, sharpness][-_ROWS:]
        now, is_sure = self.sharpness, len(self._recent) == _ROWS
        if now > _TURNS:
            self._sharp = step
        self._calm = self._calm + 1 if _TIMES * sharpness < _HALF else 0
        if not self._is_auto or step < _FROM:
            return []
        # Once it acts the first rows at this N are enough: a run may have few left.
        if now > _TURNS and n < MOST and (n > 1 or (is_sure and may_begin)):
            return self._set(min(MOST, _TIMES * n), step, now)
        if n > self.least and self._calm >= self._wait:
            return self._set(n // _TIMES, step, now)
        return []

    def _set(self, times: int, step: int, sharpness: float) -> list[Alert]:
        is_first = not self._has_acted
        if times > self.times and self._fell:
            self._wait *= 2
        self._fell = times < self.times
        self.times, self._recent, self._calm, self._has_acted = times, [], 0, True
        if self.moves is None and not self._looks:
            self._warn()
        elif self._settings.ranks.is_first:
            now = f"taken as {times} finer ones" if times > 1 else "taken as it is"
            line = "Step %d: the sharpness of the sampler's steps is %.2f; from now on each is %s."
            _log.info(line, step, sharpness, now)
        what = "substeps", Level.INFO, step, SHARPNESS, sharpness, _TURNS, _ROWS
        return [Alert(*what, remedies=(Remedy.SUBSTEPS,))] if is_first else []

    def _saved(self) -> Mapping[str, Any]:
        counts = "times", "least", "_looks", "_looked", "_calm", "_wait"
        names: dict[str, Any] = dict.fromkeys(counts, int)
        names |= dict.fromkeys(("_has_said", "_has_acted", "_fell"), bool)
        names |= {"_why": str, "_sharp": int | None, "_lost": int | None, "_recent": list[float]}
        return names | {"moves": SamplerUpdate | None, "_call": tuple[int, int]}
