"""One JEM-style training loop, written so that a guard can be put into it or left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

N_STEPS = 50
BATCH = 8
SHAPE = (1, 6, 6)


class Classifier(nn.Module):
    """A small network without normalisation; f(x) = logsumexp of its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 3), nn.LeakyReLU(0.2), nn.Conv2d(6, 6, 3), nn.LeakyReLU(0.2)
        )
        self.head = nn.Linear(6 * 4, 3)

    def classify(self, x):
        return self.head(self.features(x).flatten(1))

    def forward(self, x, y=None):
        logits = self.classify(x)
        return logits.logsumexp(1) if y is None else logits.gather(1, y[:, None])


class Sampler:
    """JEM's `get_sample_q`: chains from a replay buffer, moved in place, and written back."""

    def __init__(self, temper: Callable[[Tensor], Tensor] = lambda f: f) -> None:
        self.temper = temper

    def __call__(self, f: nn.Module, buffer: Tensor, n_steps: int = 3) -> Tensor:
        f.eval()
        rows = torch.randint(len(buffer), (BATCH,))
        fresh = torch.rand(BATCH, *SHAPE) * 2 - 1
        reinit = (torch.rand(BATCH) < 0.05).float()[:, None, None, None]
        x_k = (reinit * fresh + (1 - reinit) * buffer[rows]).requires_grad_()
        for _ in range(n_steps):
            (grad,) = torch.autograd.grad(self.temper(f(x_k)).sum(), [x_k], retain_graph=True)
            x_k.data += 1.0 * grad + 0.01 * torch.randn_like(x_k)
        f.train()
        samples = x_k.detach()
        buffer[rows] = samples
        return samples


@dataclass
class Outcome:
    """All that a run leaves behind."""

    model: Classifier
    buffer: Tensor
    rng: Tensor
    moments: list[Tensor]

    def tensors(self) -> list[Tensor]:
        return [*self.model.state_dict().values(), self.buffer, self.rng, *self.moments]

    def equals(self, other: Outcome) -> bool:
        pairs = zip(self.tensors(), other.tensors(), strict=True)
        return all(torch.equal(a, b) for a, b in pairs)


def plain_loss(fp_all: Tensor, fq_all: Tensor) -> Tensor:
    return -(fp_all.mean() - fq_all.mean())


def train(
    loss_fn: Callable[[Tensor, Tensor], Tensor] = plain_loss,
    sample_q: Any = None,
    *,
    on_start: Callable[[nn.Module, torch.optim.Optimizer], object] = lambda *_: None,
    reweight: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda p, n: (p, n),
    negate: bool = False,
    n_steps: int = N_STEPS,
) -> Outcome:
    """Train; ``negate`` hands the loss energies -f, as trainers of the energy convention do."""
    torch.manual_seed(7)
    sample_q = Sampler() if sample_q is None else sample_q
    model = Classifier()
    images, labels = torch.rand(40, *SHAPE) * 2 - 1, torch.randint(3, (40,))
    buffer = torch.rand(30, *SHAPE) * 2 - 1
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.999))
    on_start(model, optimizer)
    sign = -1 if negate else 1
    for _ in range(n_steps):
        rows = torch.randint(40, (BATCH,))
        x_p_d = images[rows] + 0.03 * torch.randn(BATCH, *SHAPE)
        x_q = sample_q(model, buffer)
        fp_all, fq_all = reweight(sign * model(x_p_d), sign * model(x_q))
        l_p_x = loss_fn(fp_all, fq_all)
        loss = l_p_x + F.cross_entropy(model.classify(x_p_d), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    moments = [state["exp_avg_sq"] for state in optimizer.state.values()]
    return Outcome(model, buffer, torch.get_rng_state(), moments)
