"""The autograd graph of a loss: the outputs behind a node, and where two kinds of them meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .places import Place, Stack

__all__ = [
    "DATA",
    "Output",
    "Rows",
    "behind",
    "edges",
    "label_of",
    "meetings",
    "place_of",
    "remember",
]

DATA = "data"
_KEY = "ebmguard.trace"
# Behind these an output is part of a penalty or of a likelihood, not of a difference of energies.
_NONLINEAR = ("Pow", "NllLoss", "LogSoftmax", "BinaryCrossEntropy", "Softplus", "Mse", "SmoothL1")


@dataclass(eq=False)
class Output:
    """A tensor that the outermost call of a module has returned.

    Attributes:
        module: the module.
        x: its input, detached.
        shape: of the output.
        calls: the user's frames at the call, and what they were doing.
        method: that has returned it; empty for the module's own call.
        labels: of each row of ``x``, where it comes from; None until somebody asks.
        cotangent: the gradient of the loss with respect to it, once there is one.
    """

    module: Any
    x: Tensor
    shape: tuple[int, ...]
    calls: Stack
    method: str = ""
    labels: list[str] | None = None
    cotangent: Tensor | None = None

    @property
    def place(self) -> Place | None:
        """The innermost expression of the user's that called the module."""
        return Place(self.calls[0][0].f_code, self.calls[0][1]) if self.calls else None


# Rows of outputs: of each output those that a tensor was computed from.
Rows = frozenset[tuple[Output, tuple[int, ...]]]
_Labels = Callable[[Output], list[str]]


def remember(tensor: Tensor, what: Output | Place) -> None:
    """Write on a tensor's node what it is, or which expression has made it."""
    node: Any = tensor.grad_fn
    if node is not None:
        key: Any = tensor.output_nr if isinstance(what, Output) else Place
        node.metadata.setdefault(_KEY, {}).setdefault(key, what)


def place_of(node: Any) -> Place | None:
    """The expression that has made a node."""
    place: Place | None = node.metadata.get(_KEY, {}).get(Place)
    return place


def edges(root: Any) -> dict[Output, GradientEdge]:
    """The outputs behind a node, as edges of the graph that gradients can be asked for."""
    found: dict[Output, GradientEdge] = {}
    todo, seen = [root], {None}
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        outputs = _outputs(node)
        found |= {output: GradientEdge(node, number) for number, output in outputs.items()}
        if not outputs:
            todo += [child for child, _ in node.next_functions if child is not None]
    return found


def label_of(rows: Rows, labels: _Labels) -> set[str]:
    """The labels of outputs whose rows have but one."""
    kinds = [{labels(output)[row] for row in chosen} for output, chosen in rows]
    return {label for kind in kinds if len(kind) == 1 for label in kind}


def behind(node: Any, number: int, known: dict[Any, Rows]) -> Rows:
    """The rows that output ``number`` of a node was computed from. ``known`` is filled."""
    for each in _inside_out(node, known):
        found: set[tuple[Output, tuple[int, ...]]] = set()
        differentiable = [(child, nr) for child, nr in each.next_functions if child is not None]
        is_product = each.name().startswith("MulBackward") and len(differentiable) > 1
        if not is_product and not any(part in each.name() for part in _NONLINEAR):
            for child, nr in differentiable:
                found |= _value(child, nr, known)
        known[each] = frozenset(found)
    return _value(node, number, known)


def meetings(root: Any, labels: _Labels, known: dict[Any, Rows]) -> Iterator[Any]:
    """The nodes at which outputs of two labels first meet, from the outputs to the loss."""

    def is_mixed(rows: Rows) -> bool:
        return len(label_of(rows, labels)) > 1

    behind(root, 0, known)
    for node, rows in list(known.items()):
        if is_mixed(rows):
            children = [(child, nr) for child, nr in node.next_functions if child is not None]
            if not any(is_mixed(_value(child, nr, known)) for child, nr in children):
                yield node


def _outputs(node: Any) -> dict[int, Output]:
    written = node.metadata.get(_KEY, {})
    return {key: what for key, what in written.items() if isinstance(what, Output)}


def _inside_out(root: Any, known: dict[Any, Rows]) -> Iterator[Any]:
    """Nodes behind the root that are not known, each after those behind it. Outputs are an end."""
    todo, entered = [root], set()
    while todo:
        node = todo.pop()
        if node in known or _outputs(node):
            continue
        if node in entered:
            yield node
            continue
        entered.add(node)
        todo.append(node)
        todo += [child for child, _ in node.next_functions if child is not None]


def _value(node: Any, number: int, known: dict[Any, Rows]) -> Rows:
    outputs = _outputs(node)
    if outputs:
        output = outputs.get(number)
        return frozenset() if output is None else frozenset({(output, tuple(range(len(output.x))))})
    rows = known.get(node, frozenset())
    index = _selection(node, number)
    if index is None:
        return rows
    sizes = getattr(node, "_saved_self_sym_sizes", (None,))
    return frozenset(
        (output, tuple(torch.tensor(chosen)[index].reshape(-1).tolist()))
        if len(chosen) == (sizes[0] if sizes[0] is not None else len(chosen))
        else (output, chosen)
        for output, chosen in rows
    )


def _selection(node: Any, number: int) -> Any:
    """Which rows output ``number`` of a node takes, as an index; None where it takes all."""
    if getattr(node, "_saved_dim", 0) != 0:
        return None
    name = node.name().rstrip("0123456789").removesuffix("Backward")
    if name == "Unbind":
        return number
    if name == "Split":
        size = node._saved_split_size
        return slice(number * size, (number + 1) * size)
    if name == "SplitWithSizes":
        first = sum(node._saved_split_sizes[:number])
        return slice(first, first + node._saved_split_sizes[number])
    if name == "Slice":
        return slice(_signed(node._saved_start), _signed(node._saved_end), node._saved_step)
    if name == "Select":
        return _signed(node._saved_index)
    if name == "IndexSelect":
        return node._saved_index.cpu()
    if name == "Index":
        first_of_all = node._saved_indices[0]
        return None if first_of_all is None else first_of_all.cpu()
    return None


def _signed(number: int) -> int:
    """Nodes show negative numbers as 64 bits without a sign."""
    return number - 2**64 if number >= 2**63 else number
