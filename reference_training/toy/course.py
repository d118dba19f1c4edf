"""What a run keeps of its members: when they diverged, how close they came, what the guard said."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ebmguard import tags

from ..engine.run_folder import RunFolder, read_rows
from ..engine.task import DIVERGED_GAP
from ..plots.numbers import mean
from .config import ToyConfig
from .evaluate import Evaluator
from .network import EnsembleMLP

MEMBERS = "members.jsonl"
GRIDS = "grids.npz"
WATCHED = (tags.GRAD_SCALE, tags.ESS, tags.ENERGY_GAP)
"""Diagnostics of the guard that are kept beside the metrics of an evaluation."""
AVERAGED = 5
"""Single evaluations move by factors of two to five; results are means over the last ones."""


class Course:
    """How the members of a run go, for members.jsonl and figures/grids.npz.

    Attributes:
        diverged_at: (G,) first diverged update of each member, -1 where there is none: that whose
            |energy gap| of f exceeds DIVERGED_GAP or is NaN. On the device: nothing waits for it.
        kl: median over the members at the latest evaluation, NaN before the first.
    """

    def __init__(
        self, config: ToyConfig, folder: RunFolder, evaluator: Evaluator, network: EnsembleMLP
    ) -> None:
        self.config, self.folder = config, folder
        self.evaluator, self.network = evaluator, network
        self.diverged_at = torch.full((len(config.members),), -1, device=evaluator.device)
        self.kl = math.nan

    def after_update(self, step: int, f_pos: Tensor, f_neg: Tensor) -> None:
        """Take in the energies of an update, (G, n_pos) and (G, n_neg)."""
        gap = f_pos.mean(1) - f_neg.mean(1)
        lost = ~(gap.abs() <= DIVERGED_GAP) & (self.diverged_at < 0)
        self.diverged_at = torch.where(lost, step, self.diverged_at)

    def due(self, step: int) -> int:
        """Evaluations that are due after so many updates."""
        return step * self.config.evaluations // self.config.total_steps

    def is_due(self, step: int) -> bool:
        """Whether an evaluation follows after so many updates; after the last one it does."""
        return self.due(step) > self.due(step - 1)

    def evaluate(self, step: int, guarded: Sequence[Mapping[str, float]]) -> None:
        """Measure all members after so many updates; the last evaluations look at samples too.

        Of the guard's latest row of each member some numbers are kept; none before the first.
        """
        rows = self.evaluator.measure(self.evaluator.log_density(self.network))
        for row, diagnostics in zip(rows, guarded, strict=False):
            row.update({tag: diagnostics[tag] for tag in WATCHED})
            # Of a mixture: who drew what counts.
            row.update({tag: x for tag, x in diagnostics.items() if tag.startswith("mixture/")})
        if self.due(step) > self.config.evaluations - AVERAGED:
            samples = self.evaluator.samples(self.network, step)
            found = self.evaluator.measure_samples(samples)
            rows = [row | more for row, more in zip(rows, found, strict=True)]
        self.kl = float(np.sort([row["kl"] for row in rows])[len(rows) // 2])  # NaN is last
        stamped = [{"step": step, "member": i, **row} for i, row in enumerate(rows)]
        self.folder.append_rows(MEMBERS, stamped)

    def results(self, step: int, guarded: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        """What results.json holds of the members, once figures/grids.npz is written."""
        rows = read_rows(self.folder.path, MEMBERS)
        if not rows or rows[-1]["step"] != step:  # resumed with as many updates as there were
            self.evaluate(step, guarded)
            rows = read_rows(self.folder.path, MEMBERS)
        log_density, grid = self.evaluator.log_density(self.network), self.evaluator.grid
        arrays: dict[str, Any] = {
            "axis": grid.axis.numpy(),
            "negative_energy": log_density.reshape(-1, *grid.shape).float().cpu().numpy(),
            "samples": self.evaluator.samples(self.network, step).float().cpu().numpy(),
        }
        # A kill in between leaves what was there.
        partial = self.folder.figures / f"partial.{GRIDS}"
        np.savez_compressed(partial, **arrays)
        os.replace(partial, self.folder.figures / GRIDS)
        diverged = [at if at >= 0 else None for at in self.diverged_at.tolist()]
        members = self.config.members.describe()
        for i, (member, at) in enumerate(zip(members, diverged, strict=True)):
            member |= {**_last_means([r for r in rows if r["member"] == i]), "diverged_at": at}
        lost = min((at for at in diverged if at is not None), default=None)
        return {"diverged_at": lost, "members": members}

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors for a checkpoint."""
        return {"diverged_at": self.diverged_at, "kl": self.kl}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved course."""
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
