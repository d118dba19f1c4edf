from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from ebmguard.reference_training.data import augment
from ebmguard.reference_training.data.augment import crop


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


def test_images_keep_their_places():
    x = torch.arange(10, dtype=torch.uint8)[:, None, None, None].expand(10, 3, 8, 8)
    out = augment(x, pad=4, flip=True, generator=torch.Generator())
    assert torch.equal(out, x)


def test_nothing_to_do_is_the_batch_itself_and_draws_nothing():
    x = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(3)
    assert augment(x, pad=0, flip=False, generator=generator) is x
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(3).get_state())
