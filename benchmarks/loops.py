"""JEM and short runs as they are published, without a guard, to measure our trainers against.

Every Langevin step is a call of the network and one of `autograd.grad`, while all parameters
require gradients; data and negatives pass through the network one after another; eager, no
channels_last, Adam as PyTorch has it by default, not the fused one.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from ebmguard.reference_training.data import ImageData
from ebmguard.reference_training.device import set_precision
from ebmguard.reference_training.networks import WideResNet
from ebmguard.reference_training.shortrun.network import EnergyNet

Shape = tuple[int, int, int]
LOADED = 16
"""Batches that JEM's loop finds in the CPU's memory, in turn."""


class Loop:
    """What the loops share: settings and precision of a run, its data, a network `f`, Adam."""

    def __init__(self, config: Any, device: torch.device, data: ImageData, f: nn.Module) -> None:
        set_precision(config.precision)
        self.precision, self.settings, self.device = config.precision, config.settings, device
        self.shape, self.f = data.sample_shape, cast(Any, f.to(device))
        self.optimizer = torch.optim.Adam(f.parameters(), lr=self.settings.lr)

    def climb(self, x: Tensor) -> Tensor:
        """The Langevin steps."""
        x = x.clone().requires_grad_()
        for _ in range(self.settings.sgld_steps):
            (gradient,) = torch.autograd.grad(self.f(x).sum(), [x])
            noise = torch.randn_like(x)
            x.data += self.settings.step_size * gradient + self.settings.noise_std * noise
        return x.detach()

    def learn(self, loss: Tensor) -> None:
        """One step of the optimizer."""
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def close(self) -> None:
        """Nothing is open."""


class JemLoop(Loop):
    """JEM's: chains rest in a buffer in the CPU's memory, from and to which they are copied.

    Batches come from there too, augmented and noisy, as if its loader always were ahead; the loss
    is read by the host, which refuses to go on where it has exploded.
    """

    def __init__(self, config: Any, device: torch.device) -> None:
        data = config.load_data()
        super().__init__(
            config, device, data, self.network(config.settings, data.sample_shape, data.classes)
        )
        self.steps = 0
        self.buffer = torch.rand(self.settings.buffer_size, *self.shape) * 2 - 1
        self.batches = [self._load(data) for _ in range(LOADED)]

    @staticmethod
    def network(settings: Any, shape: Shape, classes: int) -> nn.Module:
        """The wide residual network for images (C, H, W)."""
        own = {"depth": settings.depth, "width": settings.width, "classes": classes}
        f: nn.Module = WideResNet(in_channels=shape[0], **own)
        return f

    @staticmethod
    def counts(settings: Any) -> tuple[int, int]:
        """Samples times Langevin steps; images and samples of the update, the classifier's too."""
        images = settings.n_pos + settings.n_neg + settings.n_labelled
        return settings.sgld_steps * settings.n_neg, images

    def _load(self, data: ImageData) -> tuple[Tensor, Tensor, Tensor]:
        n = self.settings.n_pos
        rows = torch.randint(len(data.train_x), (n + self.settings.n_labelled,))
        x = data.scale(data.train_x[rows])
        x += self.settings.data_noise * torch.randn_like(x)
        return x[:n].clone(), x[n:].clone(), data.train_y[rows[n:]]

    def step(self) -> None:
        """The next step; a FloatingPointError where the loss has exploded."""
        batch = self.batches[self.steps % LOADED]
        x_pos, x_lab, labels = (tensor.to(self.device) for tensor in batch)
        self.optimizer.param_groups[0]["lr"] = self.settings.lr_at(self.steps)
        x_neg = self.sample()
        f_pos, f_neg = self.f(x_pos), self.f(x_neg)
        loss = f_neg.mean() - f_pos.mean()
        loss = loss + F.cross_entropy(self.f.classify(x_lab), labels)
        if abs(loss.item()) > 1e8:
            raise FloatingPointError("the unguarded loop has diverged")
        self.learn(loss)
        self.steps += 1

    def sample(self) -> Tensor:
        """Chains from the buffer, some of them afresh; they are written back."""
        settings = self.settings
        rows = torch.randint(len(self.buffer), (settings.n_neg,))
        fresh = torch.rand(settings.n_neg, *self.shape) * 2 - 1
        restart = (torch.rand(settings.n_neg) < settings.reinit_rate).float()[:, None, None, None]
        start = restart * fresh + (1 - restart) * self.buffer[rows]
        self.f.eval()
        x = self.climb(start.to(self.device))
        self.f.train()
        self.buffer[rows] = x.cpu()
        return x


class ShortRunLoop(Loop):
    """That of `train_cifar10_minimal.py` of Nijkamp et al. (2019).

    All images are on the GPU as floats; rows are drawn, and chains started, on the CPU and copied.
    Left out: `retain_graph=True`, which frees memory later and computes nothing; and what it prints
    and plots every 100 updates.
    """

    def __init__(self, config: Any, device: torch.device) -> None:
        data = config.load_data()
        super().__init__(config, device, data, self.network(config.settings, data.sample_shape))
        self.images = data.scale(data.train_x).to(device)

    @staticmethod
    def network(settings: Any, shape: Shape, _: int = 0) -> nn.Module:
        """The published one, for 32 pixels a side."""
        f: nn.Module = EnergyNet(in_channels=shape[0], image_size=shape[1], nf=settings.nf)
        return f

    @staticmethod
    def counts(settings: Any) -> tuple[int, int]:
        """As JEM's: as many chains as images."""
        return settings.batch * settings.sgld_steps, 2 * settings.batch

    def step(self) -> None:
        """The next update."""
        x_pos, x_neg = self.draw(), self.sample()
        self.learn(self.f(x_neg).mean() - self.f(x_pos).mean())

    def draw(self) -> Tensor:
        """Noisy images, with replacement."""
        x: Tensor = self.images[torch.randint(len(self.images), (self.settings.batch,))]
        noisy: Tensor = x + self.settings.data_noise * torch.randn_like(x)
        return noisy

    def sample(self) -> Tensor:
        """Chains from U(-1, 1)."""
        x = torch.empty(self.settings.batch, *self.shape).uniform_(-1, 1)
        return self.climb(x.to(self.device))


def step_flop(loop: Any, settings: Any, shape: Shape, classes: int = 10) -> int:
    """Floating-point operations of a training step's convolutions and products.

    A multiplication with its addition counts as two. A Langevin step has a forward pass and the
    gradient of the sample; the update has a forward pass and the gradient of the parameters.
    """
    with torch.device("meta"):
        network = loop.network(settings, shape, classes)
        x = torch.empty(1, *shape)
    # Each counted on its own: the counter's hooks do not stand autograd.grad inside of them.
    with FlopCounterMode(display=False) as forward:
        f = network(x.requires_grad_()).sum()
    with FlopCounterMode(display=False) as of_sample:
        torch.autograd.grad(f, x)
    f = network(x.detach()).sum()
    with FlopCounterMode(display=False) as of_parameters:
        torch.autograd.grad(f, list(network.parameters()))
    once, *gradients = (x.get_total_flops() for x in (forward, of_sample, of_parameters))
    counts = loop.counts(settings)
    return sum(n * (once + own) for n, own in zip(counts, gradients, strict=True))
