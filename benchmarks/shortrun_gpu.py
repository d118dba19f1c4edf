"""The short-run trainer on a GPU: its speed, its memory, and what it learns in minutes.

    python -m benchmarks.shortrun_gpu --part all --device cuda --minutes 9
    python -m benchmarks.shortrun_gpu --part train --minutes 9 --features inception:FILE

CIFAR-10 at the published settings, guarded, against an eager loop of the published structure.
Every part is a section of the file, written as soon as something is known, instead of what an
earlier command wrote there; other sections stay. So a command that is cut short loses little, and
the parts can be run by several commands. A training is gone on with by the next command, as long
as its folder is kept. Without EBMGUARD_DATA only time, memory and waiting are measured, on random
images.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ebmguard.errors import ConfigError
from ebmguard.reference_training.device import find_device

from .gpu_document import Document, provenance, run_all, write_part
from .gpu_timing import Clock, memory_of
from .shortrun_loop import SIZES
from .shortrun_parts import (
    VARIANTS,
    Bench,
    kernels_part,
    memory_part,
    step_part,
    sync_part,
    train_part,
)

HEADER = "# The short-run trainer on a GPU\n"
TITLES = {
    "step": "Time of an update",
    "kernels": "Where the time goes",
    "sync": "Waiting for the GPU",
    "memory": "Peak memory",
    "train": "A training of minutes",
}
SHARES = {"step": 4, "kernels": 1, "sync": 1, "memory": 2, "train": 5}
"""How all parts divide the time that is left."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    made.add_argument("--part", choices=[*TITLES, "all"], default="all")
    made.add_argument("--device", default="cuda", help="a GPU, such as cuda; cpu with --size toy")
    made.add_argument("--size", choices=list(SIZES), default="full", help="toy: to try the parts")
    made.add_argument("--minutes", type=float, default=9, help="time of the command")
    made.add_argument("--out", type=Path, default=Path("docs/results/shortrun_gpu.md"))
    made.add_argument("--runs", type=Path, default=Path("runs/shortrun_gpu"), help="their folder")
    made.add_argument(
        "--features",
        action="append",
        default=[],
        help="judges samples: the folder of a JEM run on the same data, or inception:FILE; can be "
        "given several times. Without it a classifier is trained first",
    )
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
        judges = [word for spec in arguments.features for word in ("--features", spec)]
        return [sys.executable, "-m", "benchmarks.shortrun_gpu", *pairs, *judges]

    if arguments.part == "all":
        failed = list(run_all(SHARES, command, arguments.minutes))
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
            arguments.features,
        )
        if arguments.memory_of:
            print(json.dumps(memory_of(bench.makers()[arguments.memory_of], device)))
            return 0
        own = command(arguments.part, arguments.minutes)
        texts = {
            "step": step_part,
            "kernels": kernels_part,
            "sync": sync_part,
            "memory": lambda bench: memory_part(bench, own),
            "train": train_part,
        }[arguments.part](bench)
        document = Document(arguments.out, HEADER, TITLES.values())
        write_part(
            document, TITLES[arguments.part], provenance(device, ["python", *own[1:]]), texts
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
