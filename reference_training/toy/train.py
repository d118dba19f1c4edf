"""The toy trainer: an ensemble of small EBMs as one batched network under one guard.

The training loop is that of Nijkamp et al. (2020), with a leading dimension for the members.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ebmguard import guard, tags
from ebmguard.objective import weights
from ebmguard.samplers import Mixture

from ..engine import loop
from ..engine.graphs import graphed_energies
from ..engine.progress import log_to_terminal
from ..engine.record import Record
from ..engine.run_folder import read_rows
from ..engine.task import DIVERGED_GAP, Task
from ..plots.numbers import markdown_table, mean, median, number
from .config import ToyConfig
from .distributions import DISTRIBUTIONS
from .evaluate import Evaluator
from .members import averaged_loss
from .network import EnsembleMLP
from .sampler import Draws, make_training_sampler

MEMBERS = "members.jsonl"
GRIDS = "grids.npz"
WATCHED = (tags.GRAD_SCALE, tags.ESS, tags.ENERGY_GAP)
"""Diagnostics of the guard that are kept beside the metrics of an evaluation."""
AVERAGED = 5
"""Single evaluations move by factors of two to five; results are means over the last ones."""


class Ensemble(Task):
    """Every member of a run.

    Attributes:
        diverged_at: (G,) first diverged update of each member, -1 where there is none: that whose
            |energy gap| of f exceeds DIVERGED_GAP or is NaN. On the device: nothing waits for it.
        kl: median over the members at the latest evaluation, NaN before the first.
    """

    def __init__(self, config: ToyConfig, record: Record) -> None:
        settings, members, device = config.settings, config.members, record.device
        distribution = DISTRIBUTIONS[settings.data]
        self.title, self.lines_every = config.scenario, max(1, settings.iterations // 20)
        self.config, self.settings, self.members, self.record = config, settings, members, record
        self.network = EnsembleMLP(members.seed_of_each, distribution.dim).to(device)
        # Every member's gradient is its own, and so is every entry of Adam's state.
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=settings.lr, fused=True)
        self.draws = Draws(settings, members, members.seeds, device)
        self.evaluator = Evaluator(settings, members, device)
        self.diverged_at = torch.full((len(members),), -1, device=device)
        self.kl = math.nan
        self.f_neg = torch.empty(0)  # of the latest update
        # One guard for the whole ensemble: beta* is a vector over the members, and so is the
        # variant.
        self.loss_fn, self.sample_q = guard(
            None,
            make_training_sampler(settings, device),
            variant=[member["variant"] for member in members.describe()],
            **record.for_guard,
            **members.strength(settings.output_scale, settings.iterations, device),
        )
        self.exponents = members.exponents(settings.output_scale, settings.iterations, device)
        self.guard = self.loss_fn.guard
        sizes = ((len(members), n, distribution.dim) for n in (settings.n_pos, settings.negatives))
        zeros = (torch.zeros(size, device=device) for size in sizes)
        self.energies = graphed_energies(self.network, *zeros)
        self.guards = {"guard": self.guard}
        self.parts = {
            "network": self.network,
            "optimizer": self.optimizer,
            "draws": self.draws,
            "course": self,
        }

    def step(self, step: int) -> None:
        """One update of every member."""
        self.optimizer.param_groups[0]["lr"] = self.settings.lr_at(step)
        x_pos = self.draws.positives()
        x0, noise = self.draws.chains(self.settings.n_neg)
        x_neg = self.sample_q(self.network, x0, noise) if self.sample_q else x0
        f_pos, f_neg = self.energies(x_pos, x_neg)
        loss = self.loss_fn(f_pos, f_neg)  # summed over the members
        if self.members.terms > 1:
            starts, slopes = self.exponents
            loss = averaged_loss(f_pos, f_neg, starts + step * slopes, self.members.variants)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.take_in(step, f_pos.detach(), f_neg.detach())

    def take_in(self, step: int, f_pos: Tensor, f_neg: Tensor) -> None:
        """The energies of an update, (G, n_pos) and (G, n_neg), say who is lost."""
        self.f_neg = f_neg
        gap = f_pos.mean(1) - f_neg.mean(1)
        lost = ~(gap.abs() <= DIVERGED_GAP) & (self.diverged_at < 0)
        self.diverged_at = torch.where(lost, step, self.diverged_at)

    def see(self, step: int, row: Mapping[str, float]) -> None:
        """Nothing: members diverge one by one."""

    def evaluate(self, step: int) -> bool:
        """Measure all members where that is due; after the last update it is."""
        is_due = self._due(step) > self._due(step - 1)
        if is_due:
            self._measure(step)
        return is_due

    def _due(self, step: int) -> int:
        """Evaluations that are due after so many updates."""
        return step * self.config.evaluations // self.settings.iterations

    def _measure(self, step: int) -> None:
        """Of the last evaluations samples too, and of the guard's latest rows some numbers."""
        rows = self.evaluator.measure(self.evaluator.log_density(self.network))
        for row, diagnostics in zip(rows, self.guard.members, strict=False):
            row.update({tag: diagnostics[tag] for tag in WATCHED})
        if isinstance(mixture := getattr(self.sample_q, "original", None), Mixture):
            # Who drew what counts.
            for row, diagnostics, f in zip(rows, self.guard.members, self.f_neg, strict=False):
                shares = weights(f, diagnostics[tags.BETA_STAR])
                for name, part in mixture.parts.items():
                    row[f"mixture/{name}/weight"] = shares[part].sum().item()
        if self._due(step) > self.config.evaluations - AVERAGED:
            samples = self.evaluator.samples(self.network, step)
            found = self.evaluator.measure_samples(samples)
            rows = [row | more for row, more in zip(rows, found, strict=True)]
        self.kl = float(np.sort([row["kl"] for row in rows])[len(rows) // 2])  # NaN is last
        stamped = [{"step": step, "member": i, **row} for i, row in enumerate(rows)]
        self.record.folder.append_rows(MEMBERS, stamped)

    def shown(self, row: Mapping[str, float]) -> dict[str, float | str]:
        """The latest KL, the guard's latest row, and how many alerts there were."""
        state: dict[str, float | str] = {} if math.isnan(self.kl) else {"median KL": self.kl}
        if tags.GRAD_SCALE in row:
            state["mean GradScale"] = row[tags.GRAD_SCALE]
        counts = self.record.counts.items()
        return {**state, "alerts": ", ".join(f"{n} {name}" for name, n in counts) or "none"}

    def results(self) -> dict[str, Any]:
        """How close every member came, once figures/grids.npz is written."""
        step, folder = self.record.next_step, self.record.folder
        rows = read_rows(folder.path, MEMBERS)
        if not rows or rows[-1]["step"] != step:  # resumed with as many updates as there were
            self._measure(step)
            rows = read_rows(folder.path, MEMBERS)
        log_density, grid = self.evaluator.log_density(self.network), self.evaluator.grid
        arrays: dict[str, Any] = {
            "axis": grid.axis.numpy(),
            "negative_energy": log_density.reshape(-1, *grid.shape).float().cpu().numpy(),
            "samples": self.evaluator.samples(self.network, step).float().cpu().numpy(),
        }
        # A kill in between leaves what was there.
        partial = folder.figures / f"partial.{GRIDS}"
        np.savez_compressed(partial, **arrays)
        os.replace(partial, folder.figures / GRIDS)
        diverged = [at if at >= 0 else None for at in self.diverged_at.tolist()]
        members = self.members.describe()
        for i, (member, at) in enumerate(zip(members, diverged, strict=True)):
            member |= {**_last_means([r for r in rows if r["member"] == i]), "diverged_at": at}
        lost = min((at for at in diverged if at is not None), default=None)
        return {"diverged_at": lost, "members": members}

    def state_dict(self) -> dict[str, Any]:
        """How the members went, for a checkpoint."""
        return {"diverged_at": self.diverged_at, "kl": self.kl}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.diverged_at, self.kl = state["diverged_at"], state["kl"]


def _last_means(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Means of each metric over the last evaluations that have it."""
    last = rows[-AVERAGED:]
    names = dict.fromkeys(name for row in reversed(last) for name in row)
    return {
        name: mean([row[name] for row in last if name in row])
        for name in names
        if name not in ("step", "member")
    }


def table(members: Sequence[Mapping[str, Any]]) -> str:
    """Medians over the seeds, one line for each variant and β."""
    columns = ("kl", "tv", "mode_mass_error", "energy_scale", "kl_sgld")
    rows = []
    for variant, beta in dict.fromkeys((m["variant"], m["beta"]) for m in members):
        same = [m for m in members if (m["variant"], m["beta"]) == (variant, beta)]
        medians = (number(median([m[name] for m in same]), 4) for name in columns)
        lost = sum(m["diverged_at"] is not None for m in same)
        rows.append([variant, beta, *medians, f"{lost} of {len(same)}"])
    return markdown_table(["variant", "beta", *columns, "diverged"], rows, words=2)


train = partial(loop.train, Ensemble)
run = partial(loop.launch, train, lambda results: table(results["members"]))


def train_run(config: ToyConfig) -> dict[str, Any] | None:
    """Open or resume the run folder and train; None where Ctrl-C stopped the run."""
    log_to_terminal()
    return train(*config.open())
