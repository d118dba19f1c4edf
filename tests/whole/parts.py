"""A trainer, and everything by which one can see that a guard hangs on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer
from torch.optim import optimizer as of_torch

from ebmguard import Guard, guard
from tests.parts import Energy, langevin

X = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))


# What torch itself notes of steps that were taken.
OF_TORCH = {"_opt_called", "_warned_capturable_if_run_uncaptured"}


class Broken(SGD):
    def step(self, closure: Any = None) -> Any:
        raise MemoryError


class BrokenFused(Adam):
    def step(self, closure: Any = None) -> Any:
        raise MemoryError


class Trainer:
    """What others made, on which a guard may hang something."""

    def __init__(self, kind: Callable[..., Optimizer] = SGD) -> None:
        self.f = Energy()
        options = {"fused": True} if kind is BrokenFused else {}
        self.opt = kind(self.f.parameters(), lr=0.01, **options)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        self.scheduler = torch.optim.lr_scheduler.ConstantLR(self.opt)

    def sampler(self, f: Any, x: Tensor, steps: int = 3) -> Tensor:
        return langevin(f, x, steps)

    def guard(self, **options: Any) -> Guard:
        told: dict[str, Any] = {"beta_star": 0.5, "output_scale": 2000.0, "model": self.f}
        told |= {"optimizer": self.opt, "scheduler": self.scheduler}
        return guard(None, self.sampler, **told | options)

    def loss(self, g: Guard, scale: float = 1.0) -> Tensor:
        samples = g.sampler(self.f, X)
        self.opt.zero_grad()
        loss: Tensor = g.loss_fn(scale * self.f(X), scale * self.f(samples))
        loss.backward()
        return loss

    def steps(self, g: Guard, count: int = 3) -> Guard:
        for _ in range(count):
            self.loss(g)
            self.opt.step()
        return g

    def traces(self) -> dict[str, Any]:
        """Everything by which one can see that something hangs on them."""
        owners: dict[str, Any] = dict(self.f.named_modules())
        owners |= {"opt": self.opt, "scaler": self.scaler, "scheduler": self.scheduler}
        # Of hooks their number, of anything else that it is there.
        seen: dict[str, Any] = {
            f"{name}.{key}": len(x) if "hooks" in key else key
            for name, each in owners.items()
            for key, x in vars(each).items()
            if key not in OF_TORCH
        }
        of_all = of_torch._global_optimizer_pre_hooks, of_torch._global_optimizer_post_hooks
        seen["lr"] = [group["lr"] for group in self.opt.param_groups]
        return seen | {"of all optimizers": [len(x) for x in of_all]}
