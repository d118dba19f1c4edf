"""How far the energies of negatives lie from those of data: two samples of f compared."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ...judge.ood import auroc

BINS = 50
WIDE = 30.0
"""How many standard deviations of the data the bins may span and be of one width."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Separation:
    """f on data beside f on negatives; both of the finite values, NaN where there are none.

    Attributes:
        data_mean, data_std: of f⁺.
        mean, std: of f⁻.
        above: P(f⁻ > f⁺), half of ties included: 1/2 where the two cannot be told apart.
        overlap: of the histograms, the sum of the smaller shares: 1 where they are the same, 0
            where no bin has both.
        not_finite: how many f⁻ are not finite.
    """

    data_mean: float
    data_std: float
    mean: float
    std: float
    above: float
    overlap: float
    not_finite: int

    @property
    def gap(self) -> float:
        """Mean f⁺ − mean f⁻."""
        return self.data_mean - self.mean


def separation(data: Floats, negatives: Floats) -> Separation:
    """Compare f on data, (N,), with f on negatives, (M,)."""
    lost = int((~np.isfinite(negatives)).sum())
    data, negatives = data[np.isfinite(data)], negatives[np.isfinite(negatives)]
    return Separation(
        *mean_std(data),
        *mean_std(negatives),
        above=auroc(torch.from_numpy(negatives), torch.from_numpy(data)),
        overlap=overlap(data, negatives),
        not_finite=lost,
    )


def mean_std(values: Floats) -> tuple[float, float]:
    """Mean and standard deviation (of a population); NaN of no values."""
    if not len(values):
        return math.nan, math.nan
    return float(values.mean()), float(values.std())


def overlap(data: Floats, negatives: Floats) -> float:
    """Sum over bins of the smaller share; NaN where there is no value on one side."""
    if not len(data) or not len(negatives):
        return math.nan
    bins = edges(data, negatives)
    return float(np.minimum(shares(data, bins), shares(negatives, bins)).sum())


def shares(values: Floats, bins: Floats) -> Floats:
    """What share of all values falls into each bin, (B,); all are of finite values."""
    return np.histogram(values, bins)[0] / max(1, len(values))


def linear_range(*samples: Floats) -> float | None:
    """Up to where a common axis around the data's mean is linear, and logarithmic beyond.

    Args:
        *samples: finite values, the data's first.

    Returns:
        a power of ten, of one to ten standard deviations of the data; None where all of the axis is
        linear, because no value lies far from the data.
    """
    spread = mean_std(samples[0])[1]
    everything = np.concatenate(samples)
    if not spread > 0 or np.ptp(everything) <= WIDE * spread:
        return None
    return float(10.0 ** math.ceil(math.log10(spread)))


def edges(*samples: Floats, bins: int = BINS) -> Floats:
    """Edges of common bins, (bins + 1,): of one width on the axis of :func:`linear_range`.

    That axis is asinh((f − mean of the data) / its linear range).

    Args:
        *samples: finite values, the data's first, which has at least one.
        bins: how many.
    """
    everything = np.concatenate(samples)
    low, high = float(everything.min()), float(everything.max())
    if low == high:
        # All values are one: a bin around it, as wide as floats of its size can tell apart.
        half = max(abs(low), 1.0) * 1e-6
        return np.linspace(low - half, high + half, bins + 1)
    linear = linear_range(*samples)
    if linear is None:
        return np.linspace(low, high, bins + 1)
    centre = float(samples[0].mean())
    first, last = (math.asinh((end - centre) / linear) for end in (low, high))
    found: Floats = centre + linear * np.sinh(np.linspace(first, last, bins + 1))
    # Rounding must not leave the extremes outside.
    found[[0, -1]] = low, high
    return found
