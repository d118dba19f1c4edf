"""Numbers that are measured together: on a device in one tensor, on the host by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import islice
from operator import or_
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..tags import TAGS

__all__ = ["Part", "Row", "joined_row", "named_in_turn", "pooled", "read_parts"]

Row: TypeAlias = dict[str, float]


class Part(NamedTuple):
    """Numbers of a row that were measured together."""

    values: Tensor  # (n,), or (models, n) where each member of an ensemble has its own
    named: Callable[[Sequence[float]], Row]  # numbers by tag, of n that the host has read

    @property
    def is_shared(self) -> bool:
        """Whether they are those of every member."""
        return self.values.ndim < 2

    @classmethod
    def of(cls, numbers: Mapping[str, Tensor], models: Sequence[int] = ()) -> Part:
        """Of 0-dim tensors by tag, or of ``(*models,)`` where one has the models' dimensions."""
        values = list(numbers.values())
        if models and any(x.ndim for x in values):
            values = [x.expand(*models).flatten() for x in values]
        names = tuple(numbers)
        return cls(_stack(values).movedim(0, -1), lambda read: dict(zip(names, read, strict=True)))

    @classmethod
    def mean(cls, calls: Sequence[tuple[Sequence[Part], Row]]) -> Part:
        """Of several calls that make one step, which may differ in what they have."""
        parts = [part for own, _ in calls for part in own]
        most = max((len(part.values) for part in parts if not part.is_shared), default=0)
        flat = [part.values.expand(most, -1) if most else part.values for part in parts]

        def named(values: Sequence[float]) -> Row:
            each = iter(values)
            return pooled([known | named_in_turn(own, each) for own, known in calls])

        return cls(torch.cat(flat, -1) if flat else torch.zeros(0), named)


def read_parts(
    parts: Sequence[Part], known: Row, values: Sequence[list[Any]]
) -> tuple[Row, list[Row]]:
    """The row of a call, and those of the members, from the values of its parts on the host."""
    shared, each = dict(known), []
    for part, own in zip(parts, values, strict=True):
        if part.is_shared:
            shared |= part.named(own)
        else:
            each.append([*map(part.named, own)])
    members = [reduce(or_, rows, shared) for rows in zip(*each, strict=True)]
    # A zero loses its sign, which says nothing and would be read as less than nothing.
    rows = [{name: x + 0.0 for name, x in row.items()} for row in members or [shared]]
    return pooled(rows), rows if members else []


def named_in_turn(parts: Sequence[Part], values: Iterator[float]) -> Row:
    """The numbers of parts, taken from the values of all, which come one after the other."""
    found: Row = {}
    for part in parts:
        found |= part.named([*islice(values, part.values.shape[-1])])
    return found


def joined_row(rows: Sequence[Row], positives: Sequence[int], negatives: Sequence[int]) -> Row:
    """The numbers of all ranks, from rows of the same names, joined as :mod:`.tags` says.

    ``positives`` and ``negatives`` are each rank's numbers of samples, which weigh some averages. A
    rank counts as many sampler's samples as negatives.
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
        by = weights.get(how, [1] * len(rows))
        return sum(x * w for x, w in zip(values, by, strict=True)) / sum(by)

    return {name: join(name) for name in rows[0]}


def pooled(rows: Sequence[Row]) -> Row:
    """Their means by name, each over the rows that have it."""
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
