"""Records runs: every number that rules may read, at every step, in one file a group of runs."""

from __future__ import annotations

import math
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ebmguard.alerts import NonFiniteRule

from .families import Run
from .fates import Watch
from .trainer import SKILL, Trainer

TAGS = (
    "beta_star", "energy_gap", "energy_overlap", "f_pos/mean", "f_pos/median", "f_pos/std",
    "f_neg/mean", "f_neg/median", "f_neg/std", "f_neg/min", "f_neg/q95", "f_neg/max",
    "grad_scale", "ref/grad_scale", "ess", "ref/ess", "sampler/grad_norm", "sampler/grad_norm_max",
    "sampler/drift_to_noise", "sampler/acceptance", "sampler/clamped", "sampler/repeated",
    "optim/grad_norm", "optim/update_norm", "nonfinite/energies", "nonfinite/samples",
    "nonfinite/pos", "nonfinite/neg", "nonfinite/gradients", "buffer/age", "buffer/duplicates",
    "loss", "pareto_k", "ref/pareto_k",
)  # fmt: skip
AFTERMATH = 150
"""Steps that a broken run goes on for."""
_OWED = NonFiniteRule().owed

Trace = dict[str, np.ndarray[Any, np.dtype[np.float32]]]


def record(run: Run, folder: Path) -> dict[str, Any]:
    """Train a run, only watched; write ``NAME.npz`` and return what it cost."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    trainer = Trainer(run)
    rows: list[dict[str, float]] = []
    for row in watched(trainer, AFTERMATH):
        rows.append(row)
        if not math.isfinite(row["energy_gap"]):
            break
    trainer.guard.close()
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = traced(rows)
    np.savez_compressed(folder / f"{run.name}.npz", **arrays)
    return {"steps": len(rows), "seconds": time.perf_counter() - began}


def watched(trainer: Trainer, aftermath: int) -> Iterator[dict[str, float]]:
    """The rows of a run, until it has been broken for so many steps."""
    watch = Watch(trainer.run.scale)
    for step in range(trainer.run.steps):
        row = trainer.step()
        yield row
        since = watch.take(row["energy_gap"], row["f_pos/std"])
        if since is not None and step - since >= aftermath:
            return


def traced(rows: Sequence[Mapping[str, float]]) -> Trace:
    """The rows as one array for each number that is known in any of them."""
    tags = {tag: rounded([row.get(tag, math.nan) for row in rows]) for tag in (*TAGS, SKILL)}
    return {tag: values for tag, values in tags.items() if not np.isnan(values).all()}


def pack(folder: Path, file: Path) -> None:
    """All runs of a folder into one file: each number's rows, run after run, NaN where unknown."""
    traces = {}
    for each in sorted(folder.glob("*.npz")):
        with np.load(each) as archive:
            traces[each.stem] = dict(archive)
    counts = {name: len(trace[SKILL]) for name, trace in traces.items()}
    columns: dict[str, Any] = {"runs": np.array(list(counts)), "rows": np.array([*counts.values()])}
    for tag in sorted(set().union(*traces.values())):
        unknown = {name: np.full(rows, np.nan, np.float32) for name, rows in counts.items()}
        columns[tag] = np.concatenate([t.get(tag, unknown[name]) for name, t in traces.items()])
    file.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_LZMA) as archive:
        for name, column in columns.items():
            with archive.open(f"{name}.npy", "w") as entry:
                np.lib.format.write_array(entry, column)


def unpack(file: Path) -> dict[str, Trace]:
    """By run, the numbers that are known in any of its rows."""
    with np.load(file) as archive:
        columns = dict(archive)
    names, ends = columns.pop("runs").tolist(), np.cumsum(columns.pop("rows"))[:-1]
    parts = {tag: np.split(column, ends) for tag, column in columns.items()}
    return {
        name: {tag: own[i] for tag, own in parts.items() if not np.isnan(own[i]).all()}
        for i, name in enumerate(names)
    }


def rounded(values: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """As float32 with 12 bits after the first, half the size when it is compressed."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    known = np.isfinite(bits.view(np.float32))
    return np.where(known, (bits + 0x400) & 0xFFFFF800, bits).astype(np.uint32).view(np.float32)


def rows_of(trace: Trace) -> list[dict[str, float]]:
    """The rows as the guard had them: a number that is not known is not there."""
    columns = {tag: values.tolist() for tag, values in trace.items() if tag != SKILL}
    count = len(next(iter(columns.values())))
    return [
        {tag: v[i] for tag, v in columns.items() if not math.isnan(v[i]) or tag in _OWED}
        for i in range(count)
    ]
