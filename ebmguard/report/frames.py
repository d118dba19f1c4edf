"""Recorded runs as pandas data frames, over many folders at once: ``ebmguard.runs``."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, typed
from . import records as of
from .files import batches, read_object

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["Runs", "load"]


@dataclass(frozen=True, eq=False)
class Runs:
    """What some run folders hold. The index of every frame begins with ``run``, the folder.

    Attributes:
        runs: one line per run: the trainer's settings (config.json) and results (results.json),
            nested ones as ``outer/inner``; ``recorded_steps``, ``error_count``, ``rollback_count``.
        rows: by ``run`` and ``step``, a column per tag (:mod:`ebmguard.tags`), ``attempt``, the
            number of rollbacks before, and what the trainer logged of the step beside
            (``cross_entropy``). NaN where a row lacks it. Of an ensemble the mean row.
        evaluations: by ``run`` and ``step``, what the trainer measured of the network; of toys with
            a column ``member``.
        alerts, rollbacks: by ``run``, in the order in which they came, those of steps that were
            abandoned later included.
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
    """The runs in folders of a guard or a trainer, finished or not.

    Args:
        paths: a folder, a pattern such as ``"runs/*"``, or several of these. What holds no rows is
            passed over.
        abandoned: keep rows and evaluations that a rollback or a resume went back behind, and mark
            them in a column of this name. Otherwise of a step that came again only the last time
            counts, and nothing after the earlier ones.

    Raises:
        ConfigError: nothing holds rows, or a file does not hold what a guard or a trainer writes.
        ImportError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise ImportError('data frames need pandas: pip install "ebmguard[train]"') from error
    several = [paths] if isinstance(paths, str | os.PathLike) else [*paths]
    names = [name for path in several for name in sorted(glob.glob(os.fspath(path)))]
    folders = {name: _Folder(Path(name)) for name in names if os.path.isdir(name)}
    folders = {name: folder for name, folder in folders.items() if len(folder.rows)}
    if not folders:
        raise ConfigError(
            f"{', '.join(map(str, several)) or 'No folder'}: nothing there holds a metrics.jsonl "
            'with rows. Name run folders of a guard or a trainer, as in load("runs/*").'
        )

    def of_all(kind: str, *index: str) -> DataFrame:
        parts = [getattr(folder, kind).assign(run=name) for name, folder in folders.items()]
        found = pd.concat([part for part in parts if len(part)] or parts[:1])
        if "abandoned" in found and not abandoned:
            found = found[~found["abandoned"]].drop(columns="abandoned")
        return found.set_index(["run", *index])

    lines = [folder.line() for folder in folders.values()]
    return Runs(
        pd.DataFrame(lines, pd.Index(folders, name="run")),
        of_all("rows", "step"),
        of_all("evaluations", "step"),
        of_all("alerts"),
        of_all("rollbacks"),
    )


class _Folder:
    """One run. Its rows and evaluations say whether they are abandoned."""

    def __init__(self, path: Path) -> None:
        import pandas as pd

        self.path = path
        self.rows = self._rows()
        self.evaluations = self._evaluations()
        self.alerts = pd.DataFrame(self._records("alerts", of.ALERT))
        self.rollbacks = pd.DataFrame(self._records("recovery", of.ROLLBACK))

    def line(self) -> dict[str, Any]:
        """Settings, results and counts."""
        config, results = (
            of.plain(read_object(file), file)
            for file in (self.path / "config.json", self.path / "results.json")
        )
        settings = config.pop("settings", None)
        parts = config, settings if isinstance(settings, dict) else {}, results
        return {
            **{
                name: own for each in parts for name, own in of.flat(each, "/").items() if own != {}
            },
            "recorded_steps": int((~self.rows["abandoned"]).sum()),
            "error_count": sum(level == "ERROR" for level in self.alerts.get("level", ())),
            "rollback_count": len(self.rollbacks),
        }

    def _rows(self) -> DataFrame:
        import pandas as pd

        path = self.path / "metrics.jsonl"
        # A batch at a time: as objects of Python they take ten times the memory.
        parts = [pd.DataFrame({"step": [], "attempt": []})]
        for records in batches(path):
            for record in records:
                of.check(record, of.ROW, path)
            parts.append(pd.DataFrame([of.numbers(record, path) for record in records]))
        found = pd.concat(parts, ignore_index=True)
        attempt = found.pop("recovery/attempt") if "recovery/attempt" in found else found["attempt"]
        found["attempt"] = attempt.fillna(0).astype("int64")
        found["step"] = found["step"].astype("int64")
        # Their step, or one before it, comes again later in the file.
        later = found["step"][::-1].cummin()[::-1].shift(-1)
        return found.assign(abandoned=found["step"] >= later)

    def _evaluations(self) -> DataFrame:
        """What evaluations of one step have left in several files, as one line."""
        import pandas as pd

        firsts = self.rows.groupby("attempt")["step"].min()
        found: dict[tuple[int, int, int], dict[str, Any]] = {}
        for name in ("evaluations", "accuracy", "members"):
            for record in self._records(name, {"step": of.ROW["step"]}):
                step, attempt = record["step"], record.get("attempt", 0)
                key = step, attempt, record.get("member", 0)
                again = firsts[firsts.index > attempt].min()  # NaN where there is no later one
                own = found.setdefault(key, {"attempt": attempt, "abandoned": bool(step >= again)})
                own.update(record)
        none = {"step": [], "abandoned": pd.array([], "bool")}
        return pd.DataFrame([found[key] for key in sorted(found)] or none)

    def _records(self, name: str, fields: of.Fields) -> list[dict[str, Any]]:
        path = self.path / f"{name}.jsonl"
        return [record for batch in batches(path) for record in of.checked(batch, fields, path)]
