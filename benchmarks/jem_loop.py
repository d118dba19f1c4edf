"""What is measured: steps of the JEM trainer, and of a loop of the published structure."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from ebmguard.reference_training.data import ROOT_VARIABLE, ImageData
from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.reference_training.jem.scenarios import Scenario
from ebmguard.reference_training.jem.trainer import Trainer, make_network
from ebmguard.reference_training.networks import WideResNet
from ebmguard.reference_training.precision import set_precision

SHAPE, CLASSES = (3, 32, 32), 10
LOADED = 16
"""Batches that the loop finds in the CPU's memory, in turn."""


@dataclass(frozen=True)
class Size:
    """How large everything is.

    Attributes:
        network: in words.
        options: settings over those of the scenario.
        compile: run the trainer's networks compiled.
        real: CIFAR-10 is used where it is at hand, and needed where it matters.
        block: steps of a variant before the next one has its turn.
        matrix: rows and columns of the matrix product that gives the floor.
        products: how many of them are measured at once.
        iterations: updates of a run that may diverge; an epoch of CIFAR-10 has 703.
        trained: updates after which energies are compared for the second time.
        watched: updates in which synchronising calls are looked for, after as many others.
    """

    network: str
    options: Mapping[str, Any] = field(default_factory=dict)
    compile: bool = True
    real: bool = True
    block: int = 5
    matrix: int = 16384
    products: int = 20
    iterations: int = 703
    trained: int = 300
    watched: int = 120


SIZES = {
    "full": Size("WRN-28-10"),
    # To try all parts on a CPU. Its numbers say nothing.
    "toy": Size(
        "WRN-10-1",
        {
            "depth": 10,
            "width": 1,
            "n_pos": 8,
            "n_neg": 8,
            "n_labelled": 8,
            "sgld_steps": 2,
            "buffer_size": 64,
            "train_images": 64,
            "valid_images": 16,
            "test_images": 32,
        },
        compile=False,
        real=False,
        block=1,
        matrix=64,
        products=2,
        iterations=4,
        trained=2,
        watched=2,
    ),
}


@dataclass(frozen=True)
class RandomImages(JemConfig):  # type: ignore[misc]
    """A run on random bytes instead of CIFAR-10, where only time and memory are measured."""

    def load_data(self) -> ImageData:
        """As many images as CIFAR-10 has, or as the settings ask for."""
        settings = self.settings
        counts = settings.train_images, settings.valid_images, settings.test_images
        sizes = zip(counts, (45_000, 5_000, 10_000), strict=True)
        return random_images(*(size if count is None else count for count, size in sizes))


@functools.lru_cache(maxsize=1)
def random_images(*counts: int) -> ImageData:
    """So many training, validation and test images of random bytes, with random labels."""
    generator = torch.Generator().manual_seed(0)
    images = (torch.randint(256, (n, *SHAPE), generator=generator).byte() for n in counts)
    labels = (torch.randint(CLASSES, (n,), generator=generator) for n in counts)
    parts = [tensor for pair in zip(images, labels, strict=True) for tensor in pair]
    return ImageData("random", *parts, classes=CLASSES, levels=255, pad=4, flip=True)


def config_of(
    size: Size,
    device: torch.device,
    out: Path,
    *,
    scenario: str,
    beta_star: float = 2.0,
    **options: Any,
) -> JemConfig:
    """Settings of a run; bfloat16 where the options say nothing else."""
    is_real = size.real and os.environ.get(ROOT_VARIABLE)
    chosen: dict[str, Any] = {"precision": "bfloat16", "compile": "yes" if size.compile else "no"}
    return (JemConfig if is_real else RandomImages)(
        out=out,
        data="cifar10",
        scenario=scenario,
        beta_star=beta_star,
        device=str(device),
        **{**size.options, **chosen, **options},
    )


class Engine:
    """Steps of our trainer as `ebmguard train jem` runs them, guarded, with a log folder."""

    def __init__(self, config: JemConfig, device: torch.device) -> None:
        set_precision(config.precision)
        data = config.load_data().to(device)
        network = make_network(config, data)
        self.config = config
        self.precision = config.precision
        self.data = data
        self.trainer = Trainer(config, network, data, log_dir=config.out)
        self.steps = 0

    def step(self) -> None:
        """The next step."""
        self.trainer.step(self.steps)
        self.steps += 1

    def close(self) -> None:
        """Close the guard's sinks."""
        self.trainer.close()


