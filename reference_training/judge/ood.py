"""Whether the model tells images of its data from others: out-of-distribution detection.

Three scores, as in JEM (Grathwohl et al. 2020, Section 5.3): log p(x) up to a constant, which is
f(x); the approximate mass, -||df/dx||; and max p(y|x). Larger means more like the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ebmguard.errors import ConfigError

from ..data import ImageData, celeba, kept_data
from ..networks import WideResNet, evaluation_mode
from .classification import as_seen
from .config import OodName

BATCH = 125
"""Images per forward and backward pass."""
SEED = 0


def other_images(name: OodName, data: ImageData, root: str | None) -> Tensor:
    """Images that are not of the run's data, at most as many as its test images.

    - ``uniform``: every value uniform in [-1, 1].
    - ``constant``: one colour each, uniform in [-1, 1].
    - ``interpolated``: means of two test images, as JEM has them.
    - the name of a data set: its test images, where they have the shape of the run's. They are not
      resized or given other channels: the model would judge that change too. Faces of CelebA alone
      are averaged down, as in JEM.

    Args:
        name: what is wanted.
        data: the run's; (N, C, H, W) float32 on its device are returned.
        root: folder of the data sets; None takes the environment variable EBMGUARD_DATA.
    """
    shape, device = data.test_x.shape, data.test_x.device
    generator = torch.Generator(device).manual_seed(SEED)
    if name == "uniform":
        return torch.rand(shape, generator=generator, device=device) * 2 - 1
    if name == "constant":
        colours = torch.rand(shape[:2], generator=generator, device=device) * 2 - 1
        return colours[:, :, None, None].expand(shape)
    if name == "interpolated":
        # Neighbours in a random order: no image is paired with itself.
        images = data.scale(data.test_x)
        order = torch.randperm(len(images), generator=generator, device=device)
        return (images[order] + images[order.roll(1)]) / 2
    if name == data.name:
        raise ConfigError(f"ood names {name}, which is what the run was trained on; leave it out")
    few: dict[str, Any] = {}
    if name == "celeba64" and shape[2] == shape[3]:
        count = min(shape[0], celeba.TEST)
        few = {"train_images": 1, "valid_images": 0, "test_images": count, "image_size": shape[2]}
    other = kept_data(name, root, **few)
    if other.sample_shape != data.sample_shape:
        raise ConfigError(
            f"ood names {name}, whose images have the shape {other.sample_shape}, and the run's "
            f"have {data.sample_shape}; leave it out: a resized set is told apart by its resizing"
        )
    return other.scale(other.test_x[: shape[0]].to(device))


def scores(network: WideResNet, images: Tensor, *, noise_std: float) -> dict[str, Tensor]:
    """f(x), -||df/dx|| as `gradient` and max p(y|x) as `confidence` of each image, (N,) each.

    Args:
        network: its mode and its gradients stay as they are.
        images: (N, C, H, W), float32.
        noise_std: standard deviation of the noise added to the images, as in classification.
    """
    with evaluation_mode(network):
        seen = torch.cat(as_seen(images, noise_std))
        values, slopes = values_and_slopes(network, seen, BATCH)
        with torch.no_grad():
            logits = torch.cat([network.classify(part) for part in torch.split(seen, BATCH)])
    confidence = logits.double().softmax(dim=1).amax(dim=1)
    return {"f": values, "gradient": -slopes, "confidence": confidence}


def values_and_slopes(
    f: Callable[[Tensor], Tensor], x: Tensor, batch: int
) -> tuple[Tensor, Tensor]:
    """f and the length of its gradient, each (N,), of images (N, ...), so many at once."""
    values, slopes = [], []
    for part in torch.split(x, batch):
        part = part.detach().requires_grad_()
        with torch.enable_grad():
            own = f(part)
            (gradient,) = torch.autograd.grad(own.sum(), part)
        values.append(own.detach())
        slopes.append(gradient.flatten(1).norm(dim=1))
    return torch.cat(values), torch.cat(slopes)


def detection(
    network: WideResNet, data: ImageData, others: Mapping[str, Tensor], *, noise_std: float
) -> dict[str, dict[str, Any]]:
    """How well the test images are told from those of :func:`other_images`, by name.

    Returns:
        of each set `images`, their number, and the :func:`auroc` of each of :func:`scores`.
    """
    results: dict[str, dict[str, Any]] = {}
    inside = scores(network, data.scale(data.test_x), noise_std=noise_std) if others else {}
    for name, images in others.items():
        outside = scores(network, images, noise_std=noise_std)
        found = {of: auroc(own, outside[of]) for of, own in inside.items()}
        results[name] = {"images": len(images), **found}
    return results


def auroc(inside: Tensor, outside: Tensor) -> float:
    """Probability that an image of the data scores higher than another, ties counted half.

    That is the area under the receiver operating characteristic, of (N,) scores and (M,) others;
    0.5 is chance, NaN where a score is not finite, or one side has none.
    """
    from sklearn.metrics import roc_auc_score  # which takes longer to import than all the rest

    scores = torch.cat([inside, outside]).cpu().numpy()
    if not (len(inside) and len(outside) and np.isfinite(scores).all()):
        return math.nan
    return float(roc_auc_score([True] * len(inside) + [False] * len(outside), scores))
