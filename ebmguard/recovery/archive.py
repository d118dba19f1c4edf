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
from ..sinks.opened import opened

__all__ = [
    "Archive",
    "described",
    "difference",
    "digest_of",
    "load_durably",
    "save_durably",
    "unreadable",
]

_log = logging.getLogger("ebmguard")

_NAME = re.compile(r"snapshot-(\d+)\.pt")
_KEPT = 2
_KEYS = {"version", "step", "ranks", "digest", "state", "recovery"}
_VERSION = 4
_DAMAGE = (BadZipFile, zlib.error, UnpicklingError, EOFError, OSError, *MISFITS)


class Archive:
    """The newest snapshots of a run, one in ``every`` steps; each rank has its own folder."""

    def __init__(self, folder: Path, every: int, ranks: Ranks, log: Writer | None = None) -> None:
        self._folder, self._every, self._ranks = folder, every, ranks
        self._log = log or Writer((), flush_every=1)
        self._own = (folder if ranks.group is None else folder / f"rank{ranks.index}").resolve()
        self.saved: int | None = None  # the step of the last one, or that the run goes on from
        self._is_failing = self._has_read = False

    def __deepcopy__(self, memo: object) -> None:
        """None: what is copied of a run does not write into its folder."""

    def claim(self) -> None:
        """Let no other run use the folder until the log is released, else a ``ConfigError``."""
        self._log.claim("Recovery: folder", self._own)

    def is_due(self, step: int) -> bool:
        """Whether to write that of this step."""
        return self.saved is None or step - self.saved >= self._every

    def write(self, step: int, state: Mapping[str, Any], recovery: Mapping[str, Any]) -> None:
        """Write a snapshot, and remove what it replaces once every rank has written its own.

        Where a rank cannot, none keeps it: a warning says so, and one is due.
        """
        file = self._own / f"snapshot-{step:08d}.pt"
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # the copies to the host have come so far
        then = ((name, x, state[name]) for name, x in state.get("next", {}).items())
        others = {name: x for name, x, y in then if x is y or digest_of(x) != digest_of(y)}
        state = {**state, "next": others}  # parts that had changed when the next step began
        digest, problem = digest_of([state, recovery]), unreadable(state)
        facts = {"version": _VERSION, "step": step, "ranks": self._ranks.count, "digest": digest}
        try:
            self._log.flush()
            if not (problem or self._log.is_whole):
                problem = "log_dir= has not taken the rows before it"
            if not problem:
                self._own.mkdir(parents=True, exist_ok=True)
                save_durably(file, {**facts, "state": state, "recovery": recovery})
                read = {} if self._has_read else load_durably(file)
                if read and digest != digest_of([read["state"], read["recovery"]]):
                    raise ConfigError(f"{file} is not what was written")
                self._has_read = True
        except (OSError, ConfigError) as error:
            problem = str(error)
            if isinstance(error, ConfigError):
                file.unlink(missing_ok=True)  # there is none where a sink refused its rows
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
                with suppress(OSError):  # it is a folder, say
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

    def newest(self, take: Callable[[dict[str, Any]], None]) -> dict[str, Any] | None:
        """The newest snapshot that every rank has and can take; None where there is none at all.

        ``take`` goes on from one, or raises one of ``MISFITS``. Where it does on another rank, it
        is called again, with an older one. Raises a ``ConfigError``, on all, where not all can.
        """
        own = dict(_snapshots([self._own]))
        everyone, problems = self._ranks.from_all([*own]), list[str]()
        for step in sorted({*own}.intersection(*everyone), reverse=True):
            course, problem = None, ""
            try:
                found = load_durably(own[step])
                self._check(step, found)
                take(found)
                course = found["recovery"]
            except MISFITS as error:
                problem = f"{own[step].name}: {type(error).__name__}: {error}"
                _log.warning("a snapshot cannot be read and is passed over: %s", problem)
            # Of two courses they are where a rollback was written on some ranks only.
            marks = self._ranks.from_all((course, problem))
            if all(mark == marks[0] for mark in marks) and not problem:
                return found
            problems += [each for _, each in marks if each]
        if not any(everyone):
            return None
        said = "no snapshot can be read and fits this run:"
        if self._ranks.count > 1:
            left = ", ".join(f"{max(steps)}" if steps else "none" for steps in everyone)
            said = f"{self._folder} has no snapshot that all {len(everyone)} ranks can read: those "
            said += f"left are of step {left}. Give every rank its files, or name another folder."
        raise ConfigError("\n  ".join([said, *problems]))

    def _check(self, step: int, snapshot: Mapping[str, Any]) -> None:
        """Refuse what is whole as a file, but is no snapshot of such a run at this step."""
        if (version := snapshot.get("version")) != _VERSION or snapshot.keys() != _KEYS:
            raise ConfigError(
                f"not a snapshot of this version: its format is {version!r}, that of this ebmguard "
                f"{_VERSION}. Go on with the ebmguard that wrote it, or begin in another folder."
            )
        said, own = snapshot["step"], snapshot["state"]["guard"]["step"]
        if not step == said == own:
            raise ConfigError(f"it says that it is of step {said!r}, and its guard {own!r}")
        if snapshot["ranks"] != self._ranks.count:
            raise ConfigError(
                f"{self._folder} holds snapshots of a run on {snapshot['ranks']} ranks, but this "
                f"one is on {self._ranks.count}. Go on with as many."
            )
        if snapshot["digest"] != digest_of([snapshot["state"], snapshot["recovery"]]):
            raise ConfigError("what it holds is not what was written")


