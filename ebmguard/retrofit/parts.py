"""Numbers that are measured together: on a device in one tensor, on the host by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

__all__ = ["Part", "Row", "pooled", "read_parts"]

Row: TypeAlias = dict[str, float]


class Part(NamedTuple):
    """Numbers of a row that were measured together.

    Attributes:
        values: ``(n,)``, or ``(models, n)`` where each member of an ensemble has its own.
        named: makes numbers by tag of n that the host has read.
    """

    values: Tensor
    named: Callable[[Sequence[float]], Row]

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
        return cls(_stack(values).movedim(0, -1), partial(_by_name, tuple(numbers)))

    @classmethod
    def mean(cls, calls: Sequence[tuple[Sequence[Part], Row]]) -> Part:
        """Of several calls that make one step, which may differ in what they have."""
        parts = [part for own, _ in calls for part in own]
        most = max((len(part.values) for part in parts if not part.is_shared), default=0)
        flat = [part.values.expand(most, -1) if most else part.values for part in parts]

        def named(values: Sequence[float]) -> Row:
            rows, start = [], 0
            for own, known in calls:
                row = dict(known)
                for part in own:
                    end = start + part.values.shape[-1]
                    row |= part.named(values[start:end])
                    start = end
                rows.append(row)
            return pooled(rows)

        like = torch.zeros(0)
        return cls(torch.cat(flat, -1) if flat else like, named)


def read_parts(
    parts: Sequence[Part], known: Row, values: Sequence[list[Any]]
) -> tuple[Row, list[Row]]:
    """The row of a call, and those of the members, from the values of its parts on the host."""
    # A zero loses its sign, which says nothing and would be read as less than nothing.
    shared = known | {
        name: x + 0.0
        for part, own in zip(parts, values, strict=True)
        if part.is_shared
        for name, x in part.named(own).items()
    }
    each = [(part, own) for part, own in zip(parts, values, strict=True) if not part.is_shared]
    if not each:
        return shared, []
    members = [
        shared | {name: x + 0.0 for part, own in each for name, x in part.named(own[i]).items()}
        for i in range(len(each[0][1]))
    ]
    return pooled(members), members


def _by_name(names: Sequence[str], values: Sequence[float]) -> Row:
    return dict(zip(names, values, strict=True))


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
