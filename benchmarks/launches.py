"""How many kernels a training step launches on a GPU, counted without one (:mod:`.gpu_on_meta`).

    python -m benchmarks.launches

First what the guard adds to a JEM step without graphs: a sampler call, loss and backward pass, with
and without it. Bringing the row to the host at the end of the step, one copy, is left out. Then the
steps of the trainers themselves (:mod:`.meta_steps`), whose chains are CUDA graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from ebmguard import guard
from ebmguard.samplers import sgld
from ebmguard.sampling import Measured

from .gpu_on_meta import gpu_on_meta
from .meta_steps import CASES, of_guard, steps_of

BATCH, STEPS = 8, 5
SETTINGS: dict[str, dict[str, Any]] = {
    "loss and sampler": {},
    "steps of the sampler known": {"step_size": 1.0, "noise_std": 0.01},
    "and the clamp": {"step_size": 1.0, "noise_std": 0.01, "clamp": (-1.0, 1.0)},
}


class Energy(nn.Module):
    """As JEM's: the logsumexp of a network's logits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.LeakyReLU(), nn.Flatten())
        self.head = nn.Linear(8 * 6 * 6, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.net(x))
        return logits.logsumexp(1)


def launches(told: dict[str, Any] | None, *, slow: bool = False) -> int:
    """Launches of one sampler call, loss and backward pass; unguarded where nothing is told."""
    f = Energy().to("meta")

    def sample_q(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return sgld(f, x, steps=STEPS, step_size=1.0, noise_std=0.01)

    def plain(f_pos: Tensor, f_neg: Tensor) -> Tensor:
        return f_neg.mean() - f_pos.mean()

    loss_fn: Callable[[Tensor, Tensor], Tensor] = plain
    with gpu_on_meta() as gpu:
        if told is not None:
            g = guard(None, sample_q, beta_star=0.5, output_scale=20_000)
            loss_fn, sample_q = g.attach(**told)
            # The first sampler calls are measured, which reads values.
            known = {"measured": asdict(Measured("it is not measured here"))}
            g.load_state_dict(g.state_dict() | known | {"step": 0 if slow else 1})
        x = torch.zeros(BATCH, 3, 8, 8, device="meta")
        before = gpu.launches.total()
        x_neg = sample_q(f, x)
        loss_fn(f(x), f(x_neg)).backward()
        found = gpu.launches.total() - before
        if told is not None:
            g.close()
    return found


def main() -> None:
    """Print the table."""
    # What is true or false on `meta` is true, a gradient that is negative too.
    logging.getLogger("ebmguard").setLevel(logging.ERROR)
    plain = launches(None)
    print(f"launches of an unguarded step with {STEPS} SGLD steps: {plain}\n")
    print("| told | added in a step | added in one of the slow tier, every 50th |")
    print("|---|---|---|")
    for name, told in SETTINGS.items():
        added = (launches(told) - plain, launches(told, slow=True) - plain)
        print(f"| {name} | {added[0]} | {added[1]} |")
    print("\n| steps of | waits | launches: usual step | the guard's | slow tier | the guard's |")
    print("|---|---:|---:|---:|---:|---:|")
    for name in CASES:
        steps = steps_of(name)
        counts = [x for own in (steps.usual, steps.slow) for x in (own.total(), of_guard(own))]
        print(f"| {name} | {steps.good_waits.total()} | {' | '.join(map(str, counts))} |")


if __name__ == "__main__":
    main()
