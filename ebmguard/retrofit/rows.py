"""One row of numbers per step, brought to the host without waiting.

With a lag of 0 a number is read the moment it is measured. With a lag L the row of step t is copied
to pinned memory behind an event, and read exactly at the end of step t + L: by then the copy is
long done, so the queue of a GPU never runs dry, and all ranks read the same rows at the same step.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["Row", "Rows", "StepRow"]

Row: TypeAlias = dict[str, float]
_Values: TypeAlias = "Tensor | list[float]"

_log = logging.getLogger("ebmguard")

# Steps between a row's measurement and its reading on a GPU.
_LAG = 2
# Histograms, the Pareto shape and what needs copies of samples or parameters come once in so many
# steps.
_SLOW_EVERY = 50
# Losses in one step, beyond any gradient accumulation.
_ENDLESS_STEP = 1000


@dataclass
class StepRow:
    """A row that has reached the host.

    Attributes:
        step: its step.
        numbers: by tag; of an ensemble, their means over the members.
        samples: the raw values of its histograms.
        members: the numbers of each member; none of a single model.
        is_over: whether its step is; else it is the row so far, which comes again.
        is_news: whether it holds anything to judge that the row so far did not.
    """

    step: int
    numbers: Row
    samples: dict[str, list[float]] = field(default_factory=dict)
    members: list[Row] = field(default_factory=list)
    is_over: bool = True
    is_news: bool = True


class Rows:
    """Counts the steps, pools the numbers of each, and hands out the rows that are due.

    Args:
        models: model dimensions of an ensemble.
        in_loss: whether numbers are read the moment they are measured (a lag of 0); None: where
            they are measured on a CPU.

    Attributes:
        step: the present step, whose row is open.
        lag: steps between a row's measurement and its reading.
        losses: how many there were so far.
        losses_in_step: how many of them in the present step.
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

    def begin_loss(self, *, is_on_host: bool) -> bool:
        """A loss is measured next; say whether it has the slow tier.

        Args:
            is_on_host: whether its numbers are on a CPU.
        """
        if not self.losses:
            self.lag = self._lag(is_on_host if self._in_loss is None else self._in_loss)
        slow = self.is_slow and not self.losses_in_step
        self.losses += 1
        self.losses_in_step += 1
        if self.losses_in_step == _ENDLESS_STEP:
            _log.warning(
                "%d losses without a step of the attached optimizer: rows wait for it. Attach the "
                "optimizer whose step() is called (of a wrapper such as SAM, the inner one).",
                self.losses_in_step,
            )
        return slow

    def add(
        self, numbers: Mapping[str, Tensor], samples: Mapping[str, Tensor] | None = None
    ) -> list[StepRow]:
        """Take what one call has measured; the calls of one step are averaged by tag.

        Args:
            numbers: 0-dim tensors of one device; of an ensemble, in the shape of its model
                dimensions or 0-dim.
            samples: vectors for histograms, on steps that have them.

        Returns:
            the row so far where the lag is 0; else nothing yet.
        """
        values = list(numbers.values())
        if self._models:
            values = [x.expand(self._models).flatten() for x in values]
        names, table = tuple(numbers), _stack(values)
        if self._models:
            table = torch.cat((table.mean(1, keepdim=True), table), 1)
        flat = {name: x.detach().flatten() for name, x in (samples or {}).items()}
        if self.lag:
            self._open.parts.append((names, table))
            self._open.samples.update(flat)
            return []
        row, members = _rows(names, table)
        self._open.rows.append(row)
        if members:
            self._open.members.append(members)
        self._open.samples.update({name: x.tolist() for name, x in flat.items()})
        self._open.has_news = False
        found, of_members = self._open.on_host()
        return [StepRow(self.step, found, {}, of_members, is_over=False)]

    def note(self, numbers: Mapping[str, float]) -> None:
        """Numbers of the present step that the host knows already; the largest of a step counts."""
        for name, value in numbers.items():
            self._open.notes[name] = max(value, self._open.notes.get(name, value))

    def note_news(self, tag: str, value: float | Tensor) -> None:
        """A number that is to be judged too: at the end of the step, where it is not 0.

        Args:
            tag: its diagnostic.
            value: a number, or a 0-dim tensor where a device knows it.
        """
        if isinstance(value, Tensor):
            if self.lag:
                self._open.parts.append(((tag,), _stack([value])))
                return
            value = float(value)
        self.note({tag: value})
        # No member's row tells that something is 0 again for the ensemble as a whole.
        self._open.has_news |= bool(self._models) or bool(value)

    def end_step(self) -> list[StepRow]:
        """Close the row of the present step, and read the rows that are due by now."""
        step = self.step
        self._close_row()
        self.step += 1
        self.losses_in_step = 0
        return self._read_until(step - self.lag)

    def drain(self) -> list[StepRow]:
        """Close the open row and read everything that is still under way.

        Nothing says that the step is over, so its number stays.
        """
        self._close_row()
        return self._read_until(self.step)

    def _close_row(self) -> None:
        if not self._open.is_empty:
            self._queue.append(_Pending.start(self.step, self._open))
            self._open = _OpenRow()

    def _read_until(self, step: int) -> list[StepRow]:
        found = []
        while self._queue and self._queue[0].row.step <= step:
            found.append(self._queue.popleft().read())
        return found

    def state_dict(self, *, is_over: bool) -> dict[str, Any]:
        """What a checkpoint needs, rows that are not due yet among it, read early and kept.

        Args:
            is_over: whether the present step ends here, with the open row.
        """
        waiting = list(self._queue)
        if is_over:
            waiting.append(_Pending.start(self.step, self._open))
        rows = [each.read() for each in waiting]
        return {
            "step": self.step + is_over,
            "losses": self.losses,
            "lag": self.lag,
            # A row gets its level later on; a copy does not.
            "rows": [[x.step, dict(x.numbers), x.samples, x.members, x.is_news] for x in rows],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._open = _OpenRow()
        self._queue = deque(
            _Pending(
                StepRow(step, dict(row), dict(samples), [dict(x) for x in members], is_news=is_news)
            )
            for step, row, samples, members, is_news in state["rows"]
        )
        self.step, self.losses = int(state["step"]), int(state["losses"])
        self.lag = int(state["lag"]) if self._in_loss is None else self._lag(self._in_loss)
        self.losses_in_step = 0

    @staticmethod
    def _lag(in_loss: bool) -> int:
        return 0 if in_loss else _LAG


@dataclass
class _OpenRow:
    # Names, and a vector of numbers; of an ensemble, a column of means and one for each member.
    parts: list[tuple[tuple[str, ...], Tensor]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)  # instead of parts where the lag is 0
    members: list[list[Row]] = field(default_factory=list)
    samples: dict[str, _Values] = field(default_factory=dict)
    notes: Row = field(default_factory=dict)
    has_news: bool = False

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
    """A row on its way to the host: what is there already, and what is coming."""

    row: StepRow
    names: tuple[str, ...] = ()
    own: int = 0
    numbers: Tensor | None = None
    samples: dict[str, _Values] = field(default_factory=dict)
    arrived: torch.cuda.Event | None = None

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
        found, members = row.on_host()
        is_news = row.has_news or not row.rows  # what is read late has not been judged yet
        on_host = StepRow(step, found, {}, members, is_news=is_news)
        return cls(on_host, names, own, numbers, samples, arrived)

    def read(self) -> StepRow:
        if self.arrived is not None:
            self.arrived.synchronize()
        row = self.row
        samples = {k: x.tolist() if isinstance(x, Tensor) else x for k, x in self.samples.items()}
        if self.numbers is None:
            return StepRow(
                row.step, row.numbers, row.samples | samples, row.members, is_news=row.is_news
            )
        found, members = _rows(self.names, self.numbers, self.own)
        return StepRow(row.step, found | row.numbers, samples, members, is_news=row.is_news)


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
