"""Data and model of :mod:`benchmarks.true_scale`, each EBM on a base that is normalised.

The model is log p(x) = log q(x) + g(x) - log Z: q is a Gaussian with the covariance of the training
images, or a small flow on top of it, and g a small convolutional network, of which several are
trained side by side. Chains run in the coordinates u in which q is N(0, I).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from ebmguard.likelihood import Gaussian
from ebmguard.reference_training.data import kept_data

SIDES = {"digits": 8, "flow": 8, "mnist": 14}
"""Pixels of a row of the images: the digits, the digits with a flow as base, and MNIST's, which are
means of squares of four."""
MNIST_IMAGES, MNIST_HELD_OUT = 10_000, 1_000
FLOW, HIDDEN, FLOW_UPDATES, FLOW_BATCH = 4, 64, 3_000, 128
"""Couplings of the flow, units of each of their two hidden layers, updates and their images."""
NOISE = 0.15
"""Standard deviation of the noise on images in [-1, 1], training and held-out: 16 levels of grey
have no density without it."""


class Couplings(nn.Module):
    """A flow of additive couplings (NICE, Dinh et al. 2014), (..., D) -> (..., D).

    A chain calls the inverse at every step, and zuko's takes four times as long.

    Args:
        pixels: D, even.
        count: how many, even; each adds to one half of the coordinates what it makes of the
            other. Without any, and at ``log_scale`` 0, it is the identity.
    """

    def __init__(self, pixels: int, count: int) -> None:
        super().__init__()
        half = pixels // 2
        self.log_scale = nn.Parameter(torch.zeros(pixels))
        self.shifts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(half, HIDDEN),
                nn.SiLU(),
                nn.Linear(HIDDEN, HIDDEN),
                nn.SiLU(),
                nn.Linear(HIDDEN, half),
            )
            for _ in range(count)
        )

    def forward(self, v: Tensor) -> Tensor:
        """To where the base is N(0, I); log |det| of it is the sum of ``log_scale``."""
        a, b = v[..., ::2], v[..., 1::2]
        for shift in self.shifts:
            a, b = b + shift(a), a
        return torch.stack([a, b], -1).flatten(-2) * self.log_scale.exp()

    def inverse(self, u: Tensor) -> Tensor:
        """What :meth:`forward` maps to u, (..., D) -> (..., D)."""
        u = u * (-self.log_scale).exp()
        a, b = u[..., ::2], u[..., 1::2]
        for shift in reversed(self.shifts):
            a, b = b, a - shift(b)
        return torch.stack([a, b], -1).flatten(-2)


@dataclass(frozen=True)
class Data:
    """Images, and the coordinates in which the base is N(0, I).

    Attributes:
        train, test: images without noise, (N, D), in [-1, 1].
        gaussian: that of the noisy training images.
        flow: from the coordinates in which the Gaussian is N(0, I) to those in which the base is;
            without couplings the Gaussian is the base.
    """

    train: Tensor
    test: Tensor
    gaussian: Gaussian
    flow: Couplings

    @classmethod
    def load(cls, name: str = "digits") -> Data:
        """The trainers' split: of the digits 1,437 and 360 images."""
        if name == "mnist":
            counts = {"train_images": MNIST_IMAGES, "test_images": MNIST_HELD_OUT}
            images = kept_data(name, None, image_size=SIDES[name], **counts)
        else:
            images = kept_data("digits", None)
        train, test = (images.scale(x).flatten(1).double() for x in (images.train_x, images.test_x))
        gaussian = Gaussian.fit(train, noise=NOISE, independent=False)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            flow = Couplings(train.shape[1], FLOW * (name == "flow"))
        own = cls(train, test, gaussian, flow)
        if flow.shifts:
            own.fit()
        own.flow.requires_grad_(False)
        return own

    def fit(self) -> None:
        """Fit the flow to the training images, with new noise at every update."""
        rng = torch.Generator().manual_seed(0)
        optimizer = torch.optim.AdamW(self.flow.parameters(), lr=1e-3, weight_decay=0.1)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, FLOW_UPDATES)
        for _ in range(FLOW_UPDATES):
            rows = torch.randint(len(self.train), (FLOW_BATCH,), generator=rng)
            u = self.white(self.train[rows], rng)
            loss = u.square().sum(1).mean() / 2 - self.flow.log_scale.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            decay.step()

    @property
    def pixels(self) -> int:
        """D."""
        return self.train.shape[1]

    @property
    def log_det(self) -> float:
        """log p(u) - log p(x)."""
        return float(self.gaussian.factor.diagonal().log().sum() - self.flow.log_scale.sum())

    @property
    def noisy(self) -> tuple[Tensor, Tensor]:
        """u of training and held-out images with the noise that every judgement sees."""
        rng = torch.Generator().manual_seed(0)
        return self.white(self.train, rng), self.white(self.test, rng)

    def white(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """u of images (B, D) with noise: (B, D) float32."""
        noise = torch.empty_like(x).normal_(generator=generator)
        off = (x + NOISE * noise - self.gaussian.mean).T
        white: Tensor = torch.linalg.solve_triangular(self.gaussian.factor, off, upper=False)
        u: Tensor = self.flow(white.T.float())
        return u


class Network(nn.Module):
    """g(u): two convolutions over the image that u stands for and two layers, (B, D) -> (B,).

    Images of 14 x 14 are halved twice, those of 8 x 8 once, so that both have as many parameters.

    Args:
        gaussian: of the images.
        back: from u to the coordinates in which the Gaussian is N(0, I).
        channels: of the first convolution; the second has twice as many.
    """

    def __init__(
        self, gaussian: Gaussian, back: Callable[[Tensor], Tensor], channels: int = 4
    ) -> None:
        super().__init__()
        self.back = back
        self.mean = nn.Buffer(gaussian.mean.float())
        self.factor = nn.Buffer(gaussian.factor.T.float().contiguous())
        self.side = math.isqrt(len(gaussian.mean))
        halved = 1 + (self.side > 8)
        self.layers = nn.Sequential(
            nn.Conv2d(1, channels, 4, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(channels, 2 * channels, 3, stride=halved, padding=1),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(32 * channels, 128),
            nn.SiLU(),
            nn.Linear(128, 1),
        )

    def image(self, v: Tensor) -> Tensor:
        """That the Gaussian's coordinates stand for, (B, 1, H, H)."""
        return torch.addmm(self.mean, v, self.factor).view(-1, 1, self.side, self.side)

    def forward(self, u: Tensor) -> Tensor:
        """The part of log p that the base lacks."""
        value: Tensor = self.layers(self.image(self.back(u))).squeeze(1)
        return value


class Matrices(nn.Module):
    """A network's layers between activations: what each adds, and the matrix it multiplies by."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self) -> list[tuple[Tensor, Tensor]]:
        """In their order."""
        affine = list[Callable[[Tensor], Tensor]]([self.network.image])
        found, shape = list[tuple[Tensor, Tensor]](), self.network.mean.shape
        for layer in (*self.network.layers, nn.SiLU()):
            if not isinstance(layer, nn.SiLU):
                affine.append(layer)
                continue
            inputs = torch.cat([torch.zeros(1, shape.numel()), torch.eye(shape.numel())])
            values = inputs.view(-1, *shape)
            for part in affine:
                values = part(values)
            rows = values.flatten(1)
            found.append((rows[0], rows[1:] - rows[0]))
            affine, shape = [], values.shape[1:]
        return found


class Networks(nn.Module):
    """A network for each member, (members, B, D) -> (members, B); they begin alike."""

    def __init__(self, network: Network, members: int) -> None:
        super().__init__()
        self.form = (network, Matrices(network))  # in a tuple they are no parts
        self.names = [name for name, _ in network.named_parameters()]
        self.values = nn.ParameterList(
            value.detach().expand(members, *value.shape).clone() for value in network.parameters()
        )

    def each(self, module: nn.Module, prefix: str, *inputs: Tensor) -> Any:
        """What a module returns with each member's values as its parameters, stacked."""

        def one(values: list[Tensor], *inputs: Tensor) -> Any:
            named = zip(self.names, values, strict=True)
            return functional_call(
                module, {f"{prefix}{name}": value for name, value in named}, inputs
            )

        return vmap(one)([*self.values], *inputs)

    def forward(self, u: Tensor) -> Tensor:
        """g of each member's own u."""
        g: Tensor = self.each(self.form[0], "", u)
        return g

    @torch.no_grad()
    def frozen(self) -> Frozen:
        """With the weights of now."""
        found = self.each(self.form[1], "network.")
        return Frozen(self.form[0].back, [(offset[:, None], matrix) for offset, matrix in found])


class Frozen(nn.Module):
    """g with the weights of a moment, every layer between activations one matrix.

    A chain calls g many times with the same weights, and convolutions of so few pixels take three
    times as long as products with their matrices.

    Args:
        back: as the network has it.
        stages: what each layer adds, and its matrix; of all members, or of one.
    """

    def __init__(
        self, back: Callable[[Tensor], Tensor], stages: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        super().__init__()
        self.back, self.stages = back, stages

    def forward(self, u: Tensor) -> Tensor:
        """The network's own, but for rounding: (members, B, D) -> (members, B)."""
        (offset, matrix), *later = self.stages
        product = torch.baddbmm if matrix.ndim == 3 else torch.addmm
        u = product(offset, self.back(u), matrix)
        for offset, matrix in later:
            u = product(offset, nn.functional.silu(u), matrix)
        return u.squeeze(-1)

    def member(self, index: int) -> Frozen:
        """One of them, (B, D) -> (B,)."""
        return Frozen(self.back, [(offset[index], matrix[index]) for offset, matrix in self.stages])


def standard(pixels: int) -> Gaussian:
    """The base in its own coordinates."""
    zeros = torch.zeros(pixels, dtype=torch.float64)
    return Gaussian(zeros, torch.ones_like(zeros))


def whole(g: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """log q + g of u, without log Z."""

    def f(u: Tensor) -> Tensor:
        return g(u) - u.square().sum(-1) / 2 - u.shape[-1] / 2 * math.log(2 * math.pi)

    return f
