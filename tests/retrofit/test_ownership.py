"""One guard for a run: one that is made once an epoch is told, and other runs are left alone."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ebmguard import Guard, guard
from ebmguard.errors import ConfigError
from ebmguard.recovery import Recovery
from tests.parts import Energy, gradient_at


class Chains:
    def __call__(self, f: Any, x: torch.Tensor) -> torch.Tensor:
        return gradient_at(f, x)

    def sample(self, f: Any, x: torch.Tensor) -> torch.Tensor:
        return gradient_at(f, x)


class Trainer:
    """Each epoch makes a guard."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.kept = folder, list[Guard]()
        self.sampler: Any = gradient_at
        self.new()

    def new(self) -> None:
        self.f = Energy()
        self.optimizer = torch.optim.Adam(self.f.parameters())

    def epoch(self, sampler: Any = gradient_at, **options: Any) -> Guard:
        loss, sample = g = guard(None, sampler, beta_star=0.5, output_scale=1, **options)
        for _ in range(2):
            loss(self.f(torch.randn(4, 2)), self.f(sample(self.f, torch.randn(4, 2)))).backward()
            self.optimizer.step()
        return g

    @property
    def told(self) -> dict[str, Any]:
        return {"model": self.f, "optimizer": self.optimizer}

    @property
    def both(self) -> list[Any]:
        return [self.optimizer, torch.optim.SGD(self.f.parameters())]

    def side_by_side(self) -> None:
        """A guard for each term of a loss."""
        self.new()
        pair = [guard(None, gradient_at, beta_star=0, **self.told) for _ in range(2)]
        for _ in range(2):
            for loss, sample in pair:
                loss(self.f(torch.randn(4, 2)), self.f(sample(self.f, torch.randn(4, 2))))
            self.optimizer.step()

    def rebound(self) -> None:
        self.sampler = self.epoch(self.sampler, **self.told).sampler

    def another_run(self) -> None:
        self.new()
        self.kept.append(self.epoch(**self.told))

    def another_run_of_this_sampler(self) -> None:
        self.new()
        self.kept.append(self.epoch(CHAINS, **self.told))

    def recorded(self) -> None:
        self.new()
        recovery = Recovery(folder=self.folder)
        told = {**self.told, "action": "rollback", "recovery": recovery}
        self.kept.append(self.epoch(**told, buffer=torch.zeros(1, 2)))


CHAINS = Chains()
KEPT = Chains()
REFUSED: dict[str, tuple[Callable[[Trainer], Any], str]] = {
    "dropped": (lambda t: t.epoch(**t.told) and None, "The optimizer, Adam, has a guard already"),
    "kept": (lambda t: t.kept.append(t.epoch(**t.told)), "The optimizer, Adam, has a guard"),
    "one of two, side by side, one of which rolls back": (
        lambda t: t.kept.append(
            guard(None, gradient_at, action="rollback", **t.told | {"optimizer": t.both})
        ),
        "The optimizer, Adam, has a guard",
    ),
    "the sampler's name bound anew": (Trainer.rebound, "The sampler is guarded already"),
    "nothing told, dropped": (lambda t: t.epoch() and None, "The sampler, gradient_at, has"),
    "nothing told, kept": (lambda t: t.kept.append(t.epoch()), "The sampler, gradient_at, has"),
    "a sampler's object": (lambda t: t.kept.append(t.epoch(KEPT)), "The sampler, Chains, has"),
    "its method": (lambda t: t.epoch(KEPT.sample) and None, r"The sampler, Chains\.sample, has"),
    "a folder": (lambda t: t.kept.append(guard(None, None, log_dir=t.folder)), "log_dir="),
    "a folder of snapshots": (Trainer.recorded, "Recovery: folder="),
}
ALLOWED: dict[str, Callable[[Trainer], Any]] = {
    "closed": lambda t: t.epoch(**t.told).close(),
    "another run": Trainer.another_run,
    "another run of the same sampler": Trainer.another_run_of_this_sampler,
    "side by side": Trainer.side_by_side,
    "never used": lambda t: guard(None, gradient_at, **t.told) and None,
    "samples alone": lambda t: t.kept.append(guard(None, gradient_at, beta_star=0)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_guard_that_is_made_once_an_epoch(tmp_path: Path, name: str) -> None:
    make, what = REFUSED[name]
    trainer = Trainer(tmp_path / "run")
    make(trainer)
    with pytest.raises(ConfigError, match=f"{what}(?s:.*)once, before the loop over epochs"):
        make(trainer)


@pytest.mark.parametrize("name", ALLOWED)
def test_another_run_is_no_second_guard(tmp_path: Path, name: str) -> None:
    trainer = Trainer(tmp_path / "run")
    for _ in range(3):
        ALLOWED[name](trainer)


def test_who_means_another_run_asks_once_more(tmp_path: Path) -> None:
    """Nothing else could be said of a guard that is gone."""
    trainer = Trainer(tmp_path)
    trainer.epoch(**trainer.told)
    with pytest.raises(ConfigError, match=r"call guard\(\.\.\.\) once more"):
        trainer.epoch(**trainer.told)
    trainer.epoch(**trainer.told)


class Module(torch.nn.Module):
    """It has the guarded sampler, and a contrastive part of its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.net, self.lock = Energy(), threading.Lock()
        self.loss, self.sampler = guard(self.contrast, gradient_at, **options)

    def contrast(self, f_pos: torch.Tensor, f_neg: torch.Tensor) -> torch.Tensor:
        with self.lock:
            return f_neg.mean() - f_pos.mean()


def test_a_loss_that_knows_the_sampler_keeps_no_guard_alive(tmp_path: Path) -> None:
    """By reference counting alone: the folder is free again at once."""
    gc.disable()
    try:
        for _ in range(3):
            module = Module(log_dir=tmp_path)
            del module.loss
            del module
    finally:
        gc.enable()


def test_a_copy_of_what_holds_the_sampler_copies_no_loss() -> None:
    module = Module()
    del module.lock
    held = {"sampler": module.sampler, "net": module.net}
    module.lock = threading.Lock()  # which nothing can copy
    copied = copy.deepcopy(held)
    assert torch.equal(
        copied["sampler"](copied["net"], torch.ones(2, 2)),
        module.sampler(module.net, torch.ones(2, 2)),
    )


def test_a_guard_that_goes_inside_an_optimizers_step_breaks_none() -> None:
    f = Energy()
    optimizer = torch.optim.SGD(f.parameters(), lr=0.1)
    held = [guard(None, gradient_at, model=f, optimizer=optimizer)]

    def closure() -> torch.Tensor:
        loss: torch.Tensor = held[0].loss(f(torch.randn(4, 2)), f(torch.randn(4, 2)))
        held.clear()
        return loss

    held[0].sampler(f, torch.randn(4, 2))
    optimizer.step(closure)
    assert not held
