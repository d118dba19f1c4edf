"""Guarded steps of several ranks: as one process, where one breaks down, and from the disk.

Started as ``python -m tests.retrofit.ranks_process RANK FOLDER WORLD`` from the project's root; a
start of processes takes long.
"""

from __future__ import annotations

import io
import logging
import re
import shutil
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ebmguard import Alert, Guard, Recovery, guard
from ebmguard.energies import Variant
from ebmguard.errors import ConfigError, DivergenceError
from ebmguard.recovery import Change
from tests.forks import ROOT
from tests.parts import Energy, climb, langevin
from tests.ranks import be_rank

WORLD = 2
STEPS = 5
VARIANTS: tuple[Variant, ...] = ("default", "no_pos", "batch", "true")

# -- a training, on one process or on all ----------------------------------------------------------

OPTIMIZERS: dict[str, Any] = {
    # Whether gradients are finite is known on the device alone, as on a GPU.
    "fused adam": partial(torch.optim.Adam, lr=0.01, fused=True),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


@dataclass(frozen=True)
class Case:
    """The sizes are (positives, negatives) of each rank."""

    sizes: tuple[tuple[int, int], ...]
    variant: Variant = "default"
    betas: tuple[float, ...] = ()  # of an ensemble
    spoiled: int | None = None  # a step at which a negative of the last rank is NaN
    last: tuple[tuple[int, int], ...] = ()  # other sizes of the last step
    has_classes: bool = False
    has_proposal: bool = False
    is_measured: bool = False  # the sampler, by the guard, which is not told its scale
    optimizer: str = "fused adam"
    passes: int = 1  # one forward pass of positives and negatives together, or one of each
    reweights: bool = False  # the energies, for a plain difference of means

    def batch(self, step: int, rank: int | None) -> tuple[Tensor, Tensor]:
        """Positives and starts of the negatives of a rank, or without a rank of all together."""
        rng = torch.Generator().manual_seed(step)
        sides: tuple[list[Tensor], list[Tensor]] = [], []
        sizes = self.last if self.last and step == STEPS - 1 else self.sizes
        for at, (n, m) in enumerate(sizes):
            x = torch.randn(n + m, 2, generator=rng, dtype=torch.float64) + at
            sides[0].append(x[:n])
            sides[1].append(2 * x[n:])
        if step == self.spoiled:
            sides[1][-1][1] = torch.nan
        pos, neg = (torch.cat(side) if rank is None else side[rank] for side in sides)
        return pos, neg


EQUAL = ((6, 4), (6, 4))
UNEQUAL = ((8, 3), (2, 5))  # both halve evenly, as the joined batch does
LAST = ((3, 1), (1, 2))
# Three shared samples would look like samples of three members.
MEMBERS: Any = {"sizes": ((8, 4), (2, 5)), "betas": (0.5, 0.0, -1.0)}
CASES: dict[str, Case] = {
    "true, equal": Case(EQUAL, "true"),
    **{f"{variant}, unequal": Case(UNEQUAL, variant) for variant in VARIANTS},
    "ensemble": Case(**MEMBERS),
    "NaN on one rank": Case(UNEQUAL, spoiled=STEPS - 1),
    "default, classes": Case(UNEQUAL, last=LAST, has_classes=True),
    "no output_scale given": Case(UNEQUAL, is_measured=True),
    "classes of an ensemble and a proposal": Case(**MEMBERS, has_classes=True, has_proposal=True),
    "a pass for each side": Case(UNEQUAL, "no_pos", passes=2, optimizer="momentum"),
    "reweighted": Case(EQUAL, last=LAST, reweights=True, optimizer="adam"),
}


class Members(nn.Module):
    """An ensemble of energies, as one module."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.members = nn.ModuleList(Energy(dtype=torch.float64) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([member(x) for member in self.members])


def train(case: Case, rank: int | None = None) -> dict[str, Any]:
    """Parameters and gradients of five steps, and all rows of the guard.

    Args:
        case: what is trained.
        rank: this rank, or None for one process with the joined batch.
    """
    torch.manual_seed(0)
    net: nn.Module = Members(len(case.betas)) if case.betas else Energy(dtype=torch.float64)
    group = None if rank is None else dist.group.WORLD
    model = net if rank is None else DistributedDataParallel(net, process_group=group)
    beta_star: Any = torch.tensor(case.betas, dtype=torch.float64) if case.betas else 0.7
    sampler = partial(climb, steps=3 if case.is_measured else 2)
    optimizer = OPTIMIZERS[case.optimizer](net.parameters())
    g = guard(
        None,
        sampler,
        beta_star=beta_star,
        output_scale=None if case.betas or case.is_measured else 2.0,
        variant=case.variant,
        process_group=group,
    )
    g.attach(optimizer=optimizer, step_size=0.1, noise_std=0.1, clamp=(-1.5, 2.0))
    kept: dict[str, list[Any]] = {"rows": [], "members": [], "gradients": []}
    for step in range(STEPS):
        xs = x_pos, x_neg = case.batch(step, rank)
        # A class for each point: where on the first axis it is.
        groups: Any = [x[:, 0].round().long() for x in xs] if case.has_classes else None
        x_neg = g.sampler(net, x_neg)
        log_q: Any = None
        if case.has_proposal:  # its log-density, up to a constant
            log_q = [-0.5 * (x - 1).square().sum(-1) for x in (x_pos, x_neg)]
            log_q = [q.expand(*beta_star.shape, -1) if case.betas else q for q in log_q]
        if case.passes == 1:
            f_pos, f_neg = model(torch.cat((x_pos, x_neg))).split((len(x_pos), len(x_neg)), -1)
        else:
            f_pos, f_neg = model(x_pos), model(x_neg)
        given = [tuple(pair) if pair else None for pair in (groups, log_q)]
        if case.reweights:
            f_pos, f_neg = g.reweight(f_pos, f_neg, *given)
            loss = f_neg.mean() - f_pos.mean()
        else:
            loss = g.loss_fn(f_pos, f_neg, *given)
        optimizer.zero_grad()
        loss.backward()
        kept["gradients"].append([p.grad.clone() for p in net.parameters() if p.grad is not None])
        optimizer.step()
        kept["rows"].append(dict(g.last))
        kept["members"].append(g.members)
    parameters = [p.detach() for p in net.parameters()]
    return {**kept, "parameters": parameters, "alerts": [alert.record() for alert in g.alerts]}


# -- what one rank does to all ---------------------------------------------------------------------

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
        self.net = Energy(dtype=torch.float64)
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
        x = langevin(f, self.buffer[rows], steps=2, noise_std=0.03)
        self.buffer[rows] = x
        return x

    def step(self, fault: str | None = None) -> None:
        """One training step; what becomes NaN on rank 1."""
        fault = fault if self.rank == 1 else None
        rows = torch.randperm(16, generator=self.order)[:6]
        x_pos = 0.5 * torch.randn(6, 2, dtype=torch.float64)
        x_neg = self.guard.sampler(self.net, rows)
        if fault == "samples":
            x_neg[0] = torch.nan
        f_pos, f_neg = self.model(torch.cat((x_pos, x_neg))).split(6)
        if fault == "energies":
            f_neg = torch.where(torch.arange(6) == 2, torch.nan, f_neg)
        loss = self.guard.loss_fn(f_pos, f_neg)
        self.optimizer.zero_grad()
        if fault == "backward":
            loss = loss * torch.nan  # which the averaging brings to all ranks
        self.scaler.scale(loss).backward()
        if fault == "gradient":
            gradient = self.optimizer.param_groups[0]["params"][0].grad
            gradient[0, 0] = torch.nan  # after they were averaged
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def kept_step(self, fault: str | None = None, at: int = FAULTY_STEP) -> None:
        """One whose state before is kept, with this fault at a step."""
        if self.guard.step >= self.kept_from:
            self.states[self.guard.step] = self.state()
        self.step(fault if self.guard.step == at else None)

    def go(self, end: int, fault: str | None = None, at: int = FAULTY_STEP) -> None:
        """Until a step."""
        while self.guard.step < end:
            self.kept_step(fault, at)

    def fail(self, fault: str) -> None:
        """Until a rollback."""
        count = len(self.guard.rollbacks)
        while len(self.guard.rollbacks) == count:
            self.kept_step(fault)

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
            "rules": self.guard.state_dict()["judge"],
            "parameters": [p.detach().clone() for p in self.net.parameters()],
        }


def stops(rank: int, fault: str) -> dict[str, Any]:
    """A run with ``action="raise"``."""
    run = Run(rank, action="raise")
    try:
        run.go(FAULTY_STEP + 3, fault)
    except DivergenceError as error:
        return {**run.told(), "error": (type(error).__name__, str(error))}
    return run.told()


def rolls_back(rank: int, fault: str) -> dict[str, Any]:
    """A run that is taken back as it was, and goes through the same steps again."""
    recovery = Recovery(**SNAPSHOTS, **UNCHANGED)
    run = Run(rank, kept_from=RESTORED, action="rollback", recovery=recovery)
    run.fail(fault)
    restored, before = run.state(), dict(run.states)
    run.go(FAULTY_STEP + 1)
    again = {step: run.states[step] for step in range(RESTORED, FAULTY_STEP + 1)}
    return {**run.told(), "restored": restored, "before": before, "again": again}


def climbs(rank: int, folder: Path) -> dict[str, Any]:
    """Two rollbacks by cause and with new random numbers, and an ERROR that none answers."""
    said: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ebmguard").addHandler(listener)
    options: dict[str, Any] = {"fused": True, "action": "rollback", "judge_in_loss": False}
    options |= {"recovery": Recovery(**SNAPSHOTS, budget=2), "log_dir": folder / "log"}
    run = Run(rank, **options)
    draws = [run.draws()]
    for fault in ("gradient", "energies"):
        run.fail(fault)
        draws.append(run.draws())
    run.go(FAULTY_STEP + 3, "samples")
    run.guard.close()
    logging.getLogger("ebmguard").removeHandler(listener)
    return {**run.told(), "draws": draws, "beta_star": run.guard.last["beta_star"], "said": said}


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

    first = make("whole")
    first.go(12)
    first.states[12] = first.state()
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
        run.go(12)
        run.states[12] = run.state()
        found[name] = {"step": step, "states": run.states}
    try:
        make("lacks all").guard.resume()
    except ConfigError as error:
        found["lacks all"] = str(error).replace(str(folder), "FOLDER")
    return found


def of_rank(_: Any, folder: Path) -> dict[str, Any]:
    logging.getLogger("ebmguard").propagate = False  # what is said is not to be seen here
    logging.getLogger("ebmguard").addHandler(logging.NullHandler())
    rank = dist.get_rank()
    found: dict[str, Any] = {name: train(case, rank) for name, case in CASES.items()}
    for fault in FAULTS:
        found[f"rolls back, {fault}"] = rolls_back(rank, fault)
        found[f"stops, {fault}"] = stops(rank, fault)
    found["climbs"], found["goes on"] = climbs(rank, folder), goes_on(rank, folder)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    run = Run(rank, scaler=scaler)
    run.go(3, "backward", at=1)  # one rank's pass is not finite
    found["leaves out"] = {**run.told(), "states": run.states}
    found["page"] = page()
    return found


def page() -> str:
    """What the script of the documentation prints; the ranks have met already."""
    text = (ROOT / "docs" / "frameworks.md").read_text()
    text = text.split("\n## Several ranks\n")[1].split("\n## ")[0]
    (script,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    printed, met = io.StringIO(), {"init_process_group": Mock(), "destroy_process_group": Mock()}
    with redirect_stdout(printed), patch.multiple(dist, **met):
        exec(script, {"__name__": "__main__"})
    return printed.getvalue()


if __name__ == "__main__":
    be_rank(of_rank)
