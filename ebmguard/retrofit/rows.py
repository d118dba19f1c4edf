"""A row of numbers per step, brought to the host without waiting.

With a lag of 0 a number is read the moment it is measured. With a lag L the row of step t is copied
to pinned memory behind an event, and read exactly at the end of step t + L: by then the copy is
long done, so the queue of a GPU never runs dry, and all ranks read the same rows at the same step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import count, islice
from numbers import Integral, Real
from operator import or_
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..energies import unwrapped
from ..errors import ConfigError
from ..tags import TAGS

__all__ = ["POOLED_STEPS", "Part", "Row", "Rows", "StepRow", "joined_row", "pooled"]

Row: TypeAlias = dict[str, float]

_LAG = 2  # steps between a row's measurement and its reading on a GPU
# Steps between histograms, Pareto shapes, and what needs copies of samples or parameters.
_SLOW_EVERY = 50
POOLED_STEPS = 16  # of a Pareto shape: that of one batch is too noisy to act on
_NOTHING = torch.zeros(0, device="cpu")


class Part(NamedTuple):
    """The numbers of a row that were measured together."""

    values: Tensor  # (n,), or (models, n) with a row for every member of an ensemble
    named: Callable[[Sequence[float]], Row]  # numbers by tag, of n that the host has read

    @classmethod
    def of(cls, numbers: Mapping[str, Tensor], models: Sequence[int] = ()) -> Part:
        """Make a part of tensors by tag: 0-dim, or ``(*models,)`` if one has these dimensions."""
        values = list(numbers.values())
        if models and any(x.ndim for x in values):
            values = [x.expand(*models).flatten() for x in values]
        names = tuple(numbers)
        return cls(_stack(values).movedim(0, -1), lambda read: dict(zip(names, read, strict=True)))

    @classmethod
    def known(cls, numbers: Row) -> Part:
        """Make a part of numbers that are on the host already."""
        return cls(_NOTHING, lambda _: numbers)

    @classmethod
    def mean(cls, calls: Sequence[Sequence[Part]]) -> Part:
        """Return the mean over the calls of one step, which may have different tags."""
        parts = [part for call in calls for part in call if part.values.numel()]
        most = max((len(part.values) for part in parts if part.values.ndim > 1), default=0)
        flat = [part.values.expand(most, -1) if most else part.values for part in parts]

        def named(values: Sequence[float]) -> Row:
            unread, rows = iter(values), list[Row]()
            for call in calls:
                numbers = (x.named([*islice(unread, x.values.shape[-1])]) for x in call)
                rows.append(reduce(or_, numbers, {}))
            return pooled(rows)

        return cls(torch.cat(flat, -1) if flat else _NOTHING, named)


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
    """A counter of the steps, which pools their numbers and hands out the rows that are due."""

    def __init__(self, models: torch.Size, in_loss: bool | None) -> None:
        self.step = 0  # the present one, whose row is open
        self.lag = 0  # steps between a row's measurement and its reading
        self.losses = 0  # so far
        self.losses_in_step = 0
        self._models = models  # dimensions of an ensemble
        self._in_loss = in_loss  # whether the lag is 0; None: where numbers are measured on a CPU
        self._queue = deque([_OpenRow()])  # the last one is open

    @property
    def _open(self) -> _OpenRow:
        return self._queue[-1]

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

    def add(
        self, parts: Sequence[Part], samples: Mapping[str, Tensor] | None = None
    ) -> list[StepRow]:
        """Take the measurements of one call. The calls of a step are averaged by tag.

        Some steps also have energies for histograms. Return the row so far, none if rows lag.
        """
        row = self._open
        for name, x in (samples or {}).items():
            row.samples[name] = unwrapped(x.detach().flatten())
        if self.lag:
            row.calls.append(parts)
            return []
        plain = [x if type(x) is Tensor else unwrapped(x) for x, _ in parts]
        row.read(parts, [x.tolist() for x in plain])
        row.has_news = False
        return [row.on_host(self.step, is_over=False)]

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

    def end_step(self) -> Iterator[StepRow]:
        """Close the current row; then read the rows that are due, one after the other.

        If a row raises an error, the rows after it stay due.
        """
        step = self.step
        self._close_row()
        self.step += 1
        self.losses_in_step = 0
        return self._read_until(step - self.lag)

    def drain(self) -> Iterator[StepRow]:
        """Close the open row; then read all pending rows as :meth:`end_step` does.

        The step may not be over, so its number stays.
        """
        self._close_row()
        return self._read_until(self.step)

    def _close_row(self) -> None:
        row = self._open
        if row.has_news or row.calls or row.rows or row.notes or row.logged:
            row.on_its_way(self.step)
            self._queue.append(_OpenRow())

    def _read_until(self, step: int) -> Iterator[StepRow]:
        while len(self._queue) > 1 and (row := self._queue[0].row) and row.step <= step:
            whole = self._queue[0].arrived()
            self._queue.popleft()
            yield whole

    def state_dict(self, *, is_over: bool) -> dict[str, Any]:
        """Return the state, with rows that are not due yet; ``is_over``: the step is over."""
        if is_over:
            self._open.on_its_way(self.step)
        rows = [row.arrived() for row in [*self._queue][: None if is_over else -1]]
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
        self._queue = deque([*(_OpenRow(row=row) for row in rows), _OpenRow()])
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
    calls: list[Sequence[Part]] = field(default_factory=list)  # not read yet
    rows: list[Row] = field(default_factory=list)  # of calls that were read
    members: list[list[Row]] = field(default_factory=list)
    samples: dict[str, Tensor] = field(default_factory=dict)
    notes: Row = field(default_factory=dict)
    logged: dict[str, float | Tensor] = field(default_factory=dict)
    has_news: bool = False
    # Once the step is over, its row so far; per device the shapes of what it has sent by place,
    # their numbers, and when these are there.
    row: StepRow | None = None
    sent: list[tuple[dict[int, torch.Size], Tensor, torch.cuda.Event | None]] = field(
        default_factory=list
    )

    def read(self, parts: Sequence[Part], values: Sequence[list[Any]]) -> None:
        """Take the values of a call, now on the host."""
        shared: Row = {}
        member_rows: list[list[Row]] = []
        for part, numbers in zip(parts, values, strict=True):
            if part.values.ndim < 2:
                shared |= part.named(numbers)
            else:
                member_rows.append([*map(part.named, numbers)])
        members = [reduce(or_, rows, shared) for rows in zip(*member_rows, strict=True)]
        # A zero loses its sign, which says nothing and would be read as less than nothing.
        rows = [{name: x + 0.0 for name, x in row.items()} for row in members or [shared]]
        self.rows.append(pooled(rows))
        self.members += [rows] if members else []

    def on_host(self, step: int, *, is_over: bool = True) -> StepRow:
        """Return what the host has read already, averaged by name; compute it without a tensor."""
        members = [pooled(rows) for rows in zip(*self.members, strict=True)] if self.members else []
        # What is read late has not been judged yet.
        is_news = self.has_news or (not self.rows and bool(self.calls or self.notes))
        items = self.logged.items()
        logged = {name: x for name, x in items if not isinstance(x, Tensor)} if items else {}
        numbers = pooled(self.rows) | self.notes
        return StepRow(step, numbers, {}, members, is_over, is_news or not is_over, logged)

    def on_its_way(self, step: int) -> None:
        """Send what devices have to the host, as the step is over."""
        self.row = self.on_host(step)
        if not (self.samples or self.calls or self.logged):
            return  # the host has all of it
        self.samples = {name: _to_host(x) for name, x in self.samples.items()}
        tensors = [unwrapped(part.values) for parts in self.calls for part in parts]
        tensors += [x.reshape(()) for x in self.logged.values() if isinstance(x, Tensor)]
        for device in {x.device for x in tensors if x.numel()}:
            # One copy for all: the numbers of a step are those of one device, as a rule.
            local = {i: x for i, x in enumerate(tensors) if x.device == device}
            arrived = None
            numbers = _to_host(torch.cat([x.flatten() for x in local.values()]))
            if device.type == "cuda":
                arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
                arrived.record(torch.cuda.current_stream(device))
            self.sent.append(({i: x.shape for i, x in local.items()}, numbers, arrived))

    def arrived(self) -> StepRow:
        """Return the whole row, once its step is over."""
        assert self.row is not None
        if not (self.sent or self.samples):
            return self.row
        values: dict[int, Any] = {}
        for shapes, numbers, event in self.sent:
            if event is not None:
                event.synchronize()
            flat = torch.split(numbers, [shape.numel() for shape in shapes.values()])
            values |= {i: x.reshape(shapes[i]).tolist() for i, x in zip(shapes, flat, strict=True)}
        coming, late = (values.get(i, []) for i in count()), _OpenRow()
        for parts in self.calls:
            late.read(parts, [next(coming) for _ in parts])
        late.logged = {k: next(coming) for k, x in self.logged.items() if isinstance(x, Tensor)}
        late_row, row = late.on_host(self.row.step), self.row
        return replace(
            row,
            numbers=late_row.numbers | row.numbers,
            samples=row.samples | {name: x.tolist() for name, x in self.samples.items()},
            members=late_row.members or row.members,
            logged=row.logged | late_row.logged,
        )


def _to_host(x: Tensor) -> Tensor:
    if not x.is_cuda:
        return x.detach().cpu()
    host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
    return host.copy_(x, non_blocking=True)


def joined_row(rows: Sequence[Row], positives: Sequence[int], negatives: Sequence[int]) -> Row:
    """Return all ranks' numbers, from rows of the same names, joined as :mod:`.tags` says.

    ``positives`` and ``negatives`` are the ranks' numbers of samples; they weight some averages.
    The sampler's samples are counted as the negatives are.
    """
    both = [n + m for n, m in zip(positives, negatives, strict=True)]
    simple: dict[str, Callable[[list[float]], float]] = {"lowest": min, "highest": max, "sum": sum}
    weights = {"positives": positives, "negatives": negatives, "both": both}

    def join(name: str) -> float:
        values = [row[name] for row in rows]
        how = TAGS[name].join if name in TAGS else "average"
        if any(x != x for x in values):
            return float("nan")
        if how in simple:
            return simple[how](values)
        rank_weights = weights.get(how, [1] * len(rows))
        return sum(x * w for x, w in zip(values, rank_weights, strict=True)) / sum(rank_weights)

    return {name: join(name) for name in rows[0]}


def pooled(rows: Sequence[Row]) -> Row:
    """Return the means by name, over the rows that have the name."""
    if len(rows) < 2:
        return dict(rows[0]) if rows else {}
    pools: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            pools.setdefault(name, []).append(value)
    return {name: sum(pool) / len(pool) for name, pool in pools.items()}


def _stack(values: Sequence[Tensor]) -> Tensor:
    dtypes = {x.dtype for x in values}
    if dtypes == {torch.float32}:
        return torch.stack([*values]).detach()
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    table = values[0].new_empty((len(values), *values[0].shape), dtype=dtype)
    torch._foreach_copy_(list(table.unbind()), [x.detach() for x in values])
    return table
