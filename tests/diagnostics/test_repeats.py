"""Samples that come again, against a comparison of the samples themselves."""

from __future__ import annotations

import hypothesis.strategies as st
import torch
from hypothesis import given

from ebmguard.diagnostics import fingerprint, repeated


@given(st.integers(1, 6), st.integers(1, 20), st.integers(0, 2**31), st.booleans())
def test_is_the_share_of_equal_samples(n, d, seed, is_ensemble):
    generator = torch.Generator().manual_seed(seed)
    shape = (3, n, d) if is_ensemble else (n, d)
    before = torch.randn(shape, generator=generator)
    keep = torch.rand(shape[:-1], generator=generator) < 0.5
    now = torch.where(keep.unsqueeze(-1), before, torch.randn(shape, generator=generator))
    found = repeated(fingerprint(now), fingerprint(before))
    assert torch.equal(found, (now == before).all(-1).float().mean(-1))


def test_the_smallest_move_counts_as_one():
    x = torch.ones(1, 3)
    moved = x.clone()
    moved[0, 1] = torch.nextafter(x[0, 1], torch.tensor(2.0))
    assert repeated(fingerprint(moved), fingerprint(x)).item() == 0
    assert repeated(fingerprint(x.clone()), fingerprint(x)).item() == 1


def test_what_cannot_be_told():
    assert repeated(fingerprint(torch.ones(2, 3)), fingerprint(torch.ones(3, 3))).isnan()
    lost = torch.tensor([[1.0, torch.nan], [1.0, 2.0]])
    assert repeated(fingerprint(lost), fingerprint(lost)).item() == 0.5


def test_waits_for_nothing():
    x = torch.ones(4, 2, device="meta")
    assert repeated(fingerprint(x), fingerprint(x)).device.type == "meta"
