from __future__ import annotations

import math

import torch

from ebmguard.reference_training.jem.samples import as_bytes


def test_pixels_are_clamped_and_nan_is_black():
    x = torch.tensor([-7.0, -1.0, 0.0, 1.0, 7.0, math.inf, -math.inf, math.nan])
    assert as_bytes(x).tolist() == [0, 0, 128, 255, 255, 255, 0, 0]
