"""What is measured against each other: iterations of our trainers, and loops as they are published.

The loops are plain ones, without a guard: every Langevin step is a call of the network and one of
`autograd.grad`, while all parameters require gradients; data and negatives pass through the network
one after another; eager, no channels_last, Adam as PyTorch has it by default, not the fused one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from ebmguard.reference_training.data import ImageData
from ebmguard.reference_training.device import find_device
from ebmguard.reference_training.engine import graphs
from ebmguard.reference_training.engine.interrupt import DeferredInterrupt
from ebmguard.reference_training.engine.loop import Run
from ebmguard.reference_training.engine.progress import Reporter
from ebmguard.reference_training.engine.record import Record
from ebmguard.reference_training.engine.run_config import RunConfig
from ebmguard.reference_training.engine.task import Task
from ebmguard.reference_training.networks import WideResNet
from ebmguard.reference_training.precision import set_precision
from ebmguard.reference_training.shortrun.network import NEGATIVE_SLOPE, SMALLEST
from ebmguard.reference_training.toy import network as toy
from ebmguard.reference_training.toy.distributions import DISTRIBUTIONS
from ebmguard.reference_training.toy.scenario import Scenario

Shape = tuple[int, int, int]

LOADED = 16
"""Batches that JEM's loop finds in the CPU's memory, in turn."""
BETA = 0.5
"""Of the toys' loop. Ours has members of several β, which cost the same."""


class Iterations:
    """Iterations of `ebmguard train`, one at a time: step, guard, log folder and record.

    Checkpoints are left out, and so are evaluations but for the one that a run may begin with.

    Args:
        build: makes the task of a trainer.
        config: settings of a new run.
        logs: the guard writes into the run folder.
        graphed: on a GPU, what the trainer runs as CUDA graphs is one.

    Attributes:
        task: what is trained.
    """

    def __init__(
        self,
        build: Callable[[Any, Record], Task],
        config: RunConfig,
        *,
        logs: bool = True,
        graphed: bool = True,
    ) -> None:
        config, folder = config.open()
        self.precision = getattr(config, "precision", "float32")
        record = (Record if logs else _Unlogged)(config, folder, find_device(config.device))
        with ExitStack() as stack:
            if not graphed:
                stack.enter_context(patch.object(graphs, "_is_gpu", lambda _: False))
            self.task = build(config, record)
        self.task.begin()
        self.run = Run(self.task, Reporter(), DeferredInterrupt())

    def step(self) -> None:
        """The next iteration."""
        self.run.advance()

    def close(self) -> None:
        """Write what is pending; a second call does nothing."""
        for guard in self.task.guards.values():
            guard.close()


class _Unlogged(Record):  # type: ignore[misc]
    @property
    def for_guard(self) -> dict[str, Any]:
        return {**super().for_guard, "log_dir": None}


# -- loops -------------------------------------------------------------------------------------


class PublishedLoop:
    """What the loops on images share.

    Args:
        config: sizes and precision.
        device: where the network is.

    Attributes:
        f: the network.
    """

    def __init__(self, config: Any, device: torch.device) -> None:
        set_precision(config.precision)
        data = config.load_data()
        self.precision = config.precision
        self.settings = config.settings
        self.device = device
        self.shape = data.sample_shape
        self.f: Any = self.network(self.settings, self.shape, data.classes).to(device)
        self.optimizer = torch.optim.Adam(self.f.parameters(), lr=self.settings.lr)
        self.prepare(data)

    @staticmethod
    def network(settings: Any, shape: Shape, classes: int) -> nn.Module:
        """f for images (C, H, W)."""
        raise NotImplementedError

    @staticmethod
    def counts(settings: Any) -> tuple[int, int]:
        """Samples times Langevin steps, and images and samples of the update."""
        raise NotImplementedError

    def prepare(self, data: ImageData) -> None:
        """Make all that the steps find ready."""
        raise NotImplementedError

    def step(self) -> None:
        """The next step."""
        raise NotImplementedError

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


class JemLoop(PublishedLoop):
    """JEM's, with its buffer, its loss on the host and its loader.

    - chains rest in a buffer in the CPU's memory, from which and to which they are copied;
    - batches come from the CPU's memory, augmented and noisy, as if its loader always were ahead;
    - the loss is read by the host, which refuses to go on where it has exploded.

    Attributes:
        buffer: the chains, (size, C, H, W), on the CPU.
    """

    @staticmethod
    def network(settings: Any, shape: Shape, classes: int) -> nn.Module:
        """The wide residual network."""
        depth, width = settings.depth, settings.width
        f: nn.Module = WideResNet(in_channels=shape[0], classes=classes, depth=depth, width=width)
        return f

    @staticmethod
    def counts(settings: Any) -> tuple[int, int]:
        """The classifier has images of its own."""
        images = settings.n_pos + settings.n_neg + settings.n_labelled
        return settings.sgld_steps * settings.n_neg, images

    def prepare(self, data: ImageData) -> None:
        """Load batches, and start the chains."""
        self.steps = 0
        self.buffer = torch.rand(self.settings.buffer_size, *self.shape) * 2 - 1
        self._batches = [self._load(data) for _ in range(LOADED)]

    def _load(self, data: ImageData) -> tuple[Tensor, Tensor, Tensor]:
        n = self.settings.n_pos
        rows = torch.randint(len(data.train_x), (n + self.settings.n_labelled,))
        x = data.scale(data.train_x[rows])
        x += self.settings.data_noise * torch.randn_like(x)
        return x[:n].clone(), x[n:].clone(), data.train_y[rows[n:]]

    def step(self) -> None:
        """The next step.

        Raises:
            FloatingPointError: the loss has exploded.
        """
        batch = self._batches[self.steps % LOADED]
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


