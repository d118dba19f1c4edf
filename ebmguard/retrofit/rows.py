"""One row of numbers per step, brought to the host without waiting, and written to sinks.

With ``lag`` 0 a row is read the moment it is measured. With a lag L the row of step t is copied to
pinned memory behind an event, and read exactly at the end of step t + L: by then the copy is long
done, so the queue of a GPU never runs dry, and all ranks read the same rows at the same step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..energies import ONE_MODEL
from ..sinks import PatientSink, Sink

__all__ = ["Finished", "Monitor", "Row"]

Row = dict[str, float]
_Values: TypeAlias = Tensor | list[float]


class Monitor:
    """Pools the numbers of a step, hands finished rows out, and writes them to sinks.

    Args:
        sinks: where rows, alerts and rollbacks go. One that raises ``OSError`` does not end the
            run (see :class:`ebmguard.sinks.PatientSink`).
        flush_every: sinks are flushed after so many rows and on an alert; a killed run loses no
            more than that.
        lag: steps between a row's measurement and its reading.

    Attributes:
        step: the step whose row is open.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        *,
        flush_every: int,
        lag: int,
    ) -> None:
        self.sinks = tuple(PatientSink(sink) for sink in sinks)
        self.lag = lag
        self.step = 0
        self._flush_every = flush_every
        self._since_flush = 0
        self._open = _OpenRow()
        self._queue: deque[_Pending] = deque()

    def add(
        self,
        numbers: Mapping[str, Tensor],
        samples: Mapping[str, Tensor],
        models: torch.Size = ONE_MODEL,
    ) -> tuple[Row, list[Row]] | None:
        """Measure once; several times in one step are averaged.

        Args:
            numbers: 0-dim tensors of one device; with model dimensions, of that shape or 0-dim.
            samples: vectors for histograms, on steps that have them; else empty.
            models: model dimensions of an ensemble.

        Returns:
            the numbers just measured, where the lag is 0, and those of every member, none without
            model dimensions; the former are then the mean of the latter. Else None.
        """
        values = list(numbers.values())
        if models:
            values = [x.expand(models).flatten() for x in values]
        names, table = tuple(numbers), _stack(values)
        if models:
            table = torch.cat((table.mean(1, keepdim=True), table), 1)
        flat = {name: x.detach().flatten() for name, x in samples.items()}
        if self.lag:
            self._open.parts.append((names, table))
            self._open.samples.update(flat)
            return None
        row, members = _rows(names, table)
        self._open.rows.append(row)
        if members:
            self._open.members.append(members)
        self._open.samples.update({name: x.tolist() for name, x in flat.items()})
        return dict(row), members

    def note(self, numbers: Mapping[str, float]) -> None:
        """Numbers that the host knows already; the largest of a step counts."""
        for name, value in numbers.items():
            self._open.notes[name] = max(value, self._open.notes.get(name, value))

    def end_step(self, step: int) -> list[Finished]:
        """Close the row of ``step``, and read the rows that are due by now."""
        if not self._open.is_empty:
            self._queue.append(_Pending.start(step, self._open))
            self._open = _OpenRow()
        self.step = step + 1
        return self._read_until(step - self.lag)

    def write(self, finished: Finished) -> None:
        """Write a row to every sink."""
        for sink in self.sinks:
            sink.write_row(finished.step, finished.row, finished.samples)
        self._since_flush += 1
        if self._since_flush >= self._flush_every:
            self.flush()

    def alert(self, record: Mapping[str, Any]) -> None:
        """Write an alert and flush, so that it outlives the run."""
        for sink in self.sinks:
            sink.write_alert(record)
        self.flush()

    def recovery(self, record: Mapping[str, Any]) -> None:
        """Write a rollback's record and flush."""
        for sink in self.sinks:
            sink.write_recovery(record)
        self.flush()

    def flush(self) -> None:
        """Flush every sink."""
        self._since_flush = 0
        for sink in self.sinks:
            sink.flush()

    def close(self) -> None:
        """Flush every sink for the last time, and say what those that fail have not taken."""
        for sink in self.sinks:
            sink.close()

    def drain(self) -> list[Finished]:
        """Close the open row and read everything that is still under way."""
        step = self.step
        rows = self.end_step(step) + self._read_until(step)
        self.step = step  # nothing says that the step is over
        return rows

    def under_way(self, *, with_open: bool) -> list[list[Any]]:
        """Rows that are not due yet, read early and kept: for checkpoints.

        Args:
            with_open: include the open row, as if its step were over.
        """
        rows = list(self._queue)
        if with_open:
            rows.append(_Pending.start(self.step, self._open))
        found = [pending.read() for pending in rows]
        # A row gets its level later on; a copy does not.
        return [list(each._replace(row=dict(each.row))) for each in found]

    def put_back(self, rows: Sequence[Sequence[Any]]) -> None:
        """The inverse of :meth:`under_way`."""
        self._open = _OpenRow()
        self._queue = deque(
            _Pending(step, (), 0, None, dict(samples), dict(row), [dict(x) for x in members], None)
            for step, row, samples, members in rows
        )

    def _read_until(self, step: int) -> list[Finished]:
        finished = []
        while self._queue and self._queue[0].step <= step:
            finished.append(self._queue.popleft().read())
        return finished


