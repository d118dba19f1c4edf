"""The first hour on a GPU, in parts: whether all runs there, and how fast.

    python -m benchmarks.gpu                          # make gpu: all parts, in their order
    python -m benchmarks.gpu --part toys              # make gpu PART=toys: one
    python -m benchmarks.gpu --part train --minutes 30

What a part prints is a section of docs/results/gpu.md, written line by line as it comes, so that a
part that is cut short loses nothing. Trainings go on where they were.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ebmguard.errors import ConfigError
from ebmguard.reference_training.device import find_device
from ebmguard.reference_training.engine.run_folder import write_text

from .grid import filled, provenance

FAILED = "**Failed**"
GRACE = 45
"""Seconds that a command may take beyond its time before it is killed."""
STOPPED = (124, 128 + 9)
"""What `timeout` returns where it has stopped a command, and where it has killed it."""
TESTS = (
    "tests/reference_training/shortrun/test_sampler.py",
    "tests/reference_training/engine/test_graphs.py",
    "tests/sampling/test_captured.py",
    "tests/check/test_checks.py",
)
"""Files with tests that need a GPU."""
TITLES = {
    "tests": "The tests that need a GPU",
    "overhead": "What the guard costs",
    "jem": "JEM: a step's time, memory and waits",
    "shortrun": "Short runs: the same",
    "toys": "The toys",
    "train": "Trainings on CIFAR-10",
}
Command = Sequence[str]


def commands(part: str, device: str, minutes: float, runs: Path, *, small: bool) -> list[Command]:
    """Words after `python -m` of each command of a part; `small` is their smallest form."""
    on, tiny = ("--device", device), ("--small",) if small else ()
    if part == "tests":
        return [("pytest", "-q", "-rs", "-p", "no:cacheprovider", *TESTS[: 1 if small else None])]
    if part == "overhead":
        few = ("--only", "mlp", "--rounds", "2", "--steps", "2") if small else ()
        return [("benchmarks.overhead", *on, *few)]
    if part in ("jem", "shortrun"):
        # Its table comes last, and must not be cut off: imports and the last round take time too.
        budget = 0 if small else 0.8 * minutes
        return [("benchmarks.gpu_steps", part, *on, "--minutes", f"{budget:.3g}", *tiny)]
    if part == "toys":
        return [("benchmarks.toy", *on, *(("--rounds", "2") if small else ()))]
    trainings = {
        "jem-0": ("jem", "--scenario", "2", "--beta-star", "0"),
        "jem-2": ("jem", "--scenario", "2", "--beta-star", "2"),
        "shortrun": ("shortrun",),
    }
    found: list[Command] = []
    for name, (trainer, *words) in trainings.items():
        own = [*words, "--data", "cifar10", "--precision", "bfloat16", *on]
        if small:
            own = ["--data", "digits", "--iterations", "4", "--sgld-steps", "2", *on]
        own = ["--resume"] if (runs / name / "config.json").is_file() else own
        found.append(("ebmguard", "train", trainer, "--out", str(runs / name), *own))
        found.append(("ebmguard", "watch", str(runs / name), "--once"))
    return found


def printed(words: Command, seconds: float) -> Iterator[str]:
    """What a command prints, line by line; when its time is over it is stopped as by Ctrl-C."""
    yield f"\n    python -m {shlex.join(words)}\n\n"
    # In the foreground, so that Ctrl-C reaches the command.
    limit = ("timeout", "--foreground", "--signal=INT", f"--kill-after={GRACE}", f"{seconds:g}")
    with subprocess.Popen(
        [*limit, sys.executable, "-u", "-m", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            # Headings of a command stand below that of the part.
            yield f"#{line}" if line.startswith("## ") else line
    if process.returncode in STOPPED:
        yield f"\nStopped after {seconds / 60:.3g} minutes.\n"
    elif process.returncode:
        yield f"\n{FAILED} with status {process.returncode}.\n"


def put(file: Path, part: str, text: str) -> None:
    """Fill the slot of a part; a new file has a section for each."""
    if not file.is_file():
        new = "".join(f"\n\n## {TITLES[x]}\n\n<!-- {x} -->\n\n<!-- /{x} -->" for x in TITLES)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, f"# A first hour on a GPU{new}\n")
    write_text(file, filled(file.read_text(encoding="utf-8"), {part: text.strip()}, whole=False))


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 1 where a part has failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--part", choices=[*TITLES, "all"], default="all")
    parser.add_argument("--device", default="cuda", help="a GPU, such as cuda; cpu with --small")
    parser.add_argument("--small", action="store_true", help="the smallest form, to try the parts")
    parser.add_argument("--minutes", type=float, default=8.0, help="of each part")
    parser.add_argument("--out", type=Path, default=Path("docs/results/gpu.md"))
    parser.add_argument("--runs", type=Path, default=Path("runs/gpu"))
    given = parser.parse_args(words)
    try:
        device = find_device(given.device)
    except ConfigError as error:
        print(f"error: {error}\nTo try the parts without a GPU: --device cpu --small")
        return 2
    failed = []
    for part in TITLES if given.part == "all" else (given.part,):
        text = f"{provenance(device, ['python', '-m', 'benchmarks.gpu', '--part', part])}\n"
        print(f"\n## {TITLES[part]}\n\n{text}", end="")
        own = commands(part, given.device, given.minutes, given.runs, small=given.small)
        trained = sum("train" in each for each in own) or 1
        for each in own:
            for line in printed(each, 60 * given.minutes / trained):
                text += line
                print(line, end="", flush=True)
                put(given.out, part, text)
        failed += [part] * (FAILED in text)
    print("\n".join(f"{part}: failed" for part in failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