class ShortRunLoop(PublishedLoop):
    """That of `train_cifar10_minimal.py` of Nijkamp et al. (2019).

    All images are on the GPU as floats; rows are drawn, and chains started, on the CPU and copied.
    Left out: `retain_graph=True`, which frees memory later and computes nothing; and what it prints
    and plots every 100 updates. As the trainer's, its convolutions are those that cuDNN found to
    be fastest.
    """

    @staticmethod
    def network(settings: Any, shape: Shape, _: int) -> nn.Module:
        """The published one, as modules in a row: (B, C, S, S) -> (B,), for 32 pixels a side.

        Other sizes are halved as often as it takes to come to the last convolution's 4x4.
        """
        (channels, size, _), nf = shape, settings.nf
        layers: list[nn.Module] = [nn.Conv2d(channels, nf, 3, 1, 1), nn.LeakyReLU(NEGATIVE_SLOPE)]
        while size > SMALLEST:
            layers += [nn.Conv2d(nf, 2 * nf, 4, 2, 1), nn.LeakyReLU(NEGATIVE_SLOPE)]
            nf, size = 2 * nf, size // 2
        return nn.Sequential(*layers, nn.Conv2d(nf, 1, size, 1, 0), nn.Flatten(0))

    @staticmethod
    def counts(settings: Any) -> tuple[int, int]:
        """As many chains as images."""
        return settings.batch * settings.sgld_steps, 2 * settings.batch

    def prepare(self, data: ImageData) -> None:
        """Bring the images to the device."""
        self.images = data.scale(data.train_x).to(self.device)

    def step(self) -> None:
        """The next update."""
        x_pos, x_neg = self.draw(), self.sample()
        self.learn(self.f(x_neg).mean() - self.f(x_pos).mean())

    def draw(self) -> Tensor:
        """Noisy images, with replacement."""
        rows = torch.randint(len(self.images), (self.settings.batch,))
        x: Tensor = self.images[rows]
        noisy: Tensor = x + self.settings.data_noise * torch.randn_like(x)
        return noisy

    def sample(self) -> Tensor:
        """Chains from U(-1, 1)."""
        x = torch.empty(self.settings.batch, *self.shape).uniform_(-1, 1)
        return self.climb(x.to(self.device))


class ToyLoop:
    """One model in a loop of the published structure, whose learning rate is 0.

    That of Nijkamp et al. (2020), with the loss of Algorithm 1 of *Energy-Based Model Training
    Objective Robust to Inaccurate SGLD Samples*. Nothing is measured or written; data come from our
    samplers, which take less time than the published ones.

    Args:
        settings: what an update does.
        device: where.
        convolutions: 1x1 convolutions on (B, dim, 1, 1), as published; else linear layers.
    """

    def __init__(self, settings: Scenario, device: torch.device, *, convolutions: bool) -> None:
        self.settings = settings
        self.distribution = DISTRIBUTIONS[settings.data]
        self.f = toy_network(self.distribution.dim, convolutions=convolutions).to(device)
        self.optimizer = torch.optim.Adam(self.f.parameters(), lr=0.0)
        self.rng = torch.Generator(device).manual_seed(0)
        self.trailing = (1, 1) if convolutions else ()

    def step(self) -> None:
        """One update of the model."""
        settings, rng = self.settings, self.rng
        x_pos = self.distribution.sample(settings.n_pos, rng)
        x_pos = x_pos.reshape(*x_pos.shape, *self.trailing)
        size = (settings.n_neg, *x_pos.shape[1:])
        x = settings.init_std * torch.randn(size, generator=rng, device=rng.device)
        for _ in range(settings.sgld_steps):
            x.requires_grad_()
            (gradient,) = torch.autograd.grad(self.f(x).sum(), x)
            noise = torch.randn(size, generator=rng, device=rng.device)
            step = settings.step_size * (1 - BETA) * gradient + settings.noise_std * noise
            x = x.detach() + step
        f_pos = settings.output_scale * self.f(x_pos).flatten()
        f_neg = settings.output_scale * self.f(x).flatten()
        log_sum = (BETA * f_neg).logsumexp(0)
        loss = torch.logaddexp(BETA * f_pos, log_sum).mean() / BETA - f_pos.mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def toy_network(dim: int, *, convolutions: bool) -> nn.Sequential:
    """dim-32-64-64-64-1 with LeakyReLU 0.05."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise((dim, *toy.WIDTHS)):
        layers.append(nn.Conv2d(fan_in, fan_out, 1) if convolutions else nn.Linear(fan_in, fan_out))
        layers.append(nn.LeakyReLU(toy.NEGATIVE_SLOPE))
    return nn.Sequential(*layers[:-1])


# -- operations --------------------------------------------------------------------------------


def step_flop(loop: type[PublishedLoop], settings: Any, shape: Shape, classes: int = 10) -> int:
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
