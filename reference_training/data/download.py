"""Data sets that are missing, fetched from where they are published, when somebody asks for it."""

from __future__ import annotations

import logging
import os
import sys
import tarfile
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from ebmguard.errors import ConfigError, printable

from .files import PublishedFiles, md5_of

CHUNK = 1 << 20
PATIENCE = 60.0
"""Seconds without a byte after which a connection is lost."""
MOST = 1 << 30
"""Bytes of a file, of which none published has as many."""
_logger = logging.getLogger("ebmguard.data")


def fetch(files: PublishedFiles, root: Path) -> None:
    """Fetch what a folder lacks of a data set; a file that came in part is gone on with.

    Files get their names when they have the published checksum, and not before.

    Raises:
        ConfigError: a file cannot be fetched or written, which names it, or is not the published
            one.
    """
    if any(all((root / f / name).is_file() for name in files.md5) for f in files.folders):
        return
    folder = root / files.folders[0]
    wanted = {folder / name: (files.page + name, md5) for name, md5 in files.md5.items()}
    if files.archive is not None:
        wanted = {folder.parent / files.archive[0].rpartition("/")[2]: files.archive}
    for path, (address, md5) in wanted.items():
        if path.is_file():
            continue
        lost = f"{', '.join(files.md5)} of {files.title} cannot be fetched from {address}"
        help_ = f"Try again later, or put the files into {folder} yourself"
        part = path.with_name(f"{path.name}.part")
        try:
            _go_on(part, address)
            if md5_of(part.read_bytes()) != md5:
                part.unlink()
                what = "what came is not what was published, by its md5, and is removed"
                raise ConfigError(f"{lost}: {what}. {help_}.")
            if files.archive is None:
                os.replace(part, path)
            else:
                _unpack(part, [*files.md5], folder)
        except (OSError, HTTPException, ValueError) as error:  # ValueError: of headers
            if isinstance(error, ConfigError):
                raise
            reason = printable(getattr(error, "reason", None) or error)
            raise ConfigError(f"{lost}: {reason}. {help_}; what has come is kept.") from error


def _go_on(part: Path, address: str) -> None:
    """Append the rest of an address to a file that has the first bytes of it."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

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
        length = response.headers.get("Content-Length", "")
        total = have + (int(length) if length.isdecimal() else 0)
        if total > MOST:
            raise ConnectionError(f"it has more than {MOST:,} bytes")
        _logger.info("fetching %s, of which %.1f MB are left", address, (total - have) / 1e6)
        task = bar.add_task(part.name, completed=have, total=total)
        with part.open("ab" if have else "wb") as stream:
            while chunk := response.read(CHUNK):
                have += stream.write(chunk)
                bar.update(task, completed=have)
                if have > MOST:
                    raise ConnectionError(f"it has more than {MOST:,} bytes")
    if have < total:
        raise ConnectionError(f"the connection ended after {have:,} of {total:,} bytes")


def _unpack(packed: Path, names: Sequence[str], folder: Path) -> None:
    """Take the members of these names out of an archive, which goes."""
    folder.mkdir(exist_ok=True)
    with tarfile.open(packed) as archive:
        for name in names:
            member = archive.extractfile(f"{folder.name}/{name}")
            assert member is not None
            part = folder / f"{name}.part"
            part.write_bytes(member.read())
            os.replace(part, folder / name)
    packed.unlink()
