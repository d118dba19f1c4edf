"""A value of the trainer's evaluated again: which rows it has, and how energies enter it."""

from __future__ import annotations

import ast
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ebmguard.trace.graph import Edge, Experiment, Operation, Output, edge_of, evaluate
from ebmguard.trace.script import stack

ROWS = torch.arange(6)


class Writing(TorchFunctionMode):
    """Writes what makes a tensor on its node, as the tracer does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = Operation.of(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if made is not None:
            made.mark(args[0] if result is None else result, stack())
        return result


def energies(values: Tensor) -> Tensor:
    """An output whose first half is of data."""
    f = values.requires_grad_() * 1
    labels = ["data"] * 3 + ["samples"] * (len(values) - 3)
    x = torch.randn(len(values), 4)
    label_rows = lambda x: labels[: len(x)]  # noqa: E731
    Output(None, value=f.detach().clone(), inputs=(x,), label_rows=label_rows).mark(f, stack())
    return f


def of(make: Any, values: Tensor) -> tuple[Edge, Edge]:
    """What is made of energies, and these."""
    f = energies(values)
    with Writing():
        made = make(f)
    found, source = edge_of(made), edge_of(f)
    assert found is not None
    assert source is not None
    return found, source


TAKEN = {
    "chunk": (lambda f: f.chunk(2)[1], [3, 4, 5]),
    "split": (lambda f: f.split([2, 4])[1], [2, 3, 4, 5]),
    "unbind": (lambda f: f.unbind()[4], [4]),
    "slice from the end": (lambda f: f[-2:], [4, 5]),
    "slice with a step": (lambda f: f[1:5:2], [1, 3]),
    "row from the end": (lambda f: f[-1], [5]),
    "index": (lambda f: f[torch.tensor([4, 0])], [0, 4]),
    "mask": (lambda f: f[ROWS > 3], [4, 5]),
    "index_select": (lambda f: f.index_select(0, torch.tensor([1, 2])), [1, 2]),
    "narrow": (lambda f: f.narrow(0, 1, 2), [1, 2]),
    "half of a half": (lambda f: f.chunk(2)[1].mul(2)[1:], [4, 5]),
    "both halves": (lambda f: f[:3].mean() - f[3:].mean(), [0, 1, 2, 3, 4, 5]),
    "all": (lambda f: f.exp(), [0, 1, 2, 3, 4, 5]),
    "a square": (lambda f: f[:3] ** 2, [0, 1, 2]),
    "beyond a clamp": (lambda f: f[:2].clamp(50, 60), []),
    "a write": (lambda f: torch.zeros_like(f).index_copy_(0, ROWS[:2], f[4:]), [4, 5]),
}


@pytest.mark.parametrize("shape", [(6,), (6, 2)])
@pytest.mark.parametrize("name", TAKEN)
def test_rows(name: str, shape: tuple[int, ...]) -> None:
    take, expected = TAKEN[name]
    edge, source = of(take, torch.randn(shape))
    assert Experiment(edge).rows[edge] == ({source: expected} if expected else {})


WRITTEN = [
    lambda f: 2 - f,
    lambda f: f - 2,
    lambda f: -f,
    lambda f: f[1:],
    lambda f: f.mul(2),
    lambda f: torch.mul(2, f),
    lambda f: torch.cat([torch.zeros(2), f]),
]


@pytest.mark.parametrize("make", WRITTEN)
def test_the_expression_of_an_operand(make: Any) -> None:
    edge, source = of(make, torch.randn(6))
    ((user, _, expression),) = Experiment(edge).users(source)
    assert user == edge
    assert expression is not None
    assert ast.unparse(expression) == "f"


def test_where_samples_and_data_meet() -> None:
    edge, _ = of(lambda f: 2 * (f[3:].mean() - f[:3].mean()) + (f**2).mean(), torch.randn(6))
    found = Experiment(edge)
    (meeting,) = found.meetings()
    assert meeting.made.func.__name__ in ("__sub__", "sub")  # type: ignore[union-attr]
    assert found.kinds(meeting) == {"data", "samples"}
    assert found.effect(meeting).weight == pytest.approx(2)


# The weight of the energies' mean; None where there is none, and whether it is affine in pieces.
ENTERS = {
    "a mean": (lambda f: -3 * f.mean(), -3.0, False),
    "a sum": (lambda f: f.sum() / 2, 3.0, False),
    "an addition in place": (lambda f: torch.zeros(()).add_(f.mean()).mul_(2), 2.0, False),
    "a square": (lambda f: f.square().mean(), None, False),
    "softplus": (lambda f: torch.nn.functional.softplus(f).mean(), None, False),
    "tanh of a mean": (lambda f: f.mean().tanh(), None, False),
    "a hinge": (lambda f: (50 + f).relu().mean(), None, True),
    "a clamp far away": (lambda f: f.mean().clamp(-100, 100), None, True),
    "a trimmed mean": (lambda f: f.sort()[0][1:].mean(), None, True),
    "unequal weights": (lambda f: (f * torch.arange(6.0)).mean(), None, True),
}


@pytest.mark.parametrize("name", ENTERS)
def test_how_energies_enter(name: str) -> None:
    make, weight, is_bent = ENTERS[name]
    root, source = of(make, torch.randn(6, generator=torch.Generator().manual_seed(0)))
    found = Experiment(root).effect(source)
    assert math.isnan(found.total) == (weight is None and not is_bent)
    if weight is None:
        assert math.isnan(found.weight)
    else:
        assert found.weight == pytest.approx(weight)


def test_evaluating_again_changes_nothing() -> None:
    values = torch.randn(6)
    edge, source = of(lambda f: torch.nn.functional.dropout(f, 0.5).mul_(3).sum(), values)
    state, node = torch.get_rng_state(), edge.node
    twice = [evaluate(edge, {source: torch.zeros(6)})[edge] for _ in range(2)]
    assert [float(each) for each in twice] == [0.0, 0.0]
    assert torch.equal(torch.get_rng_state(), state)
    assert edge.node is node
