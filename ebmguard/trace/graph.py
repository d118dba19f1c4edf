"""Torch's calls upon energies, as a graph that can be evaluated again with other energies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .script import Place

__all__ = ["DATA", "Edge", "Operation", "Output", "behind", "edge_of", "evaluate", "tensors"]

DATA = "data"
_MADE = "ebmguard"  # in a node's metadata: by the number of its result, what has made that


class Edge(NamedTuple):
    """A result of a node of the autograd graph."""

    node: Any
    number: int

    @property
    def made(self) -> Output | Operation | None:
        """What is known of it."""
        made: Output | Operation | None = self.node.metadata.get(_MADE, {}).get(self.number)
        return made


@dataclass(eq=False)
class Output:
    """A tensor that the outermost call of a module has returned, alone or as a part."""

    module: Any
    inputs: tuple[Tensor, ...]  # those with an entry for each row, detached
    value: Tensor  # detached
    calls: tuple[Place, ...]  # the user's expressions that called the module, the innermost first
    label_rows: Callable[[Tensor], list[str]]
    part: str = ""  # such as "[1]", where a tuple or a dictionary was returned
    arguments: int = 1  # x, and its conditions

    @functools.cached_property
    def labels(self) -> list[str]:
        """The origin of the rows, as it is known at the first use; a condition is data."""
        labels = zip(*map(self.label_rows, self.inputs), strict=True)
        return [next((label for label in row if label != DATA), DATA) for row in labels]

    @property
    def energy(self) -> tuple[Any, str]:
        """Of two outputs that have the same, the same call has made them."""
        return self.module, self.part

    def mark(self, tensor: Tensor) -> None:
        """Write on a tensor's node what it is."""
        _write(tensor, self)


@dataclass(eq=False)
class Operation:
    """A call of torch upon outputs, with edges in the place of what came from them."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    calls: tuple[Place, ...] = ()
    index: int = 0  # of the result, where there are several

    @classmethod
    def of(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operation | None:
        """A call that is about to be made; None where it is upon no outputs."""
        call = cls(func, *tree_map(lambda x: edge_of(x) or x, (args, kwargs)))
        if not any(True for _ in call.needs):
            return None
        if call.is_in_place and isinstance(call.args[0], Tensor):
            call.args = (call.args[0].detach().clone(), *call.args[1:])
        return call

    @property
    def is_in_place(self) -> bool:
        """Whether it changes its first argument."""
        name = str(getattr(self.func, "__name__", ""))
        is_method = name.endswith("_") and not name.endswith("__")
        return is_method or name == "__setitem__" or name.startswith("__i")

    @property
    def needs(self) -> Iterator[Edge]:
        """What it is made of."""
        yield from filter(_is_edge, tree_leaves((self.args, self.kwargs), _is_edge))

    def mark(self, result: Any, calls: tuple[Place, ...]) -> None:
        """Write on the nodes of its results what they are."""
        for index, tensor in enumerate(tensors(result)):
            if tensor.grad_fn is not None:
                _write(tensor, replace(self, calls=calls, index=index))

    def again(self, values: Mapping[Edge, Tensor]) -> Tensor:
        """Its result with these in the place of edges."""
        given = self.args, self.kwargs
        args, kwargs = tree_map(lambda x: values[x] if _is_edge(x) else x, given, is_leaf=_is_edge)
        if self.is_in_place:
            args = (args[0].clone(), *args[1:])
        result = self.func(*args, **kwargs)
        return list(tensors(args[0] if result is None else result))[self.index]


def tensors(result: Any) -> Iterator[Tensor]:
    """The tensors of a result, which may be several."""
    yield from (part for part in tree_leaves(result) if isinstance(part, Tensor))


def edge_of(x: object) -> Edge | None:
    """The edge of a tensor that came from outputs, or is one; None for anything else."""
    if not isinstance(x, Tensor) or x.grad_fn is None:
        return None
    edge = Edge(x.grad_fn, x.output_nr)
    return None if edge.made is None else edge


def behind(root: Edge, cut: Iterable[Edge] = ()) -> dict[Edge, Output | Operation]:
    """All that an edge was made of, itself too, each after what it needs; cut there."""
    made_of, ends = dict[Edge, Output | Operation](), set(cut)
    todo, entered = [root], set[Edge]()
    while todo:
        edge = todo.pop()
        made = edge.made
        if edge in made_of or made is None:
            continue
        if edge in entered or edge in ends or isinstance(made, Output):
            made_of[edge] = made
        else:
            entered.add(edge)
            todo += [edge, *made.needs]
    return made_of


def evaluate(root: Edge, given: Mapping[Edge, Tensor]) -> dict[Edge, Tensor]:
    """What the root and all behind it would be with these values in the place of theirs."""
    values = dict(given)
    is_on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(range(torch.cuda.device_count() if is_on_gpu else 0)):
        for edge, made in behind(root, given).items():
            if edge not in values:
                is_output = isinstance(made, Output)
                values[edge] = made.value if is_output else made.again(values)  # type: ignore[union-attr]
    return values


def _write(tensor: Tensor, what: Output | Operation) -> None:
    written: Any = tensor.grad_fn.metadata  # type: ignore[union-attr]
    written.setdefault(_MADE, {}).setdefault(tensor.output_nr, what)


def _is_edge(x: object) -> bool:
    return isinstance(x, Edge)
