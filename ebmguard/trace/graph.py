"""Torch's calls upon energies, as a graph that can be evaluated again with other energies."""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .script import Place, Stack

__all__ = [
    *("DATA", "NO_EFFECT", "SURE", "Edge", "Effect", "Experiment", "Operation", "Output"),
    *("edge_of", "effect", "evaluate", "moved"),
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
    def made(self) -> Operation | None:
        """The call that made it, where that was upon outputs, or is one."""
        made: Operation | None = self.node.metadata.get(_MADE, {}).get(self.number)
        return made


@dataclass(eq=False)
class Operation:
    """A call of torch upon outputs, with edges in place of their tensors."""

    func: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    # The user's expressions that made the call, the innermost first, and the names there.
    calls: tuple[Place, ...] = ()
    names: dict[Edge, str] = field(default_factory=dict)
    index: int = 0  # of the result, where there are several
    order: int = field(default_factory=itertools.count().__next__)

    @classmethod
    def of(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operation | None:
        """Describe a call before it is made. Return None where it is upon no outputs."""
        call = cls(func, *tree_map(lambda x: edge_of(x) or x, (args, kwargs)))
        if not call.needs:
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
    def needs(self) -> list[Edge]:
        """The edges among its arguments."""
        return [*filter(_is_edge, tree_leaves((self.args, self.kwargs), _is_edge))]

    @property
    def operands(self) -> Iterator[tuple[Any, ast.expr | None]]:
        """Its arguments, those in lists too, with their expressions in the user's code."""
        nodes = list[ast.expr]()
        match self.calls[0].node:
            case ast.BinOp(left=left, right=right):
                is_turned = self.func.__name__.startswith("__r")
                nodes = [right, left] if is_turned else [left, right]
            case ast.UnaryOp(operand=x) | ast.Subscript(value=x):
                nodes = [x]
            case ast.Call(func=called, args=nodes):
                if isinstance(called, ast.Attribute) and len(nodes) < len(self.args):
                    nodes = [called.value, *nodes]
        for argument, node in itertools.zip_longest(self.args, nodes):
            is_list = isinstance(argument, list | tuple) and not _is_edge(argument)
            inner = itertools.zip_longest(argument, getattr(node, "elts", ())) if is_list else ()
            yield from inner or [(argument, node)]

    def mark(self, result: Any, stack: Stack) -> None:
        """Write on the nodes of a result what has made it, at the first of these places."""
        values = stack.frames[0].f_locals if stack.frames else {}
        behind = {edge for need in self.needs for edge in _behind(need)}
        names = {edge: name for name, x in values.items() if (edge := edge_of(x)) in behind}
        for index, tensor in enumerate(_tensors(result)):
            if tensor.grad_fn is not None:
                made = replace(self, calls=stack.places, names=names, index=index)
                written: Any = tensor.grad_fn.metadata
                written.setdefault(_MADE, {}).setdefault(tensor.output_nr, made)

    def again(self, values: Mapping[Edge, Tensor]) -> Tensor:
        """Run it again, with these values in place of edges."""
        given = self.args, self.kwargs
        args, kwargs = tree_map(lambda x: values[x] if _is_edge(x) else x, given, is_leaf=_is_edge)
        if self.is_in_place:
            args = (args[0].clone(), *args[1:])
        result = self.func(*args, **kwargs)
        return _tensors(args[0] if result is None else result)[self.index]


@dataclass(eq=False, kw_only=True)
class Output(Operation):
    """The outermost call of a module, whose result, or a part of it, is not computed again."""

    value: Tensor  # detached
    inputs: tuple[Tensor, ...]  # those with an entry for each row, detached
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
        return self.func, self.part

    def again(self, _: Mapping[Edge, Tensor]) -> Tensor:
        """Return its value."""
        return self.value


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
            is_mixed = len(self.kinds(edge)) > 1
            if is_mixed and made.needs and all(len(self.kinds(need)) < 2 for need in made.needs):
                yield edge

    def users(self, edge: Edge) -> Iterator[tuple[Edge, Operation, ast.expr | None]]:
        """Yield results of calls upon an edge, the calls, and its expression there."""
        for user, made in self.made.items():
            for x, expression in made.operands:
                if _is_edge(x) and x == edge:
                    yield user, made, expression

    def spots(self, edge: Edge) -> Iterator[tuple[Place, ast.expr, Any]]:
        """Yield the expressions of an edge, from the inside out, with the code that they call."""
        made, users = self.made[edge], [*self.users(edge)]
        is_whole = not made.part if isinstance(made, Output) else not users
        if is_whole and (node := made.calls[0].node) is not None:
            yield made.calls[0], node, None
        for _, call, expression in users:
            if expression is not None:
                yield call.calls[0], expression, None
            for inner, place in itertools.pairwise(made.calls):
                if place not in call.calls and (node := place.node) is not None:
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

    def sign_of(self, edge: Edge, other: Experiment, its: Edge) -> int:
        """1 where an edge, as a function of outputs, is another's values; -1 their negatives."""
        rows, value = other.rows[its], other.values[its]
        by_energy = {other.outputs[of].energy: other.outputs[of].value for of in rows}
        energies = {of: made.energy for of, made in self.outputs.items()}
        if not by_energy.keys() >= {*energies.values()}:
            return 0
        chosen, *_ = rows.values()
        try:
            given = {of: by_energy[energy] for of, energy in energies.items()}
            again = evaluate(edge, given)[edge][chosen]
        except (RuntimeError, IndexError):  # It has terms with a shape of their own.
            return 0
        a, b = (x.detach().double().reshape(len(x), -1) for x in (again, value))
        if a.numel() == b.numel():
            b = b.reshape(a.shape)  # N negatives of each positive, in a row
        if a.shape[1] != b.shape[1]:
            a, b = a.sum(1), b.sum(1)  # The heads of an energy are summed.
        signs = (x for x in (1, -1) if a.shape == b.shape and torch.allclose(a, x * b, SURE, 1e-6))
        return next(signs, 0)


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


def moved(value: Tensor, amplitude: float) -> Tensor:
    """Return a leaf with these values, moved by different amounts."""
    generator = torch.Generator().manual_seed(0)
    by = 1 + torch.rand(value.shape, generator=generator).to(value)
    size = value.abs().max() if value.numel() else 0.0
    return (value.detach() + amplitude * (1 + size) * by).requires_grad_()


def _behind(root: Edge, cut: Collection[Edge] = ()) -> dict[Edge, Operation]:
    """Return all that an edge is made of, itself last, in order of evaluation; stop at ``cut``."""
    found, todo = dict[Edge, Operation](), [root]
    while todo:
        edge = todo.pop()
        if edge not in found and (made := edge.made) is not None:
            found[edge] = made
            todo += [] if edge in cut else made.needs
    return dict(sorted(found.items(), key=lambda item: item[1].order))


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
