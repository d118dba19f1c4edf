"""Torch's calls upon energies, as a graph that can be evaluated again with other energies."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .script import Place

__all__ = [
    *("DATA", "NO_EFFECT", "SURE", "Edge", "Effect", "Experiment", "Operation", "Output"),
    *("edge_of", "effect", "evaluate", "is_same", "mark", "moved"),
]

DATA = "data"
SURE = 1e-3
_MADE = "ebmguard"  # in a node's metadata: by the number of its result, what has made that
# How far energies are moved, in units of the largest: what is affine is so at all of them.
_AMPLITUDES = (0.0, 1e-3, -1e-3, 1.0, -1.0, 1e3, -1e3)
_NEAR = 3  # of these that find no kink


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

    @cached_property
    def labels(self) -> list[str]:
        """The origin of the rows, as it is known at the first use; a condition is data."""
        labels = zip(*map(self.label_rows, self.inputs), strict=True)
        return [next((label for label in row if label != DATA), DATA) for row in labels]

    @property
    def energy(self) -> tuple[Any, str]:
        """The key of an energy: a module and a part of its result."""
        return self.module, self.part

    def again(self, _: Mapping[Edge, Tensor]) -> Tensor:
        """Return its value, which is not computed."""
        return self.value


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
        for index, tensor in enumerate(_tensors(result)):
            if tensor.grad_fn is not None:
                mark(tensor, replace(self, calls=calls, index=index))

    def again(self, values: Mapping[Edge, Tensor]) -> Tensor:
        """Run it again, with these values in place of edges."""
        given = self.args, self.kwargs
        args, kwargs = tree_map(lambda x: values[x] if _is_edge(x) else x, given, is_leaf=_is_edge)
        if self.is_in_place:
            args = (args[0].clone(), *args[1:])
        result = self.func(*args, **kwargs)
        return _tensors(args[0] if result is None else result)[self.index]

    def operand(self, at: tuple[int, int]) -> ast.expr | None:
        """Return the expression of an argument, or of an element of a list, in the user's code."""
        position, index = at
        node, name = self.calls[0].node, getattr(self.func, "__name__", "")
        if isinstance(node, ast.BinOp):
            return [node.left, node.right][position if not name.startswith("__r") else 1 - position]
        if isinstance(node, ast.UnaryOp):
            return node.operand
        if isinstance(node, ast.Subscript):
            return node.value
        if not isinstance(node, ast.Call):
            return None
        given = list(node.args)
        if isinstance(node.func, ast.Attribute) and len(given) < len(self.args):
            given = [node.func.value, *given]
        argument = given[position] if position < len(given) else None
        return argument.elts[index] if isinstance(argument, ast.List | ast.Tuple) else argument


def mark(tensor: Tensor, made: Output | Operation) -> None:
    """Write on a tensor's node what has made it."""
    written: Any = tensor.grad_fn.metadata  # type: ignore[union-attr]
    written.setdefault(_MADE, {}).setdefault(tensor.output_nr, made)


def edge_of(x: object) -> Edge | None:
    """Return the edge of a tensor that is an output or is made of outputs, else None."""
    if not isinstance(x, Tensor) or x.grad_fn is None:
        return None
    edge = Edge(x.grad_fn, x.output_nr)
    return None if edge.made is None else edge


def evaluate(root: Edge, given: Mapping[Edge, Tensor]) -> dict[Edge, Tensor]:
    """Evaluate the root and all behind it again, with these values for some edges."""
    values = dict(given)
    is_on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(range(torch.cuda.device_count() if is_on_gpu else 0)):
        for edge, made in _behind(root, given).items():
            if edge not in values:
                values[edge] = made.again(values)
    return values


