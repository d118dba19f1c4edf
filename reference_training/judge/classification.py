"""The model as a classifier: accuracy, and how far its confidence can be believed."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..data import ImageData
from ..networks import WideResNet, evaluation_mode

BATCH = 250
"""Images per forward pass."""
NOISE_SEED = 0
"""The same noise in every evaluation, so that two evaluations differ by their network alone."""
ECE_BINS = 15


def as_seen(images: Tensor, noise_std: float) -> list[Tensor]:
    """Batches of images as the network reads them.

    Args:
        images: (N, C, H, W), float32 in [-1, 1].
        noise_std: standard deviation of the Gaussian noise added to them. JEM's published code
            adds that of the training images, 0.03, to test images too.
    """
    parts = list(torch.split(images, BATCH))
    if not noise_std:
        return parts
    rng = torch.Generator(images.device).manual_seed(NOISE_SEED)
    return [x + noise_std * torch.randn(x.shape, generator=rng, device=x.device) for x in parts]


def classify(network: WideResNet, images: Tensor, *, noise_std: float) -> Tensor:
    """Class logits of images, (N, classes).

    Args:
        network: which may be in training; its mode and its gradients stay as they are.
        images: as in :func:`as_seen`, at least one.
        noise_std: as in :func:`as_seen`.
    """
    with evaluation_mode(network), torch.no_grad():
        return torch.cat([network.classify(x) for x in as_seen(images, noise_std)])


def classification(
    network: WideResNet, data: ImageData, *, noise_std: float
) -> dict[str, dict[str, Any]]:
    """The classifier on `validation` images, where there are some, and on those of the `test`.

    Returns:
        of each set `images`, their number, `accuracy` and `ece`, the :func:`calibration_error`.
    """
    parts = {"validation": (data.valid_x, data.valid_y), "test": (data.test_x, data.test_y)}
    results = {}
    for name, (images, labels) in parts.items():
        if len(labels):
            logits = classify(network, data.scale(images), noise_std=noise_std)
            results[name] = {
                "images": len(labels),
                "accuracy": accuracy(logits, labels),
                "ece": calibration_error(logits, labels),
            }
    return results


def accuracy_of(network: WideResNet, data: ImageData, *, noise_std: float = 0.0) -> float:
    """Share of the test images whose label the network gives, as :func:`classify` calls it."""
    return accuracy(classify(network, data.scale(data.test_x), noise_std=noise_std), data.test_y)


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Share of the images, (N, classes) and (N,), whose label has the largest logit.

    A network that has diverged to NaN answers the first class, as it does in other trainers: its
    accuracy is that of chance.
    """
    return float((logits.argmax(dim=1) == labels).double().mean())


def calibration_error(logits: Tensor, labels: Tensor, *, bins: int = ECE_BINS) -> float:
    """Expected calibration error: the mean over images of |accuracy - confidence| of their bin.

    The confidence is the largest class probability; the bins divide (0, 1] evenly, each with its
    upper end (Guo et al. 2017, "On Calibration of Modern Neural Networks", Eq. 3). torchmetrics
    has the same, but puts a confidence of exactly 1 into a bin of its own, and an overconfident
    network has many of those.

    Args:
        logits: (N, classes).
        labels: (N,) int64.
        bins: number of bins.

    Returns:
        from 0, calibrated, to 1; NaN where a probability is not finite.
    """
    confidence, predicted = logits.double().softmax(dim=1).max(dim=1)
    if not confidence.isfinite().all():
        return math.nan
    rows = (confidence * bins).ceil().long().clamp(1, bins) - 1
    excess = torch.zeros(bins, dtype=torch.float64, device=logits.device)
    excess.scatter_add_(0, rows, (predicted == labels).double() - confidence)
    return float(excess.abs().sum()) / len(labels)
