"""What is measured: updates of the short-run trainer, and of a loop of the published structure."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ebmguard.reference_training.data import ROOT_VARIABLE, ImageData
from ebmguard.reference_training.engine.progress import SilentReporter
from ebmguard.reference_training.precision import set_precision
from ebmguard.reference_training.shortrun.config import ShortRunConfig
from ebmguard.reference_training.shortrun.network import NEGATIVE_SLOPE, SMALLEST, EnergyNet
from ebmguard.reference_training.shortrun.presets import Preset
from ebmguard.reference_training.shortrun.train import train

from .jem_loop import SHAPE, Flop, random_images


@dataclass(frozen=True)
class Size:
    """How large everything is.

    Attributes:
        data: the data set.
        options: settings over those of its preset.
        compile: the variants that are said to be compiled are.
        block: updates of a variant before the next one has its turn.
        watched: updates in which synchronising calls are looked for, after as many others.
        profiled: updates whose kernels are counted.
        classifier: settings of the classifier that judges samples, where the user names none.
        samples: how many are judged; None is as many as there are held-out images.
    """

    data: str
    options: Mapping[str, Any] = field(default_factory=dict)
    compile: bool = True
    block: int = 5
    watched: int = 120
    profiled: int = 2
    classifier: Mapping[str, Any] = field(default_factory=dict)
    samples: int | None = None


SIZES = {
    # The published script's settings, which are the preset's.
    "full": Size(
        "cifar10",
        classifier={
            "depth": 16,
            "width": 4,
            "lr": 3e-4,
            "warmup": 200,
            "precision": "bfloat16",
            "iterations": 6000,
            "valid_images": 1000,
            "eval_every": 500,
            "checkpoint_every": 500,
        },
    ),
    # To try all parts on a CPU. Its numbers say nothing.
    "toy": Size(
        "digits",
        {
            "nf": 4,
            "activation": "leaky_relu",
            "batch": 8,
            "sgld_steps": 2,
            "train_images": 64,
            "test_images": 32,
            "iterations": 40,
        },
        compile=False,
        block=1,
        watched=2,
        profiled=1,
        classifier={
            "depth": 10,
            "width": 1,
            "n_pos": 8,
            "train_images": 64,
            "valid_images": 16,
            "test_images": 32,
            "iterations": 2,
            "eval_every": 1,
        },
        samples=16,
    ),
}


@dataclass(frozen=True)
class RandomImages(ShortRunConfig):  # type: ignore[misc]
    """A run on random bytes instead of CIFAR-10, where only time and memory are measured."""

    def load_data(self) -> ImageData:
        """As many images as CIFAR-10 has, or as the settings ask for."""
        settings = self.settings
        train_images, test_images = settings.train_images, settings.test_images
        return random_images(
            50_000 if train_images is None else train_images,
            0,
            10_000 if test_images is None else test_images,
        )


def lacks_data(size: Size) -> bool:
    """Whether the data are ones that the user has to name, and has not."""
    return size.data != "digits" and not os.environ.get(ROOT_VARIABLE)


def config_of(size: Size, device: torch.device, out: Path, **options: Any) -> ShortRunConfig:
    """Settings of a run, on random images where there are no others."""
    return (RandomImages if lacks_data(size) else ShortRunConfig)(
        out=out, data=size.data, device=str(device), **{**size.options, **options}
    )


class OurRun:
    """Updates of `ebmguard train shortrun`, one at a time: the command's own loop, which waits.

    The loop runs in a thread of its own, of which the reporter that it tells of every update holds
    it until the next one is asked for. So all of an update is there: guard, log folder, record.

    Args:
        config: settings of a new run.
    """

    def __init__(self, config: ShortRunConfig) -> None:
        config, folder = config.open()
        self.precision = config.precision
        self._pacer = _Pacer()
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._training = self._thread.submit(self._pacer.run, config, folder)
        self._training.add_done_callback(lambda _: self._pacer.done.release())

    def step(self) -> None:
        """The next update.

        Raises:
            RuntimeError: the training is over, or whatever it has raised.
        """
        self._pacer.turn.release()
        self._pacer.done.acquire()
        if self._training.done():
            self._training.result()
            raise RuntimeError("the training is over: it has diverged, or had all its updates")

    def close(self) -> None:
        """End the training; a second call does nothing."""
        self._pacer.over = True
        self._pacer.turn.release()
        self._thread.shutdown()


class _Over(Exception):
    """Ends a training from between two of its updates."""


class _Pacer(SilentReporter):  # type: ignore[misc]
    """Holds a training until its next update is asked for."""

    def __init__(self) -> None:
        self.turn, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.over = False

    def run(self, *what: Any) -> None:
        """Train, from the first turn on."""
        try:
            self._wait()
            train(*what, self)
        except _Over:
            pass

    def step(self, done: int, state: Mapping[str, float | str]) -> None:
        """An update is finished."""
        self.done.release()
        self._wait()

    def _wait(self) -> None:
        self.turn.acquire()
        if self.over:
            raise _Over


class PublishedLoop:
    """Updates of the published structure, written plainly, without a guard.

    That of `train_cifar10_minimal.py` of Nijkamp et al. (2019):

    - all images on the GPU as floats; rows are drawn, and chains started, on the CPU and copied;
    - every Langevin step is a call of the network and one of `autograd.grad`, while all parameters
      require gradients; its noise is drawn in the step;
    - data and negatives pass through the network one after another;
    - eager, no channels_last, Adam as PyTorch has it by default, which is not the fused one.

    Left out: `retain_graph=True`, which frees memory later and computes nothing; and what it prints
    and plots every 100 updates. As the trainer's, its convolutions are those that cuDNN found to
    be fastest.

    Args:
        config: sizes and precision.
        device: where the network is.

    Attributes:
        f: the network.
    """

    def __init__(self, config: ShortRunConfig, device: torch.device) -> None:
        set_precision(config.precision)
        data = config.load_data()
        self.precision = config.precision
        self.settings = config.settings
        self.device = device
        self.shape = data.sample_shape
        self.f = published_network(self.shape, self.settings.nf).to(device)
        self.images = data.scale(data.train_x).to(device)
        self.optimizer = torch.optim.Adam(self.f.parameters(), lr=self.settings.lr)

    def step(self) -> None:
        """The next update."""
        x_pos, x_neg = self.draw(), self.sample()
        loss = self.f(x_pos).mean() - self.f(x_neg).mean()
        self.optimizer.zero_grad()
        (-loss).backward()
        self.optimizer.step()

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


def published_network(shape: tuple[int, int, int], nf: int) -> nn.Sequential:
    """The published network, (B, C, S, S) -> (B,), as modules in a row; for 32 pixels a side.

    Other sizes are halved as often as it takes to come to the last convolution's 4x4.
    """
    channels, size, _ = shape
    layers: list[nn.Module] = [nn.Conv2d(channels, nf, 3, 1, 1), nn.LeakyReLU(NEGATIVE_SLOPE)]
    while size > SMALLEST:
        layers += [nn.Conv2d(nf, 2 * nf, 4, 2, 1), nn.LeakyReLU(NEGATIVE_SLOPE)]
        nf, size = 2 * nf, size // 2
    return nn.Sequential(*layers, nn.Conv2d(nf, 1, size, 1, 0), nn.Flatten(0))


def step_flop(settings: Preset, shape: tuple[int, int, int] = SHAPE) -> int:
    """Floating-point operations of an update's convolutions and products.

    A multiplication with its addition counts as two. Langevin steps have a forward pass and the
    gradient of the samples; the update, of data and negatives, has a forward pass and the gradient
    of the parameters.
    """
    with torch.device("meta"):
        network = EnergyNet(in_channels=shape[0], image_size=shape[1], nf=settings.nf)
    flop = Flop.of(network, shape)
    total: int = settings.batch * (settings.sgld_steps * flop.langevin + 2 * flop.learning)
    return total
