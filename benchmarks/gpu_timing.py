"""Ways to train against each other on a GPU: time in alternating blocks, and peak memory."""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch._dynamo.utils import counters

from ebmguard.reference_training.precision import PrecisionName, set_precision

from .overhead import peak_resident_kib
from .toy import synchronize

WARM_UP = 3
MIN_ROUNDS, MAX_ROUNDS = 3, 40
LONGEST_WARM_UP = 0.6
"""Share of a part's time after which no further variant is prepared."""


class Steps(Protocol):
    """Something that trains a network step by step."""

    precision: PrecisionName

    def step(self) -> None:
        """The next step."""

    def close(self) -> None:
        """Let go of what is open."""


class Clock:
    """The time that a part may take."""

    def __init__(self, minutes: float) -> None:
        self._start = time.monotonic()
        self._seconds = 60 * minutes

    @property
    def left(self) -> float:
        """Seconds; below 0 when it is over."""
        return self._start + self._seconds - time.monotonic()

    @property
    def used(self) -> float:
        """Share of the time, 1 when it is over."""
        return 1 - self.left / self._seconds if self._seconds else 1.0


class Turn(NamedTuple):
    """What is done in one turn: so many calls, after what is not timed."""

    call: Callable[[], object]
    calls: int
    before: Callable[[], object] = lambda: None


def alternate(turns: Mapping[str, Turn], clock: Clock, device: torch.device) -> dict[str, Any]:
    """Seconds of one call by name, a list over rounds; there and back until the time is over."""
    found: dict[str, list[float]] = {name: [] for name in turns}
    longest, rounds = 0.0, 0
    while rounds < MIN_ROUNDS or (rounds < MAX_ROUNDS and clock.left > 1.5 * longest):
        began = time.monotonic()
        for name in list(turns)[:: -1 if rounds % 2 else 1]:
            call, calls, before = turns[name]
            before()
            synchronize(device)
            start = time.perf_counter()
            for _ in range(calls):
                call()
            synchronize(device)
            found[name].append((time.perf_counter() - start) / calls)
        longest = max(longest, time.monotonic() - began)
        rounds += 1
    return found


def spread(values: Sequence[float], digits: str = ".1f") -> str:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:{digits}} ({low:{digits}} to {high:{digits}})"


def warmed_up(make: Callable[[], Steps], device: torch.device) -> tuple[Steps, float]:
    """A variant after its first steps, and the seconds that these took."""
    start = time.perf_counter()
    made = make()
    with ExitStack() as on_failure:
        on_failure.callback(made.close)
        for _ in range(WARM_UP):
            made.step()
        synchronize(device)
        on_failure.pop_all()
    return made, time.perf_counter() - start


def first_line(error: Exception) -> str:
    """What an error says, short enough for a table."""
    return str(error).strip().partition("\n")[0].replace("|", "\\|")


def compilations() -> int:
    """Frames that torch.compile has compiled in this process so far."""
    return int(counters["frames"]["ok"])


def step_tables(
    variants: Mapping[str, Callable[[], Steps]],
    loops: Sequence[str],
    *,
    block: int,
    flop: int,
    clock: Clock,
    device: torch.device,
) -> Iterator[str]:
    """Tables of the first steps and of later ones of each variant, alternating in this process.

    Args:
        variants: what makes each, the most important first: what finds no time is left out.
        loops: those of them to which the others are compared; never left out.
        block: steps of a variant before the next one has its turn.
        flop: floating-point operations of a step.
        clock: the time of all.
        device: where they train.
    """
    yield (
        f"The first {WARM_UP} steps (compilation, capture, cuDNN's choices), not counted below:\n\n"
        "| variant | seconds |\n|---|---:|\n"
    )
    with ExitStack() as open_ones:
        made: dict[str, Steps] = {}
        for name, make in variants.items():
            if len(made) > len(loops) and clock.used > LONGEST_WARM_UP:
                yield f"| {name} | left out: no time |\n"
                continue
            try:
                made[name], seconds = warmed_up(make, device)
            except RuntimeError as error:  # out of memory, or the compiler failed
                traceback.print_exc()
                yield f"| {name} | failed: {first_line(error)} |\n"
            else:
                open_ones.callback(made[name].close)
                yield f"| {name} | {seconds:.1f} |\n"
        compiled = compilations()
        turns = {
            name: Turn(each.step, block, partial(set_precision, each.precision))
            for name, each in made.items()
        }
        found = alternate(turns, clock, device)
    loops = [name for name in loops if name in found]
    yield "\n| variant | step, ms | TFLOP/s |" + "".join(f" {x} / it |" for x in loops)
    yield "\n|---|---:|---:|" + len(loops) * "---:|" + "\n"
    for name, own in found.items():
        ratios = [
            spread([a / b for a, b in zip(found[loop], own, strict=True)], ".2f") for loop in loops
        ]
        rate = flop / statistics.median(own) / 1e12
        cells = (spread([1e3 * x for x in own]), f"{rate:.1f}", *ratios)
        yield f"| {name} | {' | '.join(cells)} |\n"
    yield f"\n{len(next(iter(found.values())))} rounds.\n"
    if (again := compilations() - compiled) > 0:
        yield f"\n**{again} functions were compiled during the measurement: do not use it.**\n"


def memory_of(make: Callable[[], Steps], device: torch.device) -> dict[str, float]:
    """GiB at the peak of the first steps, and of later ones, of a process of its own."""
    cuda = device.type == "cuda"

    def peaks(when: str) -> dict[str, float]:
        if not cuda:
            # Of the whole process, since it began.
            return {f"{when}, resident": peak_resident_kib() / 2**20}
        found = {
            f"{when}, allocated": torch.cuda.max_memory_allocated(device) / 2**30,
            f"{when}, reserved": torch.cuda.max_memory_reserved(device) / 2**30,
        }
        torch.cuda.reset_peak_memory_stats(device)
        return found

    made, _ = warmed_up(make, device)
    found = peaks("first steps")
    if cuda:
        gc.collect()
        torch.cuda.empty_cache()
        peaks("")
    for _ in range(WARM_UP):
        made.step()
    synchronize(device)
    found |= peaks("later steps")
    made.close()
    return found


def memory_table(variants: Sequence[str], command: Sequence[str], clock: Clock) -> Iterator[str]:
    """A table of the peak memory of variants.

    Args:
        variants: by name, the most important first.
        command: prints :func:`memory_of` as JSON when `--memory-of NAME` follows it.
        clock: the time of all.
    """
    yield (
        f"Each variant in a process of its own; GiB at the peak of the first {WARM_UP} steps "
        f"(compilation, capture, cuDNN's trials) and of the {WARM_UP} after them. What a CUDA "
        "graph works in is reserved, and allocated only while it is captured.\n\n"
    )
    header = ""
    for i, name in enumerate(variants):
        if i and clock.left <= 0:
            yield f"\n{name}: left out, no time.\n"
            continue
        words = [*command, "--memory-of", name]
        run = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
        if run.returncode:
            yield f"\n{name}: failed with status {run.returncode}.\n\n"
            header = ""
            continue
        found = json.loads(run.stdout.splitlines()[-1])
        cells = f"| {name} | " + " | ".join(f"{x:.2f}" for x in found.values()) + " |\n"
        if not header:
            header = f"| variant | {' | '.join(found)} |\n|---|{len(found) * '---:|'}\n"
            cells = header + cells
        yield cells
