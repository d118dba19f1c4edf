"""Data sets that are missing, fetched from where they are published, when somebody asks for it."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from ebmguard.errors import ConfigError, DiskError

from .files import PublishedFiles

CHUNK = 1 << 20
PATIENCE = 60.0
"""Seconds without a byte after which a connection is lost."""
_logger = logging.getLogger("ebmguard.data")


def fetch(files: PublishedFiles, root: Path) -> None:
    """Fetch what a folder lacks of a data set; a file that came in part is gone on with.

    Files get their names when they have the published checksum, and not before.

    Raises:
        ConfigError: a file cannot be fetched, which names it, or is not the published one.
        DiskError: the disk does not take it.
    """
    if any(all((root / f / name).is_file() for name in files.md5) for f in files.folders):
        return
    folder = root / files.folders[0]
    if files.archive is None:
        for name, md5 in files.md5.items():
            if not (folder / name).is_file():
                _write(folder / name, _fetched(files, folder / name, files.page + name, md5))
        return
    address, md5 = files.archive
    part = folder.parent / address.rpartition("/")[2]
    with tarfile.open(fileobj=io.BytesIO(_fetched(files, part, address, md5))) as archive:
        for name, own in files.md5.items():
            member = archive.extractfile(f"{files.folders[0]}/{name}")
            content = b"" if member is None else member.read()
            files.check(content, own, folder / name)
            _write(folder / name, content)


def _fetched(files: PublishedFiles, path: Path, address: str, md5: str) -> bytes:
    """The content of an address, whose file beside `path` goes when all of it has come."""
    part = path.with_name(f"{path.name}.part")
    lost = f"{', '.join(files.md5)} of {files.title} cannot be fetched from {address}"
    help_ = f"Try again later, or put the files into {path.parent} yourself"
    try:
        _go_on(part, address)
    except DiskError:
        raise
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(f"{lost}: {reason}. {help_}; what has come is kept.") from error
    content = part.read_bytes()
    part.unlink()
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != md5:
        what = "what came is not what was published, by its md5, and is removed"
        raise ConfigError(f"{lost}: {what}. {help_}.")
    return content


def _go_on(part: Path, address: str) -> None:
    """Append the rest of an address to a file that has the first bytes of it."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    with _disk(part):
        part.parent.mkdir(parents=True, exist_ok=True)
        have = part.stat().st_size if part.is_file() else 0
    try:
        response = urlopen(Request(address, headers={"Range": f"bytes={have}-"}), timeout=PATIENCE)
    except HTTPError as error:
        if error.code == 416 and have:  # there is no more
            return
        raise
    columns = (TextColumn(part.name), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())
    with response, bar:
        have = have if response.status == 206 else 0
        total = have + int(response.headers.get("Content-Length", 0))
        _logger.info("fetching %s, of which %.1f MB are left", address, (total - have) / 1e6)
        task = bar.add_task(part.name, completed=have, total=total)
        while chunk := response.read(CHUNK):
            with _disk(part), part.open("ab" if have else "wb") as stream:
                stream.write(chunk)
            have += len(chunk)
            bar.update(task, completed=have)
    if have < total:
        raise ConnectionError(f"the connection ended after {have:,} of {total:,} bytes")


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Context of what is written to a file: its errors are the disk's."""
    try:
        yield
    except OSError as error:
        raise DiskError.of(path, error) from error


def _write(path: Path, content: bytes) -> None:
    """All of a file, or nothing."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with _disk(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(content)
            os.replace(partial, path)
    finally:
        with suppress(OSError):  # it has its name, or was never there
            partial.unlink()
