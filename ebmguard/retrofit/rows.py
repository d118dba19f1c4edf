"""One row of numbers per step, brought to the host without waiting.

With a lag of 0 a number is read the moment it is measured. With a lag L the row of step t is copied
to pinned memory behind an event, and read exactly at the end of step t + L: by then the copy is
long done, so the queue of a GPU never runs dry, and all ranks read the same rows at the same step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .parts import Part, Row, pooled, read_parts

__all__ = ["POOLED_STEPS", "Rows", "StepRow"]

_Values: TypeAlias = "Tensor | list[float]"

# Steps between a row's measurement and its reading on a GPU.
_LAG = 2
# Histograms, the Pareto shape and what needs copies of samples or parameters come once in so many
# steps.
_SLOW_EVERY = 50
# The Pareto shape of one batch is too noisy to act on; that of so many pooled ones is not.
POOLED_STEPS = 16


@dataclass
class StepRow:
    """A row that has reached the host.

    Attributes:
        numbers: by tag; of an ensemble, their means over the members.
        samples: the raw values of its histograms.
        members: the numbers of each member; none of a single model.
        is_over: whether its step is; else it is the row so far, which comes again.
        is_news: whether it holds anything to judge that the row so far did not.
        logged: the trainer's own numbers, which nobody judges.
    """

    step: int
    numbers: Row
    samples: dict[str, list[float]] = field(default_factory=dict)
    members: list[Row] = field(default_factory=list)
    is_over: bool = True
    is_news: bool = True
    logged: Row = field(default_factory=dict)


class Rows:
    """Counts the steps, pools the numbers of each, and hands out the rows that are due.

    Args:
        models: model dimensions of an ensemble.
        in_loss: whether the lag is 0; None: where numbers are measured on a CPU.

    Attributes:
        step: the present step, whose row is open.
        lag: steps between a row's measurement and its reading.
        losses, losses_in_step: how many there were so far, and in the present step.
    """

    def __init__(self, models: torch.Size, in_loss: bool | None) -> None:
        self.step = 0
        self.lag = 0
        self.losses = 0
        self.losses_in_step = 0
        self._models = models
        self._in_loss = in_loss
        self._open = _OpenRow()
        self._queue: deque[_Pending] = deque()

    @property
    def is_slow(self) -> bool:
        """Whether the present step has the tier that is not taken at every step."""
        return self.step % _SLOW_EVERY == 0

    @property
    def is_pooled(self) -> bool:
        """Whether the present step is one of those that the next slow tier pools."""
        return self.step % _SLOW_EVERY > _SLOW_EVERY - POOLED_STEPS or self.is_slow

    def begin_loss(self, *, is_on_host: bool) -> bool:
        """A loss is measured next, on a CPU or not; say whether it has the slow tier."""
        if not self.losses:
            self._set_lag(0 if is_on_host else _LAG)
        slow = self.is_slow and not self.losses_in_step
        self.losses += 1
        self.losses_in_step += 1
        return slow

    def add(
        self,
        parts: Sequence[Part],
        known: Row | None = None,
        samples: Mapping[str, Tensor] | None = None,
    ) -> list[StepRow]:
        """Take what one call has measured; the calls of one step are averaged by tag.

        Args:
            parts: what is measured.
            known: numbers that the host knows.
            samples: energies for histograms, on steps that have them.

        Returns:
            the row so far where the lag is 0; else nothing yet.
        """
        flat = {name: x.detach().flatten() for name, x in (samples or {}).items()}
        if self.lag:
            self._open.calls.append((parts, known or {}))
            self._open.samples.update(flat)
            return []
        row, members = read_parts(parts, known or {}, [part.values.tolist() for part in parts])
        self._open.rows.append(row)
        self._open.members.append(members)
        self._open.samples.update({name: x.tolist() for name, x in flat.items()})
        self._open.has_news = False
        so_far = self._open.on_host(self.step)
        so_far.is_over, so_far.is_news = False, True
        return [so_far]

    def note(self, numbers: Mapping[str, float], row: StepRow | None = None) -> None:
        """Numbers that the host knows already, of the present step or of a row whose step is over.

        The largest of a step counts.
        """
        notes = row.numbers if row is not None and row.is_over else self._open.notes
        for name, value in numbers.items():
            notes[name] = max(value, notes.get(name, value))

    def log(self, numbers: Mapping[str, float | Tensor]) -> None:
        """The trainer's own numbers for the row of the present step; of a name the last counts."""
        for name, value in numbers.items():
            # A copy: an accumulator goes on counting. That of a device is read with its row.
            if isinstance(value, Tensor):
                late = value.device.type != "cpu"
                value = value.detach().clone() if late else value.item()
            self._open.logged[name] = value if isinstance(value, Tensor) else float(value)

    def note_news(self, tag: str, value: float | Tensor) -> None:
        """A number, or one that a device knows, to be judged at the end of the step if not 0."""
        if isinstance(value, Tensor):
            if not self.losses:  # none may ever come, as where a classifier alone is trained
                self._set_lag(_LAG if value.is_cuda else 0)
            if self.lag:
                self._open.calls.append(([Part.of({tag: value})], {}))
                return
            value = float(value)
        self.note({tag: value})
        # No member's row tells that something is 0 again for the ensemble as a whole.
        self._open.has_news |= bool(self._models) or bool(value)

    def end_step(self) -> Iterator[StepRow]:
        """Close the row of the present step; then the rows that are due by now, each read in turn.

        A row that nobody takes, since the one before it has raised an error, stays due.
        """
        step = self.step
        self._close_row()
        self.step += 1
        self.losses_in_step = 0
        return self._read_until(step - self.lag)

    def drain(self) -> Iterator[StepRow]:
        """Close the open row; then everything that is still under way, read as by :meth:`end_step`.

        Nothing says that the step is over, so its number stays.
        """
        self._close_row()
        return self._read_until(self.step)

    def _close_row(self) -> None:
        if not self._open.is_empty:
            self._queue.append(self._open.on_its_way(self.step))
            self._open = _OpenRow()

    def _read_until(self, step: int) -> Iterator[StepRow]:
        while self._queue and self._queue[0].row.step <= step:
            yield self._queue.popleft().read()

    def state_dict(self, *, is_over: bool) -> dict[str, Any]:
        """What a checkpoint needs: also rows that are not due yet, read early and kept.

        With ``is_over`` the present step ends here, with the open row.
        """
        now = [self._open.on_its_way(self.step)] if is_over else []
        rows = [each.read() for each in (*self._queue, *now)]
        return {
            "step": self.step + is_over,
            "losses": self.losses,
            "lag": self.lag,
            # A row gets its level later on; a copy does not.
            "rows": [
                [x.step, dict(x.numbers), x.samples, x.members, x.is_news, x.logged] for x in rows
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._open = _OpenRow()
        self._queue = deque(
            _Pending(
                StepRow(step, dict(row), {}, list(members), is_news=is_news, logged=dict(logged)),
                dict(samples),
            )
            for step, row, samples, members, is_news, logged in state["rows"]
        )
        self.step, self.losses = int(state["step"]), int(state["losses"])
        self._set_lag(int(state["lag"]))
        self.losses_in_step = 0

    def _set_lag(self, usual: int) -> None:
        self.lag = usual if self._in_loss is None else 0 if self._in_loss else _LAG


@dataclass
class _OpenRow:
    calls: list[tuple[Sequence[Part], Row]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)  # instead of calls where the lag is 0
    members: list[list[Row]] = field(default_factory=list)
    samples: dict[str, _Values] = field(default_factory=dict)
    notes: Row = field(default_factory=dict)
    logged: dict[str, float | Tensor] = field(default_factory=dict)
    has_news: bool = False

    @property
    def is_empty(self) -> bool:
        return not (self.calls or self.rows or self.notes or self.logged)

    def on_host(self, step: int) -> StepRow:
        """What the host has read already, averaged by name. Computed without a tensor."""
        members = [pooled(own) for own in zip(*self.members, strict=True)]
        # What is read late has not been judged yet.
        is_news = self.has_news or (not self.rows and bool(self.calls or self.notes))
        logged = {name: x for name, x in self.logged.items() if not isinstance(x, Tensor)}
        numbers = pooled(self.rows) | self.notes
        return StepRow(step, numbers, {}, members, is_news=is_news, logged=logged)

    def on_its_way(self, step: int) -> _Pending:
        """The row of this step, now that it is over."""
        samples = {k: _to_host(x) if isinstance(x, Tensor) else x for k, x in self.samples.items()}
        late = {name: x for name, x in self.logged.items() if isinstance(x, Tensor)}
        pending = _Pending(self.on_host(step), samples, self.calls, tuple(late))
        sent = [part.values.flatten() for parts, _ in self.calls for part in parts]
        sent += [x.reshape(1) for x in late.values()]
        for device in {x.device for x in sent}:
            # One copy for all: the numbers of a step are those of one device, as a rule.
            own = [i for i, x in enumerate(sent) if x.device == device]
            pending.places += own
            pending.sizes += [sent[i].numel() for i in own]
            pending.numbers.append(_to_host(torch.cat([sent[i] for i in own])))
            if device.type == "cuda":
                arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
                arrived.record(torch.cuda.current_stream(device))
                pending.arrived.append(arrived)
        return pending


@dataclass
class _Pending:
    """A row on its way to the host: what is there already, and what is coming."""

    row: StepRow
    samples: dict[str, _Values]
    calls: Sequence[tuple[Sequence[Part], Row]] = ()
    late: tuple[str, ...] = ()  # names of the trainer's own numbers that a device has
    # Of each device, and the places of the parts in it, and their sizes.
    numbers: list[Tensor] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    arrived: list[torch.cuda.Event] = field(default_factory=list)

    def read(self) -> StepRow:
        samples = {k: x.tolist() if isinstance(x, Tensor) else x for k, x in self.samples.items()}
        if not (self.calls or self.late):
            return replace(self.row, samples=samples) if samples else self.row
        for event in self.arrived:
            event.synchronize()
        values = [x for own in self.numbers for x in own.tolist()]
        cut, start = {}, 0
        for place, size in zip(self.places, self.sizes, strict=True):
            cut[place] = values[start : start + size]
            start += size
        parts = iter(cut[place] for place in sorted(cut))
        rows, members = [], []
        for own, known in self.calls:
            row, each = read_parts(own, known, [_rows(part.values, next(parts)) for part in own])
            rows.append(row)
            members += [each] if each else []
        numbers = pooled(rows) | self.row.numbers
        logged = self.row.logged | {name: next(parts)[0] for name in self.late}
        means = [pooled(each) for each in zip(*members, strict=True)] or self.row.members
        return replace(self.row, numbers=numbers, samples=samples, members=means, logged=logged)


def _rows(like: Tensor, values: list[float]) -> list[Any]:
    """The values as ``like.tolist()`` has them."""
    if like.ndim < 2:
        return values
    n = like.shape[-1]
    return [values[start : start + n] for start in range(0, len(values), n)]


def _to_host(x: Tensor) -> Tensor:
    if not x.is_cuda:
        return x.detach().cpu()
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)
