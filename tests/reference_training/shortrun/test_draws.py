"""What is random in an update: its streams, the ranks' parts, and K. Bits: see test_train.py."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from scipy import stats

from ebmguard.reference_training.data import ImageData
from ebmguard.reference_training.engine.ranks import ONE_RANK, Ranks
from ebmguard.reference_training.shortrun.config import CIFAR10
from ebmguard.reference_training.shortrun.sampler import Draws

COUNT = 50
SMALL = replace(CIFAR10, batch=8, data_noise=0.0, sgld_steps=3, most_sgld_steps=6)


def images():
    """Random images, two of them for each count of bytes."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(256, (COUNT, 3, 6, 6), generator=rng, dtype=torch.uint8)
    y = torch.zeros(COUNT, dtype=torch.int64)
    return ImageData("made up", x, y, x[:0], y[:0], x[:4], y[:4], 1, 255, 0, False)


def draws(settings=SMALL, seed=3, ranks=ONE_RANK):
    return Draws(images(), settings, seed, ranks)


def test_streams_do_not_disturb_each_other():
    """Runs that differ in K, or in what their chains draw, see the same images."""
    one, other = draws(), draws(replace(SMALL, sgld_steps=9, most_sgld_steps=9))
    for _ in range(5):
        a = one.positives()
        one.starts(7)
        one.noise(2, 5)
        one.sgld_steps()
        b = other.positives()
        assert torch.equal(a, b)
    quiet, busy = draws(), draws()
    for _ in range(5):
        busy.positives()
        assert torch.equal(quiet.starts(2), busy.starts(2))
    counts = [quiet.sgld_steps() for _ in range(40)]
    assert counts == [busy.sgld_steps() for _ in range(40)]


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_images_and_steps_and_have_chains_of_their_own(world):
    settings = replace(SMALL, data_noise=0.1)
    one = draws(settings)
    parts = [draws(settings, ranks=Ranks(rank, world)) for rank in range(world)]
    for _ in range(5):
        whole = one.positives()
        own = [part.positives() for part in parts]
        assert torch.equal(torch.cat(own), whole)
        assert {len(x) for x in own} == {8 // world}
        assert len({part.sgld_steps() for part in parts} | {one.sgld_steps()}) == 1
    starts = [part.starts(4) for part in parts]
    assert torch.equal(starts[0], one.starts(4))
    for i, x in enumerate(starts):
        for y in starts[:i]:
            assert float((x - y).abs().mean()) > 0.4  # of independent uniform numbers: 2/3


def test_k_is_uniform_on_its_range():
    found = draws()
    counts = Counter(found.sgld_steps() for _ in range(4000))
    assert set(counts) == {3, 4, 5, 6}
    assert stats.chisquare([counts[k] for k in range(3, 7)]).pvalue > 1e-3
    fixed = draws(replace(SMALL, most_sgld_steps=3))
    before = fixed.state_dict()["counts"]
    assert {fixed.sgld_steps() for _ in range(10)} == {3}
    assert torch.equal(before, fixed.state_dict()["counts"])
