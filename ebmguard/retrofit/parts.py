"""The measurements of a step, and the one place where they become numbers by tag."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..diagnostics import wide
from ..energies import unwrapped
from ..tags import TAGS

__all__ = [
    "Call",
    "Part",
    "Row",
    "averaged",
    "by_tag",
    "joined_ranks",
    "on_device",
    "parts_of",
    "read",
]

Row: TypeAlias = dict[str, float]


@dataclass(eq=False, slots=True)
class Part:
    """Raw values, and the function by which the host makes numbers of them.

    Parts of several steps with the same function, arguments and shape are read as one.
    """

    values: Tensor  # (...,), or (models, ...) where the function keeps this dimension
    named: Callable[..., Mapping[str, Tensor]]  # numbers (k,), or (k, models), of k stacked values
    arguments: tuple[Hashable, ...] = ()

    @classmethod
    def of(cls, numbers: Mapping[str, Tensor], models: Sequence[int] = ()) -> Part:
        """Make a part of tensors by tag: 0-dim, or ``(*models,)`` if one has these dimensions."""
        values = list(numbers.values())
        if models and any(x.ndim for x in values):
            values = [x.expand(*models).flatten() for x in values]
        return cls(_stack(values).movedim(0, -1), by_tag, (tuple(numbers),))


def by_tag(values: Tensor, names: Sequence[str]) -> Mapping[str, Tensor]:
    """Name numbers that are ready, ``(..., names)``."""
    return dict(zip(names, values.unbind(-1), strict=True))


Call: TypeAlias = "list[Part | Row | list[Call]]"
"""The measurements of one call: parts, numbers that are on the host already, and lists of calls,
such as the sampler's before a loss, whose means count."""


def parts_of(call: Call) -> list[Part]:
    """Return all parts of a call, in order."""
    parts = list[Part]()
    for item in call:
        if type(item) is Part:
            parts.append(item)
        elif type(item) is list:
            for one in item:
                parts += parts_of(one)
    return parts


def read(calls: Sequence[Call]) -> list[tuple[Row, list[Row]]]:
    """Return every call's numbers, and those of the members of an ensemble; none for one model."""
    alike: dict[Any, list[Part]] = {}
    for call in calls:
        for part in parts_of(call):
            kind = part.named, part.arguments, part.values.shape, part.values.dtype
            alike.setdefault(kind, []).append(part)
    lines: dict[int, tuple[Iterable[str], list[Any]]] = {}
    for (named, arguments, *_), parts in alike.items():
        plain = [x.values if type(x.values) is Tensor else unwrapped(x.values) for x in parts]
        values = torch.stack(plain).cpu()
        numbers = named(values, *arguments)
        # A zero loses its sign, which says nothing and would be read as less than nothing.
        table = wide(torch.stack([*numbers.values()], -1)) + 0.0
        for part, line in zip(parts, table.tolist(), strict=True):
            lines[id(part)] = numbers.keys(), line
    rows: list[tuple[Row, list[Row]]] = []
    for shared, own in (_row_of(call, lines) for call in calls):
        members = [shared | member for member in own]
        rows.append((pooled(members) if members else shared, members))
    return rows


def _row_of(
    call: Call, lines: Mapping[int, tuple[Iterable[str], list[Any]]]
) -> tuple[Row, list[Row]]:
    """Return the numbers that all members share, and those of each."""
    shared: Row = {}
    several: list[list[Row]] = []
    for item in call:
        if isinstance(item, Part):
            names, line = lines[id(item)]
            if line and isinstance(line[0], list):
                several.append([dict(zip(names, x, strict=True)) for x in line])
            else:
                shared.update(zip(names, line, strict=True))
        elif isinstance(item, list):
            rows = [_row_of(one, lines) for one in item]
            if count := max(len(members) for _, members in rows):
                whole = [[row | own for own in owns or [{}] * count] for row, owns in rows]
                several.append([pooled(of_one) for of_one in zip(*whole, strict=True)])
            else:
                shared |= pooled([row for row, _ in rows])
        else:
            shared |= item
    return shared, [reduce(or_, rows) for rows in zip(*several, strict=True)] if several else []


def on_device(call: Call, like: Tensor) -> dict[str, Tensor]:
    """Return one call's numbers as tensors, without waiting for the device of ``like``."""
    numbers: dict[str, Tensor] = {}
    for item in call:
        if isinstance(item, Part):
            named = item.named(item.values.unsqueeze(0), *item.arguments)
            numbers |= {name: x[0] for name, x in named.items()}
        elif isinstance(item, list):
            rows = [on_device(one, like) for one in item]
            for name in {name: None for row in rows for name in row}:
                numbers[name] = torch.stack([row[name] for row in rows if name in row]).mean(0)
        else:  # filled in on the device: a copy from the host would wait
            numbers |= {name: like.new_full((), x) for name, x in item.items()}
    return numbers


def averaged(calls: Sequence[tuple[Row, list[Row]]]) -> tuple[Row, list[Row]]:
    """Return the means over calls by name, of the ensemble and of every member."""
    if len(calls) == 1:
        return calls[0]
    members = [members for _, members in calls if members]
    of_members = [pooled(rows) for rows in zip(*members, strict=True)] if members else []
    return pooled([row for row, _ in calls]), of_members


def joined_ranks(
    values: Tensor, names: Sequence[str], positives: Sequence[int], negatives: Sequence[int]
) -> Mapping[str, Tensor]:
    """Join all ranks' numbers by tag, ``(..., ranks, tags)``, as :mod:`.tags` says.

    ``positives`` and ``negatives`` are the ranks' numbers of samples; they weight some averages.
    The sampler's samples are counted as the negatives are.
    """
    both = [n + m for n, m in zip(positives, negatives, strict=True)]
    weights = {"positives": positives, "negatives": negatives, "both": both}

    def join(how: str, x: Tensor) -> Tensor:
        if how in ("lowest", "highest"):
            return x.amin(-1) if how == "lowest" else x.amax(-1)  # either is NaN if one is
        if how == "sum":
            return x.sum(-1)
        rank_weights = x.new_tensor(weights.get(how, [1] * x.shape[-1]))
        return (x * rank_weights).sum(-1) / rank_weights.sum()

    joins = {name: TAGS[name].join if name in TAGS else "average" for name in names}
    return {
        name: join(joins[name], x) for name, x in zip(names, wide(values).unbind(-1), strict=True)
    }


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
