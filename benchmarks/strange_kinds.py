"""Kinds of training runs as people write them, with samplers of their own.

None of them is in the population. Networks give f, high on data, but where E is said.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm

from .population.data import load
from .population.networks import Residual
from .population.trainer import Lion

N = 2200
"""Samples; what is held out of them are the first."""


# Data: samples (N, ...), and what each is conditioned on.
def draws(*shape: int, seed: int = 0, normal: bool = False) -> Tensor:
    make = torch.randn if normal else torch.rand
    return make(*shape, generator=torch.Generator().manual_seed(seed))


def sides() -> Tensor:
    return draws(N, 1, seed=1).round() * 2 - 1


def digits() -> tuple[Tensor, ...]:
    data = load("digits")
    return torch.cat([data.held_out, data.x]), torch.cat([data.held_out_y, data.y])


def series() -> tuple[Tensor, ...]:
    """Two decaying oscillations: (N, 24)."""
    speed, phase, decay = draws(3, 2, N, 1)
    at = torch.linspace(0, 1, 24)
    angle = 2 * math.pi * ((1 + 4 * speed) * at + phase)
    return ((torch.exp(-2 * decay * at) * angle.sin()).sum(0),)


def graphs() -> tuple[Tensor, ...]:
    """Smooth signals on random graphs: (N, 8, 2), and adjacencies (N, 8, 8)."""
    edges = (draws(N, 8, 8) < 0.35).float().triu(1)
    edges = edges + edges.mT
    laplace = torch.diag_embed(edges.sum(2)) - edges
    x = torch.linalg.solve(torch.eye(8) + 2 * laplace, draws(N, 8, 2, normal=True))
    return x / x.std(), edges


def clouds() -> tuple[Tensor, ...]:
    """Sixteen points of a turned helix: (N, 16, 3)."""
    at = 4 * math.pi * draws(N, 16)
    x = torch.stack([at.cos(), at.sin(), at / 6 - 1], 2)
    return (x @ torch.linalg.qr(draws(N, 3, 3, normal=True)).Q,)


def branches() -> tuple[Tensor, ...]:
    """y on two lines that cross, and x: (N, 1) each."""
    x = 4 * draws(N, 1) - 2
    return sides() * x / 2 + 0.05 * draws(N, 1, normal=True), x


def demonstrations() -> tuple[Tensor, ...]:
    """Actions that go round to either side, (N, 2), and what the agent sees, (N, 4)."""
    seen = 2 * draws(N, 4) - 1
    ahead = functional.normalize(seen[:, 2:] - seen[:, :2])
    across = torch.stack([-ahead[:, 1], ahead[:, 0]], 1)
    return 0.7 * ahead + 0.35 * sides() * across + 0.05 * draws(N, 2, normal=True), seen


def spirals() -> tuple[Tensor, ...]:
    at = 3 * math.pi * draws(N, 1).sqrt()
    x = sides() * at * torch.cat([at.cos(), at.sin()], 1) / 5
    return (x + 0.05 * draws(N, 2, normal=True),)


def clusters(size: int = 8) -> tuple[Tensor, ...]:
    """Four flat clusters: (N, size)."""
    which = (4 * draws(N)).long()
    flat = torch.einsum("nk,nkd->nd", draws(N, 2, seed=1, normal=True), draws(4, 2, size)[which])
    x = draws(4, size, seed=2, normal=True)[which] + flat
    return (x + 0.1 * draws(N, size, seed=3, normal=True),)


def decoded(z: Tensor) -> Tensor:
    """What a fixed decoder makes of latents (n, 6): (n, 16)."""
    return torch.tanh(z @ draws(6, 32, normal=True) / 4) @ draws(32, 16, normal=True) / 6


def latents() -> tuple[Tensor, ...]:
    (z,) = clusters(6)
    return z, decoded(z) + 0.1 * draws(N, 16, normal=True)


# Networks.
class Do(nn.Module):
    def __init__(self, what: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Any) -> Tensor:
        return self.what(x)


class One(nn.Sequential):
    """A number for each sample, (B,), and for what it is conditioned on."""

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        out: Tensor = super().forward(torch.cat([x, *given], 1) if given else x)
        return out.squeeze(1)


def mlp(inputs: int, act: Any = nn.SiLU, width: int = 64) -> list[nn.Module]:
    return [nn.Linear(inputs, width), act(), nn.Linear(width, width), act(), nn.Linear(width, 1)]


def conv(act: Any = nn.SiLU, norm: Any = nn.Identity, wrap: Any = lambda layer: layer) -> nn.Module:
    layers = [wrap(nn.Conv2d(1, 8, 3, 1, 1)), norm(4, 8), act(), wrap(nn.Conv2d(8, 16, 4, 2, 1))]
    layers += [norm(4, 16), act(), nn.Flatten(), wrap(nn.Linear(256, 32)), act()]
    return One(*layers, wrap(nn.Linear(32, 1)))


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, nn.GELU(), batch_first=True)
    at = draws(6, 32, normal=True)
    layers = [nn.Unflatten(1, (6, 4)), nn.Linear(4, 32), Do(lambda x: x + at), layer]
    return One(*layers, Do(lambda x: x.mean(1)), nn.Linear(32, 1))


def recurrent() -> nn.Module:
    lstm = nn.LSTM(1, 16, batch_first=True, bidirectional=True)
    return One(nn.Unflatten(1, (24, 1)), lstm, Do(lambda x: x[0].mean(1)), *mlp(32))


def point_net() -> nn.Module:
    each = [nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]
    return One(*each, Do(lambda x: x.amax(1)), *mlp(64, nn.ReLU, 32))


def fourier() -> nn.Module:
    waves = draws(2, 32, normal=True)
    return One(Do(lambda x: torch.cat([(x @ waves).sin(), (x @ waves).cos()], 1)), *mlp(64))


def residual() -> nn.Module:
    def block() -> nn.Module:
        return Residual(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

    return One(nn.Flatten(), nn.Linear(64, 64), block(), block(), block(), nn.Linear(64, 1))


class MessagePassing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(2, 32), nn.Linear(32, 1)
        self.rounds = nn.ModuleList(nn.Linear(64, 32) for _ in range(2))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = self.embed(x)
        for each in self.rounds:
            h = h + functional.silu(each(torch.cat([h, edges @ h], 2)))
        out: Tensor = self.head(h)
        return out.sum((1, 2))


class AutoEncoder(nn.Sequential):
    """E(x) is the squared error of the reconstruction."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x.flatten(1))
        return (out - x.flatten(1)).square().sum(1)


