"""Runs of several ranks, one of which breaks down, or which go on from the disk.

Started as ``python -m tests.retrofit.ranks_actions RANK FOLDER WORLD`` from the project's root.
They also train the cases of :mod:`tests.retrofit.ddp_training`: a start of processes takes long.
"""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ebmguard import Alert, Guard, Recovery, guard
from ebmguard.errors import ConfigError, DivergenceError
from ebmguard.recovery import Change
from tests.ranks import joined
from tests.retrofit.ddp_training import CASES, Energy, train

FAULTY_STEP = 7
RESTORED = 4  # the newest certified snapshot then
SNAPSHOTS: dict[str, Any] = {"every": 2, "certify_after": 2, "relapse_within": 0}
UNCHANGED: dict[str, Any] = {"ladder": (Change(),), "reseed": False}


FAULTS = "energies", "samples", "gradient"  # what becomes NaN on rank 1


class Run:
    """A guarded trainer of one rank, with noise of its own, and an order that all ranks share."""

    def __init__(
        self,
        rank: int,
        *,
        seed: int = 0,
        kept_from: int = 0,
        fused: bool = False,
        scaler: torch.amp.GradScaler | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(seed)
        self.rank = rank
        self.net = Energy()
        self.model = DistributedDataParallel(self.net)
        torch.manual_seed(1000 + rank)
        self.order = torch.Generator().manual_seed(5)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01, fused=fused)
        self.buffer = torch.randn(16, 2, dtype=torch.float64)
        self.scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
        self.alerts: list[Alert] = []
        self.guard: Guard = guard(
            None,
            self.sample,
            on_alert=self.alerts.append,
            **({"beta_star": 0.7, "process_group": dist.group.WORLD} | options),
            output_scale=2 * 0.1 / 0.03**2,
        )
        self.guard.attach(
            model=self.net,
            optimizer=self.optimizer,
            buffer=self.buffer,
            generators=[self.order],
            scaler=self.scaler,
        )
        # By the number of the step that comes next.
        self.kept_from = kept_from
        self.states: dict[int, list[Tensor]] = {}

    def sample(self, f: nn.Module, rows: Tensor) -> Tensor:
        x = self.buffer[rows]
        for _ in range(2):
            x.requires_grad_()
            (gradient,) = torch.autograd.grad(f(x).sum(), x)
            x = x.detach() + 0.1 * gradient + 0.03 * torch.randn_like(x)
        self.buffer[rows] = x
        return x

    def step(self, fault: str | None = None) -> None:
        """One training step.

        Args:
            fault: what becomes NaN on rank 1.
        """
        is_hit = self.rank == 1
        rows = torch.randperm(16, generator=self.order)[:6]
        x_pos = 0.5 * torch.randn(6, 2, dtype=torch.float64)
        x_neg = self.guard.sampler(self.net, rows)
        if is_hit and fault == "samples":
            x_neg[0] = torch.nan
        f_pos, f_neg = self.model(torch.cat((x_pos, x_neg))).split(6)
        if is_hit and fault == "energies":
            f_neg = torch.where(torch.arange(6) == 2, torch.nan, f_neg)
        loss = self.guard.loss_fn(f_pos, f_neg)
        self.optimizer.zero_grad()
        if is_hit and fault == "backward":
            loss = loss * torch.nan  # which the averaging brings to all ranks
        self.scaler.scale(loss).backward()
        if is_hit and fault == "gradient":
            gradient = self.optimizer.param_groups[0]["params"][0].grad
            gradient[0, 0] = torch.nan  # after they were averaged
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def kept_step(self, fault: str | None = None) -> None:
        """One whose state before is kept."""
        if self.guard.step >= self.kept_from:
            self.states[self.guard.step] = self.state()
        self.step(fault)

    def state(self) -> list[Tensor]:
        """Parameters and Adam's moments, and this rank's buffer."""
        moments = [x for state in self.optimizer.state.values() for x in state.values()]
        return [x.detach().clone() for x in (*self.net.parameters(), *moments, self.buffer)]

    def draws(self) -> dict[str, list[float]]:
        """The next random numbers: this rank's, and those of the common order."""
        own, common = torch.rand(4), torch.rand(4, generator=self.order)
        return {"own": own.tolist(), "common": common.tolist()}

    def told(self) -> dict[str, Any]:
        """What must be the same on all ranks."""
        return {
            "alerts": [alert.record() for alert in self.alerts],
            "rollbacks": [rollback.record() for rollback in self.guard.rollbacks],
            "attempt": self.guard.attempt,
            "step": self.guard.step,
            "rules": self.guard._loop.judge.state_dict(),
            "parameters": [p.detach().clone() for p in self.net.parameters()],
        }


