"""What the loops of JEM's family share: a small network, chains, and the gradient by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.adapters.closed_form import gradients

CLASSES, BATCH, CHAINS, SHAPE = 3, 6, 30, (2, 6, 6)


class Net(nn.Module):
    """Class logits; log p(x), and log p(x, y) as a column, from the same logits.

    ``layer_one_out`` keeps its gradient, as PYLD's networks have it.
    """

    layer_one_out: Tensor

    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__()
        self.layer_one = nn.Conv2d(SHAPE[0], 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6) if batch_norm else nn.Identity()
        self.rest = nn.Sequential(nn.LeakyReLU(0.2), nn.Conv2d(6, 8, 3), nn.LeakyReLU(0.2))
        self.head = nn.Linear(8 * 16, CLASSES)

    def classify(self, x: Tensor) -> Tensor:
        self.layer_one_out = self.layer_one(x).requires_grad_()
        self.layer_one_out.retain_grad()
        logits: Tensor = self.head(self.rest(self.norm(self.layer_one_out)).flatten(1))
        return logits

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        logits = self.classify(x)
        return logits.logsumexp(1) if y is None else logits.gather(1, y[:, None])


def uniform(n: int) -> Tensor:
    return torch.rand(n, *SHAPE) * 2 - 1


def data() -> tuple[Tensor, Tensor]:
    return uniform(40), torch.arange(40) % CLASSES


def draw(chains: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Where chains start, and which rows of the replay buffer these are. A class owns a block."""
    rows = torch.randint(len(chains) // (1 if y is None else CLASSES), (BATCH,))
    rows = rows if y is None else rows + y * (len(chains) // CLASSES)
    fresh = (torch.rand(BATCH) < 0.1).float()[:, None, None, None]
    return fresh * uniform(BATCH) + (1 - fresh) * chains[rows], rows


def plain(f_pos: Tensor, f_neg: Tensor) -> Tensor:
    return -(f_pos.mean() - f_neg.mean())


def slope(f: nn.Module, x: Tensor) -> Tensor:
    """df/dx of each sample."""
    leaf = x.detach().clone().requires_grad_()
    return torch.autograd.grad(f(leaf).sum(), leaf)[0]


def expected_gradient(
    f: nn.Module, f_pos: Tensor, f_neg: Tensor, beta_star: float
) -> tuple[Tensor, ...]:
    """Of every parameter, chained through the network that gave these energies."""
    to_pos, to_neg = gradients(f_pos.flatten(), f_neg.flatten(), beta_star)
    outer = to_pos.view_as(f_pos), to_neg.view_as(f_neg)
    inputs = list(f.parameters())
    return torch.autograd.grad(
        [f_pos, f_neg], inputs, outer, retain_graph=True, materialize_grads=True
    )


def gradient(loss: Tensor, f: nn.Module) -> tuple[Tensor, ...]:
    inputs = list(f.parameters())
    return torch.autograd.grad(loss, inputs, retain_graph=True, materialize_grads=True)


@contextmanager
def doubles() -> Iterator[None]:
    """Inside the block new tensors have double precision."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def state_of(f: nn.Module, optimizer: torch.optim.Optimizer, chains: Tensor) -> list[Tensor]:
    """All that a run leaves behind, the random generator included."""
    moments = [
        value
        for entry in optimizer.state.values()
        for value in entry.values()
        if isinstance(value, Tensor)
    ]
    return [*f.state_dict().values(), *moments, chains, torch.get_rng_state()]


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def cross_entropy(f: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(f.classify(x), y)
