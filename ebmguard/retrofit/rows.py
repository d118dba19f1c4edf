"""A row of numbers per step, brought to the host without waiting.

With a lag of 0 a number is read the moment it is measured. With a lag L the row of step t is copied
to pinned memory behind an event, and read exactly at the end of step t + L: by then the copy is
long done, so the queue of a GPU never runs dry, and all ranks read the same rows at the same step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from numbers import Integral, Real
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..energies import unwrapped
from ..errors import ConfigError
from .parts import Call, Part, Row, averaged, parts_of, read

__all__ = ["BLOCK", "POOLED_STEPS", "Rows", "StepRow"]

_LAG = 2  # steps between a row's measurement and its reading on a GPU
# Steps between histograms, Pareto shapes, and what needs copies of samples or parameters.
_SLOW_EVERY = 50
BLOCK = 16  # rows that are read at once where nothing in them is alarming
POOLED_STEPS = 16  # of a Pareto shape: that of one batch is too noisy to act on


@dataclass
class StepRow:
    """A row that has reached the host."""

    step: int
    numbers: Row  # by tag; of an ensemble, their means over the members
    samples: dict[str, list[float]] = field(default_factory=dict)  # raw values of its histograms
    members: list[Row] = field(default_factory=list)  # a row per member; none for one model
    is_over: bool = True  # whether its step is; else it is the row so far, which comes again
    is_news: bool = True  # whether it holds anything to judge that the row so far did not
    logged: Row = field(default_factory=dict)  # the trainer's own numbers, which nobody judges


class Rows:
    """A counter of the steps, which pools their numbers and hands out the rows that are due.

    Args:
        models: the dimensions of an ensemble.
        in_loss: whether the lag is 0; None: where numbers are measured on a CPU.
        block: the number of rows that may wait and then are read at once.
    """

    def __init__(self, models: torch.Size, in_loss: bool | None, block: int = 1) -> None:
        self.step = 0  # the present one, whose row is open
        self.lag = 0  # steps between a row's measurement and its reading
        self.losses = 0  # so far
        self.losses_in_step = 0
        self.waits = False  # whether the step under way holds nothing that must be read at once
        self._models, self._in_loss, self._block = models, in_loss, block
        self._queue = deque([_OpenRow()])  # the last one is open

    @property
    def _open(self) -> _OpenRow:
        return self._queue[-1]

    @property
    def can_wait(self) -> bool:
        """Return whether rows may wait until a block of them is full."""
        return not self.lag and len(self._open.calls) < self._block - 1

    @property
    def is_slow(self) -> bool:
        """Return whether the current step also measures the slow tier."""
        return self.step % _SLOW_EVERY == 0

    @property
    def is_pooled(self) -> bool:
        """Return whether the next slow tier pools the current step."""
        return self.step % _SLOW_EVERY > _SLOW_EVERY - POOLED_STEPS or self.is_slow

    def begin_loss(self, *, is_on_host: bool) -> bool:
        """Announce a loss, on a CPU or not; return whether it measures the slow tier."""
        if not self.losses:
            self._set_lag(0 if is_on_host else _LAG)
        slow = self.is_slow and not self.losses_in_step
        self.losses += 1
        self.losses_in_step += 1
        return slow

    def add(self, call: Call, samples: Mapping[str, Tensor] | None = None) -> None:
        """Take the measurements of one call. The calls of a step are averaged by tag.

        Some steps also have energies for histograms.
        """
        self._open.calls.append(call)
        for name, x in (samples or {}).items():
            self._open.samples[name] = unwrapped(x.detach().flatten())

    def so_far(self) -> Iterator[StepRow]:
        """Read all rows if calls wait in one, with the row under way; nothing if rows lag."""
        # No generator of ours: a signal's handler may close the guard at any call.
        if self.lag or not any(map(attrgetter("calls"), [*self._queue])):
            return
        yield from self._read_until(self.step - 1)
        if self._open.calls:
            self._open.read()
            yield self._open.whole(self.step, is_over=False)

    def note(self, numbers: Mapping[str, float], row: StepRow | None = None) -> None:
        """Add numbers that are on the host, for the current step or a row whose step is over.

        The largest value of a step counts.
        """
        notes = row.numbers if row is not None and row.is_over else self._open.notes
        for name, value in numbers.items():
            notes[name] = max(value, notes.get(name, value))

    def log(self, numbers: Mapping[str, float | Tensor]) -> None:
        """Add the trainer's own numbers to the current row; the last value of a name counts."""
        for name, value in numbers.items():
            # A copy: an accumulator goes on counting. That of a device is read with its row.
            if isinstance(value, Tensor):
                late = value.device.type != "cpu"
                value = value.detach().clone() if late else value.item()
            self._open.logged[name] = value if isinstance(value, Tensor) else float(value)

    def note_news(self, tag: str, value: float | Tensor) -> None:
        """Add a number or 0-dim tensor that is judged at the end of the step if it is not 0."""
        if isinstance(value, Tensor):
            if not self.losses:  # none may ever come, as where a classifier alone is trained
                self._set_lag(_LAG if value.is_cuda else 0)
            if self.lag:
                self._open.calls.append([Part.of({tag: value})])
                return
            value = float(value)
        self.note({tag: value})
        # No member's row tells that something is 0 again for the ensemble as a whole.
        self._open.has_news |= bool(self._models) or bool(value)
        self.waits &= not self._open.has_news

    def end_step(self) -> Iterator[StepRow]:
        """Close the current row; then read the rows that are due, one after the other.

        If a row raises an error, the rows after it stay due.
        """
        step, waits = self.step, self.waits
        self._close_row()
        self.step += 1
        self.losses_in_step, self.waits = 0, False
        is_due = not waits or len(self._queue) > self._block
        return self._read_until(step - self.lag) if is_due else iter(())

    def drain(self) -> Iterator[StepRow]:
        """Close the open row; then read all pending rows as :meth:`end_step` does.

        The step may not be over, so its number stays.
        """
        self._close_row()
        return self._read_until(self.step)

    def _close_row(self) -> None:
        row = self._open
        if row.has_news or row.calls or row.numbers or row.notes or row.logged:
            row.close(self.step, sends=self.lag > 0)
            self._queue.append(_OpenRow())

    def _read_until(self, step: int) -> Iterator[StepRow]:
        due = [row for row in [*self._queue][:-1] if row.step <= step]
        for row, whole in zip(due, _arrived(due), strict=True):
            assert row is self._queue.popleft()
            yield whole

    def state_dict(self, *, is_over: bool) -> dict[str, Any]:
        """Return the state, with rows that are not due yet; ``is_over``: the step is over."""
        waiting = [*self._queue][:-1]
        if is_over:
            waiting.append(replace(self._open))
            waiting[-1].close(self.step, sends=self.lag > 0)
        rows = [*_arrived(waiting)]
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
        """Restore a :meth:`state_dict`; raise on any other state before anything changes."""
        step, losses, lag = (_count(name, state[name]) for name in ("step", "losses", "lag"))
        rows = []
        for t, row, samples, members, is_news, logged in state["rows"]:
            values = _count("step", t), _numbers(row), dict(samples), [*map(_numbers, members)]
            rows.append(StepRow(*values, is_news=bool(is_news), logged=_numbers(logged)))
        self.step, self.losses, self.losses_in_step = step, losses, 0
        self.waits = False
        self._queue = deque([*(_OpenRow(step=row.step, row=row) for row in rows), _OpenRow()])
        self._set_lag(lag)

    def _set_lag(self, usual: int) -> None:
        self.lag = usual if self._in_loss is None else 0 if self._in_loss else _LAG


