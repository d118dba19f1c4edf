"""A loss evaluated again with other energies: where those of two kinds meet, and how they enter."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .graph import Edge, Operation, Output, behind, evaluate

__all__ = [
    *("NO_EFFECT", "Effect", "Experiment"),
    *("effect", "effect_on", "is_same", "moved", "operand"),
]

# How far energies are moved, in units of the largest: what is affine is so at all of them.
_AMPLITUDES = (0.0, 1e-3, -1e-3, 1.0, -1.0, 1e3, -1e3)
_NEAR = 3  # of these that find no kink
_SURE = 1e-3


class Effect(NamedTuple):
    """The dependence of one value on another, from gradients at moved values."""

    weight: float  # the slope in its mean, wherever it is moved; NaN where there is no such number
    total: float  # the sum of the gradient where it is; NaN where it changes with every move
    bends: bool = False  # it enters, and has no weight


NO_EFFECT = Effect(math.nan, math.nan)


class Experiment:
    """A value of the trainer, as a function of the outputs behind it."""

    def __init__(self, root: Edge) -> None:
        self.root = root
        self.made = behind(root)
        self.outputs = {e: made for e, made in self.made.items() if isinstance(made, Output)}
        self.values = evaluate(root, {})

    @cached_property
    def rows(self) -> dict[Edge, dict[Edge, list[int]]]:
        """The rows of each output behind each edge, where some gradient reaches them."""
        rows: dict[Edge, dict[Edge, list[int]]] = {edge: {} for edge in self.made}
        reached: dict[tuple[Edge, Edge], Tensor] = {}
        for amplitude in (0.0, 1.0, -1.0):
            leaves = {e: moved(out.value, amplitude) for e, out in self.outputs.items()}
            values = evaluate(self.root, leaves)
            for edge in self.made:
                found_grads = _gradients(values[edge], [*leaves.values()])
                for of, grads in zip(leaves, found_grads, strict=True):
                    mask = grads.reshape(len(grads), -1).ne(0).any(1)
                    reached[edge, of] = reached.get((edge, of), mask) | mask
        for (edge, of), mask in reached.items():
            if mask.any():
                rows[edge][of] = mask.nonzero().flatten().tolist()
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

    def users(self, edge: Edge) -> Iterator[tuple[Edge, tuple[int, int]]]:
        """Yield results of calls upon an edge, and its position: (argument, index)."""
        for user, made in self.made.items():
            for at, argument in enumerate(made.args if isinstance(made, Operation) else ()):
                is_list = isinstance(argument, list | tuple) and not isinstance(argument, Edge)
                for index, x in enumerate(argument if is_list else [argument]):
                    if isinstance(x, Edge) and x == edge:
                        yield user, (at, index)

    def of_samples(self, label: str) -> Iterator[tuple[Edge, dict[Edge, list[int]]]]:
        """Yield edges with one row per sample of a label, and the outputs' rows behind."""
        for edge in self.made:
            rows, value = self.rows[edge], self.values[edge]
            counts = {len(chosen) for chosen in rows.values()}
            is_one_each = value.ndim and counts in ({len(value)}, {value.numel()})
            if self.kinds(edge) == {label} and is_one_each:
                yield edge, rows


def effect(root: Edge, at: Edge, value: Tensor, rows: int = 0) -> Effect:
    """Measure how a value enters the root, or the root's mean where that has ``rows`` rows."""
    return effect_on(lambda leaf: evaluate(root, {at: leaf})[root], value, rows)


def effect_on(of: Callable[[Tensor], Tensor], value: Tensor, rows: int = 0) -> Effect:
    """Measure how a value enters the result of a function."""
    gradients = []
    for amplitude in _AMPLITUDES:
        leaf = moved(value, amplitude)
        result = of(leaf)
        is_batch = rows and result.ndim and len(result) == rows
        total = result.sum() / (len(result) if is_batch else 1)
        gradients += [gradient.double() for gradient in _gradients(total, [leaf])]
    mean, size = float(gradients[0].mean()), float(gradients[0].abs().max())
    if max(float((gradient - mean).abs().max()) for gradient in gradients) <= _SURE * abs(mean):
        scale = len(value) if value.ndim else 1
        return Effect(mean * scale, float(gradients[0].sum())) if mean else NO_EFFECT
    near = max(float((gradient - gradients[0]).abs().max()) for gradient in gradients[:_NEAR])
    is_in_pieces = size > 0 and near <= 1e-5 * size  # a clamp, or a mean of some of the samples
    return Effect(math.nan, float(gradients[0].sum()) if is_in_pieces else math.nan, bends=True)


def is_same(
    one: Edge, outputs: Iterable[Edge], rows: Mapping[Edge, list[int]], other: Tensor
) -> int:
    """1 where an edge, as a function of outputs, is the other's values; -1 their negatives.

    Args:
        one: made of ``outputs``.
        rows: of the outputs behind the other.
        other: values, one for each of these rows.
    """
    of = {edge: made for edge in (*rows, *outputs) if isinstance(made := edge.made, Output)}
    by_energy = {of[edge].energy: of[edge].value for edge in rows}
    given = {edge: by_energy.get(of[edge].energy) for edge in outputs}
    chosen, *_ = rows.values()
    if any(value is None for value in given.values()):
        return 0
    try:
        value = evaluate(one, given)[one][chosen]  # type: ignore[arg-type]
    except (RuntimeError, IndexError):  # It has terms with a shape of their own.
        return 0
    a, b = (x.detach().double().reshape(len(x), -1) for x in (value, other))
    if a.numel() == b.numel():
        b = b.reshape(a.shape)  # N negatives of each positive, in a row
    if a.shape[1] != b.shape[1]:
        a, b = a.sum(1), b.sum(1)  # The heads of an energy are summed.
    for sign in (1, -1):
        if a.shape == b.shape and torch.allclose(a, sign * b, _SURE, 1e-6):
            return sign
    return 0


def operand(call: Operation, at: tuple[int, int]) -> ast.expr | None:
    """Return the expression of an argument, or of an element of a list, in the user's code."""
    position, index = at
    node = call.calls[0].node
    name = getattr(call.func, "__name__", "")
    if isinstance(node, ast.BinOp):
        return [node.left, node.right][position if not name.startswith("__r") else 1 - position]
    if isinstance(node, ast.UnaryOp):
        return node.operand
    if isinstance(node, ast.Subscript):
        return node.value
    if not isinstance(node, ast.Call):
        return None
    given = list(node.args)
    if isinstance(node.func, ast.Attribute) and len(given) < len(call.args):
        given = [node.func.value, *given]
    argument = given[position] if position < len(given) else None
    return argument.elts[index] if isinstance(argument, ast.List | ast.Tuple) else argument


def moved(value: Tensor, amplitude: float) -> Tensor:
    """Return a leaf with these values, moved by different amounts."""
    generator = torch.Generator().manual_seed(0)
    by = 1 + torch.rand(value.shape, generator=generator).to(value)
    size = value.abs().max() if value.numel() else 0.0
    return (value.detach() + amplitude * (1 + size) * by).requires_grad_()


def _gradients(value: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Return the gradients of the sum of a value's entries, weighed differently."""
    if not value.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    weights = torch.rand(value.shape, generator=torch.Generator().manual_seed(1)).to(value)
    total = (value * (1 + weights)).sum() if value.ndim else value
    gradients = torch.autograd.grad(total, leaves, retain_graph=True, materialize_grads=True)
    return [grad.detach() for grad in gradients]
