"""The first hour on a GPU, in parts: whether all runs there, and how fast.

    python -m benchmarks.gpu_hour                    # make gpu: all parts, in their order
    python -m benchmarks.gpu_hour --part toys        # make gpu PART=toys: one
    python -m benchmarks.gpu_hour --part train --minutes 30

Each part is a section of docs/results/gpu.md. A part ends within eight minutes; the training takes
as long as it is given, and goes on where it was.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ebmguard.errors import ConfigError
from ebmguard.reference_training.device import find_device

from .document import Part, run_parts

MINUTES = 8.0
"""Of a part."""
TESTS = (
    "tests/reference_training/shortrun/test_sampler.py",
    "tests/reference_training/engine/test_graphs.py",
    "tests/sampling/test_captured.py",
    "tests/check/test_checks.py",
)
"""Files with tests that need a GPU."""
Commands = Callable[[float], list[list[str]]]


def parts_of(device: str, out: Path, *, small: bool) -> dict[str, Part]:
    """The parts, in their order; `small` is the smallest form of each command, to try it."""

    def measured(**parts: Sequence[str]) -> Commands:
        """Parts of the benchmarks of trainers, which share the time."""
        words = [(module, part) for module, own in parts.items() for part in own]
        size = "toy" if small else "full"

        def commands(minutes: float) -> list[list[str]]:
            each = f"{minutes / len(words):.3g}"
            shared = ["--device", device, "--size", size, "--minutes", each]
            return [[f"benchmarks.{x}", "--measure", part, *shared] for x, part in words]

        return commands

    def always(*words: str, few: Sequence[str] = ()) -> Commands:
        return lambda _: [[*words, *(few if small else ())]]

    def train(_: float) -> list[list[str]]:
        run = out.parent / ("gpu-small" if small else "gpu-jem")
        words = ["ebmguard", "train", "jem", "--out", str(run)]
        if (run / "config.json").is_file():
            return [[*words, "--resume"]]
        words += ["--device", device]
        if small:
            return [[*words, "--iterations", "4", "--sgld-steps", "2", "--test-images", "20"]]
        return [[*words, "--data", "cifar10", "--beta-star", "0.5", "--precision", "bfloat16"]]

    pytest = ("pytest", "-q", "-rs", "-p", "no:cacheprovider", *TESTS[: 1 if small else None])
    overhead = always(
        *("benchmarks.overhead", "--device", device),
        few=("--only", "mlp", "--rounds", "2", "--steps", "2"),
    )
    toys = always("benchmarks.toy", "--device", device, few=("--rounds", "2"))
    return {
        "tests": Part("The tests that need a GPU", always(*pytest), logs=True),
        "overhead": Part("What the guard costs", overhead, logs=True),
        "waits": Part("Waiting for the GPU", measured(jem_gpu=["sync"], shortrun_gpu=["sync"])),
        "jem": Part("JEM: floor, step, compilation", measured(jem_gpu=["floor", "step"])),
        "shortrun": Part("Short runs: kernels, step", measured(shortrun_gpu=["kernels", "step"])),
        "toys": Part("The toys", toys, logs=True),
        "train": Part("A JEM on CIFAR-10", train, logs=True),
    }


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 1 where a part has failed."""
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = list(parts_of("cpu", Path(), small=True))
    made.add_argument("--part", choices=[*names, "all"], default="all")
    made.add_argument("--device", default="cuda", help="a GPU, such as cuda; cpu with --small")
    made.add_argument("--small", action="store_true", help="the smallest form, to try the parts")
    made.add_argument("--minutes", type=float, default=MINUTES, help="of each part")
    made.add_argument("--out", type=Path, default=Path("docs/results/gpu.md"))
    given = made.parse_args(words)
    try:
        find_device(given.device)
    except ConfigError as error:
        print(f"error: {error}\nTo try the parts without a GPU: --device cpu --small")
        return 2
    parts = parts_of(given.device, given.out, small=given.small)
    minutes = given.minutes * (len(parts) if given.part == "all" else 1)
    return run_parts(parts, given, minutes, "# A first hour on a GPU", "benchmarks.gpu_hour")


if __name__ == "__main__":
    sys.exit(main())
