"""The snapshots of a run on the disk, in files that are whole or not there."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from ctypes import c_char
from datetime import date, datetime, timedelta, timezone
from io import BytesIO
from pathlib import Path
from pickle import PickleError, UnpicklingError
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor
from torch.serialization import get_safe_globals, safe_globals
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_map

from ..errors import MISFITS, ConfigError, DiskError
from ..ranks import Ranks
from ..sinks import Writer
from ..sinks.safe_files import safe_open

__all__ = [
    *("Archive", "digest_of", "first_difference", "load_durably", "save_durably"),
    *("shapes_of", "unloadable_part"),
]

_log = logging.getLogger("ebmguard")

_NAME = re.compile(r"snapshot-(\d+)\.pt")
_KEPT = 2
_KEYS = {"version", "step", "ranks", "digest", "state", "recovery"}
_VERSION = 4
_DAMAGE = (BadZipFile, zlib.error, UnpicklingError, EOFError, OSError, *MISFITS)


class Archive:
    """The newest snapshots of a run, one in ``every`` steps; every rank writes to a folder."""

    def __init__(self, folder: Path, every: int, ranks: Ranks, log: Writer | None = None) -> None:
        self._folder, self._every, self._ranks = folder, every, ranks
        self._log = log or Writer((), flush_every=1)
        rank_folder = folder if ranks.group is None else folder / f"rank{ranks.index}"
        self._rank_folder = rank_folder.resolve()
        self.saved: int | None = None  # the step of the last one, or that the run goes on from
        self._is_failing = self._has_read = False

    def __deepcopy__(self, memo: object) -> None:
        """Return None: a copy of a run does not write into the folder of the run."""

    def claim(self) -> None:
        """Let no other run use the folder until the log is released, else a ``ConfigError``."""
        self._log.claim("Recovery: folder", self._rank_folder)

    def is_due(self, step: int) -> bool:
        """Return whether to write the snapshot of this step."""
        return self.saved is None or step - self.saved >= self._every

    def write(self, step: int, state: Mapping[str, Any], recovery: Mapping[str, Any]) -> None:
        """Write a snapshot, and remove those that it replaces once every rank has written one.

        If one rank fails, no rank keeps the snapshot: a warning is logged, and one is due.
        """
        file = self._rank_folder / f"snapshot-{step:08d}.pt"
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # the copies to the host have come so far
        pairs = ((name, x, state[name]) for name, x in state.get("next", {}).items())
        changed = {name: x for name, x, y in pairs if x is y or digest_of(x) != digest_of(y)}
        state = {**state, "next": changed}  # parts that had changed when the next step began
        digest, problem = digest_of([state, recovery]), unloadable_part(state)
        facts = {"version": _VERSION, "step": step, "ranks": self._ranks.count, "digest": digest}
        try:
            self._log.flush()
            if not (problem or self._log.is_whole):
                problem = "log_dir= has not taken the rows before it"
            if not problem:
                self._rank_folder.mkdir(parents=True, exist_ok=True)
                save_durably(file, {**facts, "state": state, "recovery": recovery})
                read = {} if self._has_read else load_durably(file)
                if read and digest != digest_of([read["state"], read["recovery"]]):
                    raise ConfigError(f"{file} is not what was written")
                self._has_read = True
        except (OSError, ConfigError) as error:
            problem = str(error)
            if isinstance(error, ConfigError):
                file.unlink(missing_ok=True)  # there is none where a sink refused its rows
        # Ranks that are killed before this line go on from the snapshot that all of them have.
        problems = [text for text in self._ranks.from_all(problem) if text]
        if self._is_failing != bool(problems) and self._ranks.is_first:
            note = f"No snapshot of step {step}: {'; '.join(problems)}. Training goes on; the next "
            note += "one is tried again."
            _log.warning(note if problems else f"Snapshots are written again, that of step {step}.")
        self._is_failing = bool(problems)
        if problems:
            self.saved = None
            if not problem:
                file.unlink()
            return
        self.saved = step
        snapshots = _snapshots([self._rank_folder])
        kept = [path for saved_step, path in snapshots if saved_step <= step][-_KEPT:]
        for _, path in snapshots:  # later ones are of steps that a rollback has undone
            if path not in kept:
                with suppress(OSError):  # a folder may have such a name
                    path.unlink()

    def check_empty(self) -> None:
        """Refuse, on all ranks, to begin a run over the snapshots of another."""
        snapshots = _snapshots([self._folder, *self._folder.glob("rank*")])
        newest = max(self._ranks.from_all(snapshots[-1][0] if snapshots else -1))
        if newest >= 0:
            raise ConfigError(
                f"{self._folder} holds snapshots of a run, the newest of step {newest}. Go on with "
                "it by g.resume() before the first step, or name another Recovery(folder=...)."
            )

    def newest(self, take: Callable[[dict[str, Any]], None]) -> dict[str, Any] | None:
        """Return the newest snapshot that every rank can load; None if no rank has any.

        ``take`` loads a snapshot, or raises one of ``MISFITS``. If it fails on any rank, it is
        called again on all of them with an older snapshot.

        Raises:
            ConfigError: on every rank, if there is no snapshot that all of them can load.
        """
        files = dict(_snapshots([self._rank_folder]))
        everyone, problems = self._ranks.from_all([*files]), list[str]()
        for step in sorted({*files}.intersection(*everyone), reverse=True):
            history, problem = None, ""
            try:
                snapshot = load_durably(files[step])
                self._check(step, snapshot)
                take(snapshot)
                history = snapshot["recovery"]
            except MISFITS as error:
                problem = f"{files[step].name}: {type(error).__name__}: {error}"
                _log.warning("a snapshot cannot be read and is passed over: %s", problem)
            # They differ where a rollback was written on some ranks only.
            marks = self._ranks.from_all((history, problem))
            if all(mark == marks[0] for mark in marks) and not problem:
                return snapshot
            problems += [text for _, text in marks if text]
        if not any(everyone):
            return None
        text = "no snapshot can be read and fits this run:"
        if self._ranks.count > 1:
            left = ", ".join(f"{max(steps)}" if steps else "none" for steps in everyone)
            text = f"{self._folder} has no snapshot that all {len(everyone)} ranks can read: those "
            text += f"left are of step {left}. Give every rank its files, or name another folder."
        raise ConfigError("\n  ".join([text, *problems]))

    def _check(self, step: int, snapshot: Mapping[str, Any]) -> None:
        """Refuse a whole file that is no snapshot of this step and of as many ranks."""
        if (version := snapshot.get("version")) != _VERSION or snapshot.keys() != _KEYS:
            raise ConfigError(
                f"not a snapshot of this version: its format is {version!r}, that of this ebmguard "
                f"{_VERSION}. Go on with the ebmguard that wrote it, or begin in another folder."
            )
        file_step, guard_step = snapshot["step"], snapshot["state"]["guard"]["step"]
        if not step == file_step == guard_step:
            raise ConfigError(f"it says it is of step {file_step!r}, and its guard {guard_step!r}")
        if snapshot["ranks"] != self._ranks.count:
            raise ConfigError(
                f"{self._folder} holds snapshots of a run on {snapshot['ranks']} ranks, but this "
                f"one is on {self._ranks.count}. Go on with as many."
            )
        if snapshot["digest"] != digest_of([snapshot["state"], snapshot["recovery"]]):
            raise ConfigError("what it holds is not what was written")


def _snapshots(folders: Iterable[Path]) -> list[tuple[int, Path]]:
    """Return steps and paths of the snapshots in folders, oldest first."""
    paths = [path for folder in folders for path in folder.glob("snapshot-*.pt")]
    matches = ((_NAME.fullmatch(path.name), path) for path in paths)
    return sorted((int(match[1]), path) for match, path in matches if match)


def shapes_of(tree: Any) -> dict[str, str]:
    """Return shape and dtype, as text, of every tensor in nested containers, by its path."""
    tensors = ((path, x) for path, x in tree_flatten_with_path(tree)[0] if isinstance(x, Tensor))
    return {keystr(path): f"{tuple(x.shape)} of {x.dtype}" for path, x in tensors}


def first_difference(saved: Mapping[str, str], current: Mapping[str, str]) -> str:
    """Return the first difference between two descriptions in words; empty if they are equal."""
    for path in {**saved, **current}:
        was, now = (description.get(path, "missing") for description in (saved, current))
        if was != now:
            return f"{path} is {was} there, but {now} here"
    return ""


def digest_of(tree: Any) -> str:
    """Return a digest of the host tensors and plain values in nested containers."""
    digest = hashlib.blake2b(digest_size=16)
    leaves, structure = tree_flatten(tree)
    digest.update(repr(structure).encode())
    for x in leaves:
        if isinstance(x, set):
            x = sorted(map(repr, x))  # in one order in all processes
        elif not getattr(getattr(x, "dtype", None), "hasobject", True):
            # NumPy's, but for arrays of objects; a file gives back this machine's order of bytes.
            x = x.astype(x.dtype.newbyteorder("=")).tobytes()
        digest.update(repr(type(x) if isinstance(x, Tensor) else x).encode())
        if isinstance(x, Tensor) and x.numel() and x.layout is torch.strided:
            x = x.detach().contiguous()
            digest.update(f"{x.shape} {x.dtype}".encode())
            digest.update((c_char * x.nbytes).from_address(x.data_ptr()))
    return digest.hexdigest()


def unloadable_part(tree: Any, path: str = "") -> str:
    """Name the part of nested containers that ``torch.load`` would refuse; empty if none."""
    if _is_readable(tree):
        return ""
    items = [*tree.items()] if isinstance(tree, Mapping) else []
    items += enumerate(tree) if isinstance(tree, list | tuple) else ()
    while len(items) > 1:
        half = len(items) // 2
        items = items[half:] if _is_readable(items[:half]) else items[:half]
    inner = (unloadable_part(x, f"{path}[{key!r}]" if path else str(key)) for key, x in items)
    kind = f"{path} is a {type(tree).__module__}.{type(tree).__qualname__}. Let its state_dict() "
    return next(filter(None, inner), kind + "return tensors, numbers, texts, lists and dicts.")


def _is_readable(tree: Any) -> bool:
    tree = tree_map(lambda x: torch.empty(0) if type(x) is Tensor else x, tree)
    with suppress(*_DAMAGE, PickleError):
        torch.save(tree, stream := BytesIO())
        stream.seek(0)
        _loaded(stream, "cpu")
        return True
    return False


def _loaded(stream: Any, device: torch.device | str) -> Any:
    """Load a file without executing code: what torch allows, dates, paths, NumPy's numbers."""
    plain: list[Any] = [date, datetime, timedelta, timezone, type(Path())]
    if numpy := sys.modules.get("numpy"):
        samples = numpy.zeros(1), numpy.float64()
        plain += [numpy.ndarray, numpy.dtype, *(x.__reduce__()[0] for x in samples)]
        plain += {type(numpy.dtype(code)) for code in numpy.typecodes["All"]}
    known = get_safe_globals()  # those stay
    with safe_globals([x for x in plain if x not in known]):
        return torch.load(stream, map_location=device, weights_only=True)