class Experiment:
    """A value of the trainer, as a function of the outputs behind it."""

    def __init__(self, root: Edge) -> None:
        self.root = root
        self.made = _behind(root)
        self.outputs = {e: made for e, made in self.made.items() if isinstance(made, Output)}
        self.values = evaluate(root, {})

    @cached_property
    def rows(self) -> dict[Edge, dict[Edge, list[int]]]:
        """The rows of each output behind each edge, where some gradient reaches them."""
        rows: dict[Edge, dict[Edge, list[int]]] = {edge: {} for edge in self.made}
        for amplitude in (0.0, 1.0, -1.0):
            leaves = {e: moved(out.value, amplitude) for e, out in self.outputs.items()}
            values = evaluate(self.root, leaves)
            for edge in self.made:
                gradients = _gradients(values[edge], [*leaves.values()])
                for of, grads in zip(leaves, gradients, strict=True):
                    reached = grads.reshape(len(grads), -1).any(1).nonzero().flatten().tolist()
                    if reached:
                        rows[edge][of] = sorted({*rows[edge].get(of, ()), *reached})
        return rows

    def kinds(self, edge: Edge) -> set[str]:
        """The labels of the samples behind an edge."""
        rows = self.rows[edge].items()
        return {self.outputs[of].labels[row] for of, chosen in rows for row in chosen}

    def meetings(self) -> Iterator[Edge]:
        """Yield the edges where samples of two kinds first meet, from the outputs on."""
        for edge, made in self.made.items():
            needs = made.needs if isinstance(made, Operation) else [edge]
            if len(self.kinds(edge)) > 1 and all(len(self.kinds(need)) < 2 for need in needs):
                yield edge

    def users(self, edge: Edge) -> Iterator[tuple[Edge, Operation, tuple[int, int]]]:
        """Yield results of calls upon an edge, the calls, and its position: (argument, index)."""
        for user, made in self.made.items():
            for at, argument in enumerate(made.args if isinstance(made, Operation) else ()):
                is_list = isinstance(argument, list | tuple) and not isinstance(argument, Edge)
                for index, x in enumerate(argument if is_list else [argument]):
                    if isinstance(x, Edge) and x == edge:
                        yield user, made, (at, index)  # type: ignore[misc]

    def spots(self, edge: Edge) -> Iterator[tuple[Place, ast.expr, Any]]:
        """Yield the expressions of an edge, from the inside out, with the code that they call."""
        made = self.made[edge]
        users: list[tuple[Edge, Operation | None, tuple[int, int]]] = [*self.users(edge)]
        for _, call, at in users or [(edge, None, (0, 0))]:
            is_whole = not made.part if isinstance(made, Output) else call is None
            if is_whole and (node := made.calls[0].node) is not None:
                yield made.calls[0], node, None
            if call is not None and (node := call.operand(at)) is not None:
                yield call.calls[0], node, None
            for inner, place in pairwise(made.calls):
                is_between = call is not None and place not in call.calls
                if is_between and (node := place.node) is not None:
                    yield place, node, inner.code

    def effect(self, at: Edge, rows: int = 0, root: Edge | None = None) -> Effect:
        """Measure how an edge enters the root, or the root's mean where that has ``rows`` rows."""
        end = self.root if root is None else root
        return effect(lambda leaf: evaluate(end, {at: leaf})[end], self.values[at], rows)

    def of_samples(self, label: str) -> Iterator[tuple[Edge, dict[Edge, list[int]]]]:
        """Yield edges with one row per sample of a label, and the outputs' rows behind."""
        for edge, rows in self.rows.items():
            value, counts = self.values[edge], {len(chosen) for chosen in rows.values()}
            is_one_each = value.ndim and counts in ({len(value)}, {value.numel()})
            if self.kinds(edge) == {label} and is_one_each:
                yield edge, rows


class Effect(NamedTuple):
    """The dependence of one value on another, from gradients at moved values."""

    weight: float  # the slope in its mean, wherever it is moved; NaN where there is no such number
    total: float  # the sum of the gradient where it is; NaN where it changes with every move
    bends: bool = False  # it enters, and has no weight


NO_EFFECT = Effect(math.nan, math.nan)