class PublishedLoop:
    """Steps of JEM's published structure, written plainly, without a guard.

    - positives, negatives and the classifier's images pass through the network one after another;
    - every Langevin step is a call of the network and one of `autograd.grad`, while all parameters
      require gradients;
    - chains rest in a buffer in the CPU's memory, from which and to which they are copied;
    - batches come from the CPU's memory, augmented and noisy, as if its loader always were ahead;
    - eager, no channels_last, Adam as PyTorch has it by default, which is not the fused one;
    - the loss is read by the host, which refuses to go on where it has exploded.

    Args:
        config: sizes and precision.
        device: where the network is.

    Attributes:
        buffer: the chains, (size, C, H, W), on the CPU.
    """

    def __init__(self, config: JemConfig, device: torch.device) -> None:
        set_precision(config.precision)
        settings, data = config.settings, config.load_data()
        self.config = config
        self.precision = config.precision
        self.settings = settings
        self.device = device
        self.f = WideResNet(
            in_channels=data.sample_shape[0],
            classes=data.classes,
            depth=settings.depth,
            width=settings.width,
        ).to(device)
        self.optimizer = torch.optim.Adam(self.f.parameters(), lr=settings.lr)
        self.buffer = torch.rand(settings.buffer_size, *data.sample_shape) * 2 - 1
        self.steps = 0
        self._batches = [self._load(data) for _ in range(LOADED)]

    def _load(self, data: ImageData) -> tuple[Tensor, Tensor, Tensor]:
        rows = torch.randint(len(data.train_x), (self.settings.n_pos + self.settings.n_labelled,))
        x = data.scale(data.train_x[rows])
        x += self.settings.data_noise * torch.randn_like(x)
        n = self.settings.n_pos
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
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.steps += 1

    def sample(self) -> Tensor:
        """Chains from the buffer, some of them afresh; they are written back."""
        settings, shape = self.settings, self.buffer.shape[1:]
        rows = torch.randint(len(self.buffer), (settings.n_neg,))
        fresh = torch.rand(settings.n_neg, *shape) * 2 - 1
        restart = (torch.rand(settings.n_neg) < settings.reinit_rate).float()[:, None, None, None]
        start = restart * fresh + (1 - restart) * self.buffer[rows]
        self.f.eval()
        x = self.climb(start.to(self.device))
        self.f.train()
        self.buffer[rows] = x.cpu()
        return x

    def climb(self, x: Tensor) -> Tensor:
        """The Langevin steps."""
        x = x.clone().requires_grad_()
        for _ in range(self.settings.sgld_steps):
            (gradient,) = torch.autograd.grad(self.f(x).sum(), [x])
            noise = torch.randn_like(x)
            x.data += self.settings.step_size * gradient + self.settings.noise_std * noise
        return x.detach()

    def close(self) -> None:
        """Nothing is open."""


def step_flop(settings: Scenario) -> int:
    """Floating-point operations of a training step's convolutions and products.

    A multiplication with its addition counts as two. Langevin steps have a forward pass and the
    gradient of the samples; the update has a forward pass and the gradient of the parameters.
    """
    with torch.device("meta"):
        network = WideResNet(
            in_channels=SHAPE[0], classes=CLASSES, depth=settings.depth, width=settings.width
        )
    flop = Flop.of(network, SHAPE)
    images = settings.n_pos + settings.n_neg + settings.n_labelled
    total: int = settings.sgld_steps * settings.n_neg * flop.langevin + images * flop.learning
    return total


class Flop(NamedTuple):
    """Floating-point operations of a network's convolutions and products for one image.

    A multiplication with its addition counts as two.

    Attributes:
        forward: f(x).
        of_sample: df/dx, after that.
        of_parameters: df/dtheta, after f(x).
    """

    forward: int
    of_sample: int
    of_parameters: int

    @property
    def langevin(self) -> int:
        """Of a Langevin step: a forward pass and the gradient of the sample."""
        return self.forward + self.of_sample

    @property
    def learning(self) -> int:
        """Of an update's pass: a forward pass and the gradient of the parameters."""
        return self.forward + self.of_parameters

    @classmethod
    def of(cls, network: nn.Module, shape: Sequence[int]) -> Flop:
        """Count those of a network on the device "meta", for images (C, H, W)."""
        x = torch.empty(1, *shape, device="meta")
        # Each counted on its own: the counter's hooks do not stand autograd.grad inside of them.
        with FlopCounterMode(display=False) as forward:
            f = network(x.requires_grad_()).sum()
        with FlopCounterMode(display=False) as of_sample:
            torch.autograd.grad(f, x)
        f = network(x.detach()).sum()
        with FlopCounterMode(display=False) as of_parameters:
            torch.autograd.grad(f, list(network.parameters()))
        return cls(*(x.get_total_flops() for x in (forward, of_sample, of_parameters)))