def save_durably(file: Path, state: Mapping[str, Any]) -> None:
    """Write tensors and plain values to a file atomically: a kill leaves the old or the new one.

    Raises:
        DiskError: the disk does not take it; no part of it stays on the disk.
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
        # torch still closes its archive, and that raises another error over the disk's.
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
    """Load what :func:`save_durably` wrote to a device (None: the CPU), executing no code in it.

    Raises:
        ConfigError: the file cannot be read, leads out of its folder, or is not what was written.
    """
    try:
        if (stream := safe_open(file)) is None:
            raise ConfigError("there is no such file")
        with stream, ZipFile(stream) as archive:
            size = stream.seek(0, os.SEEK_END)
            if sum(x.file_size for x in archive.infolist()) > size:
                raise BadZipFile("it unpacks to more than it is, which PyTorch never writes")
            # PyTorch writes checksums and does not look at them again.
            if torn := archive.testzip():
                raise BadZipFile(f"{torn} in it is not what was written")
            stream.seek(0)
            try:
                state = dict(_loaded(stream, device or "cpu"))
            except UnpicklingError as error:
                what = [*re.findall(r"GLOBAL (\S+)", str(error)), "code"][0]
                fix = "If you trust it: torch.load(file, weights_only=False)"
                problem = f"it is whole, but holds {what}, as earlier versions wrote. {fix}"
                raise ConfigError(problem) from error
        inside: list[Any] = [state]
        while inside:  # nested lists may name one list twice, and so on: more than the file holds
            if (size := size - 1) < 0:
                raise BadZipFile("what it holds is more than it is")
            node = inside.pop()
            inside += node.values() if isinstance(node, dict) else ()
            inside += node if isinstance(node, list | tuple) else ()
        return state
    except _DAMAGE as error:
        raise ConfigError(f"{file}: {error}") from error
