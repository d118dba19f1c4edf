"""How many kernels the guard adds to a training step: a JEM step with and without it, on `meta`.

    python -m benchmarks.launches

Tensors of the device `meta` have shapes and no values, so that nothing is computed, and whatever
would wait for a device raises. An operation counts as a launch unless its result shares the memory
of an argument (a view) or it only makes a tensor. The lag is that of a GPU; bringing the row to the
host at the end of the step, one copy, is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ebmguard import guard
from ebmguard.samplers import sgld

BATCH, STEPS = 8, 5
SETTINGS: dict[str, dict[str, Any]] = {
    "loss and sampler": {},
    "steps of the sampler known": {"step_size": 1.0, "noise_std": 0.01},
    "and the clamp": {"step_size": 1.0, "noise_std": 0.01, "clamp": (-1.0, 1.0)},
}
_NO_LAUNCH = ("empty", "detach", "alias", "new_empty", "_to_copy")


class Launches(TorchDispatchMode):
    """Counts operations that run a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        aliases = [x.alias_info for x in func._schema.returns]
        is_view = any(x is not None and not x.is_write for x in aliases)
        self.count += not (is_view or name.startswith(_NO_LAUNCH))
        return func(*args, **(kwargs or {}))


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
    if told is not None:
        g = guard(None, sample_q, beta_star=0.5, output_scale=20_000, judge_in_loss=False)
        loss_fn, sample_q = g.attach(**told)
        fresh = g.state_dict() | {"step": 0 if slow else 1}
        g.load_state_dict(fresh)
    x = torch.zeros(BATCH, 3, 8, 8, device="meta")
    with Launches() as found:
        x_neg = sample_q(f, x)
        loss_fn(f(x), f(x_neg)).backward()
    if told is not None:
        g.load_state_dict(fresh)  # there is no row to write
    total: int = found.count
    return total


def main() -> None:
    """Print the table."""
    plain = launches(None)
    print(f"launches of an unguarded step with {STEPS} SGLD steps: {plain}\n")
    print("| told | added in a step | added in one of the slow tier, every 50th |")
    print("|---|---|---|")
    for name, told in SETTINGS.items():
        added = (launches(told) - plain, launches(told, slow=True) - plain)
        print(f"| {name} | {added[0]} | {added[1]} |")


if __name__ == "__main__":
    main()
