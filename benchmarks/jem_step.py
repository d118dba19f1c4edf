"""The training step whose overhead is measured: JEM's, with and without the guard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ebmguard
from ebmguard import Recovery
from ebmguard.reference_training.networks import WideResNet
from ebmguard.samplers import ReplayBuffer, sgld
from ebmguard.steering import AdaptiveSteps

BETA_STAR = 2.0
STEP_SIZE, NOISE_STD = 1.0, 0.01
REFERENCE = 0.5
FLUSH_EVERY = 50

Loss = Callable[[Tensor, Tensor], Tensor]
Sampler = Callable[[nn.Module], Tensor]


@dataclass(frozen=True)
class Scenario:
    """One network, batch and sampler; ``target`` is the ratio that the guard may cost."""

    title: str
    depth: int
    width: int
    shape: tuple[int, int, int]
    batch: int
    sgld_steps: int
    target: float
    digits: bool  # the network of the digits, and one forward pass for images and samples
    memory_steps: int


SCENARIOS = {
    "cifar": Scenario(
        "WRN-16-2, 3x32x32, 16 + 16, 20 SGLD steps", 16, 2, (3, 32, 32), 16, 20, 1.01, False, 8
    ),
    "digits": Scenario(
        "WRN-10-1, 1x8x8, 64 + 64, 5 SGLD steps", 10, 1, (1, 8, 8), 64, 5, 1.03, True, 100
    ),
    "digits-wide": Scenario(
        "WRN-10-2, 1x8x8, 64 + 64, 5 SGLD steps", 10, 2, (1, 8, 8), 64, 5, 1.03, True, 100
    ),
}


class Pool(nn.Module):
    """A network of next to no cost, which leaves the guard's own cost to be seen."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.head = nn.Linear(channels, 10)

    def classify(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits

    def forward(self, x: Tensor) -> Tensor:
        return torch.logsumexp(self.classify(x), 1)


class Trainer:
    """A JEM trainer: replay buffer, SGLD, contrastive loss and cross-entropy, Adam.

    Attributes:
        loss: the plain contrastive loss.
        sample: the plain sampler, a function of the network.
    """

    def __init__(
        self, scenario: Scenario, network: WideResNet | Pool, device: torch.device
    ) -> None:
        network.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.network = network
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(
            network.parameters(), lr=0.0, fused=True
        )
        self.rng = torch.Generator(device).manual_seed(0)
        self.buffer = ReplayBuffer(1000, scenario.shape, reinit_rate=0.05, generator=self.rng)
        size = (scenario.batch, *scenario.shape)
        self.images = torch.rand(size, generator=self.rng, device=device) * 2 - 1
        self.labels = torch.arange(scenario.batch, device=device) % 10
        self.scenario = scenario

    def sample(self, f: nn.Module, n_steps: int | None = None) -> Tensor:
        start, rows = self.buffer.sample(self.scenario.batch)
        x = sgld(
            f,
            start,
            steps=n_steps or self.scenario.sgld_steps,
            step_size=STEP_SIZE,
            noise_std=NOISE_STD,
            generator=self.rng,
        )
        self.buffer.write(rows, x)
        return x

    @staticmethod
    def loss(f_pos: Tensor, f_neg: Tensor) -> Tensor:
        return -(f_pos.mean() - f_neg.mean())

    def step(self, loss: Loss, sample: Sampler) -> None:
        x_neg = sample(self.network)
        if self.scenario.digits:
            logits = self.network.classify(torch.cat((self.images, x_neg)))
            f_pos, f_neg = logits.logsumexp(1).split(self.scenario.batch)
            logits = logits[: self.scenario.batch]
        else:
            f_pos, f_neg = self.network(self.images), self.network(x_neg)
            logits = self.network.classify(self.images)
        cross_entropy = F.cross_entropy(logits, self.labels)
        self.optimizer.zero_grad()
        (loss(f_pos, f_neg) + cross_entropy).backward()
        self.optimizer.step()


def guarded(trainer: Trainer, log_dir: str, **options: Any) -> ebmguard.Guard:
    return ebmguard.guard(
        None,
        trainer.sample,
        beta_star=BETA_STAR,
        step_size=STEP_SIZE,
        noise_std=NOISE_STD,
        log_dir=log_dir,
        flush_every=FLUSH_EVERY,
        reference_beta_star=REFERENCE,
        **options,
    )


def with_everything(trainer: Trainer, log_dir: str) -> ebmguard.Guard:
    """A guard with all that there is, which watches an optimizer of its own."""
    guard = guarded(
        trainer,
        log_dir,
        action="rollback",
        # Snapshots are measured apart.
        recovery=Recovery(every=10**9),
        adapt=AdaptiveSteps(),
    )
    # The unguarded steps in between must not reach the hooks.
    own = torch.optim.Adam(trainer.network.parameters(), lr=1e-12, fused=True)
    guard.attach(
        model=trainer.network,
        optimizer=own,
        buffer=trainer.buffer,
        generators=[trainer.rng],
        step_size=STEP_SIZE,
        noise_std=NOISE_STD,
        clamp=(-3.0, 3.0),
        sgld_steps=trainer.scenario.sgld_steps,
        steps_argument="n_steps",
    )
    return guard


def build(scenario: Scenario, device: torch.device) -> Trainer:
    torch.manual_seed(0)
    network = WideResNet(
        in_channels=scenario.shape[0],
        depth=scenario.depth,
        width=scenario.width,
        early_stride=scenario.digits,
    )
    return Trainer(scenario, network, device)
