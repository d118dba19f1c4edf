"""Data of the population: small real images and tables, and two-dimensional toys."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from reference_training.data import load_data
from reference_training.toy.distributions import DISTRIBUTIONS

PROBES = 128
"""Held-out samples of which a run's skill is read at every step."""
_TRAIN, _CLASSES_OF_CIFAR = 4000, 4


class Data(NamedTuple):
    """Samples ``(n, ...)`` of about unit size and classes ``(n,)``, for training and held out.

    ``noise`` is the standard deviation of what is added to training images, as in JEM.
    """

    x: Tensor
    y: Tensor
    held_out: Tensor
    held_out_y: Tensor
    classes: int
    noise: float


@cache
def load(name: str) -> Data:
    """The data of a name; images need EBMGUARD_DATA, but for the digits."""
    generator = torch.Generator().manual_seed(0)
    noise = 0.0
    if name in ("waves", "sets"):
        x, y = {"waves": _waves, "sets": _sets}[name](generator)
    elif name == "mnist-latents":  # as a frozen linear encoder has them
        pixels, y = _images("mnist14")
        flat = pixels.flatten(1) - pixels.flatten(1).mean(0)
        _, _, axes = torch.linalg.svd(flat, full_matrices=False)
        x = flat @ axes[:16].T
        x = x / x.std(0)
    elif name.startswith(("digits", "mnist", "cifar")):
        x, y = _images(name)
        noise = 0.03
    elif name in ("wine", "breast_cancer", "iris"):
        from sklearn import datasets

        table = getattr(datasets, f"load_{name}")()
        x = torch.tensor(table.data, dtype=torch.float32)
        x, y = (x - x.mean(0)) / x.std(0), torch.tensor(table.target)
    elif name in ("moons", "circles"):
        from sklearn import datasets

        shape = {"factor": 0.4} if name == "circles" else {}
        make = getattr(datasets, f"make_{name}")
        points, which = make(2 * _TRAIN, noise=0.08, random_state=0, **shape)
        x, y = torch.tensor(points, dtype=torch.float32), torch.tensor(which)
        x = (x - x.mean(0)) / x.std(0)
    else:
        x = DISTRIBUTIONS["gmm"].sample(2 * _TRAIN, generator) / 1.5
        y = torch.zeros(len(x), dtype=torch.int64)
    order = torch.randperm(len(x), generator=generator)
    x, y = x[order], y[order]
    held_out = min(PROBES, len(x) // 3)
    end = held_out + _TRAIN
    classes = int(y.max()) + 1
    return Data(x[held_out:end], y[held_out:end], x[:held_out], y[:held_out], classes, noise)


def _images(name: str) -> tuple[Tensor, Tensor]:
    if name == "digits":
        data = load_data("digits")
        both = (data.train_x, data.test_x), (data.train_y, data.test_y)
        pixels, y = torch.cat(both[0]), torch.cat(both[1])
    elif name.startswith("mnist"):
        data = load_data("mnist", train_images=2 * _TRAIN, valid_images=100)
        pixels, y = data.train_x, data.train_y
    else:
        data = load_data("cifar10", train_images=12_000, valid_images=100)
        few = data.train_y < _CLASSES_OF_CIFAR
        pixels, y = data.train_x[few], data.train_y[few]
    x = data.scale(pixels)
    if name == "mnist14":
        x = functional.avg_pool2d(x, 2)
    if name.startswith("cifar"):  # the middle of the picture
        size = int(name.removeprefix("cifar"))
        edge = (32 - size) // 2
        x = x[:, :, edge : edge + size, edge : edge + size].contiguous()
    return x, y


def _waves(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sines, squares and sawteeth of any phase, one to three periods long: (n, 16, 1)."""
    n = 2 * _TRAIN
    y = torch.randint(3, (n,), generator=generator)
    periods = 1 + 2 * torch.rand(n, 1, generator=generator)
    at = (periods * torch.linspace(0, 1, 16) + torch.rand(n, 1, generator=generator)) % 1
    sine = torch.sin(2 * math.pi * at)
    shapes = torch.stack([sine, sine.sign(), 2 * at - 1], 1)
    x = shapes[torch.arange(n), y] + 0.05 * torch.randn(n, 16, generator=generator)
    return 0.8 * x.unsqueeze(2), y


def _sets(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Twelve points of a turned ring, square or cross: (n, 12, 2)."""
    n = 2 * _TRAIN
    y = torch.randint(3, (n,), generator=generator)
    at, turn = torch.rand(n, 12, generator=generator), torch.rand(n, 1, generator=generator)
    angle = 2 * math.pi * at
    unit = torch.stack([angle.cos(), angle.sin()], 2)
    square = unit / unit.abs().amax(2, keepdim=True)
    side = torch.randint(4, (n, 12), generator=generator) * (math.pi / 2)
    cross = at.unsqueeze(2) * torch.stack([side.cos(), side.sin()], 2)
    x = torch.stack([unit, square, cross], 1)[torch.arange(n), y]
    c, s = (2 * math.pi * turn).cos(), (2 * math.pi * turn).sin()
    x = torch.stack([c * x[..., 0] - s * x[..., 1], s * x[..., 0] + c * x[..., 1]], 2)
    return 0.7 * x + 0.05 * torch.randn(x.shape, generator=generator), y
