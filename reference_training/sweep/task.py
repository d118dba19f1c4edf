"""One cell as a task of Ray: the plain command of a single run, watched until its end.

Ray's workers import this file, so that it needs nothing that takes long to import.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

ASK, KILL = 1, 2
"""What the runs are asked: to write a checkpoint and to stop; not even that."""
ENDED, FAILED, STOPPED, ELSEWHERE = "ended", "failed", "stopped", "elsewhere"
"""How a task ends."""
POLL_SECONDS = 0.2
SHOWN_LINES = 10


class RunKilledError(Exception):
    """A run was killed, which says nothing against its settings: Ray tries again."""


class Board:
    """An actor beside the sweep: what the cells tell, and what they are asked."""

    def __init__(self) -> None:
        self._level = 0
        self._attempts: Counter[int] = Counter()
        self._told: list[tuple[int, str]] = []

    def attempt(self, cell: int) -> int:
        """How many workers have taken the cell before."""
        self._attempts[cell] += 1
        return self._attempts[cell] - 1

    def tell(self, cell: int, text: str) -> None:
        """Something that a person should read."""
        self._told.append((cell, text))

    def ask(self, level: int) -> None:
        """ASK or KILL."""
        self._level = level

    def level(self) -> int:
        """What the runs are asked; 0 is nothing."""
        return self._level

    def take(self) -> list[tuple[int, str]]:
        """What was told since the last time."""
        told, self._told = self._told, []
        return told


def train_cell(
    board: Any,
    number: int,
    words: Sequence[str],
    begun: Path | None,
    log_file: Path,
    directory: str,
) -> tuple[str, str]:
    """Train one cell to its end, on whatever node this runs.

    Args:
        board: handle of the :class:`Board`.
        number: of the cell.
        words: what this node's Python is to run, without --resume.
        begun: a file that is there when `--resume` goes on with the run; None where nothing does.
        log_file: the cell's log and lock.
        directory: where the command is run.

    Returns:
        How it ended, and why.

    Raises:
        RunKilledError: the run was killed by a signal that nobody here has sent.
        OSError: the log cannot be written and locked, or there is no such directory.
    """
    import ray

    # In a thread of its own: a task that waits for Ray gives its core away meanwhile.
    threads = ThreadPoolExecutor(1)

    def call(name: str, *values: Any) -> Any:
        return threads.submit(lambda: ray.get(getattr(board, name).remote(*values))).result()

    is_retry = call("attempt", number) > 0
    with log_file.open("ab") as log:
        while not lock(log):
            if not is_retry:
                return ELSEWHERE, "another sweep is training it"
            if call("level"):
                return STOPPED, ""
            time.sleep(POLL_SECONDS)  # a worker was killed, and its run writes a checkpoint
        if call("level"):
            return STOPPED, ""
        resumed = begun is not None and begun.is_file()
        command = [*words, *(["--resume"] if resumed else [])]
        log.write(f"$ {shlex.join([sys.executable, *command])}\n".encode())
        log.flush()
        said_from = log.tell()
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
        where = f"on {socket.gethostname()}" + (f", GPU {gpus}" if gpus else "")
        call("tell", number, f"{'resumed' if resumed else 'started'} {where}")
        status, level = _run(command, log, directory, lambda: call("level"))
    if status == 0:
        return ENDED, ""
    if level:
        return STOPPED, ""
    if status < 0:
        raise RunKilledError(f"killed by {signal.Signals(-status).name}, see {log_file}")
    with log_file.open("rb") as written:
        written.seek(said_from)
        last = written.read().decode(errors="replace").splitlines()[-SHOWN_LINES:]
    said = "".join(f"\n    {line}" for line in last)
    return FAILED, f"exit status {status}, see {log_file}{said}"


def lock(log: IO[bytes]) -> bool:
    """Lock an open log until it is closed.

    A process that inherits the file holds the lock too, so that a run which outlives its worker
    keeps its folder. The kernel gives the lock back when all of them are gone, however they went.

    Returns:
        False where another process holds the lock.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _run(command: Sequence[str], log: IO[bytes], directory: str, asked: Any) -> tuple[int, int]:
    """Run the command, and pass on what is asked.

    Returns:
        Its exit status, negative for a signal; and what was asked at last.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.child", str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=directory,
        # Ctrl-C in the terminal reaches the sweep alone, which passes it on once.
        start_new_session=True,
    )
    level = 0
    try:
        while process.poll() is None:
            now = asked()
            if now >= ASK > level:
                process.terminate()
            if now >= KILL > level:
                os.killpg(process.pid, signal.SIGKILL)
            level = max(level, now)
            time.sleep(POLL_SECONDS)
    finally:
        if process.poll() is None:  # the sweep is gone
            process.terminate()
            process.wait()
    return process.returncode, level