def stops(rank: int, fault: str) -> dict[str, Any]:
    """A run with ``action="raise"``."""
    run = Run(rank, action="raise")
    try:
        for step in range(FAULTY_STEP + 3):
            run.step(fault if step == FAULTY_STEP else None)
    except DivergenceError as error:
        return {**run.told(), "error": (type(error).__name__, str(error))}
    return run.told()


def rolls_back(rank: int, fault: str) -> dict[str, Any]:
    """A run that is taken back as it was, and goes through the same steps again."""
    recovery = Recovery(**SNAPSHOTS, **UNCHANGED)
    run = Run(rank, kept_from=RESTORED, action="rollback", recovery=recovery)
    while not run.guard.rollbacks:
        run.kept_step(fault if run.guard.step == FAULTY_STEP else None)
    restored, before = run.state(), dict(run.states)
    while run.guard.step <= FAULTY_STEP:
        run.kept_step()
    again = {step: run.states[step] for step in range(RESTORED, FAULTY_STEP + 1)}
    return {**run.told(), "restored": restored, "before": before, "again": again}


def climbs(rank: int, folder: Path) -> dict[str, Any]:
    """Two rollbacks by cause and with new random numbers, and an ERROR that none answers."""
    log_dir = folder / "log"
    said: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ebmguard").addHandler(listener)
    recovery = Recovery(**SNAPSHOTS, budget=2)
    # Fused: whether gradients are finite is known on the device alone, as on a GPU.
    run = Run(
        rank,
        fused=True,
        action="rollback",
        recovery=recovery,
        log_dir=log_dir,
        judge_in_loss=False,
    )
    draws = [run.draws()]
    for fault in ("gradient", "energies"):
        count = len(run.guard.rollbacks)
        while len(run.guard.rollbacks) == count:
            run.step(fault if run.guard.step == FAULTY_STEP else None)
        draws.append(run.draws())
    while run.guard.step < FAULTY_STEP + 3:
        run.step("samples" if run.guard.step == FAULTY_STEP else None)
    run.guard.close()
    logging.getLogger("ebmguard").removeHandler(listener)
    return {
        **run.told(),
        "draws": draws,
        "beta_star": run.guard.last["beta_star"],
        "said": said,
    }


def leaves_out(rank: int, **options: Any) -> dict[str, Any]:
    """A run that goes on where one rank's backward pass is not finite."""
    run = Run(rank, **options)
    for step in range(3):
        run.kept_step("backward" if step == 1 else None)
    return {**run.told(), "states": run.states}


def goes_on(rank: int, folder: Path) -> dict[str, Any]:
    """A run that writes snapshots, and others that go on with it or are refused."""
    folder, made = folder / "snapshots", list[Run]()

    def make(name: str, seed: int = 0) -> Run:
        for before in made:
            before.guard.close()
        recovery = Recovery(**SNAPSHOTS, **UNCHANGED, folder=folder / name, folder_every=2)
        options: dict[str, Any] = {"action": "rollback", "recovery": recovery}
        made[:] = [Run(rank, seed=seed, kept_from=8, **options)]
        return made[0]

    def refused(act: Callable[[], object]) -> str:
        try:
            act()
        except ConfigError as error:
            return str(error).replace(str(folder), "FOLDER")
        return "accepted"

    first = make("whole")
    for _ in range(12):
        first.kept_step()
    first.states[first.guard.step] = first.state()
    dist.barrier()
    if rank == 0:
        for name in ("lacks one", "lacks all"):
            shutil.copytree(folder / "whole", folder / name)
        max((folder / "lacks one" / "rank1").iterdir()).unlink()
        shutil.rmtree(folder / "lacks all" / "rank1")
    dist.barrier()
    found: dict[str, Any] = {"first": first.states}
    for name in ("whole", "lacks one"):
        run = make(name, seed=1)
        step = run.guard.resume()
        while run.guard.step < 12:
            run.kept_step()
        run.states[12] = run.state()
        found[name] = {"step": step, "states": run.states}
    found["lacks all"] = refused(make("lacks all").guard.resume)
    found["begins"] = refused(make("lacks all").step)
    found["nothing"] = make("nothing").guard.resume()
    return found


def main(rank: int, folder: Path, world: int) -> None:
    logging.getLogger("ebmguard").propagate = False  # what is said is not to be seen here
    logging.getLogger("ebmguard").addHandler(logging.NullHandler())
    with joined(rank, world, folder):
        training = {name: train(case, world, rank) for name, case in CASES.items()}
        results: dict[str, Any] = {"training": training}
        for fault in FAULTS:
            results[f"rolls back, {fault}"] = rolls_back(rank, fault)
            results[f"stops, {fault}"] = stops(rank, fault)
        results["climbs"], results["goes on"] = climbs(rank, folder), goes_on(rank, folder)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        results["leaves out, by scaler"] = leaves_out(rank, scaler=scaler)
        results["leaves out, fused"] = leaves_out(rank, fused=True)
        torch.save(results, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
