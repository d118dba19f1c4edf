"""A run in which everything has a state, an ordinary loop, and a detector that fires as told."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ebmguard import Guard, Level, Recovery, guard
from ebmguard.recovery import Change
from ebmguard.samplers import ReplayBuffer, sgld
from tests.parts import Energy, Memory, Script, gradient_at
from tests.runs import frozen, randomness

SAME: dict[str, Any] = {"ladder": (Change(),), "reseed": False}
QUICK: dict[str, Any] = {"every": 4, "certify_after": 4, "relapse_within": 6}


class Scripted(Script):
    """Fires when the judgements, counted over all attempts, reach a number; calm otherwise."""

    def __init__(
        self,
        errors: Sequence[int],
        active: Mapping[int, dict[str, Level]] = {},
        remedies: Sequence[str] = (),
    ) -> None:
        levels = dict.fromkeys(errors, Level.ERROR)
        super().__init__(levels, counted=True, active=active, remedies=remedies)


class Run:
    """Adam, a scheduler, an average of the parameters, a replay buffer, and four random sources."""

    def __init__(
        self,
        recovery: Recovery | None,
        *,
        detector: Any = None,
        seed: int = 0,
        fused: bool = False,
        **options: Any,
    ) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model = Energy()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2, fused=fused)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 7, 0.9)
        self.ema = torch.optim.swa_utils.AveragedModel(self.model)
        self.rng = torch.Generator().manual_seed(seed)
        self.buffer = ReplayBuffer(
            32, (2,), reinit_rate=0.1, generator=torch.Generator().manual_seed(seed + 1)
        )
        self.memory = Memory()
        self.sgld_steps: list[int] = []
        usual: dict[str, Any] = {"beta_star": 0.5, "output_scale": 200.0, "sinks": [self.memory]}
        if recovery is not None:
            usual |= {"action": "rollback", "recovery": recovery}
        self.guard: Guard = guard(None, self.sample, **(usual | options))
        if detector is not None:
            self.guard._loop.judge = detector
        self.guard.attach(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            ema=self.ema,
            buffer=self.buffer,
            generators=[self.rng],
            sgld_steps=3,
        )

    def sample(self, f: nn.Module, buffer: ReplayBuffer) -> Tensor:
        x, rows = buffer.sample(8)
        steps = self.guard.next_steps()
        self.sgld_steps.append(steps)
        x = sgld(f, x, steps=steps, step_size=0.1, noise_std=0.03, generator=self.rng)
        buffer.write(rows, x)
        return x

    def step(self) -> None:
        """One training step that draws from every source of randomness."""
        shift = random.random() + np.random.rand()
        x_pos = 0.3 * torch.randn(8, 2) + 0.1 * shift
        loss_fn, sample_q = self.guard
        x_neg = sample_q(self.model, self.buffer)
        loss = loss_fn(self.model(x_pos), self.model(x_neg)) + 1e-3 * self.model(x_pos).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.ema.update_parameters(self.model)

    def state(self) -> dict[str, Any]:
        """Everything, as independent bytes."""
        parts = {
            name: getattr(self, name)
            for name in ("model", "optimizer", "scheduler", "ema", "buffer", "rng")
        }
        return {**frozen(parts), **randomness(), "step": self.guard.step}


def langevin(f: nn.Module, x: Tensor, rng: torch.Generator | None = None) -> Tensor:
    for _ in range(3):
        x = x + 0.1 * gradient_at(f, x) + 0.2 * torch.randn(x.shape, generator=rng)
    return x


class Replay:
    """A buffer that is made anew at every push."""

    def __init__(self, size: int) -> None:
        self.x = torch.randn(size, 2)

    def push(self, x: Tensor) -> None:
        self.x = torch.cat([x, self.x])[: len(self.x)]

    def state_dict(self) -> dict[str, Any]:
        return {"x": self.x}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.x = state["x"]


class Loop:
    """An ordinary one, made as a new process would.

    Args:
        more: layers of the network.
        told: settings of the guard.
    """

    def __init__(self, *more: nn.Module, lr: Any = 0.01, **told: Any) -> None:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(0)
        self.f = nn.Sequential(nn.Linear(2, 16), nn.SiLU(), *more, nn.Linear(16, 1))
        self.optimizer = torch.optim.Adam(self.f.parameters(), lr=lr)
        self.rng = torch.Generator()
        usual: dict[str, Any] = {"model": self.f, "optimizer": self.optimizer}
        usual |= {"beta_star": 0.5, "output_scale": 5, "generators": [self.rng]}
        self.g: Guard = guard(None, langevin, **usual | told)

    def step(self, factor: float = 1.0) -> None:
        loss_fn, sample = self.g
        x = 0.5 * torch.randn(16, 2) + 1
        x_neg = sample(self.f, torch.randn(16, 2), self.rng)
        loss = loss_fn(factor * self.f(x), self.f(x_neg))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()


def kept(folder: Path | None, *more: nn.Module, **told: Any) -> Loop:
    recovery = Recovery(folder=folder, every=4, certify_after=4, folder_every=4)
    return Loop(*more, action="rollback", recovery=recovery, **told)


def go_on(
    folder: Path,
    stop: int,
    *,
    schedule: str = "end",
    average: str = "end",
    push: str = "end",
    more: str = "",
) -> tuple[dict[str, Any], int | None]:
    """A loop in a new process, gone on with by ``g.resume()`` alone: its state, and from where.

    Args:
        schedule, average, push: where in a step these are.
        more: batch norm instead of dropout, or further draws.
    """
    torch.manual_seed(0)
    ema, replay = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 1)), Replay(32)
    norm = nn.BatchNorm1d(16) if more == "batch norm" else nn.Dropout(0.2)
    run = kept(folder / "kept", norm, buffer=replay, ema=ema, log_dir=folder)
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda k: 1 / (1 + k))
    own = nn.Linear(2, 1)
    run.g.attach(scheduler=scheduler)
    resumed = run.g.resume()
    loss_fn, sample = run.g

    def at(place: str) -> None:
        if schedule == place and (run.g.step or place == "end"):
            scheduler.step()
        if average == place:
            with torch.no_grad():
                own.weight.copy_(next(run.f.parameters())[:1])
            ema.update_parameters(own)

    while run.g.step < stop:
        at("top")
        x = 0.5 * torch.randn(16, 2) + 1 + random.random() + np.random.rand()
        rows = torch.randint(32, (16,))
        at("data")
        f_pos = run.f(x)
        x_neg = sample(run.f, replay.x[rows], run.rng)
        at("middle")
        loss = loss_fn(f_pos, run.f(x_neg))
        if push == "middle":
            replay.push(x_neg)
        run.optimizer.zero_grad()
        loss.backward()
        run.optimizer.step()
        if push == "end":
            replay.push(x_neg)
        if push == "in place":
            replay.x[rows] = x_neg
        if more == "draws":
            torch.randn(3, generator=run.rng)
        at("end")
    run.g.close()
    parts = {"model": run.f, "optimizer": run.optimizer, "scheduler": scheduler, "ema": ema}
    return {**frozen({**parts, "buffer": replay, "rng": run.rng}), **randomness()}, resumed


def run_until(run: Run, judgements: int) -> list[dict[str, Any]]:
    """States after each training step."""
    states = []
    for _ in range(judgements):
        run.step()
        states.append(run.state())
    return states


@torch.no_grad()
def scale_last_layer(model: nn.Module, factor: float) -> None:
    for p in [*model.parameters()][-2:]:
        p.mul_(factor)
