"""What a run keeps of its members: when they diverged, how close they came, what the guard said."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ebmguard import tags
from ebmguard.alerts import Alert
from ebmguard.sinks import read_jsonl

from ..engine.run_folder import RunFolder
from ..numbers import mean
from .config import ToyConfig
from .evaluate import Evaluator
from .network import EnsembleMLP

MEMBERS = "members.jsonl"
GRIDS = "grids.npz"
DIVERGED_GAP = 1e4
"""A member has diverged at the first update whose |energy gap| of f exceeds this or is NaN."""
WATCHED = (tags.GRAD_SCALE, tags.ESS, tags.ENERGY_GAP)
"""Diagnostics of the guard that are kept beside the metrics of an evaluation."""
AVERAGED = 5
"""Single evaluations move by factors of two to five; results are means over the last ones."""


class Record:
    """The numbers of a run as it goes.

    Args:
        config: settings of the run.
        folder: where members.jsonl, figures/grids.npz and results.json go.
        members: G.
        device: of the ensemble.

    Attributes:
        next_step: updates finished so far.
        diverged_at: (G,) first diverged update of each member, -1 where there is none. On the
            device: nothing waits for it.
    """

    def __init__(
        self, config: ToyConfig, folder: RunFolder, members: int, device: torch.device
    ) -> None:
        self.config = config
        self.folder = folder
        self.next_step = 0
        self.diverged_at = torch.full((members,), -1, device=device)
        self._iterations = config.settings.iterations
        self._alerts: dict[str, int] = {}
        self._kl = math.nan
        self._earlier = 0.0
        self._started = time.monotonic()

    def on_alert(self, alert: Alert) -> None:
        """Count an alert of the guard."""
        self._alerts[alert.level.name] = self._alerts.get(alert.level.name, 0) + 1

    def after_update(self, f_pos: Tensor, f_neg: Tensor) -> None:
        """Take in the energies of an update, (G, n_pos) and (G, n_neg)."""
        gap = f_pos.mean(1) - f_neg.mean(1)
        lost = ~(gap.abs() <= DIVERGED_GAP) & (self.diverged_at < 0)
        self.diverged_at = torch.where(lost, self.next_step, self.diverged_at)
        self.next_step += 1

    @property
    def evaluation(self) -> int:
        """Evaluations that are due by now."""
        return self.next_step * self.config.evaluations // self._iterations

    @property
    def is_due(self) -> bool:
        """Whether this update is followed by an evaluation; the last one is."""
        before = (self.next_step - 1) * self.config.evaluations // self._iterations
        return self.evaluation > before

    @property
    def is_evaluated(self) -> bool:
        """Whether the ensemble as it is has been evaluated."""
        rows = self._rows()
        return bool(rows) and rows[-1]["step"] == self.next_step

    def evaluate(
        self, evaluator: Evaluator, network: EnsembleMLP, guarded: Sequence[Mapping[str, float]]
    ) -> None:
        """Measure all members; the last evaluations look at samples too.

        Args:
            evaluator: measures.
            network: the ensemble.
            guarded: the guard's latest row of each member, of which some numbers are kept; none
                before the first has arrived.
        """
        rows = evaluator.measure(evaluator.log_density(network))
        for row, diagnostics in zip(rows, guarded, strict=False):
            row.update({tag: diagnostics[tag] for tag in WATCHED})
            # Of a mixture: who drew what counts.
            row.update({tag: x for tag, x in diagnostics.items() if tag.startswith("mixture/")})
        if self.evaluation > self.config.evaluations - AVERAGED:
            samples = evaluator.samples(network, self.next_step)
            found = evaluator.measure_samples(samples)
            rows = [row | more for row, more in zip(rows, found, strict=True)]
        ranked = sorted((row["kl"] for row in rows), key=lambda kl: (math.isnan(kl), kl))
        self._kl = ranked[len(rows) // 2]
        self.folder.append_rows(
            MEMBERS,
            [{"step": self.next_step, "member": i, **row} for i, row in enumerate(rows)],
        )

    def shown(self, row: Mapping[str, float]) -> dict[str, float | str]:
        """What is worth a look on the terminal: the guard's latest row, and the latest KL."""
        state: dict[str, float | str] = {}
        if not math.isnan(self._kl):
            state["median KL"] = self._kl
        if tags.GRAD_SCALE in row:
            state["mean GradScale"] = row[tags.GRAD_SCALE]
        state["alerts"] = ", ".join(f"{n} {name}" for name, n in self._alerts.items()) or "none"
        return state

    def finish(self, evaluator: Evaluator, network: EnsembleMLP, device: str) -> dict[str, Any]:
        """Write figures/grids.npz and results.json.

        Returns:
            What results.json holds.
        """
        log_density = evaluator.log_density(network)
        grid = evaluator.grid
        arrays: dict[str, Any] = {
            "axis": grid.axis.numpy(),
            "negative_energy": log_density.reshape(-1, *grid.shape).float().cpu().numpy(),
            "samples": evaluator.samples(network, self.next_step).float().cpu().numpy(),
        }
        # A kill in between leaves what was there.
        partial = self.folder.figures / f"partial.{GRIDS}"
        np.savez_compressed(partial, **arrays)
        os.replace(partial, self.folder.figures / GRIDS)
        rows = self._rows()
        diverged = self.diverged_at.tolist()
        members = [
            {
                **who,
                **_last_means([row for row in rows if row["member"] == i]),
                "diverged_at": diverged[i] if diverged[i] >= 0 else None,
            }
            for i, who in enumerate(self.config.members.describe())
        ]
        results = {
            "command": self.config.command(),
            "seed": self.config.seed,
            "iterations": self._iterations,
            "device": device,
            "wall_seconds": self.elapsed(),
            "diverged_at": min((at for at in diverged if at >= 0), default=None),
            "members": members,
        }
        self.folder.write_results(results)
        return results

    def _rows(self) -> list[dict[str, Any]]:
        file = self.folder.path / MEMBERS
        return read_jsonl(file) if file.is_file() else []

    def elapsed(self) -> float:
        """Seconds of training, those before a resume included."""
        return self._earlier + time.monotonic() - self._started

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors for a checkpoint."""
        return {
            "next_step": self.next_step,
            "diverged_at": self.diverged_at,
            "alerts": dict(self._alerts),
            "kl": self._kl,
            "elapsed": self.elapsed(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved record."""
        self.next_step = state["next_step"]
        self.diverged_at = state["diverged_at"]
        self._alerts = dict(state["alerts"])
        self._kl = state["kl"]
        self._earlier = state["elapsed"]


def _last_means(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Means of each metric over the last evaluations that have it."""
    last = rows[-AVERAGED:]
    names = dict.fromkeys(name for row in reversed(last) for name in row)
    return {
        name: mean([row[name] for row in last if name in row])
        for name in names
        if name not in ("step", "member")
    }
