"""The folder of one run: who may write into it, and what goes where."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ebmguard.errors import ConfigError, DiskError, printable
from ebmguard.recovery import save_durably
from ebmguard.report.files import batches
from ebmguard.sinks import LOCK, lock_folder, read_jsonl, to_json
from ebmguard.sinks.safe_files import safe_open

from .checkpoints import Checkpoints
from .ranks import ONE_RANK, Ranks

CONFIG = "config.json"
RESULTS = "results.json"
METRICS = "metrics.jsonl"
FOLDERS = ("figures", "samples", "checkpoints")
ROW_FILES = (
    METRICS,
    "alerts.jsonl",
    "recovery.jsonl",
    "accuracy.jsonl",
    "evaluations.jsonl",
    "members.jsonl",
    "p_x_y/metrics.jsonl",
    "p_x_y/alerts.jsonl",
)
"""Files of one JSON object a line, where a run has them; those of two names are the guards'."""


class RunFolder:
    """A run folder that this process may write into.

    Make one with :meth:`create` or :meth:`resume`. Of several ranks the first one alone writes;
    what the others ask to be written is left out, but for their part of a checkpoint. While it
    lives, no other process writes (:func:`ebmguard.sinks.lock_folder`).

    Attributes:
        path: the folder.
        config: the settings of the run, as config.json holds them.
        writes: whether this process writes.
        figures: folder of pictures, and of the samples that they show.
        samples: folder of samples of training steps as arrays of bytes.
        checkpoints: the checkpoints.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], ranks: Ranks = ONE_RANK) -> None:
        self.path = path
        self.config = dict(config)
        self.writes = ranks.is_first
        self._lock = lock_folder(path) if self.writes else None
        self.figures, self.samples, checkpoints = (path / name for name in FOLDERS)
        self.checkpoints = Checkpoints(checkpoints, ranks)

    @classmethod
    def create(cls, path: Path, config: Mapping[str, Any], ranks: Ranks = ONE_RANK) -> RunFolder:
        """Start a run in `path`, which must be new or empty.

        Raises:
            ConfigError: the folder holds a run already, or other files, cannot be written, or is
                in use by another process.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            _check_new(path)
            folder = cls(path, config, ranks)
            _check_new(path)  # of two that came at once, the other may have begun here meanwhile
        except OSError as error:
            raise ConfigError(f"{path} cannot be a run folder: {error}") from error
        folder.write_config(config)
        return folder

    @classmethod
    def resume(cls, path: Path, ranks: Ranks = ONE_RANK) -> RunFolder:
        """Open the run that `path` holds.

        Raises:
            ConfigError: there is no run in it, another process is writing it, or a file in it is a
                link: one that came from elsewhere may lead to any file.
        """
        read_config(path)  # of what is no run's, nothing is changed
        files = [path / name for name in ROW_FILES]
        files += [file for name in FOLDERS for file in (path / name).glob("*")]
        links = [str(file) for file in files if file.is_symlink()]
        if links:
            raise ConfigError(
                f"{', '.join(links[:3])}: a link, through which nothing is written. Put the file "
                "itself there, or remove it; folders may be links"
            )
        folder = cls(path, {}, ranks)
        folder.config = read_config(path)  # now that nobody else changes it
        return folder

    def save(self, name: str, state: Mapping[str, Any]) -> None:
        """Write tensors and plain values to the file `name`, all of them or nothing."""
        if self.writes:
            save_durably(self.path / name, state)

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write config.json, and make the folders beside it where they are missing."""
        self.config = dict(config)
        if self.writes:
            write_json(self.path / CONFIG, self.config)
            for name in FOLDERS:
                (self.path / name).mkdir(exist_ok=True)

    def write_results(self, results: Mapping[str, Any]) -> None:
        """Write results.json; numbers that are not finite become strings."""
        if self.writes:
            write_json(self.path / RESULTS, results)

    def append_rows(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append lines to the row file `name`.

        Raises:
            DiskError: the disk does not take them; a resumed run cuts off what it took.
        """
        if not self.writes:
            return
        lines = [json.dumps(to_json(row), allow_nan=False) + "\n" for row in rows]
        file = self.path / name
        try:
            with file.open("a", encoding="utf-8") as stream:
                stream.write("".join(lines))
        except OSError as error:
            raise DiskError.of(file, error) from error

    def row_sizes(self) -> dict[str, int]:
        """Bytes in each row file, for a checkpoint: what was written by then."""
        files = {name: self.path / name for name in ROW_FILES}
        return {name: file.stat().st_size for name, file in files.items() if file.is_file()}

    def cut_rows(self, sizes: Mapping[str, int]) -> None:
        """Cut the row files back to :meth:`row_sizes`: a resumed run writes the rest again."""
        if not self.writes:
            return
        for name, size in self.row_sizes().items():
            # After a loss of power a file may have less than was written to it.
            os.truncate(self.path / name, min(size, sizes.get(name, 0)))


