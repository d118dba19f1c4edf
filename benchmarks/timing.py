"""Ways to train against each other: time in alternating blocks, and peak memory."""

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
from typing import NamedTuple, Protocol

import torch
from torch._dynamo.utils import counters

from ebmguard.reference_training.precision import PrecisionName, set_precision

from .reading import peak_resident_kib

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


class Seconds(NamedTuple):
    """Of one call, the mean of a turn's."""

    wall: float
    cpu: float


Rounds = dict[str, list[Seconds]]


def alternate(
    turns: Mapping[str, Turn], rounds: Clock | int, device: torch.device, warm_up: int = 0
) -> Rounds:
    """Let the turns alternate there and back; seconds of a call by name, a list over rounds.

    Args:
        turns: by name, in their order.
        rounds: how many; or as many as there is time for.
        device: on a GPU a turn lies between two synchronisations.
        warm_up: rounds before these, which are not counted.
    """
    found: Rounds = {name: [] for name in turns}
    longest, done = 0.0, -warm_up
    while done < 0 or _goes_on(rounds, done, longest):
        began = time.monotonic()
        for name in list(turns)[:: -1 if done % 2 else 1]:
            call, calls, before = turns[name]
            before()
            synchronize(device)
            cpu, wall = time.process_time(), time.perf_counter()
            for _ in range(calls):
                call()
            synchronize(device)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if done >= 0:
                found[name].append(Seconds(wall / calls, cpu / calls))
        longest = max(longest, time.monotonic() - began)
        done += 1
    return found


def _goes_on(rounds: Clock | int, done: int, longest: float) -> bool:
    if isinstance(rounds, int):
        return done < rounds
    return done < MIN_ROUNDS or (done < MAX_ROUNDS and rounds.left > 1.5 * longest)


def synchronize(device: torch.device) -> None:
    """Wait for what a GPU has under way."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ratios(over: Sequence[Seconds], under: Sequence[Seconds], digits: str = ".2f") -> str:
    """How many times as long one takes as the other: median and quartiles within rounds."""
    return spread([a.wall / b.wall for a, b in zip(over, under, strict=True)], digits)


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
        wall = [x.wall for x in own]
        rate = f"{flop / statistics.median(wall) / 1e12:.1f}"
        cells = (spread([1e3 * x for x in wall]), rate, *(ratios(found[x], own) for x in loops))
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
