"""Ways to train against each other: time in alternating blocks, and peak memory."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple, Protocol

import torch
from torch._dynamo.utils import counters

from ebmguard.reference_training.precision import PrecisionName

from .reading import peak_resident_kib

WARM_UP = 3
MIN_ROUNDS, MAX_ROUNDS = 3, 40


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