def _snapshots(folders: Iterable[Path]) -> list[tuple[int, Path]]:
    """Steps and paths of the snapshots in folders, oldest first."""
    paths = [path for folder in folders for path in folder.glob("snapshot-*.pt")]
    found = ((_NAME.fullmatch(path.name), path) for path in paths)
    return sorted((int(match[1]), path) for match, path in found if match)


def described(tree: Any) -> dict[str, str]:
    """Shape and dtype, in words, of every tensor in nested containers, by the way to it."""
    tensors = ((way, x) for way, x in tree_flatten_with_path(tree)[0] if isinstance(x, Tensor))
    return {keystr(way): f"{tuple(x.shape)} of {x.dtype}" for way, x in tensors}


def difference(saved: Mapping[str, str], own: Mapping[str, str]) -> str:
    """The first difference between two descriptions, in words; empty without one."""
    for way in {**saved, **own}:
        was, now = (each.get(way, "missing") for each in (saved, own))
        if was != now:
            return f"{way} is {was} there, but {now} here"
    return ""


def digest_of(tree: Any) -> str:
    """A digest of the tensors on the host and of the plain values in nested containers."""
    found = hashlib.blake2b(digest_size=16)
    leaves, structure = tree_flatten(tree)
    found.update(repr(structure).encode())
    for x in leaves:
        if isinstance(x, set):
            x = sorted(map(repr, x))  # in one order in all processes
        elif not getattr(getattr(x, "dtype", None), "hasobject", True):
            # NumPy's, but for arrays of objects; a file gives back this machine's order of bytes.
            x = x.astype(x.dtype.newbyteorder("=")).tobytes()
        found.update(repr(type(x) if isinstance(x, Tensor) else x).encode())
        if isinstance(x, Tensor) and x.numel() and x.layout is torch.strided:
            x = x.detach().contiguous()
            found.update(f"{x.shape} {x.dtype}".encode())
            found.update((c_char * x.nbytes).from_address(x.data_ptr()))
    return found.hexdigest()


def unreadable(tree: Any, way: str = "") -> str:
    """The part of nested containers, in words, that a file could not give back; empty if none."""
    if _is_readable(tree):
        return ""
    items = [*tree.items()] if isinstance(tree, Mapping) else []
    items += enumerate(tree) if isinstance(tree, list | tuple) else ()
    while len(items) > 1:
        half = len(items) // 2
        items = items[half:] if _is_readable(items[:half]) else items[:half]
    inner = (unreadable(x, f"{way}[{key!r}]" if way else str(key)) for key, x in items)
    said = f"{way} is a {type(tree).__module__}.{type(tree).__qualname__}. Let its state_dict() "
    return next(filter(None, inner), said + "return tensors, numbers, texts, lists and dicts.")


def _is_readable(tree: Any) -> bool:
    tree = tree_map(lambda x: torch.empty(0) if type(x) is Tensor else x, tree)
    with suppress(*_DAMAGE, PickleError):
        torch.save(tree, stream := BytesIO())
        stream.seek(0)
        _loaded(stream, "cpu")
        return True
    return False


def _loaded(stream: Any, device: torch.device | str) -> Any:
    """Executes nothing: besides what torch reads, dates, paths and NumPy's numbers and arrays."""
    plain: list[Any] = [date, datetime, timedelta, timezone, type(Path())]
    if numpy := sys.modules.get("numpy"):
        made = numpy.zeros(1), numpy.float64()
        plain += [numpy.ndarray, numpy.dtype, *(x.__reduce__()[0] for x in made)]
        plain += {type(numpy.dtype(code)) for code in numpy.typecodes["All"]}
    known = get_safe_globals()  # those stay
    with safe_globals([x for x in plain if x not in known]):
        return torch.load(stream, map_location=device, weights_only=True)


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
        ConfigError: the file cannot be read, leads out of its folder, or is not what was written.
    """
    try:
        if (stream := opened(file)) is None:
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
                said = f"it is whole, but holds {what}, as earlier versions wrote. {fix}"
                raise ConfigError(said) from error
        inside: list[Any] = [state]
        while inside:  # a list that holds one twice, which holds one twice, and so on
            if (size := size - 1) < 0:
                raise BadZipFile("what it holds is more than it is")
            each = inside.pop()
            inside += each.values() if isinstance(each, dict) else ()
            inside += each if isinstance(each, list | tuple) else ()
        return state
    except _DAMAGE as error:
        raise ConfigError(f"{file}: {error}") from error
