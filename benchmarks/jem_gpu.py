"""The JEM trainer on a GPU: its speed, who diverges, what bfloat16 costs, and its memory.

    python -m benchmarks.jem_gpu --part all --device cuda --minutes 9 --out docs/results/jem_gpu.md

Every part is a section of the file, written as soon as something is known, in the place of what an
earlier command wrote there; other sections stay. So a command that is cut short loses little, and
the parts can be run by several commands. Runs that may diverge are gone on with by the next
command. Without EBMGUARD_DATA only time, memory and waiting are measured, on random images.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date
from pathlib import Path

import torch

from ebmguard.errors import ConfigError
from ebmguard.reference_training.device import describe, find_device

from .cells import commit
from .jem_loop import SIZES
from .jem_parts import (
    VARIANTS,
    Bench,
    Clock,
    diverge_part,
    energies_part,
    floor_part,
    memory_of,
    memory_part,
    step_part,
    sync_part,
)

HEADER = "# The JEM trainer on a GPU\n"
TITLES = {
    "step": "Time of a step",
    "floor": "Against the floor of a matrix product",
    "sync": "Waiting for the GPU",
    "diverge": "Who diverges in the first epoch",
    "energies": "Energies in bfloat16 and in float32",
    "memory": "Peak memory",
}
SHARES = {"step": 3, "floor": 1, "sync": 1, "diverge": 4, "energies": 1, "memory": 2}
"""How all parts divide the time that is left."""
UNFINISHED = "**Cut short here.**"
GRACE = 45
"""Seconds that a part may take beyond its time before it is ended."""


class Document:
    """Sections of a Markdown file.

    Args:
        path: the file; what it holds beside the sections that are put is kept.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def put(self, title: str, text: str) -> None:
        """Write a section, in the place of that of the same title."""
        old = self.path.read_text(encoding="utf-8") if self.path.is_file() else HEADER
        top, *parts = re.split(r"^## ", old, flags=re.MULTILINE)
        sections = dict(part.split("\n", 1) for part in parts)
        sections[title] = f"\n{text.strip()}\n\n"
        order = [*TITLES.values(), *sections]
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


def run_all(command: Callable[[str, float], Sequence[str]], minutes: float) -> Iterator[str]:
    """Run each part in a process of its own; yields those that failed or found no time.

    Args:
        command: of a part, by its name and minutes.
        minutes: of all parts.
    """
    clock, waiting = Clock(minutes), dict(SHARES)
    for part in SHARES:
        seconds = clock.left * waiting[part] / sum(waiting.values())
        del waiting[part]
        if seconds <= 0:
            yield f"{part}: no time"
            continue
        try:
            subprocess.run(command(part, seconds / 60), check=True, timeout=seconds + GRACE)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            yield f"{part}: {error}"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    made.add_argument("--part", choices=[*TITLES, "all"], default="all")
    made.add_argument("--device", default="cuda", help="a GPU, such as cuda; cpu with --size toy")
    made.add_argument("--size", choices=list(SIZES), default="full", help="toy: to try the parts")
    made.add_argument("--minutes", type=float, default=9, help="time of the command")
    made.add_argument("--out", type=Path, default=Path("docs/results/jem_gpu.md"))
    made.add_argument("--runs", type=Path, default=Path("runs/jem_gpu"), help="folder of the runs")
    made.add_argument("--memory-of", choices=list(VARIANTS), help=argparse.SUPPRESS)
    return made


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 1 where a part failed."""
    arguments = parser().parse_args(words)
    try:
        device = find_device(arguments.device)
    except ConfigError as error:
        print(f"error: {error}\nTo try the parts without a GPU: --device cpu --size toy")
        return 2

    def command(part: str, minutes: float) -> list[str]:
        options = {
            "part": part,
            "device": arguments.device,
            "size": arguments.size,
            "minutes": f"{minutes:.3g}",
            "out": str(arguments.out),
            "runs": str(arguments.runs),
        }
        pairs = [word for name, value in options.items() for word in (f"--{name}", value)]
        return [sys.executable, "-m", "benchmarks.jem_gpu", *pairs]

    if arguments.part == "all":
        failed = list(run_all(command, arguments.minutes))
        print("\n".join(failed))
        return 1 if failed else 0
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(
            SIZES[arguments.size],
            device,
            Clock(arguments.minutes),
            arguments.runs,
            Path(scratch),
        )
        if arguments.memory_of:
            print(json.dumps(memory_of(bench, arguments.memory_of)))
            return 0
        own = command(arguments.part, arguments.minutes)
        texts = {
            "step": step_part,
            "floor": floor_part,
            "sync": sync_part,
            "diverge": diverge_part,
            "energies": energies_part,
            "memory": lambda bench: memory_part(bench, own),
        }[arguments.part](bench)
        source = provenance(device, ["python", *own[1:]])
        write_part(Document(arguments.out), TITLES[arguments.part], source, texts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
