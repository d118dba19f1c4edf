"""Recorded runs as pandas data frames, over many folders at once: ``ebmguard.runs``."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, typed
from . import files
from .folder import RecordedRun

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["Runs", "load"]


@dataclass(frozen=True, eq=False)
class Runs:
    """The contents of run folders. The index of every frame begins with ``run``, the folder.

    Attributes:
        runs: one line per run: the trainer's settings (config.json) and results (results.json),
            nested ones as ``outer/inner``; ``verdict``, the line that every page shows;
            ``recorded_steps``, ``error_count``, ``rollback_count``.
        rows: by ``run`` and ``step``. Columns: one per tag (:mod:`ebmguard.tags`), ``attempt`` (the
            number of earlier rollbacks), and numbers of the trainer (``cross_entropy``). NaN if
            a row lacks it. An ensemble has its mean row. A long run does not have every row:
            ``log_every`` = k means that one in k was written.
        evaluations: by ``run`` and ``step``, the trainer's evaluations of the network; toys have a
            column ``member``.
        alerts, rollbacks: by ``run``, in the order in which they came, also those of steps that
            were abandoned later.
    """

    runs: DataFrame
    rows: DataFrame
    evaluations: DataFrame
    alerts: DataFrame
    rollbacks: DataFrame


@typed
def load(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], *, abandoned: bool = False
) -> Runs:
    """Load the runs in folders of a guard or a trainer, finished or not.

    Args:
        paths: a run folder, one that holds some, a pattern such as ``"runs/*"``, or several of
            these. Folders without rows are skipped.
        abandoned: also keep rows and evaluations that a rollback or a resume has undone, and mark
            them in a column of this name. Otherwise, if a step was repeated, only its last pass
            counts, and nothing after the earlier passes.

    Raises:
        ConfigError: nothing holds rows, or a file does not hold what a guard or a trainer writes.
        ImportError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise ImportError('data frames need pandas: pip install ".[train]" in a clone') from error
    several = [paths] if isinstance(paths, str | os.PathLike) else [*paths]
    names = [name for path in several for name in sorted(glob.glob(os.fspath(path)))]
    places = [Path(name) for name in names if os.path.isdir(name)]
    folders = {str(run): _read(run) for run in files.run_folders(places)}
    folders = {name: frames for name, frames in folders.items() if len(frames["rows"])}
    if not folders:
        raise ConfigError(
            f"{', '.join(map(str, several)) or 'No folder'}: nothing there holds a metrics.jsonl "
            'with rows. Name run folders of a guard or a trainer, as in load("runs/*").'
        )

    def joined(kind: str, *index: str) -> DataFrame:
        parts = [frames[kind].assign(run=name) for name, frames in folders.items()]
        frame = pd.concat([part for part in parts if len(part)] or parts[:1])
        if "abandoned" in frame and not abandoned:
            frame = frame[~frame["abandoned"]].drop(columns="abandoned")
        return frame.set_index(["run", *index])

    return Runs(
        pd.DataFrame(
            [frames["line"] for frames in folders.values()], pd.Index(folders, name="run")
        ),
        joined("rows", "step"),
        joined("evaluations", "step"),
        joined("alerts"),
        joined("rollbacks"),
    )


def _read(path: Path) -> dict[str, Any]:
    """Return the line of one run and its frames; rows and evaluations have ``abandoned``."""
    import pandas as pd

    parts = [pd.DataFrame({"step": [], "attempt": []})]
    # A batch at a time: as objects of Python they take ten times the memory.
    run = RecordedRun(path)
    run.on_rows = lambda rows: parts.append(pd.DataFrame(rows))
    run.update()
    rows = pd.concat(parts, ignore_index=True)
    attempt = rows.pop("recovery/attempt") if "recovery/attempt" in rows else rows["attempt"]
    rows["attempt"] = attempt.fillna(0).astype("int64")
    rows["step"] = rows["step"].astype("int64")
    # A row is abandoned if its step, or one before it, comes again later in the file.
    rows["abandoned"] = rows["step"] >= rows["step"][::-1].cummin()[::-1].shift(-1)
    none = {"step": [], "abandoned": pd.array([], "bool")}
    evaluations = pd.DataFrame(_evaluations(path, rows.groupby("attempt")["step"].min()) or none)
    line = files.flattened(run.settings, "/") | files.flattened(run.results, "/")
    line |= {
        "verdict": str(run.verdict),
        "recorded_steps": int((~rows["abandoned"]).sum()),
        "error_count": run.counts.get("ERROR", 0),
        "rollback_count": len(run.rollbacks),
    }
    alerts, rollbacks = pd.DataFrame(run.alerts), pd.DataFrame(run.rollbacks)
    frames = {"rows": rows, "evaluations": evaluations, "alerts": alerts, "rollbacks": rollbacks}
    return frames | {"line": line}


def _evaluations(path: Path, firsts: Any) -> list[dict[str, Any]]:
    """Merge the evaluations of a step from several files; ``firsts`` are the attempts' steps."""
    merged: dict[tuple[int, int, int], dict[str, Any]] = {}
    for name in ("evaluations", "accuracy", "members"):
        for record in chain.from_iterable(files.batches(path / f"{name}.jsonl", files.ROW)):
            step, attempt = record["step"], record.get("attempt", 0)
            again = firsts[firsts.index > attempt].min()  # NaN where there is no later one
            evaluation = merged.setdefault((step, attempt, record.get("member", 0)), {})
            evaluation |= {"attempt": attempt, "abandoned": bool(step >= again)} | record
    return [merged[key] for key in sorted(merged)]
