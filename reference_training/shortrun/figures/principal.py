"""Principal components of a data set: how well k numbers tell an image, linearly."""

from __future__ import annotations

import torch
from torch import Tensor

from ebmguard.errors import ConfigError

MOST_IMAGES = 4096
"""Images that the components are found from: no more of them can be told apart."""


def principal_errors(x: Tensor, data: Tensor, levels: int) -> Tensor:
    """Mean squared error of images that are told by their first k principal components.

    Args:
        x: (N, C, H, W) in [-1, 1], D entries each.
        data: (M, C, H, W) uint8 in 0..levels, on the device of `x`: mean and components are those
            of its first images, at most :data:`MOST_IMAGES`.
        levels: of the data, which stand for [-1, 1].

    Returns:
        (min(M, D) + 1, N) float64: over the entries of an image, with k = 0 (the mean image), 1, 2
        ... components. Where M is less than D, the last is not 0.

    Raises:
        ConfigError: the data are empty, or of another shape.
    """
    if not len(data) or data.shape[1:] != x.shape[1:]:
        raise ConfigError(
            f"images of {tuple(x.shape[1:])} have no components in data of {tuple(data.shape)}: "
            "expected one image or more, of that shape"
        )
    some = data[:MOST_IMAGES].flatten(1).double().div(levels / 2).sub(1.0)
    mean = some.mean(0)
    _, _, components = torch.linalg.svd(some - mean, full_matrices=False)
    centred = x.detach().flatten(1).double() - mean
    told = (centred @ components.T).square().cumsum(1)
    left = centred.square().sum(1, keepdim=True) - torch.nn.functional.pad(told, (1, 0))
    # The difference of two equal sums may be a rounding error below 0.
    return left.clamp(min=0).T / centred.shape[1]


def components_needed(errors: Tensor, least: float) -> int | None:
    """The fewest components whose mean error is at most `least`.

    Args:
        errors: of :func:`principal_errors`, (k + 1, N).
        least: a mean squared error.

    Returns:
        None where all of them do not suffice.
    """
    enough = (errors.mean(1) <= least).nonzero()
    return int(enough[0]) if len(enough) else None
