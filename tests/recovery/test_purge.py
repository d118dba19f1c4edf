"""Rows that would poison a run again are told from those that are only far out."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from ebmguard.recovery.changes import poisoned_rows, purge


@given(st.integers(0, 10_000), st.sets(st.integers(0, 63), max_size=20))
def test_poison_is_found_and_replaced_by_rows_that_were_there(seed: int, bad: set[int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    samples = torch.randn(64, 3, 4, generator=generator)
    clean = samples.clone()
    for i, row in enumerate(sorted(bad)):
        samples[row, 0, 0] = (torch.nan, torch.inf, 1e8, -1e5)[i % 4]
    assert poisoned_rows(samples).nonzero().squeeze(1).tolist() == sorted(bad)
    assert purge(samples, torch.Generator().manual_seed(1)) == len(bad)
    healthy = [row for row in range(64) if row not in bad]
    assert torch.equal(samples[healthy], clean[healthy])
    for row in bad:
        assert any(torch.equal(samples[row], clean[each]) for each in healthy)


def test_chains_at_a_clamp_are_healthy() -> None:
    samples = torch.rand(50, 8) * 2 - 1
    samples[:, 0] = 1.0
    assert not poisoned_rows(samples).any()


def test_a_buffer_without_a_healthy_row_stays() -> None:
    samples = torch.full((4, 2), torch.nan)
    assert purge(samples, torch.Generator()) == 0


def test_rows_stay_within_their_class() -> None:
    samples = torch.arange(4.0).repeat_interleave(5).unsqueeze(1).repeat(1, 3) + 1
    before = samples.clone()
    samples[7, 1] = torch.nan
    samples[16, 0] = 1e9
    buffer = SimpleNamespace(samples=samples, classes=4)
    assert purge(buffer, torch.Generator().manual_seed(0)) == 2
    assert torch.equal(samples, before)


def test_chains_among_mostly_fresh_rows_are_healthy() -> None:
    samples = torch.rand(10_000, 64) * 2 - 1
    samples[:300] = 0.8 * torch.randn(300, 64)
    assert not poisoned_rows(samples).any()
