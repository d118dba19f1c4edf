"""Parts of a benchmark of a GPU: what their commands print is a section of a Markdown file.

The slot of a section is filled line by line as the lines come; all else in the file stays. So a
command that is cut short loses nothing, and parts can be run one by one.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch

from ebmguard.reference_training.device import describe, find_device

from .grid import commit, filled, write_text
from .timing import Clock

UNFINISHED, FAILED = "**Cut short here.**", "**Failed**"
GRACE = 45
"""Seconds that a command may take beyond its time before it is killed."""


class Part(NamedTuple):
    """A section.

    Attributes:
        title: of the section.
        commands: words after `python -m` of each command, from the minutes that the part has.
        share: of the time that is left to it and those after it.
        logs: whether what they log is shown too.
    """

    title: str
    commands: Callable[[float], Sequence[Sequence[str]]]
    share: float = 1
    logs: bool = False


def put(file: Path, name: str, text: str, parts: Mapping[str, Part], header: str) -> None:
    """Fill the slot of a part; a new file has the header, and a section for each part."""
    if not file.is_file():
        new = "".join(f"\n\n## {parts[x].title}\n\n<!-- {x} -->\n\n<!-- /{x} -->" for x in parts)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, f"{header}{new}\n")
    write_text(file, filled(file.read_text(encoding="utf-8"), {name: text.strip()}, whole=False))


def run_parts(
    parts: Mapping[str, Part], given: argparse.Namespace, minutes: float, header: str, module: str
) -> int:
    """Run the parts that are asked for, and write their sections.

    Args:
        parts: all that there are.
        given: the command line; `part` is one of them or "all", `out` is the file, `device` where.
        minutes: of all that are asked for together.
        header: first line of the file, where it is new.
        module: whose command this is.

    Returns:
        The exit status: 1 where a part has failed, or found no time.
    """
    device = find_device(given.device)
    waiting = {name: part for name, part in parts.items() if given.part in (name, "all")}
    clock, failed = Clock(minutes), []
    for name, part in list(waiting.items()):
        own = clock.left * part.share / sum(each.share for each in waiting.values()) / 60
        del waiting[name]
        if own <= 0:
            failed.append(f"{name}: no time")
            continue
        text = f"{provenance(device, ['python', '-m', module, '--part', name])}\n\n"
        print(f"\n## {part.title}\n\n{text}", end="")
        for line in printed(part.commands(own), own, logs=part.logs):
            text += line
            print(line, end="", flush=True)
            put(given.out, name, f"{text}\n{UNFINISHED}", parts, header)
        put(given.out, name, text, parts, header)
        failed += [f"{name}: failed"] * (FAILED in text)
    print("\n".join(failed))
    return 1 if failed else 0


def printed(
    commands: Sequence[Sequence[str]], minutes: float, *, logs: bool = False
) -> Iterator[str]:
    """What commands print, line by line; where its time is over one is stopped as by Ctrl-C.

    The last line of a command says so, or that it has failed.
    """
    seconds = 60 * minutes / len(commands)
    for words in commands:
        if len(commands) > 1:
            yield f"\n`python -m {shlex.join(words)}`\n\n"
        with subprocess.Popen(
            [sys.executable, "-m", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if logs else None,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        ) as process:
            assert process.stdout is not None
            stop = threading.Timer(seconds, process.send_signal, [signal.SIGINT])
            kill = threading.Timer(seconds + GRACE, process.kill)
            stop.start()
            kill.start()
            try:
                for line in process.stdout:
                    # Headings of a command stand below that of the part.
                    yield f"#{line}" if line.startswith("## ") else line
                status = process.wait()
            finally:
                is_stopped = not stop.is_alive()
                stop.cancel()
                kill.cancel()
                process.kill()  # nothing where it has ended
        if is_stopped:
            yield f"\nStopped after {seconds / 60:.3g} minutes.\n"
        elif status:
            yield f"\n{FAILED} with status {status}.\n"


def provenance(device: torch.device, command: Sequence[str]) -> str:
    """What ran, where and when."""
    revision = commit() if shutil.which("git") else "unknown"
    return (
        f"Commit {revision}, {describe(device)}, torch {torch.__version__}, "
        f"{date.today():%d %B %Y}: `{shlex.join(command)}`"
    )
