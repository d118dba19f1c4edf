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
from collections.abc import Sequence
from pathlib import Path
from typing import IO

POLL_SECONDS = 0.2
SHOWN_LINES = 10


class RunKilledError(Exception):
    """A run was killed, which says nothing against its settings: Ray tries again."""


def train_cell(words: Sequence[str], begun: Path | None, log_file: Path, directory: str) -> str:
    """Train one cell to its end, on whatever node this runs.

    `ray.cancel` raises a KeyboardInterrupt here. The first one asks the run to write a checkpoint
    and to stop, a second one kills it.

    Args:
        words: what this node's Python is to run, without --resume.
        begun: a file that is there when `--resume` goes on with the run; None where nothing does.
        log_file: the cell's log and lock.
        directory: where the command is run.

    Returns:
        Why it failed; empty where it did not.

    Raises:
        RunKilledError: the run was killed by a signal that nobody here has sent.
        OSError: the log cannot be written and locked, or there is no such directory.
    """
    with log_file.open("ab") as log:
        while not lock(log):
            time.sleep(POLL_SECONDS)  # a worker was killed, and its run writes a checkpoint
        command = [*words, *(["--resume"] if begun is not None and begun.is_file() else [])]
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
        where = socket.gethostname() + (f", GPU {gpus}" if gpus else "")
        log.write(f"on {where}\n$ {shlex.join([sys.executable, *command])}\n".encode())
        log.flush()
        said_from = log.tell()
        status = _run(command, log, directory)
    if status < 0:
        raise RunKilledError(f"killed by {signal.Signals(-status).name}, see {log_file}")
    with log_file.open("rb") as written:
        written.seek(said_from)
        last = written.read().decode(errors="replace").splitlines()[-SHOWN_LINES:]
    said = "".join(f"\n    {line}" for line in last)
    return f"exit status {status}, see {log_file}{said}" if status else ""


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


def _run(command: Sequence[str], log: IO[bytes], directory: str) -> int:
    """Run the command; its exit status, negative for a signal."""
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

    def wait() -> None:
        while process.poll() is None:
            time.sleep(POLL_SECONDS)  # Python sees no interrupt of Ray in a longer one

    try:
        wait()
    finally:
        process.terminate()  # which does nothing to one that is over
        try:
            wait()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode
