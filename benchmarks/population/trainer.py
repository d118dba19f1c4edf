"""Trains one run of the population under the guard, and notes how well the network does."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ebmguard import guard
from ebmguard.samplers import ReplayBuffer, annealed, mala, sgld

from .data import load
from .families import Run
from .networks import Energy

SKILL = "skill"
"""Held-out accuracy or area under the ROC curve, in percent; see :meth:`Trainer.skill`."""

_BUFFER = 1000


def make_optimizer(run: Run, parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of a run, as people build it."""
    kinds: dict[str, Any] = {
        "sgd": torch.optim.SGD,
        "momentum": partial(torch.optim.SGD, momentum=0.9, weight_decay=5e-4),
        "lion": partial(Lion, of_step=0.9, of_mean=0.99),
        "sign": partial(Lion, of_step=0.0, of_mean=0.0),
        "rmsprop": torch.optim.RMSprop,
        "adamw": partial(torch.optim.AdamW, betas=(0.9, 0.999), weight_decay=0.01),
        "adam": partial(torch.optim.Adam, betas=(0.9, 0.999)),
    }
    made: torch.optim.Optimizer = kinds[run.optimizer](parameters, lr=run.lr)
    return made


class Lion(torch.optim.Optimizer):
    """Steps of one size along the sign of a mean gradient (Chen et al. 2023)."""

    def __init__(self, parameters: Any, lr: float, of_step: float, of_mean: float) -> None:
        super().__init__(parameters, {"lr": lr, "of_step": of_step, "of_mean": of_mean})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.sub_(group["lr"] * p.grad.lerp(mean, group["of_step"]).sign())
                mean.lerp_(p.grad, 1 - group["of_mean"])


def rate(run: Run, step: int) -> float:
    """The learning rate of a step, as a part of the run's."""
    part = min(1.0, (step + 1) / (run.warm_up or 1))
    if run.schedule == "cyclic":
        return part * (0.525 - 0.475 * math.cos(8 * math.pi * step / run.steps))
    if run.schedule == "late":
        return part * min(1.0, max(1 / 30, (step - 0.6 * run.steps) / 50))
    return part