def read_config(path: Path) -> dict[str, Any]:
    """config.json of the run in a folder; raises as :func:`read_json`, or where there is none."""
    if not (path / CONFIG).is_file():
        raise ConfigError(f"{path} holds no run to resume or to read ({CONFIG} is missing)")
    return read_json(path / CONFIG)


def open_file(file: Path) -> BinaryIO:
    """A file of a run folder, to read.

    Raises:
        ConfigError: it is missing, no file, or a link that leads out of its folder.
    """
    stream = safe_open(file)
    if stream is None:
        raise ConfigError(f"{file} is missing; name another folder")
    return stream


def read_json(file: Path) -> dict[str, Any]:
    """The object that a file of a run folder holds.

    Raises:
        ConfigError: as :func:`open_file`, or it is damaged.
    """
    with open_file(file) as stream:
        try:
            content = json.load(stream)
            reason = f"it is a {type(content).__name__}, expected {{...}}"
        except (OSError, ValueError, RecursionError) as error:
            content, reason = None, printable(error)
    if not isinstance(content, dict):
        raise ConfigError(f"{file} is damaged: {reason}; restore or remove it")
    return content


def read_rows(path: Path, name: str) -> list[dict[str, Any]]:
    """The lines of a run's row file, a last one in the making left out; none where it has none."""
    file = path / name
    return read_jsonl(file) if file.is_file() else []


def last_course(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows in the order of a file, without those of steps that a rollback gave up.

    A step that comes again replaces what there was from it on.
    """
    kept: list[Mapping[str, Any]] = []
    for row in rows:
        while kept and kept[-1]["step"] >= row["step"]:
            kept.pop()
        kept.append(row)
    return kept


def course(path: Path, names: Sequence[str]) -> list[Mapping[str, Any]]:
    """Some of the numbers in metrics.jsonl, as far as its rows have them, of the last course.

    The file of a published JEM run has 140,600 lines with some fifty numbers each, so that only
    what is asked for is kept. Of a run in progress, a last line that is not complete is left out.
    """
    return last_course(
        {"step": row["step"]} | {name: float(row[name]) for name in names if name in row}
        for rows in batches(path / METRICS)
        for row in rows
    )


def series(
    path: Path, names: Sequence[str]
) -> tuple[NDArray[np.int64], dict[str, NDArray[np.float64]]]:
    """Some of the numbers in metrics.jsonl at every step that was recorded.

    Returns:
        (T,) steps, ascending, and for each name (T,) values, NaN where it was not recorded. Of a
        run that was rolled back, those of its last course.
    """
    rows = course(path, names)
    values = {name: np.array([row.get(name, math.nan) for row in rows]) for name in names}
    return np.array([row["step"] for row in rows], dtype=np.int64), values


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    """Write a file of JSON as text; numbers that are not finite become strings."""
    write_text(file, json.dumps(to_json(values), indent=2, allow_nan=False) + "\n")


def write_text(file: Path, text: str) -> None:
    """Write a file, all of it or nothing.

    Raises:
        DiskError: it could not be written.
    """
    partial = file.with_name(file.name + ".partial")
    try:
        partial.unlink(missing_ok=True)
        with partial.open("x", encoding="utf-8") as stream:  # through no link
            stream.write(text)
        os.replace(partial, file)
    except OSError as error:
        with suppress(OSError):  # where nothing can be written, nothing can be removed
            partial.unlink(missing_ok=True)
        raise DiskError.of(file, error) from error


def _check_new(path: Path) -> None:
    # A kill in the first moment leaves settings without their name.
    taken = sorted({entry.name for entry in path.iterdir()} - {f"{CONFIG}.partial", LOCK})
    if CONFIG in taken:
        raise ConfigError(
            f"{path} already holds a run; go on with it by --resume, or choose another --out"
        )
    if taken:
        raise ConfigError(
            f"{path} holds other files ({', '.join(taken[:3])}); a run needs a new or empty "
            "folder: choose another --out"
        )
