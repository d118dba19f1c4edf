"""The file that a benchmark of a GPU writes, part by part, and the processes of its parts."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path

import torch

from ebmguard.reference_training.device import describe

from .grid import commit
from .timing import Clock

UNFINISHED = "**Cut short here.**"
GRACE = 45
"""Seconds that a part may take beyond its time before it is ended."""


class Document:
    """Sections of a Markdown file.

    Args:
        path: the file; what it holds beside the sections that are put is kept.
        header: its first line, where it is new.
        titles: of the sections that a benchmark puts, in their order.
    """

    def __init__(self, path: Path, header: str, titles: Iterable[str]) -> None:
        self.path = path
        self.header = header
        self.titles = tuple(titles)

    def put(self, title: str, text: str) -> None:
        """Write a section, instead of the one of the same title."""
        old = self.path.read_text(encoding="utf-8") if self.path.is_file() else self.header
        top, *parts = re.split(r"^## ", old, flags=re.MULTILINE)
        sections = dict(part.split("\n", 1) for part in parts)
        sections[title] = f"\n{text.strip()}\n\n"
        order = [*self.titles, *sections]
        body = "".join(f"## {x}\n{sections[x]}" for x in dict.fromkeys(order) if x in sections)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text(f"{top.rstrip()}\n\n{body.rstrip()}\n", encoding="utf-8")
        os.replace(partial, self.path)


def write_part(document: Document, title: str, source: str, texts: Iterable[str]) -> None:
    """Write and print what a part yields, as it comes."""
    text = f"{source}\n\n"
    print(f"\n## {title}\n\n{text}", end="")
    for more in texts:
        text += more
        print(more, end="", flush=True)
        document.put(title, f"{text}\n{UNFINISHED}")
    document.put(title, text)


def provenance(device: torch.device, command: Sequence[str]) -> str:
    """What ran, where and when."""
    revision = commit() if shutil.which("git") else "unknown"
    return (
        f"Commit {revision}, {describe(device)}, torch {torch.__version__}, "
        f"{date.today():%d %B %Y}: `{shlex.join(command)}`"
    )


def run_all(
    shares: Mapping[str, float], command: Callable[[str, float], Sequence[str]], minutes: float
) -> Iterator[str]:
    """Run each part in a process of its own; yields those that failed or found no time.

    Args:
        shares: how the parts, in their order, divide the time that is left.
        command: of a part, by its name and minutes.
        minutes: of all parts.
    """
    clock, waiting = Clock(minutes), dict(shares)
    for part in shares:
        seconds = clock.left * waiting[part] / sum(waiting.values())
        del waiting[part]
        if seconds <= 0:
            yield f"{part}: no time"
            continue
        try:
            subprocess.run(command(part, seconds / 60), check=True, timeout=seconds + GRACE)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            yield f"{part}: {error}"