class Trainer:
    """One run: data, network, optimizer, sampler and guard.

    Args:
        run: its settings.
        options: of the guard, such as ``action="rollback"``; they come before the run's.
    """

    def __init__(self, run: Run, **options: Any) -> None:
        self.run = run
        torch.manual_seed(run.seed)
        self.rng = torch.Generator().manual_seed(run.seed)
        self.data = data = load(run.data)
        shape = data.x.shape[1:]
        self.classes = run.levels or data.classes
        outputs = 1 if run.task == "ebm" else self.classes
        sizes = (run.width, run.activation, run.norm, run.scale)
        self.network = Energy(shape, outputs, run.network, *sizes)
        self.optimizer = make_optimizer(run, self.network.parameters())
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: rate(run, step)
        )
        self.buffer: ReplayBuffer | None = None
        if run.sampler in ("persistent", "annealed", "mala"):
            self.buffer = ReplayBuffer(
                _BUFFER // self.classes * self.classes,
                shape,
                reinit_rate=0.05,
                generator=self.rng,
                low=-2.0 if len(shape) == 1 else -1.0,
                high=2.0 if len(shape) == 1 else 1.0,
                classes=self.classes if run.task == "joint" else 1,
            )
        noise, self.step_size = run.noise_std, run.step_size / run.scale
        told: dict[str, Any] = {"step_size": self.step_size, "noise_std": noise} if noise else {}
        if run.sampler == "mala":
            told = {}
        told |= {"substeps": 1, "action": "warn"}  # a run is what its settings say
        told["beta_star"] = run.beta_star / run.scale
        told["output_scale"] = run.output_scale if noise else 1e6
        self.guard = guard(
            None,
            self.draw,
            model=self.network,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            buffer=self.buffer,
            clamp=(-run.clamp, run.clamp) if run.clamp else None,
            generators=[self.rng],
            sgld_steps=run.sgld_steps,
            steps_argument="steps",
            **told | options,
        )
        self.loss, self.sample = self.guard
        self._probes = self._make_probes()

    def draw(self, f: Energy, data: Tensor, y: Tensor | None, steps: int) -> Tensor:
        """The sampler that the guard tempers: samples from f, (B, ...)."""
        run, rows = self.run, None
        if self.buffer is not None:
            start, rows = self.buffer.sample(len(data), y)
        elif run.sampler == "data":
            start = data
        else:
            start = torch.empty_like(data).uniform_(-1, 1, generator=self.rng)
            if run.prior:
                start.normal_(generator=self.rng)
        step_size: Any = self.step_size
        noise_std: Any = run.noise_std
        if run.sampler == "annealed":
            factors = annealed(2, 1, steps)
            noise_std = [noise_std * a for a in factors]
            step_size = [step_size * a**2 for a in factors]
        own: Any = (lambda x: f(x, y)) if y is not None else f
        if run.prior:
            own = lambda x: f(x) - x.square().sum(1) / 2  # noqa: E731
        if run.sampler == "mala":
            sizes = {"step_size": step_size, "noise_std": noise_std}
            found = mala(own, start, steps=steps, generator=self.rng, **sizes)
        else:
            found = sgld(
                own,
                start,
                steps=steps,
                step_size=step_size,
                noise_std=noise_std,
                generator=self.rng,
                clamp=(-run.clamp, run.clamp) if run.clamp else None,
            )
        if self.buffer is not None and rows is not None:
            self.buffer.write(rows, found)
        return found

    def step(self) -> dict[str, float]:
        """One training step: its row, with the skill that the network had before it."""
        run, data = self.run, self.data
        skill = self.skill()
        chosen = torch.randint(len(data.x), (run.batch,), generator=self.rng)
        x, y = data.x[chosen], data.y[chosen]
        clean = x
        level: Any = 1
        if run.levels:
            y = torch.randint(run.levels, (run.batch,), generator=self.rng)
            level = (3.0**y).reshape(-1, *[1] * (x.dim() - 1))
        if data.noise:
            x = x + level * data.noise * torch.randn(x.shape, generator=self.rng)
        of_class = y if run.task == "joint" else None
        negatives = self.sample(self.network, x, of_class)
        f_pos, f_neg = self.network(x, of_class), self.network(negatives, of_class)
        loss = self.loss(f_pos, f_neg)
        if run.task == "jem":
            loss = loss + functional.cross_entropy(self.network.classify(clean), y)
        if run.l2:
            loss = loss + run.l2 * (f_pos.square().mean() + f_neg.square().mean())
        if run.penalty:
            between = torch.lerp(x, negatives, torch.rand(1, generator=self.rng)).requires_grad_()
            f_sum = self.network(between, of_class).sum()
            (slope,) = torch.autograd.grad(f_sum, between, create_graph=True)
            loss = loss + run.penalty * slope.square().flatten(1).sum(1).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return {**self.guard.last, "loss": float(loss.detach()), SKILL: skill}

    @torch.no_grad()
    def skill(self) -> float:
        """How good the network is on held-out data, in percent; NaN where it is not finite.

        A classifier's accuracy. Of a network that only has energies, the area under the ROC curve
        of f between held-out data and data whose coordinates were permuted, each among the samples
        (in the plane, and uniform points).
        """
        data, probes = self.data, self._probes
        state = self.network.training
        self.network.eval()
        try:
            lowest = torch.zeros_like(data.held_out_y) if self.run.levels else None
            if self.run.task != "ebm" and lowest is None:
                logits = self.network.classify(data.held_out)
                if not bool(torch.isfinite(logits).all()):
                    return math.nan
                return 100 * float((logits.argmax(1) == data.held_out_y).float().mean())
            real, shuffled = (self.network(x, lowest) for x in (data.held_out, probes))
        finally:
            self.network.train(state)
        if not bool(torch.isfinite(real).all() and torch.isfinite(shuffled).all()):
            return math.nan
        higher = (real[:, None] > shuffled).double() + 0.5 * (real[:, None] == shuffled).double()
        return 100 * float(higher.mean())

    def _make_probes(self) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        flat = self.data.held_out.flatten(1)
        if flat.shape[1] == 2:  # of a plane, the margins say too much
            return torch.empty_like(flat).uniform_(-2.5, 2.5, generator=generator)
        orders = torch.rand(flat.shape, generator=generator).argsort(0)
        return flat.gather(0, orders).reshape(self.data.held_out.shape)
