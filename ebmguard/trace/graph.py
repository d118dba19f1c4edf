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
        """The output or operation that made it; None for anything else."""
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
        """The key of an energy: a module and a part of its result."""
        return self.module, self.part

    def mark(self, tensor: Tensor) -> None:
        """Write this output on a tensor's node."""
        _write(tensor, self)


@dataclass(eq=False)
class Operation:
    """A call of torch upon outputs, with edges in place of their tensors."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    calls: tuple[Place, ...] = ()
    index: int = 0  # of the result, where there are several

    @classmethod
    def of(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operation | None:
        """Describe a call before it is made. Return None where it is upon no outputs."""
        call = cls(func, *tree_map(lambda x: edge_of(x) or x, (args, kwargs)))
        if not any(True for _ in call.needs):
            return None
        if call.is_in_place and isinstance(call.args[0], Tensor):
            call.args = (call.args[0].detach().clone(), *call.args[1:])
        return call

    @property
    def is_in_place(self) -> bool:
        """True where it changes its first argument."""
        name = str(getattr(self.func, "__name__", ""))
        is_method = name.endswith("_") and not name.endswith("__")
        return is_method or name == "__setitem__" or name.startswith("__i")

    @property
    def needs(self) -> Iterator[Edge]:
        """The edges among its arguments."""
        yield from filter(_is_edge, tree_leaves((self.args, self.kwargs), _is_edge))

    def mark(self, result: Any, calls: tuple[Place, ...]) -> None:
        """Write this operation on the nodes of its results."""
        for index, tensor in enumerate(tensors(result)):
            if tensor.grad_fn is not None:
                _write(tensor, replace(self, calls=calls, index=index))

    def again(self, values: Mapping[Edge, Tensor]) -> Tensor:
        """Run it again, with these values in place of edges."""
        given = self.args, self.kwargs
        args, kwargs = tree_map(lambda x: values[x] if _is_edge(x) else x, given, is_leaf=_is_edge)
        if self.is_in_place:
            args = (args[0].clone(), *args[1:])
        result = self.func(*args, **kwargs)
        return list(tensors(args[0] if result is None else result))[self.index]


def tensors(result: Any) -> Iterator[Tensor]:
    """Yield the tensors of a result."""
    yield from (part for part in tree_leaves(result) if isinstance(part, Tensor))


def edge_of(x: object) -> Edge | None:
    """Return the edge of a tensor that is an output or is made of outputs, else None."""
    if not isinstance(x, Tensor) or x.grad_fn is None:
        return None
    edge = Edge(x.grad_fn, x.output_nr)
    return None if edge.made is None else edge


def behind(root: Edge, cut: Iterable[Edge] = ()) -> dict[Edge, Output | Operation]:
    """Return all that an edge is made of, itself last, in order of evaluation; stop at ``cut``."""
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
    """Evaluate the root and all behind it again, with these values for some edges."""
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
