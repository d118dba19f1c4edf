"""The training steps whose overhead is measured: JEM's, with and without the guard."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ebmguard
from ebmguard.reference_training.networks import WideResNet
from ebmguard.samplers import ReplayBuffer, sgld

BETA_STAR, REFERENCE = 2.0, 0.5
STEPS: dict[str, Any] = {"step_size": 1.0, "noise_std": 0.01}
FLUSH_EVERY = 50

Loss = Callable[[Tensor, Tensor], Tensor]
Sampler = Callable[[nn.Module], Tensor]


class Perceptron(nn.Sequential):
    """A network of which a step takes hardly longer than the guard does."""

    classify = nn.Sequential.forward

    def __init__(self, *sizes: int) -> None:
        layers = [[nn.Linear(*each), nn.SiLU()] for each in itertools.pairwise(sizes)]
        super().__init__(*itertools.chain(*layers))
        self.pop(-1)

    def forward(self, x: Tensor) -> Tensor:
        """Negative energies, (B,)."""
        f: Tensor = self.classify(x).logsumexp(1)
        return f


class Case(NamedTuple):
    """One network, batch and sampler.

    Attributes:
        block: steps of a measurement on a CPU: 50 have the guard's slow tier and its flush once.
        goal: the ratio that the guard may cost, or what it may add.
    """

    title: str
    network: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int
    sgld_steps: int
    block: int = FLUSH_EVERY
    goal: str = ""
    beta_star: float = BETA_STAR


MLP, SMALL, LARGE, PLANE = (
    partial(Perceptron, 64, 128, 128, 10),
    partial(WideResNet, in_channels=1, depth=10, width=1, early_stride=True),
    partial(WideResNet, in_channels=3, depth=16, width=2),
    partial(Perceptron, 2, 16, 10),
)
CASES = {
    "mlp": Case("MLP, 64 + 64 samples, 5 SGLD steps", MLP, (64,), 64, 5, goal="0.7 ms"),
    "default": Case("the same at β* = 0", MLP, (64,), 64, 5, goal="0.7 ms", beta_star=0.0),
    "digits": Case(
        *("WRN-10-1, 1x8x8, 64 + 64 samples, 5 SGLD steps", SMALL, (1, 8, 8), 64, 5), goal="1.03"
    ),
    "cifar": Case(
        *("WRN-16-2, 3x32x32, 16 + 16 samples, 20 SGLD steps", LARGE, (3, 32, 32), 16, 20),
        *(1, "1.005"),
    ),
    "plane": Case("MLP in the plane, 16 + 16 samples, 2 SGLD steps", PLANE, (2,), 16, 2),
}


class Trainer:
    """A JEM trainer: replay buffer, SGLD, contrastive loss and cross-entropy, Adam.

    The learning rate is 0, so that all steps do the same work.

    Attributes:
        plain: the contrastive difference (Eq. 3), and the plain sampler, a function of the network.
    """

    def __init__(self, case: Case, device: torch.device) -> None:
        torch.manual_seed(0)
        network: Any = case.network()
        self.network = network.to(device=device, memory_format=torch.channels_last)
        self.optimizer = self.adam(lr=0.0)
        self.rng = torch.Generator(device).manual_seed(0)
        self.buffer = ReplayBuffer(1000, case.shape, reinit_rate=0.05, generator=self.rng)
        size = (case.batch, *case.shape)
        self.images = torch.rand(size, generator=self.rng, device=device) * 2 - 1
        self.labels = torch.arange(case.batch, device=device) % 10
        self.case = case
        self.plain: tuple[Loss, Sampler] = lambda pos, neg: neg.mean() - pos.mean(), self.sample

    def adam(self, lr: float) -> torch.optim.Optimizer:
        """An optimizer of the network."""
        return torch.optim.Adam(self.network.parameters(), lr=lr, fused=True)

    def sample(self, f: nn.Module) -> Tensor:
        """The ends of chains from the buffer."""
        start, rows = self.buffer.sample(self.case.batch)
        x = sgld(f, start, steps=self.case.sgld_steps, generator=self.rng, **STEPS)
        self.buffer.write(rows, x)
        return x

    def step(self, loss: Loss, sample: Sampler, optimizer: torch.optim.Optimizer) -> None:
        """One training step."""
        x_neg = sample(self.network)
        logits = self.network.classify(torch.cat((self.images, x_neg)))
        f_pos, f_neg = logits.logsumexp(1).split(self.case.batch)
        cross_entropy = F.cross_entropy(logits[: self.case.batch], self.labels)
        optimizer.zero_grad()
        (loss(f_pos, f_neg) + cross_entropy).backward()
        optimizer.step()

    def guard(self, log_dir: str, optimizer: torch.optim.Optimizer, **more: Any) -> ebmguard.Guard:
        """A guard to which everything is attached.

        Args:
            log_dir: of its files.
            optimizer: one of its own, where unguarded steps in between must not reach its hooks.
            more: options.
        """
        told: dict[str, Any] = {"beta_star": self.case.beta_star, **STEPS}
        told["reference_beta_star"] = REFERENCE
        told |= {"log_dir": log_dir, "flush_every": FLUSH_EVERY, "clamp": (-3.0, 3.0)}
        told |= {"model": self.network, "buffer": self.buffer, "generators": [self.rng]}
        told |= {"optimizer": optimizer, "sgld_steps": self.case.sgld_steps, **more}
        return ebmguard.guard(None, self.sample, **told)
