"""Ways to train against each other: time in alternating blocks, memory, and waits for a GPU."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from ebmguard.reference_training.device import find_device
from ebmguard.reference_training.engine import graphs
from ebmguard.reference_training.engine.interrupt import DeferredInterrupt
from ebmguard.reference_training.engine.loop import Run
from ebmguard.reference_training.engine.progress import Reporter
from ebmguard.reference_training.engine.record import Record
from ebmguard.reference_training.engine.run_config import RunConfig
from ebmguard.reference_training.engine.task import Task

MIN_ROUNDS, MAX_ROUNDS = 3, 40


class Turn(NamedTuple):
    """What is done in one turn: so many calls, after what is not timed."""

    call: Callable[[], object]
    calls: int
    before: Callable[[], object] = lambda: None


class Seconds(NamedTuple):
    """Of one call, the mean of a turn's."""

    wall: float
    cpu: float


def alternate(
    turns: Mapping[str, Turn],
    device: torch.device,
    *,
    rounds: int = MAX_ROUNDS,
    seconds: float = float("inf"),
    warm_up: int = 0,
) -> dict[str, list[Seconds]]:
    """Let the turns alternate there and back; seconds of a call by name, a list over rounds.

    Args:
        turns: by name, in their order.
        device: on a GPU a turn lies between two synchronisations.
        rounds: how many; fewer, but for :data:`MIN_ROUNDS`, where the seconds are over.
        seconds: that they may take.
        warm_up: rounds before these, which are not counted.
    """
    found: dict[str, list[Seconds]] = {name: [] for name in turns}
    end, longest, done = time.monotonic() + seconds, 0.0, -warm_up
    while done < min(rounds, MIN_ROUNDS) or (
        done < rounds and end - time.monotonic() > 1.5 * longest
    ):
        began = time.monotonic()
        for name in list(turns)[:: -1 if done % 2 else 1]:
            seconds_of_call = seconds_of(turns[name], device)
            if done >= 0:
                found[name].append(seconds_of_call)
        longest = max(longest, time.monotonic() - began)
        done += 1
    return found


def seconds_of(turn: Turn, device: torch.device) -> Seconds:
    """Of a call of one turn."""
    turn.before()
    synchronize(device)
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(turn.calls):
        turn.call()
    synchronize(device)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Seconds(wall / turn.calls, cpu / turn.calls)


def synchronize(device: torch.device) -> None:
    """Wait for what a GPU has under way."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_mib(device: torch.device) -> float:
    """The most memory that a GPU, or else this process, has held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    # ru_maxrss of a child process starts at its parent's value on Linux, /proc does not.
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    lines = (line.split() for line in status.read_text().splitlines())
    return next(int(words[1]) / 2**10 for words in lines if words[0] == "VmHWM:")


def prove_no_wait(step: Callable[[], object], steps: int, device: torch.device) -> str:
    """Run good steps in which PyTorch raises at any synchronising call; what that says.

    The event wait for the guard's row of two steps ago is explicit and so is not one of them;
    neither is anything that the steps before have set up once.
    """
    if device.type != "cuda":
        return "Not on a GPU: PyTorch looks for synchronising calls there alone."
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(steps):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return f"No synchronising call in {steps} guarded steps."


def ratios(over: Sequence[Seconds], under: Sequence[Seconds], digits: str = ".2f") -> str:
    """How many times as long one takes as the other: median and quartiles within rounds."""
    return spread([a.wall / b.wall for a, b in zip(over, under, strict=True)], digits)


def spread(values: Sequence[float], digits: str = ".1f") -> str:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:{digits}} ({low:{digits}} to {high:{digits}})"


class Iterations:
    """Iterations of `ebmguard train`, one at a time: step, guard, log folder and record.

    Checkpoints are left out, and so are evaluations but for the one that a run may begin with.

    Args:
        build: makes the task of a trainer.
        config: settings of a new run.
        graphed: on a GPU, what the trainer runs as CUDA graphs is one.
    """

    def __init__(
        self,
        build: Callable[[Any, Record], Task],
        config: RunConfig,
        *,
        graphed: bool = True,
    ) -> None:
        config, folder = config.open()
        self.precision = getattr(config, "precision", "float32")
        record = Record(config, folder, find_device(config.device))
        with ExitStack() as stack:
            if not graphed:
                stack.enter_context(patch.object(graphs, "_is_gpu", lambda _: False))
            self.task = build(config, record)
        self.task.begin()
        self.step = Run(self.task, Reporter(), DeferredInterrupt()).advance

    def close(self) -> None:
        """Write what is pending; a second call does nothing."""
        for guard in self.task.guards.values():
            guard.close()