class Classifier(nn.Module):
    """f(x) is the logsumexp of logits that were trained before."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 96), nn.LeakyReLU(0.2), nn.Linear(96, 10)
        )
        data, optimizer = load("digits"), torch.optim.Adam(self.parameters(), lr=3e-3)
        for _ in range(150):
            i = torch.randint(len(data.x), (64,))
            optimizer.zero_grad()
            self.cross_entropy(data.x[i], data.y[i]).backward()
            optimizer.step()

    def cross_entropy(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self.logits(x), y)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.logits(x)
        return out.logsumexp(1)


# Chains, each another public habit.
def jem(f: Any, x: Tensor, *given: Tensor, steps: int, size: float, noise: float) -> Tensor:
    x = x.clone().requires_grad_()
    for _ in range(steps):
        f_prime = torch.autograd.grad(f(x, *given).sum(), [x], retain_graph=True)[0]
        x.data += size * f_prime + noise * torch.randn_like(x)
    return x.detach()


def plain(f: Any, x: Tensor, *given: Tensor, steps: int, size: float, noise: float) -> Tensor:
    for _ in range(steps):
        x = x.detach().requires_grad_()
        x = x + size * torch.autograd.grad(f(x, *given).sum(), x)[0] + noise * torch.randn_like(x)
    return x.detach()


def noise_first(f: Any, x: Tensor, *given: Tensor, steps: int, size: float, noise: float) -> Tensor:
    """Noise before the gradient, by ``backward``."""
    f.requires_grad_(False)
    x = x.detach().clone().requires_grad_()
    for _ in range(steps):
        x.data.add_(noise * torch.randn_like(x))
        (-f(x, *given)).sum().backward()
        assert x.grad is not None
        x.data.add_(-size * x.grad.data)
        x.grad.detach_().zero_()
    f.requires_grad_(True)
    return x.detach()


def cut(f: Any, x: Tensor, *given: Tensor, steps: int, size: float, noise: float) -> Tensor:
    """The norm of each gradient cut at 1."""
    for _ in range(steps):
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(f(x, *given).sum(), x)
        norm = grad.flatten(1).norm(dim=1).clamp(min=1).reshape(-1, *[1] * (x.dim() - 1))
        x = x + size * grad / norm + noise * torch.randn_like(x)
    return x.detach()


def clamped(f: Any, x: Tensor, *given: Tensor, steps: int, size: float, noise: float) -> Tensor:
    for _ in range(steps):
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(f(x, *given).sum(), x)
        x = (x + size * grad + noise * torch.randn_like(x)).clamp(-1, 1)
    return x.detach()


def descending(e: Any, x: Tensor, *given: Tensor, steps: int, size: float, noise: float) -> Tensor:
    x = x.detach().clone()
    for _ in range(steps):
        x.requires_grad_(True)
        energy = e(x, *given)
        (grad,) = torch.autograd.grad(energy, x, grad_outputs=torch.ones_like(energy))
        with torch.no_grad():
            x = x - size * grad + noise * torch.randn_like(x)
    return x


def decaying(e: Any, x: Tensor, *given: Tensor, steps: int, size: float, noise: float) -> Tensor:
    """Steps of E that shrink along the chain, as in implicit behavioural cloning."""
    for i in range(steps):
        x, part = x.detach().requires_grad_(), 0.1 + 0.9 * (1 - i / steps) ** 2
        (grad,) = torch.autograd.grad(e(x, *given).sum(), x)
        x = x - part * size * grad + part**0.5 * noise * torch.randn_like(x)
    return x.detach()


def of_mean(f: Any, x: Tensor, *given: Tensor, steps: int, size: float, noise: float) -> Tensor:
    """Of the batch's mean, whose gradient is a sample's by B."""
    for _ in range(steps):
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(f(x, *given).mean(), x)
        x = x + size * len(x) * grad + noise * torch.randn_like(x)
    return x.detach()


def latent(f: Any, z: Tensor, *x: Tensor, steps: int, size: float, noise: float) -> Tensor:
    """Of exp(f) times a normal prior, and times the likelihood of x where one is given."""
    for _ in range(steps):
        z = z.detach().requires_grad_()
        log_p = f(z).sum() - z.square().sum() / 2
        for each in x:
            log_p = log_p - (each - decoded(z)).square().sum() / (2 * 0.6**2)
        z = z + size * torch.autograd.grad(log_p, z)[0] + noise * torch.randn_like(z)
    return z.detach()


@dataclasses.dataclass(frozen=True)
class Kind:
    """How people train one thing.

    Attributes:
        data: gives samples, and what each is conditioned on.
        network, optimizer: make them; an optimizer gets parameters and a rate.
        chain, steps, size, noise: the sampler, and its Langevin steps.
        start: of a chain: "buffer", "noise" (uniform), "normal" or "data".
        batch, micro_batches: samples of an update, and the batches whose gradients are added up.
        is_energy: the network is low on data.
        casts: bf16 where autocast has it.
        warm_up: updates in which the rate grows.
    """

    data: Callable[[], tuple[Tensor, ...]]
    network: Callable[[], nn.Module]
    chain: Callable[..., Tensor] = plain
    steps: int = 5
    size: float = 1.0
    noise: float = 0.01
    start: str = "buffer"
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam
    batch: int = 64
    micro_batches: int = 1
    is_energy: bool = False
    casts: bool = False
    warm_up: int = 0


def images() -> tuple[Tensor, ...]:
    return digits()[:1]


def auto_encoder() -> nn.Module:
    inner = [nn.Linear(64, 48), nn.SiLU(), nn.Linear(48, 12), nn.SiLU(), nn.Linear(12, 48)]
    return AutoEncoder(*inner, nn.SiLU(), nn.Linear(48, 64))


LION = partial(Lion, of_step=0.9, of_mean=0.99)
ADAMW = partial(torch.optim.AdamW, weight_decay=0.01)
MOMENTUM = partial(torch.optim.SGD, momentum=0.9)
KINDS = {
    "transformer": Kind(series, transformer, jem, size=0.5, warm_up=50),
    "LSTM": Kind(series, recurrent, jem, 3, 5.0, optimizer=ADAMW, batch=32),
    "graph": Kind(graphs, MessagePassing, plain, 10, 0.1, 0.03, "normal"),
    "point cloud": Kind(clouds, point_net, plain, 8, 0.5, 0.01, optimizer=ADAMW),
    "latent prior": Kind(latents, lambda: One(*mlp(6)), latent, 20, 0.05, 0.316, "normal"),
    "regression": Kind(branches, lambda: One(*mlp(2)), plain, 10, 0.3, 0.05, "noise"),
    "cloning": Kind(
        demonstrations, lambda: One(*mlp(6, nn.ReLU)), decaying, 8, 0.5, 0.03, "noise",
        is_energy=True,
    ),
    "Fourier": Kind(spirals, fourier, plain, 10, 0.01, 0.1414),
    "clusters": Kind(clusters, lambda: One(*mlp(8, nn.Softplus)), of_mean, 5, 1.0, 0.05),
    "Lion": Kind(clusters, lambda: One(*mlp(8, nn.ELU)), jem, 5, 0.5, 0.02, optimizer=LION),
    "noise first": Kind(images, conv, noise_first, batch=32),
    "GroupNorm": Kind(images, lambda: conv(nn.ReLU, nn.GroupNorm), plain, batch=32),
    "spectral": Kind(images, lambda: conv(wrap=spectral_norm), plain, size=10.0, batch=32),
    "bf16": Kind(images, lambda: conv(nn.GELU), jem, batch=32, casts=True),
    "short run": Kind(images, conv, clamped, 15, 1.0, 0.01, "noise", batch=32),
    "cut": Kind(images, lambda: One(nn.Flatten(), *mlp(64, nn.ReLU)), cut, 5, 1.0, 0.01),
    "accumulation": Kind(
        images, lambda: One(nn.Flatten(), *mlp(64)), jem, optimizer=MOMENTUM, micro_batches=2
    ),
    "residual": Kind(images, residual, plain, optimizer=ADAMW),
    "auto-encoder": Kind(
        images, auto_encoder, descending, 5, 0.2, 0.01, optimizer=torch.optim.RMSprop,
        is_energy=True,
    ),
    "fine-tuning": Kind(digits, Classifier, jem, 3, optimizer=MOMENTUM),
}  # fmt: skip
