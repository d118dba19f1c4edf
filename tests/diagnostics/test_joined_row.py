"""Diagnostics across ranks against those of the joined batch; the ranks are threads here."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from ebmguard.diagnostics import (
    diagnostics_of_ranks,
    energy_diagnostics,
    joined_row,
    nonfinite_diagnostics,
    weight_diagnostics_at,
)
from ebmguard.objective import joined as joined_batch
from tests.parts import PATIENCE

Batch = tuple[Tensor, Tensor]
Row = dict[str, Tensor]
AVERAGED = {
    *(f"{side}/{name}" for side in ("f_pos", "f_neg") for name in ("q05", "median", "q95")),
    *("energy_overlap", "other"),
}


class Meeting:
    """Stands in for process groups: threads that wait for each other."""

    def __init__(self, world: int) -> None:
        self.barrier = Barrier(world, timeout=PATIENCE)
        self.slots: list[tuple[Tensor, ...]] = [()] * world

    def gathered(self, rank: Any, *tensors: Tensor) -> list[Tensor]:
        self.slots[rank] = tensors
        self.barrier.wait()
        found = [torch.stack(same) for same in zip(*self.slots, strict=True)]
        self.barrier.wait()
        return found


def own(pos: Tensor, neg: Tensor, **more: Tensor) -> Row:
    return {**energy_diagnostics(pos, neg), **nonfinite_diagnostics(pos, neg, 1.0), **more}


def across(
    monkeypatch: pytest.MonkeyPatch,
    batches: list[Batch],
    stars: Any,
    *,
    groups: list[Batch] | None = None,
    log_q: list[Batch] | None = None,
    **more: Any,
) -> tuple[list[Row], Row]:
    meeting = Meeting(len(batches))
    monkeypatch.setattr(joined_row, "gathered", meeting.gathered)
    monkeypatch.setattr(joined_batch, "gathered", meeting.gathered)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda rank: rank)

    def one(rank: int) -> tuple[list[Row], Row]:
        mine = own(*batches[rank], **{name: values[rank] for name, values in more.items()})
        return diagnostics_of_ranks(
            *batches[rank],
            stars,
            mine,
            rank,  # type: ignore[arg-type]
            None if groups is None else groups[rank],
            None if log_q is None else log_q[rank],
        )

    with ThreadPoolExecutor(len(batches)) as pool:
        found = list(pool.map(one, range(len(batches))))
    for weights, numbers in found[1:]:
        for row, first in zip((*weights, numbers), (*found[0][0], found[0][1]), strict=True):
            assert list(row) == list(first)
            assert all(torch.equal(row[x].nan_to_num(7e7), first[x].nan_to_num(7e7)) for x in row)
    return found[0]


def draw(*sizes: tuple[int, int], offset: float = 0.0) -> list[Batch]:
    return [
        (
            torch.randn(n).double() * 2 + rank + offset,
            torch.randn(m).double() - rank + offset,
        )
        for rank, (n, m) in enumerate(sizes)
    ]


def close(found: Row, expected: Row) -> None:
    for name, right in expected.items():
        for x, y in zip(found[name].flatten().tolist(), right.flatten().tolist(), strict=True):
            assert x == pytest.approx(y, rel=1e-10, abs=1e-13, nan_ok=True), name


def joined(batches: list[Batch]) -> Batch:
    return torch.cat([pos for pos, _ in batches], -1), torch.cat([neg for _, neg in batches], -1)


@pytest.mark.parametrize("stars", [(0.7, 0.5), (-1.5, 0.5), (0.0, 3.0)])
@pytest.mark.parametrize(
    "sizes", [((4, 4), (4, 4)), ((5, 1), (2, 7)), ((1, 1), (1, 1)), ((3, 8), (9, 2), (1, 5))]
)
def test_as_of_the_joined_batch(monkeypatch, sizes, stars):
    batches = draw(*sizes)
    weights, numbers = across(monkeypatch, batches, stars)
    for found, expected in zip(
        weights, weight_diagnostics_at(*joined(batches), stars), strict=True
    ):
        assert list(found) == list(expected)
        close(found, expected)
    expected = own(*joined(batches))
    assert list(numbers) == list(expected)
    close(numbers, {name: x for name, x in expected.items() if name not in AVERAGED})


def test_a_proposal_of_each_rank(monkeypatch):
    batches, log_q = draw((5, 1), (2, 7)), draw((5, 1), (2, 7), offset=-3.0)
    weights, _ = across(monkeypatch, batches, (2.0, 0.5), log_q=log_q)
    expected = weight_diagnostics_at(*joined(batches), (2.0, 0.5), log_q=joined(log_q))
    for found, right in zip(weights, expected, strict=True):
        close(found, right)


@pytest.mark.parametrize("has_proposal", [False, True])
def test_classes(monkeypatch, has_proposal):
    sizes = (5, 1), (2, 7), (3, 3)
    batches = draw(*sizes)
    log_q = draw(*sizes) if has_proposal else None
    groups = [
        # A class without a negative, one whose negatives are on another rank, and one at home.
        (torch.tensor([0, 1, 9, 2, 2]), torch.tensor([0])),
        (torch.tensor([0, 9]), torch.tensor([1, 0, 0, 1, 1, 7, 0])),
        (torch.tensor([3, 3, 0]), torch.tensor([3, 3, 1])),
    ]
    weights, numbers = across(monkeypatch, batches, (2.0, 0.5), groups=groups, log_q=log_q)
    expected = weight_diagnostics_at(
        *joined(batches), (2.0, 0.5), joined(groups), None if log_q is None else joined(log_q)
    )
    for found, right in zip(weights, expected, strict=True):
        assert list(found) == list(right)
        close(found, right)
        assert found["unpaired"] == 4
    right = own(*joined(batches))
    close(numbers, {name: x for name, x in right.items() if name not in AVERAGED})


def test_all_else_is_averaged(monkeypatch):
    batches = draw((4, 3), (7, 2))
    others = [torch.tensor(2.0), torch.tensor(5.0)]
    _, numbers = across(monkeypatch, batches, (0.5,), other=others)
    rows = [own(*batch, other=x) for batch, x in zip(batches, others, strict=True)]
    close(numbers, {x: (rows[0][x] + rows[1][x]).double() / 2 for x in AVERAGED})


def test_of_the_sampler(monkeypatch):
    norms = [torch.rand(4), torch.rand(10)]
    seen: Any = {
        "sampler/grad_norm": [x.mean() for x in norms],
        "sampler/grad_norm_max": [x.max() for x in norms],
        "nonfinite/samples": [torch.tensor(0.5), torch.tensor(0.0)],
    }
    _, numbers = across(monkeypatch, draw((3, 4), (3, 10)), (0.5,), **seen)
    assert numbers["sampler/grad_norm"].item() == pytest.approx(torch.cat(norms).mean().item())
    assert numbers["sampler/grad_norm_max"].item() == torch.cat(norms).max().item()
    assert numbers["nonfinite/samples"].item() == pytest.approx(2 / 14)


def test_means_over_samples_count_each_sample_once(monkeypatch):
    """Of ranks with 4 and 10 negatives."""
    tags = (
        *("sampler/drift_to_noise", "sampler/acceptance", "sampler/clamped"),
        *("buffer/age", "buffer/reinit", "buffer/duplicates"),
    )
    each = {tag: [torch.rand(4), torch.rand(10)] for tag in tags}
    seen: Any = {tag: [x.mean() for x in own] for tag, own in each.items()}
    _, numbers = across(monkeypatch, draw((3, 4), (3, 10)), (0.5,), **seen)
    for tag in tags:
        assert numbers[tag].item() == pytest.approx(torch.cat(each[tag]).mean().item()), tag


def test_what_all_ranks_share_stays_as_it_is(monkeypatch):
    tags = ("sampler/evaluations", "optim/grad_norm", "optim/update_norm", "optim/amplification")
    seen: Any = {tag: [torch.tensor(1.5)] * 2 for tag in tags}
    _, numbers = across(monkeypatch, draw((3, 4), (3, 10)), (0.5,), **seen)
    assert [numbers[tag].item() for tag in tags] == [1.5] * 4


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_one_bad_energy_spoils_the_weights_of_all(monkeypatch, value, side):
    batches = draw((4, 3), (2, 5))
    batches[1][side][1] = value
    weights, numbers = across(monkeypatch, batches, (0.5, 0.0))
    assert all(x.isnan() for row in weights for x in row.values())
    assert numbers["nonfinite/pos"] + numbers["nonfinite/neg"] == 1
    assert numbers["nonfinite/energies"].item() == pytest.approx(1 / 14)
    assert numbers[("f_pos/mean", "f_neg/mean")[side]].item() == pytest.approx(value, nan_ok=True)
    assert numbers[("f_neg/mean", "f_pos/mean")[side]].isfinite()


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_failing_sampler_in_float32(monkeypatch, offset):
    """GradScale leaves float32; how it is shared among the positives does not."""
    batches = [(pos + 3000, neg) for pos, neg in draw((4, 3), (2, 5), offset=offset)]
    single = [(pos.float(), neg.float()) for pos, neg in batches]
    (found,), _ = across(monkeypatch, single, (1.0,))
    # At a distance where float64 still has it.
    near = [(pos - 2700, neg) for pos, neg in batches]
    (expected,) = weight_diagnostics_at(*joined(near), (1.0,))
    assert found.pop("grad_scale") == 0.0
    for name, value in found.items():
        assert value.item() == pytest.approx(expected[name].item(), rel=5e-3), name


def test_ranks_far_apart(monkeypatch):
    """All of one rank's weights underflow beside the other's."""
    (first, second) = draw((4, 3), (2, 5))
    batches = [first, (second[0], second[1] - 1e4)]
    (found,), _ = across(monkeypatch, batches, (1.0,))
    (expected,) = weight_diagnostics_at(*joined(batches), (1.0,))
    close(found, expected)
