"""Whole training runs under a watch: what waits for the GPU in them, and when they are to stop."""

from __future__ import annotations

import signal
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ebmguard.reference_training.engine.progress import LineReporter, Reporter

from .timing import Clock

SYNCHRONISES = "synchronizing CUDA operation"
PROJECT = ("reference_training", "ebmguard")


class Window(Reporter):  # type: ignore[misc]
    """Calls back at both ends of a window of whole iterations of a run.

    Args:
        after: iterations before the first one that is inside.
        inside: how many are.
        begin: called between two iterations, in the midst of the loop.
        end: likewise.
    """

    def __init__(
        self, after: int, inside: int, begin: Callable[[], object], end: Callable[[], object]
    ) -> None:
        self._calls = {after: begin, after + inside: end}

    def step(self, done: int, state: Mapping[str, float | str]) -> None:
        """Called at the end of an iteration."""
        if done in self._calls:
            self._calls[done]()


class Deadline(LineReporter):  # type: ignore[misc]
    """Stops a run as Ctrl-C does when its time is over; it can be resumed.

    Args:
        seconds: from now.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._clock = Clock(seconds / 60)
        self._rang = False

    def step(self, done: int, state: Mapping[str, float | str]) -> None:
        """Log, and look at the clock."""
        super().step(done, state)
        if self._clock.left <= 0 and not self._rang:
            self._rang = True
            signal.raise_signal(signal.SIGINT)


def is_ours(parts: Sequence[str]) -> bool:
    """Whether a file is the project's, by the parts of its path, wherever PyTorch lies."""
    return "torch" not in parts and any(name in parts for name in PROJECT)


@contextmanager
def synchronising_calls() -> Iterator[Counter[str]]:
    """Where PyTorch has warned of a synchronising call inside the block, and how often."""
    places: Counter[str] = Counter()
    shown = warnings.showwarning

    def note(message: Warning | str, *others: Any) -> None:
        if SYNCHRONISES not in str(message):
            shown(message, *others)
            return
        frames = [x for x in traceback.extract_stack()[:-1] if x.filename != warnings.__file__]
        own = [x for x in frames if is_ours(Path(x.filename).parts)]
        frame = (own or frames)[-1]
        place = f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno}"
        places[f"`{frame.line}` ({place})"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note  # type: ignore[assignment]
        yield places


def waits(
    run: Callable[[Reporter], object], watched: int, device: torch.device, command: str
) -> Iterator[str]:
    """Where iterations of a run wait for the GPU, in words.

    Args:
        run: trains more than twice as many iterations as are watched, with the reporter given.
        watched: iterations, after as many others.
        device: where it trains.
        command: what trains, in words.
    """
    cuda = device.type == "cuda"

    def set_mode(mode: str) -> None:
        if cuda:
            torch.cuda.set_sync_debug_mode(mode)

    window = Window(watched, watched, lambda: set_mode("warn"), lambda: set_mode("default"))
    try:
        with synchronising_calls() as places:
            run(window)
    finally:
        set_mode("default")
    if not cuda:
        yield "Not on a GPU: PyTorch looks for synchronising calls there alone.\n"
    yield (
        f"Iterations {watched} to {2 * watched} of `{command}`, all of them (step, guard, "
        "trainer's log), with PyTorch looking for synchronising calls. Waits for the event of a "
        "row of two steps ago are none.\n\n"
    )
    yield f"Found: {sum(places.values()) or 'none'}.\n"
    for place, times in places.most_common():
        yield f"- {times} times {place}\n"


def prove_no_wait(step: Callable[[], object], steps: int) -> None:
    """Run good steps in which PyTorch raises at any synchronising call.

    The event wait for the guard's row of two steps ago is explicit and so is not one of them;
    neither is anything that the steps before have set up once.
    """
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(steps):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