class Finished(NamedTuple):
    """A row that has reached the host.

    Attributes:
        step: its step.
        row: the numbers; of an ensemble, their means over the members.
        samples: the raw values of its histograms.
        members: the numbers of each member; none of a single model.
    """

    step: int
    row: Row
    samples: dict[str, list[float]]
    members: list[Row]


@dataclass
class _OpenRow:
    # Names, and a vector of numbers; of an ensemble, a column of means and one for each member.
    parts: list[tuple[tuple[str, ...], Tensor]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)  # in the place of parts where the lag is 0
    members: list[list[Row]] = field(default_factory=list)
    samples: dict[str, _Values] = field(default_factory=dict)
    notes: Row = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not self.parts and not self.rows and not self.notes

    def on_host(self) -> tuple[Row, list[Row]]:
        """What the host has read already, averaged by name. Computed without a tensor."""
        return _pooled(self.rows) | self.notes, [
            _pooled(own) for own in zip(*self.members, strict=True)
        ]

    def on_device(self) -> tuple[tuple[str, ...], int, Tensor | None]:
        """Names, how many of them from the first on are also members' own, and their numbers."""
        if not self.parts:
            return (), 0, None
        if len(self.parts) == 1:
            names, table = self.parts[0]
            return names, len(names) if table.ndim > 1 else 0, table
        pools: dict[str, list[Tensor]] = {}
        for names, table in self.parts:
            for name, value in zip(names, table.unbind(), strict=True):
                pools.setdefault(name, []).append(value)
        # Most numbers of a step come once: a mean would be one more kernel for each of them.
        means = {
            name: pool[0] if len(pool) == 1 else _stack(pool).mean(0)
            for name, pool in pools.items()
        }
        own = [name for name, mean in means.items() if mean.ndim]
        if own:  # one tensor for all, whatever of it only the ensemble as a whole has
            like = means[own[0]]
            means = {name: means[name] for name in own} | {
                name: mean.expand_as(like) for name, mean in means.items() if not mean.ndim
            }
        return tuple(means), len(own), _stack(list(means.values()))


@dataclass
class _Pending:
    """A row on its way to the host."""

    step: int
    names: tuple[str, ...]
    own: int
    numbers: Tensor | None
    samples: dict[str, _Values]
    on_host: Row
    members: list[Row]
    arrived: torch.cuda.Event | None

    @classmethod
    def start(cls, step: int, row: _OpenRow) -> _Pending:
        names, own, table = row.on_device()
        numbers = None if table is None else _to_host(table)
        samples = {
            name: _to_host(x) if isinstance(x, Tensor) else x for name, x in row.samples.items()
        }
        arrived = None
        if table is not None and table.is_cuda:
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(torch.cuda.current_stream(table.device))
        return cls(step, names, own, numbers, samples, *row.on_host(), arrived)

    def read(self) -> Finished:
        if self.arrived is not None:
            self.arrived.synchronize()
        row, members = self.on_host, self.members
        if self.numbers is not None:
            found, members = _rows(self.names, self.numbers, self.own)
            row = found | row
        samples = {k: x.tolist() if isinstance(x, Tensor) else x for k, x in self.samples.items()}
        return Finished(self.step, row, samples, members)


def _rows(names: tuple[str, ...], table: Tensor, own: int | None = None) -> tuple[Row, list[Row]]:
    """The row, and those of the members, who have the first ``own`` names; all where it is None."""
    if table.ndim == 1:
        return dict(zip(names, table.tolist(), strict=True)), []
    means, *columns = table.t().tolist()
    # Only the first names of a column are a member's, so that its end is not reached.
    members = [dict(zip(names[:own], column, strict=False)) for column in columns]
    return dict(zip(names, means, strict=True)), members


def _pooled(rows: Sequence[Row]) -> Row:
    if len(rows) == 1:
        return rows[0]
    pools: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            pools.setdefault(name, []).append(value)
    return {name: sum(pool) / len(pool) for name, pool in pools.items()}


def _stack(values: list[Tensor]) -> Tensor:
    dtypes = {x.dtype for x in values}
    if dtypes != {torch.float32}:
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        values = [x.to(dtype) for x in values]
    return torch.stack(values).detach()


def _to_host(x: Tensor) -> Tensor:
    if not x.is_cuda:
        return x.detach().cpu()
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)
