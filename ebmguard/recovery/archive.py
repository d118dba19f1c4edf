"""The snapshots of a run on the disk, in files that are whole or not there."""

from __future__ import annotations

import logging
import math
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch

from ..errors import ConfigError, DiskError
from ..ranks import Ranks

__all__ = ["Archive", "load_durably", "save_durably"]

_log = logging.getLogger("ebmguard")

_NAME = re.compile(r"snapshot-(\d+)\.pt")
_KEPT = 2
_KEYS = {"version", "step", "ranks", "state", "recovery"}
_VERSION = 2
_DAMAGE = (BadZipFile, zlib.error, UnpicklingError, EOFError, OSError, RuntimeError, ValueError)


class Archive:
    """The newest snapshots of a run, one in ``every`` steps; each rank has its own folder."""

    def __init__(self, folder: Path, every: int, ranks: Ranks) -> None:
        self._folder, self._every, self._ranks = folder, every, ranks
        self._own = folder if ranks.group is None else folder / f"rank{ranks.index}"
        self.saved: int | None = None  # the step of the last one, or that the run goes on from
        self._is_failing = False

    def __deepcopy__(self, memo: object) -> None:
        """None: what is copied of a run does not write into its folder."""

    def is_due(self, step: int) -> bool:
        """Whether to write that of this step."""
        return self.saved is None or step - self.saved >= self._every

    def write(self, step: int, state: Mapping[str, Any], recovery: Mapping[str, Any]) -> None:
        """Write a snapshot, and remove what it replaces once every rank has written its own.

        Where a rank cannot, none keeps it: a warning says so, and one is due.
        """
        file = self._own / f"snapshot-{step:08d}.pt"
        facts = {"version": _VERSION, "step": step, "ranks": self._ranks.count}
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        problem = ""
        try:
            self._own.mkdir(parents=True, exist_ok=True)
            save_durably(file, {**facts, "state": state, "recovery": recovery})
        except OSError as error:
            problem = str(error)
        # Killed before that, they go on from what they all had.
        problems = [each for each in self._ranks.from_all(problem) if each]
        if self._is_failing != bool(problems) and self._ranks.is_first:
            said = f"No snapshot of step {step}: {'; '.join(problems)}. Training goes on; the next "
            said += "one is tried again."
            _log.warning(said if problems else f"Snapshots are written again, that of step {step}.")
        self._is_failing = bool(problems)
        if problems:
            self.saved = None
            if not problem:
                file.unlink()
            return
        self.saved = step
        found = _snapshots([self._own])
        kept = [path for at, path in found if at <= step][-_KEPT:]
        for _, path in found:  # later ones are of a course that was given up
            if path not in kept:
                path.unlink()

    def check_empty(self) -> None:
        """Refuse, on all ranks, to begin a run over the snapshots of another."""
        found = _snapshots([self._folder, *self._folder.glob("rank*")])
        newest = max(self._ranks.from_all(found[-1][0] if found else -1))
        if newest >= 0:
            raise ConfigError(
                f"{self._folder} holds snapshots of a run, the newest of step {newest}. Go on with "
                "it by g.resume() before the first step, or name another Recovery(folder=...)."
            )

    def newest(self) -> dict[str, Any] | None:
        """The newest snapshot that every rank has and can read; None where there is none at all.

        Raises a ``ConfigError``, on all, where not all can read one or their number is another.
        """
        before, damaged = math.inf, list[str]()
        while True:
            found = self._newest_readable(before, damaged)
            mine = None if found is None else {x: found[x] for x in ("step", "ranks", "recovery")}
            marks = self._ranks.from_all(mine)
            if all(mark == mine for mark in marks):
                break
            if None in marks:
                tries = ", ".join("none" if mark is None else str(mark["step"]) for mark in marks)
                raise ConfigError(
                    f"{self._folder} has no snapshot that all {len(marks)} ranks can read: those "
                    f"left are of step {tries}. Give every rank its files, or name another folder."
                )
            # Of one step but of two courses, where a rollback was written on some ranks only.
            steps = [mark["step"] for mark in marks]
            before = min(steps) + (len(set(steps)) > 1)
        if found is None:
            if problems := [each for rank in self._ranks.from_all(damaged) for each in rank]:
                raise ConfigError("no snapshot can be read:\n  " + "\n  ".join(problems))
            return None
        if found["ranks"] != self._ranks.count:
            raise ConfigError(
                f"{self._folder} holds snapshots of a run on {found['ranks']} ranks, but this one "
                f"is on {self._ranks.count}. Go on with as many."
            )
        return found

    def _newest_readable(self, before: float, damaged: list[str]) -> dict[str, Any] | None:
        for _, path in reversed([x for x in _snapshots([self._own]) if x[0] < before]):
            try:
                snapshot = load_durably(path)
                if set(snapshot) != _KEYS or snapshot["version"] != _VERSION:
                    raise ConfigError(f"{path}: not a snapshot of this version")
                return snapshot
            except ConfigError as problem:
                _log.warning("a snapshot cannot be read and is passed over: %s", problem)
                damaged.append(str(problem))
        return None


def _snapshots(folders: Iterable[Path]) -> list[tuple[int, Path]]:
    """Steps and paths of the snapshots in folders, oldest first."""
    paths = [path for folder in folders for path in folder.glob("snapshot-*.pt")]
    found = ((_NAME.fullmatch(path.name), path) for path in paths)
    return sorted((int(match[1]), path) for match, path in found if match)


def save_durably(file: Path, state: Mapping[str, Any]) -> None:
    """Write tensors and plain values to a file: killed at any moment, it is the old or the new one.

    Raises:
        DiskError: the disk does not take it; nothing of it is left there.
    """
    partial = file.with_suffix(".partial")
    try:
        partial.unlink(missing_ok=True)
        with partial.open("xb") as stream:  # through no link
            torch.save(dict(state), stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, file)
    except (OSError, RuntimeError) as error:
        partial.unlink(missing_ok=True)
        # torch ends its archive even then, and raises an error of its own over that of the disk.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise DiskError.of(file, cause) from error
    if os.name == "posix":
        descriptor = os.open(file.parent, os.O_RDONLY)  # the name itself
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def load_durably(file: Path, device: torch.device | None = None) -> dict[str, Any]:
    """What :func:`save_durably` wrote, on a device (None: the CPU). Reading executes nothing.

    Raises:
        ConfigError: the file cannot be read, or is not what was written.
    """
    try:
        with ZipFile(file) as archive:  # PyTorch writes checksums and does not look at them again
            if torn := archive.testzip():
                raise BadZipFile(f"{torn} in it is not what was written")
        state: dict[str, Any] = torch.load(file, map_location=device or "cpu", weights_only=True)
    except _DAMAGE as error:
        raise ConfigError(f"{file}: {error}") from error
    return state
