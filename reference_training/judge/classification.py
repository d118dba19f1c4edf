"""The model as a classifier: accuracy, and how far its confidence can be believed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


def as_seen(
    images: Tensor, scale: Callable[[Tensor], Tensor], *, noise_std: float
) -> Iterator[Tensor]:
    """Images as the network reads them, a batch at a time.

    Args:
        images: (N, C, H, W), uint8.
        scale: makes them float32 in [-1, 1]: the data set's `scale`.
        noise_std: standard deviation of the Gaussian noise added to the scaled images. JEM's
            published code adds that of the training images, 0.03, to test images too.

    Yields:
        (up to BATCH, C, H, W), float32.
    """
    generator = torch.Generator(images.device).manual_seed(NOISE_SEED)
    for part in torch.split(images, BATCH):
        x = scale(part)
        if noise_std:
            noise = torch.randn(x.shape, generator=generator, device=x.device)
            x = x + noise_std * noise
        yield x


def classify(
    network: WideResNet, images: Tensor, scale: Callable[[Tensor], Tensor], *, noise_std: float
) -> Tensor:
    """Class logits of images, (N, classes).

    Args:
        network: which may be in training; its mode and its gradients stay as they are.
        images: (N, C, H, W), uint8, at least one.
        scale: as in :func:`as_seen`.
        noise_std: as in :func:`as_seen`.
    """
    with evaluation_mode(network), torch.no_grad():
        seen = as_seen(images, scale, noise_std=noise_std)
        return torch.cat([network.classify(x) for x in seen])


def classification(
    network: WideResNet, data: ImageData, *, noise_std: float
) -> dict[str, dict[str, Any]]:
    """The classifier on `validation` images, where there are some, and on those of the `test`.

    Args:
        network: as in :func:`classify`.
        data: on the network's device.
        noise_std: as in :func:`as_seen`.

    Returns:
        of each set `images`, their number, `accuracy` and `ece`, the :func:`calibration_error`.
    """
    parts = {"validation": (data.valid_x, data.valid_y), "test": (data.test_x, data.test_y)}
    results = {}
    for name, (images, labels) in parts.items():
        if len(labels):
            logits = classify(network, images, data.scale, noise_std=noise_std)
            results[name] = {
                "images": len(labels),
                "accuracy": accuracy(logits, labels),
                "ece": calibration_error(logits, labels),
            }
    return results


def accuracy_of(network: WideResNet, data: ImageData, *, noise_std: float = 0.0) -> float:
    """Share of the test images whose label the network gives, as :func:`classify` calls it."""
    return accuracy(classify(network, data.test_x, data.scale, noise_std=noise_std), data.test_y)


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Share of the images whose label has the largest logit.

    A network that has diverged to NaN answers the first class, as it does in other trainers: its
    accuracy is that of chance.

    Args:
        logits: (N, classes).
        labels: (N,) int64.
    """
    return float((logits.argmax(dim=1) == labels).double().mean())


def calibration_error(logits: Tensor, labels: Tensor, *, bins: int = ECE_BINS) -> float:
    """Expected calibration error: the mean over images of |accuracy - confidence| of their bin.

    The confidence is the largest class probability; the bins divide (0, 1] evenly, each with its
    upper end (Guo et al. 2017, "On Calibration of Modern Neural Networks", Eq. 3).

    torchmetrics has the same, but puts a confidence of exactly 1 into a bin of its own, and an
    overconfident network has many of those.

    Args:
        logits: (N, classes).
        labels: (N,) int64.
        bins: number of bins.

    Returns:
        from 0, calibrated, to 1; NaN where a probability is not finite.
    """
    confidence, predicted = logits.double().softmax(dim=1).max(dim=1)
    if not confidence.isfinite().all():
        return float("nan")
    excess = (predicted == labels).double() - confidence
    rows = (confidence * bins).ceil().long().clamp(1, bins) - 1
    per_bin = torch.zeros(bins, dtype=torch.float64, device=logits.device)
    per_bin.scatter_add_(0, rows, excess)
    return float(per_bin.abs().sum()) / len(labels)