def _count(name: str, value: Any) -> int:
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_whole or not 0 <= int(value) <= 2**53:  # up to there a float has every one
        raise ConfigError(f"The state has {name}={value!r}; expected a whole number, 0 to 2**53.")
    return int(value)


def _numbers(row: Mapping[str, Any]) -> Row:
    if wrong := [tag for tag, value in row.items() if not isinstance(value, Real)]:
        raise ConfigError(
            f"A row of the state has {wrong[0]}={row[wrong[0]]!r}, which is no number."
        )
    return dict(row)


@dataclass
class _OpenRow:
    calls: list[Call] = field(default_factory=list)  # not read yet
    numbers: list[tuple[Row, list[Row]]] = field(default_factory=list)  # of calls that were read
    samples: dict[str, Tensor] = field(default_factory=dict)
    notes: Row = field(default_factory=dict)
    logged: dict[str, float | Tensor] = field(default_factory=dict)
    has_news: bool = False
    # Once the step is over; and the row, once it is whole.
    step: int = -1
    sent: list[torch.cuda.Event] = field(default_factory=list)  # ends of copies to the host
    dtypes: list[tuple[Part, torch.dtype]] = field(default_factory=list)  # before these
    row: StepRow | None = None

    def read(self) -> None:
        """Read the calls; the row so far is judged now."""
        # At once, since an interrupt may come before any line.
        self.numbers, self.calls = [*self.numbers, *read(self.calls)], []
        self.has_news = False

    def whole(self, step: int, *, is_over: bool = True) -> StepRow:
        """Return the row of the calls that were read."""
        numbers, members = averaged(self.numbers)
        samples: dict[str, list[float]] = {}
        if is_over and self.samples:
            samples = {name: x.tolist() for name, x in self.samples.items()}
        logged = dict(zip(self.logged, map(float, self.logged.values()), strict=True))
        logged = logged if is_over else {}
        is_news = self.has_news or not is_over
        return StepRow(step, numbers | self.notes, samples, members, is_over, is_news, logged)

    def close(self, step: int, *, sends: bool) -> None:
        """Note that the step is over. What devices have is sent to the host."""
        # What is read late has not been judged yet.
        self.has_news |= bool(self.calls) or (bool(self.notes) and not self.numbers)
        self.step, self.row = step, None
        if not (sends or self.logged):
            return
        late = {name: x for name, x in self.logged.items() if isinstance(x, Tensor)}
        self.samples = {name: _to_host(x) for name, x in self.samples.items()}
        parts = [part for call in self.calls for part in parts_of(call)]
        values = [unwrapped(part.values) for part in parts] + [x.reshape(()) for x in late.values()]
        self.dtypes += [(part, x.dtype) for part, x in zip(parts, values, strict=False)]
        # One copy for all, in the widest type: those of a step are of one device, as a rule.
        for device in {x.device for x in values if x.device.type != "cpu"}:
            places = [i for i, x in enumerate(values) if x.device == device]
            host = _to_host(torch.cat([values[i].flatten() for i in places]))
            sizes = [values[i].numel() for i in places]
            for i, x in zip(places, torch.split(host, sizes), strict=True):
                values[i] = x.view(values[i].shape)
            if device.type == "cuda":
                self.sent.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
                self.sent[-1].record(torch.cuda.current_stream(device))
        for part, x in zip(parts, values, strict=False):
            part.values = x
        self.logged |= dict(zip(late, values[len(parts) :], strict=True))


def _arrived(rows: Sequence[_OpenRow]) -> Iterator[StepRow]:
    """Yield the whole rows of steps that are over. All of them are read at once."""
    waiting = [row for row in rows if row.row is None]
    for row in waiting:
        for event in row.sent:
            event.synchronize()
        for part, dtype in row.dtypes:
            part.values = part.values.to(dtype)
    numbers = iter(read([call for row in waiting for call in row.calls]))
    for row in waiting:
        row.numbers, row.calls = [*row.numbers, *islice(numbers, len(row.calls))], []
        row.sent, row.dtypes = [], []
        row.row = row.whole(row.step)
    for row in rows:
        assert row.row is not None
        yield row.row


def _to_host(x: Tensor) -> Tensor:
    if not x.is_cuda:
        return x.cpu()
    host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
    return host.copy_(x, non_blocking=True)
