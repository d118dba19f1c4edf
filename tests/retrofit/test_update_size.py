"""Sizes of gradients and updates."""

from __future__ import annotations

import math

import pytest
import torch

from ebmguard.retrofit.optimizer import total_norm


def test_norm_of_everything_together():
    parts = [torch.randn(3, 4), torch.randn(()), torch.randn(0), torch.randn(5)]
    expected = torch.cat([x.flatten() for x in parts]).norm()
    found = total_norm(parts)
    assert found.shape == ()
    torch.testing.assert_close(found, expected)


def test_types_may_differ():
    wide = torch.full((2,), 1e150, dtype=torch.float64)
    half = torch.full((100,), 6e4, dtype=torch.float16)  # the sum of squares is infinite in float16
    assert total_norm([half]).item() == pytest.approx(6e5, rel=1e-3)
    assert total_norm([half]).dtype == torch.float32
    assert total_norm([torch.ones(3).bfloat16(), wide]).item() == pytest.approx(
        math.sqrt(2) * 1e150
    )
    assert total_norm([torch.tensor([3 + 4j])]).item() == pytest.approx(5.0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_shows(bad):
    assert not total_norm([torch.ones(2), torch.tensor([bad])]).isfinite()


def test_nothing_is_read_by_the_host():
    meta = torch.empty(3, device="meta")
    assert total_norm([meta, meta]).shape == ()
