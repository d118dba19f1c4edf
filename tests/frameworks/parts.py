"""What the trainers of all frameworks have in common: a network, a sampler object, data."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.parts import Energy, gradients

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"

BATCH = 8
SHAPE = (1, 4, 4)
N_BATCHES = 6
NOISE = 0.01
STEP_SIZE = 0.1
OUTPUT_SCALE = 2 * STEP_SIZE / NOISE**2


def make_net() -> Energy:
    return Energy(shape=SHAPE)


class Sampler:
    """Chains from a buffer that is a list of images, each a tensor of its own."""

    def __init__(self, model: nn.Module, noise: float = NOISE, max_len: int = 32) -> None:
        self.model = model
        self.noise = noise
        self.max_len = max_len
        self.examples = list((torch.rand(BATCH, *SHAPE) * 2 - 1).split(1))

    def sample_new_exmps(self, steps: int = 4, step_size: float = STEP_SIZE) -> Tensor:
        rows = torch.randint(len(self.examples), (BATCH,)).tolist()
        fresh = (torch.rand(BATCH) < 0.05)[:, None, None, None]
        start = torch.cat([self.examples[i] for i in rows])
        start = torch.where(fresh, torch.rand_like(start) * 2 - 1, start)
        images = Sampler.generate_samples(self.model, start, steps, step_size, self.noise)
        self.examples = [*images.detach().split(1), *self.examples][: self.max_len]
        return images

    def state_dict(self) -> dict[str, Any]:
        return {"examples": list(self.examples)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.examples = state["examples"]

    @staticmethod
    def generate_samples(
        model: Any, images: Tensor, steps: int, step_size: float, noise: float = NOISE
    ) -> Tensor:
        was_training = model.training
        model.eval()
        with torch.enable_grad():
            images = images.detach().clone().requires_grad_()
            for _ in range(steps):
                images.data.add_(noise * torch.randn_like(images)).clamp_(-1, 1)
                (slope,) = torch.autograd.grad(-model(images).sum(), images)
                images.data.add_(-step_size * slope).clamp_(-1, 1)
        model.train(was_training)
        return images


def expected_gradient(net: nn.Module, real: Tensor, fake: Tensor, beta: float) -> Any:
    """Gradient of Eq. 8 and an L2 term on the energies, in double precision."""
    net = copy.deepcopy(net).double()
    f_pos, f_neg = net(real.double()), net(fake.double())
    to_pos, to_neg = gradients(f_pos, f_neg, beta)
    surrogate = (to_pos * f_pos + to_neg * f_neg).sum()
    loss = surrogate + 0.1 * (f_pos**2 + f_neg**2).mean()
    return torch.autograd.grad(loss, list(net.parameters()))


class Before:
    """A trainer's network and chains before its first update, at β* = 3 and β = 1/4.

    Args:
        net: the network.
        chains: the plain sampler.
    """

    beta_star, output_scale = 3.0, 12.0

    def __init__(self, net: nn.Module, chains: Sampler) -> None:
        self.net, self.chains = copy.deepcopy(net), copy.deepcopy(chains)
        self.random = torch.get_rng_state()

    def check_update(self, net: nn.Module, seen: Sequence[tuple[Tensor, Tensor]]) -> None:
        """One step of SGD with rate 0.5 by the mean of the batches' gradients in closed form.

        Args:
            net: the network after it.
            seen: positives and negatives of each batch. The negatives must be those of the same
                sampler on three quarters of the energy.
        """
        grads = [expected_gradient(self.net, real, fake, self.beta_star) for real, fake in seen]
        steps = zip(self.net.parameters(), net.parameters(), *grads, strict=True)
        for before, after, *parts in steps:
            expected = before.double() - 0.5 * sum(parts) / len(seen)
            torch.testing.assert_close(after.double(), expected, rtol=0, atol=1e-6)
        energy = self.net

        class ThreeQuarters(nn.Module):
            def forward(self, x):
                return 0.75 * energy(x)

        self.chains.model = ThreeQuarters()
        torch.set_rng_state(self.random)
        for _, fake in seen:
            torch.testing.assert_close(self.chains.sample_new_exmps(steps=4).detach(), fake)


def data(rank: int = 0, world: int = 1) -> DataLoader[Any]:
    """The batches, or one rank's part of each."""
    x = torch.rand(N_BATCHES * BATCH, *SHAPE, generator=torch.Generator().manual_seed(0))
    # A generator of its own: else every epoch draws a number from the global one.
    own = TensorDataset(x[rank::world])
    return DataLoader(own, BATCH // world, generator=torch.Generator())


def run_the_page(heading: str, folder: Path) -> dict[str, Any]:
    """Run the code under a heading of docs/frameworks.md; the names that it leaves behind."""
    part = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", part, re.DOTALL)
    torch.manual_seed(0)
    net = make_net()

    def sample_q(f):
        return Sampler.generate_samples(f, torch.rand(BATCH, *SHAPE), steps=2, step_size=1.0)

    names: dict[str, Any] = {
        "net": net,
        "optimizer": torch.optim.Adam(net.parameters()),
        "loader": data(),
        "sample_q": sample_q,
        "path": folder / "state",
    }
    exec(compile(code, str(PAGE), "exec"), names)
    return names
