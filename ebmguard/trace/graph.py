"""The autograd graph of a loss: the outputs behind a node, and where two kinds of them meet."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .script import Place

__all__ = ["DATA", "Output", "Rows", "behind", "edges", "kinds", "meetings", "remember"]

DATA = "data"
_SELECT = ("Unbind", "Split", "Slice", "Select", "Index")  # nodes that take some of the rows
# Behind these an output is part of a penalty or of a likelihood, not of a difference of energies.
_NONLINEAR = ("Pow", "NllLoss", "LogSoftmax", "BinaryCrossEntropy", "Softplus", "Mse", "SmoothL1")


@dataclass(eq=False)
class Output:
    """A tensor that the outermost call of a module has returned."""

    module: Any
    x: Tensor  # its input, detached
    shape: tuple[int, ...]
    place: Place | None  # the innermost expression of the user's that called the module
    label_rows: Callable[[Tensor], list[str]]
    method: str = ""  # that has returned it; empty for the module's own call
    cotangent: Any = None  # the gradient of the loss by it, once there is one

    @functools.cached_property
    def labels(self) -> list[str]:
        """Where each row of x comes from, as is known when somebody asks."""
        return self.label_rows(self.x)

    def keep_cotangent(self, gradient: Tensor) -> None:
        """The hook of the tensor itself."""
        self.cotangent = gradient.detach().clone()

    def pull(self, label: str) -> float:
        """The sum of the loss's gradient by the rows of a label."""
        return float(self.cotangent[[each == label for each in self.labels]].double().sum())


# Rows of outputs: of each output those that a tensor was computed from.
Rows = frozenset[tuple[Output, tuple[int, ...]]]


def remember(tensor: Tensor, what: Output | Place) -> None:
    """Write on a tensor's node what it is, or which expression has made it."""
    written: Any = tensor.grad_fn.metadata  # type: ignore[union-attr]
    if isinstance(what, Output):
        written.setdefault(Output, {}).setdefault(tensor.output_nr, what)
    else:
        written.setdefault(Place, what)


def edges(root: Any) -> dict[Output, GradientEdge]:
    """The outputs behind a node, as edges of the graph that gradients can be asked for."""
    children = [child for node in _inside_out(root, {}) for child, _ in _children(node)]
    return {
        output: GradientEdge(node, number)
        for node in dict.fromkeys([root, *children])
        for number, output in node.metadata.get(Output, {}).items()
    }


def kinds(rows: Rows) -> set[str]:
    """The labels of outputs whose rows have but one."""
    found = [{output.labels[row] for row in chosen} for output, chosen in rows]
    return {label for kind in found if len(kind) == 1 for label in kind}


def behind(node: Any, number: int, known: dict[Any, Rows]) -> Rows:
    """The rows that output ``number`` of a node was computed from. ``known`` is filled."""
    for each in _inside_out(node, known):
        parts = _children(each)
        is_product = each.name().startswith("MulBackward") and len(parts) > 1
        if is_product or any(name in each.name() for name in _NONLINEAR):
            parts = []
        known[each] = Rows().union(*(_value(child, nr, known) for child, nr in parts))
    return _value(node, number, known)


def meetings(root: Any, known: dict[Any, Rows]) -> Iterator[Any]:
    """The nodes at which outputs of two labels first meet, from the outputs to the loss."""
    behind(root, 0, known)
    for node, rows in list(known.items()):
        if len(kinds(rows)) > 1:
            below = (_value(child, nr, known) for child, nr in _children(node))
            if not any(len(kinds(each)) > 1 for each in below):
                yield node


def _children(node: Any) -> list[tuple[Any, int]]:
    return [(child, nr) for child, nr in node.next_functions if child is not None]


def _inside_out(root: Any, known: dict[Any, Rows]) -> Iterator[Any]:
    """Nodes behind the root that are not known, each after those behind it. Outputs are an end."""
    todo, entered = [root], set()
    while todo:
        node = todo.pop()
        if node in known or Output in node.metadata:
            continue
        if node in entered:
            yield node
        else:
            entered.add(node)
            todo += [node, *(child for child, _ in _children(node))]


def _value(node: Any, number: int, known: dict[Any, Rows]) -> Rows:
    if Output in node.metadata:
        output = node.metadata[Output].get(number)
        return frozenset() if output is None else frozenset({(output, tuple(range(len(output.x))))})
    rows = known.get(node, frozenset())
    if not rows or not node.name().startswith(_SELECT):
        return rows
    # What the node would send back for a gradient of this result goes to the rows that it took.
    given = [torch.zeros(m.shape, dtype=m.dtype, device=m.device) for m in node._input_metadata]
    given[number] += 1
    sent = node(*given)
    back = sent if isinstance(sent, Tensor) else sent[0]
    taken = back.reshape(len(back), -1).any(1).tolist()
    return frozenset(
        (output, tuple(itertools.compress(chosen, taken)) if len(chosen) == len(taken) else chosen)
        for output, chosen in rows
    )
