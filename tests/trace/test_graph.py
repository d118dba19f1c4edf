"""Which rows of an output a tensor was computed from."""

from __future__ import annotations

import pytest
import torch

from ebmguard.trace.graph import Output, behind, edges, remember

ROWS = torch.arange(6)


def labelled(x: torch.Tensor) -> list[str]:
    return ["data"] * len(x)


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
    "a square": (lambda f: f[:3] ** 2, []),
    "a product": (lambda f: f[:3] * f[3:], []),
}


@pytest.mark.parametrize("shape", [(6,), (6, 2)])
@pytest.mark.parametrize("name", TAKEN)
def test_rows(name: str, shape: tuple[int, ...]) -> None:
    take, expected = TAKEN[name]
    f = torch.randn(shape, requires_grad=True) * 1
    output = Output(None, torch.randn(6, 4), shape, None, labelled)
    remember(f, output)
    value = take(f)
    rows = behind(value.grad_fn, value.output_nr, {})
    assert sorted({row for _, chosen in rows for row in chosen}) == expected
    assert list(edges(value.grad_fn)) == [output]


def test_of_columns_every_row_is_behind() -> None:
    f = torch.randn(6, 2, requires_grad=True) * 1
    remember(f, Output(None, torch.randn(6, 4), (6, 2), None, labelled))
    value = f[:, 0]
    ((_, chosen),) = behind(value.grad_fn, value.output_nr, {})
    assert chosen == (0, 1, 2, 3, 4, 5)
