"""The work on a grid: runs begin, end, fail and are stopped."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from ebmguard.errors import ConfigError

from ...interrupt import INTERRUPTED
from ...numbers import duration
from ...run_folder import RESULTS
from ..runs import find_runs
from ..table.tables import page
from .attempt import Attempt, lock, status_words
from .cell import Cell, outcome
from .place import Place
from .remaining import remaining_seconds
from .stop import Stop

STOPPED = (INTERRUPTED, -signal.SIGINT, -signal.SIGTERM, -signal.SIGKILL)
"""How a run ends that is stopped: with its checkpoint, before its first step, by force."""
POLL_SECONDS = 0.2
TABLE = "table.md"


class Sweep:
    """This process's share of a grid, on its way.

    Attributes:
        failures: the cells that failed, each with why.
        unfinished: cells that were stopped, or not begun when the sweep was.
    """

    def __init__(self, out: Path, cells: Sequence[Cell], place: Place) -> None:
        self.failures: list[tuple[Cell, str]] = []
        self.unfinished: list[Cell] = []
        self._out = out
        self._prefix = f"[rank {place.rank}] " if place.world > 1 else ""
        self._waiting = deque(cells[place.rank :: place.world])
        self._slots = len(place.slots)
        self._free = list(reversed(place.slots))
        self._running: list[Attempt] = []
        self._took: list[float] = []
        self._elsewhere: list[Cell] = []

    def run(self, stop: Stop) -> None:
        """Work until nothing is left, or until `stop` asks."""
        self.say(f"{len(self._waiting)} runs in {self._out}, {self._slots} at a time")
        try:
            self._work(stop)
        finally:
            # There are some only where something here went wrong: nothing goes on unwatched.
            for attempt in self._running:
                attempt.interrupt()
            for attempt in self._running:
                attempt.close()
        self.unfinished += self._waiting
        self._write_table()
        if self._elsewhere:
            titles = "; ".join(cell.title for cell in self._elsewhere)
            self.say(f"{len(self._elsewhere)} left to another sweep: {titles}")
        for cell, why in self.failures:
            self.say(f"FAILED {cell.title}: {why}")

    def say(self, text: str) -> None:
        """Print, with the rank where there are several."""
        print(f"{self._prefix}{text}", flush=True)

    def _work(self, stop: Stop) -> None:
        told = False
        while self._running or (self._waiting and not stop.asked):
            while self._waiting and self._free and not stop.asked:
                self._begin(self._waiting.popleft())
            if stop.asked and not told:
                self.say("stopping: the runs write checkpoints first; Ctrl-C again kills them")
                for attempt in self._running:
                    attempt.interrupt()
                told = True
            if stop.insists:
                for attempt in self._running:
                    attempt.kill()
            time.sleep(POLL_SECONDS if self._running else 0)
            for attempt in list(self._running):
                status = attempt.poll()
                if status is not None:
                    self._end(attempt, status, stop)

    def _begin(self, cell: Cell) -> None:
        try:
            log = lock(cell.log)
        except ConfigError as error:
            self._fail(cell, str(error))
            return
        if log is None:
            self._elsewhere.append(cell)
            self.say(f"{cell.title}: skipped, another sweep is training it")
            return
        try:
            results = cell.results()
        except ConfigError as error:
            log.close()
            self._fail(cell, str(error))
            return
        if results is not None:
            log.close()
            self.say(f"{cell.title}: kept, {outcome(results)}")
            return
        attempt = Attempt(cell, self._free.pop(), log)
        self._running.append(attempt)
        doing = "resumed" if attempt.resumed else "started"
        self.say(f"{cell.title}: {doing} {attempt.slot.name}".rstrip())

    def _end(self, attempt: Attempt, status: int, stop: Stop) -> None:
        self._running.remove(attempt)
        self._free.append(attempt.slot)
        cell, seconds = attempt.cell, attempt.seconds
        attempt.close()
        results = cell.results() if status == 0 else None
        if results is not None:
            self._took.append(seconds)
            self.say(f"{cell.title}: {outcome(results)}, {duration(seconds)}{self._left(stop)}")
        elif stop.asked and status in STOPPED:
            self.unfinished.append(cell)
            self.say(f"{cell.title}: stopped")
        else:
            said = "".join(f"\n    {line}" for line in attempt.last_words())
            self._fail(cell, f"{status_words(status)}, see {cell.log}{said}")
        self._write_table()

    def _fail(self, cell: Cell, why: str) -> None:
        self.failures.append((cell, why))
        self.say(f"{cell.title}: FAILED, {why.splitlines()[0]}")

    def _left(self, stop: Stop) -> str:
        """What is left, and for how long."""
        waiting = sum(not (cell.config.out / RESULTS).is_file() for cell in self._waiting)
        running = [attempt.seconds for attempt in self._running]
        seconds = remaining_seconds(self._took, running, waiting, self._slots)
        if stop.asked or seconds is None or not waiting + len(running):
            return ""
        return f"; {waiting + len(running)} left, about {duration(seconds)}"

    def _write_table(self) -> None:
        """Write OUT/table.md, whole at every moment, whoever else writes it."""
        try:
            text = page(find_runs([self._out]))
        except ConfigError as error:
            self.say(f"no {TABLE} yet: {error}")
            return
        partial = self._out / f".{TABLE}.{socket.gethostname()}.{os.getpid()}"
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, self._out / TABLE)
