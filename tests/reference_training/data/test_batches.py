"""Batches: crops and flips against padded images, and the order of an epoch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from ebmguard.reference_training.data import EpochOrder, augment
from ebmguard.reference_training.data.augment import crop
from tests.reference_training.parts import CPU


def numpy_window(image, pad, top, left, mirrored):
    """The window of one image (C, H, W), by padding the whole image."""
    _, height, width = image.shape
    padded = np.pad(image, ((0, 0), (pad, pad), (pad, pad)), mode="reflect")
    window = padded[:, pad + top : pad + top + height, pad + left : pad + left + width]
    return window[:, :, ::-1] if mirrored else window


@pytest.mark.parametrize(("shape", "pad"), [((3, 32, 32), 4), ((2, 5, 7), 4), ((1, 3, 2), 1)])
def test_crops_are_those_of_padded_images(shape, pad):
    rng = np.random.default_rng(0)
    images = rng.integers(256, size=(200, *shape), dtype=np.uint8)
    top, left = rng.integers(-pad, pad, size=(2, 200), endpoint=True)
    mirrored = rng.integers(2, size=200) == 1
    # The corners, for certain.
    top[:4], left[:4] = [-pad, -pad, pad, pad], [-pad, pad, -pad, pad]
    expected = [
        numpy_window(*case) for case in zip(images, [pad] * 200, top, left, mirrored, strict=True)
    ]
    found = crop(*map(torch.from_numpy, (images, top, left, mirrored)))
    assert found.dtype == torch.uint8
    assert found.is_contiguous()
    np.testing.assert_array_equal(found.numpy(), np.stack(expected))


def outcomes(image, pad, flip):
    """Every augmented version of an image, by its bytes: (top, left, mirrored)."""
    offsets = range(-pad, pad + 1)
    found = {
        numpy_window(image, pad, top, left, mirrored).tobytes(): (top, left, mirrored)
        for top in offsets
        for left in offsets
        for mirrored in (range(2) if flip else (0,))
    }
    assert len(found) == len(offsets) ** 2 * (2 if flip else 1)
    return found


@pytest.mark.parametrize(("pad", "flip"), [(4, True), (2, True), (4, False), (0, True)])
def test_every_crop_and_flip_is_as_likely(pad, flip):
    image = np.random.default_rng(0).integers(256, size=(1, 16, 16), dtype=np.uint8)
    cases = outcomes(image, pad, flip)
    draws = 50 * len(cases)
    x = torch.from_numpy(image).expand(draws, 1, 16, 16)
    out = augment(x, pad=pad, flip=flip, generator=torch.Generator().manual_seed(0))
    counts = dict.fromkeys(cases.values(), 0)
    for window in out.numpy():
        counts[cases[window.tobytes()]] += 1
    statistic = sum((n - 50) ** 2 / 50 for n in counts.values())
    assert 0.001 < chi2.cdf(statistic, len(cases) - 1) < 0.999


def epoch(order, number):
    start = number * order.steps_per_epoch
    return torch.cat([order.rows(start + i) for i in range(order.steps_per_epoch)]).tolist()


@pytest.mark.parametrize(("count", "batch", "steps"), [(103, 10, 10), (100, 10, 10), (7, 7, 1)])
def test_an_epoch_visits_every_image_at_most_once_in_full_batches(count, batch, steps):
    order = EpochOrder(count, batch, 0, CPU)
    assert order.steps_per_epoch == steps
    assert order.rows(0).shape == (batch,)
    assert order.rows(0).dtype == torch.int64
    for number in range(3):
        visited = epoch(order, number)
        assert len(set(visited)) == len(visited) == steps * batch
        assert set(visited) <= set(range(count))


def test_a_batch_depends_on_the_step_and_the_seed_alone():
    straight = EpochOrder(50, 8, 3, CPU)
    batches = [straight.rows(step).clone() for step in range(40)]
    for step in (39, 0, 17, 18, 6, 5, 17):
        assert torch.equal(straight.rows(step), batches[step])
        assert torch.equal(EpochOrder(50, 8, 3, CPU).rows(step), batches[step])
    # Neighbours, and seeds that are alike in the lower 32 bits, which are all that a CPU uses.
    orders = [EpochOrder(100, 10, seed, CPU) for seed in (0, 1, 2, 2**32, 2**32 + 1)]
    seen = {tuple(epoch(order, number)) for order in orders for number in range(4)}
    assert len(seen) == 20