def effect(of: Callable[[Tensor], Tensor], value: Tensor, rows: int = 0) -> Effect:
    """Measure how a value enters a function's result, or its mean where that has ``rows`` rows."""
    gradients = []
    for amplitude in _AMPLITUDES:
        leaf = moved(value, amplitude)
        result = of(leaf)
        is_batch = rows and result.ndim and len(result) == rows
        total = result.sum() / (len(result) if is_batch else 1)
        gradients += [gradient.double() for gradient in _gradients(total, [leaf])]
    mean, size = float(gradients[0].mean()), float(gradients[0].abs().max())
    if max(float((gradient - mean).abs().max()) for gradient in gradients) <= SURE * abs(mean):
        scale = len(value) if value.ndim else 1
        return Effect(mean * scale, float(gradients[0].sum())) if mean else NO_EFFECT
    near = max(float((gradient - gradients[0]).abs().max()) for gradient in gradients[:_NEAR])
    is_in_pieces = size > 0 and near <= 1e-5 * size  # a clamp, or a mean of some of the samples
    return Effect(math.nan, float(gradients[0].sum()) if is_in_pieces else math.nan, bends=True)


def is_same(
    one: Edge, outputs: Collection[Edge], rows: Mapping[Edge, list[int]], other: Tensor
) -> int:
    """1 where an edge, as a function of outputs, is the other's values; -1 their negatives.

    Args:
        one: made of ``outputs``.
        rows: of the outputs behind the other.
        other: values, one for each of these rows.
    """
    of = {edge: made for edge in (*rows, *outputs) if isinstance(made := edge.made, Output)}
    by_energy = {of[edge].energy: of[edge].value for edge in rows}
    given = {edge: by_energy[of[edge].energy] for edge in outputs if of[edge].energy in by_energy}
    if len(given) < len(outputs):
        return 0
    chosen, *_ = rows.values()
    try:
        value = evaluate(one, given)[one][chosen]
    except (RuntimeError, IndexError):  # It has terms with a shape of their own.
        return 0
    a, b = (x.detach().double().reshape(len(x), -1) for x in (value, other))
    if a.numel() == b.numel():
        b = b.reshape(a.shape)  # N negatives of each positive, in a row
    if a.shape[1] != b.shape[1]:
        a, b = a.sum(1), b.sum(1)  # The heads of an energy are summed.
    for sign in (1, -1):
        if a.shape == b.shape and torch.allclose(a, sign * b, SURE, 1e-6):
            return sign
    return 0


def moved(value: Tensor, amplitude: float) -> Tensor:
    """Return a leaf with these values, moved by different amounts."""
    generator = torch.Generator().manual_seed(0)
    by = 1 + torch.rand(value.shape, generator=generator).to(value)
    size = value.abs().max() if value.numel() else 0.0
    return (value.detach() + amplitude * (1 + size) * by).requires_grad_()


def _behind(root: Edge, cut: Iterable[Edge] = ()) -> dict[Edge, Output | Operation]:
    """Return all that an edge is made of, itself last, in order of evaluation; stop at ``cut``."""
    made_of, todo, entered = dict[Edge, Output | Operation](), [root], set(cut)
    while todo:
        edge = todo.pop()
        made = edge.made
        if edge in made_of or made is None:
            continue
        if edge in entered or isinstance(made, Output):
            made_of[edge] = made
        else:
            entered.add(edge)
            todo += [edge, *made.needs]
    return made_of


def _gradients(value: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Return the gradients of the sum of a value's entries, weighed differently."""
    if not value.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    weights = torch.rand(value.shape, generator=torch.Generator().manual_seed(1)).to(value)
    total = (value * (1 + weights)).sum() if value.ndim else value
    gradients = torch.autograd.grad(total, leaves, retain_graph=True, materialize_grads=True)
    return [grad.detach() for grad in gradients]


def _tensors(result: Any) -> list[Tensor]:
    return [part for part in tree_leaves(result) if isinstance(part, Tensor)]


def _is_edge(x: object) -> bool:
    return isinstance(x, Edge)
