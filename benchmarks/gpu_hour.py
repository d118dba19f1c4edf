"""The first hour on a GPU, in parts: whether all runs there, and how fast.

    python -m benchmarks.gpu_hour                    # make gpu: all parts, in their order
    python -m benchmarks.gpu_hour --part toys        # make gpu PART=toys: one
    python -m benchmarks.gpu_hour --part train --minutes 30

Each part is a section of docs/results/gpu.md, with commit, device and commands, written line by
line as they come, so that an interrupted hour keeps what it has measured. A part ends within eight
minutes; the training takes as long as it is given, and goes on where it was.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ebmguard.errors import ConfigError
from ebmguard.reference_training.device import find_device

from .document import GRACE, Document, provenance, write_part

HEADER = "# A first hour on a GPU\n"
MINUTES = 8.0
"""Of a part."""
FAILED = "**Failed**"
TESTS = (
    "tests/reference_training/engine/test_graphs.py",
    "tests/reference_training/shortrun/test_sampler.py",
    "tests/sampling/test_captured.py",
    "tests/check/test_checks.py",
)
"""Files with tests that need a GPU."""


class Hour(NamedTuple):
    """What the parts are given.

    Attributes:
        device: as it is named on the command line.
        small: the smallest form of each command, to try it.
        minutes: of a part.
        out: the document.
    """

    device: str
    small: bool
    minutes: float
    out: Path


class Part(NamedTuple):
    """One part of the hour.

    Attributes:
        title: of its section.
        commands: words after `python -m`, for each command.
    """

    title: str
    commands: Callable[[Hour], list[list[str]]]


def _benchmark(module: str, *parts: str) -> Callable[[Hour], list[list[str]]]:
    """Parts of one of the GPU benchmarks, which share the time."""

    def commands(hour: Hour) -> list[list[str]]:
        size = "toy" if hour.small else "full"
        minutes = f"{hour.minutes / len(parts):.3g}"
        # They write a file of their own too; here counts what they print.
        own = hour.out.with_name(f"{module}.md")
        shared = ["--device", hour.device, "--size", size, "--minutes", minutes, "--out", str(own)]
        return [[f"benchmarks.{module}", "--part", part, *shared] for part in parts]

    return commands


def _waits(hour: Hour) -> list[list[str]]:
    half = hour._replace(minutes=hour.minutes / 2)
    trainers = ("jem_gpu", "shortrun_gpu")
    return [words for module in trainers for words in _benchmark(module, "sync")(half)]


def _tests(hour: Hour) -> list[list[str]]:
    files = TESTS[1:2] if hour.small else TESTS
    return [["pytest", "-q", "-rs", "-p", "no:cacheprovider", *files]]


def _overhead(hour: Hour) -> list[list[str]]:
    few = ["--only", "mlp", "--rounds", "2", "--steps", "2"]
    return [["benchmarks.overhead", "--device", hour.device, *(few if hour.small else [])]]


def _toys(hour: Hour) -> list[list[str]]:
    few = ["--rounds", "2"] if hour.small else []
    return [["benchmarks.toy", "--device", hour.device, *few]]


def _train(hour: Hour) -> list[list[str]]:
    out = hour.out.parent / ("gpu-small" if hour.small else "gpu-jem")
    words = ["ebmguard", "train", "jem", "--out", str(out)]
    if (out / "config.json").is_file():
        return [[*words, "--resume"]]
    words += ["--device", hour.device]
    if hour.small:
        return [[*words, "--iterations", "4", "--sgld-steps", "2", "--test-images", "20"]]
    return [[*words, "--data", "cifar10", "--beta-star", "0.5", "--precision", "bfloat16"]]


PARTS = {
    "tests": Part("The tests that need a GPU", _tests),
    "overhead": Part("What the guard costs", _overhead),
    "waits": Part("Waiting for the GPU", _waits),
    "jem": Part("JEM: floor, step, compilation", _benchmark("jem_gpu", "floor", "step")),
    "shortrun": Part("Short runs: kernels, step", _benchmark("shortrun_gpu", "kernels", "step")),
    "toys": Part("The toys", _toys),
    "train": Part("A JEM on CIFAR-10", _train),
}


def printed(words: Sequence[str], seconds: float) -> Iterator[str]:
    """What a command prints, line by line; where its time is over it is stopped as by Ctrl-C.

    The last line says so, or that it has failed.
    """
    with subprocess.Popen(
        [sys.executable, "-m", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        timers = [
            threading.Timer(seconds, process.send_signal, [signal.SIGINT]),
            threading.Timer(seconds + GRACE, process.kill),
        ]
        for timer in timers:
            timer.start()
        try:
            for line in process.stdout:
                # Headings of a benchmark stand below that of the part.
                yield f"#{line}" if line.startswith("## ") else line
            status = process.wait()
        finally:
            is_stopped = not timers[0].is_alive()
            for timer in timers:
                timer.cancel()
            process.kill()  # nothing where it has ended
    if is_stopped:
        yield f"\nStopped after {seconds / 60:.3g} minutes.\n"
    elif status:
        yield f"\n{FAILED} with status {status}.\n"


def run_part(name: str, hour: Hour) -> bool:
    """Run a part and write its section; whether it has come through."""
    part, device = PARTS[name], find_device(hour.device)
    commands = part.commands(hour)
    failed = False

    def texts() -> Iterator[str]:
        nonlocal failed
        for words in commands:
            if len(commands) > 1:
                yield f"\n`python -m {shlex.join(words)}`\n\n"
            for line in printed(words, 60 * hour.minutes / len(commands)):
                failed |= line.strip().startswith(FAILED)
                yield line

    document = Document(hour.out, HEADER, [each.title for each in PARTS.values()])
    first = (
        ["python", "-m", *commands[0]] if len(commands) == 1 else ["make", "gpu", f"PART={name}"]
    )
    write_part(document, part.title, provenance(device, first), texts())
    return not failed


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 1 where a part has failed."""
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    made.add_argument("--part", choices=[*PARTS, "all"], default="all")
    made.add_argument("--device", default="cuda", help="a GPU, such as cuda; cpu with --small")
    made.add_argument("--small", action="store_true", help="the smallest form, to try the parts")
    made.add_argument("--minutes", type=float, default=MINUTES, help="of each part")
    made.add_argument("--out", type=Path, default=Path("docs/results/gpu.md"))
    arguments = made.parse_args(words)
    try:
        find_device(arguments.device)
    except ConfigError as error:
        print(f"error: {error}\nTo try the parts without a GPU: --device cpu --small")
        return 2
    hour = Hour(arguments.device, arguments.small, arguments.minutes, arguments.out)
    names = list(PARTS) if arguments.part == "all" else [arguments.part]
    failed = [name for name in names if not run_part(name, hour)]
    print("".join(f"\n{name}: failed" for name in failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
