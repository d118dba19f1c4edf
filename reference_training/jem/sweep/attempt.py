"""One process that trains one cell, and the lock that keeps other sweeps away from it."""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from ebmguard.errors import ConfigError

from .cell import Cell
from .place import Slot, run_environment

SHOWN_LINES = 10


def trainer() -> tuple[str, ...]:
    """The command that trains one run, without its options."""
    return (sys.executable, "-m", "ebmguard", "train", "jem")


def lock(file: Path) -> IO[bytes] | None:
    """Open a cell's log for appending, and lock it until it is closed.

    A process that inherits the file holds the lock too, so that a run which outlives its sweep
    keeps its folder. The kernel gives the lock back when all of them are gone, however they went.

    Returns:
        None where another process holds the lock.

    Raises:
        ConfigError: the file cannot be written or locked.
    """
    log = None
    try:
        log = file.open("ab")
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if log:
            log.close()
        return None
    except OSError as error:
        if log:
            log.close()
        raise ConfigError(
            f"{file} cannot be written and locked, which keeps two sweeps from training one run; "
            f"choose an --out on another file system: {error}"
        ) from error
    return log


class Attempt:
    """A running `ebmguard train jem`.

    Attributes:
        cell: what it trains.
        slot: where.
        resumed: whether it goes on with an earlier run.
    """

    def __init__(self, cell: Cell, slot: Slot, log: IO[bytes]) -> None:
        """Start it; `log` is the cell's locked log, which is closed when the run ends."""
        self.cell = cell
        self.slot = slot
        self.resumed = cell.begun
        self._log = log
        words = [*trainer(), *slot.words, *cell.words, *(["--resume"] if self.resumed else [])]
        log.write(f"$ {shlex.join(words)}\n".encode())
        log.flush()
        self._said_from = log.tell()
        self._began = time.monotonic()
        # A session of its own: Ctrl-C in the terminal reaches the sweep alone, which passes it on
        # once. A second one would stop the trainer in the middle of a step.
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=run_environment(os.environ, slot),
            start_new_session=True,
        )

    @property
    def seconds(self) -> float:
        """How long it has been running."""
        return time.monotonic() - self._began

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def interrupt(self) -> None:
        """Ask it to write a checkpoint and to stop."""
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """End it and what it has started, at once."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Wait for its end, and let others have the cell."""
        self._process.wait()
        self._log.close()

    def last_words(self) -> list[str]:
        """The last lines that it printed."""
        with self.cell.log.open("rb") as log:
            log.seek(self._said_from)
            return log.read().decode(errors="replace").splitlines()[-SHOWN_LINES:]


def status_words(status: int) -> str:
    """An exit status in words."""
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
