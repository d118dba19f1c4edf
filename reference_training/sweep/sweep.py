"""The work on a grid: a process for each cell, begun, watched, tried again and stopped."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial

import torch

from ebmguard.errors import ConfigError

from ..engine.interrupt import INTERRUPTED, DeferredInterrupt
from .cell import Cell
from .view import View

POLL_SECONDS = 0.2
RETRIES = 3
"""How often a cell is tried again whose process was killed, which says nothing against it."""
SHOWN_LINES = 10
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
DIE_WITH_SWEEP = (
    partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGTERM)
    if sys.platform == "linux"
    else None
)
"""In a new process: it is told to stop when the sweep dies, however that dies."""


class Sweep(DeferredInterrupt):
    """Cells that lie beside each other, on their way; a second Ctrl-C kills their processes.

    Args:
        cells: in the order of the work.
        gpus: where cells are done at the same time: the GPU of each, or "" for one of a core.
        write_page: is called after each cell.
    """

    def __init__(
        self, cells: Sequence[Cell], gpus: Sequence[str], write_page: Callable[[], None]
    ) -> None:
        super().__init__()
        self._cells, self._gpus, self._write = cells, gpus, write_page
        self._unfinished = deque(range(len(cells)))
        self._failures: dict[int, str] = {}
        self._insists = False
        self._view = View(cells, len(gpus))

    def insist(self) -> None:
        """The runs are not even to write checkpoints."""
        self._insists = True

    def run(self) -> int:
        """Do what is not done; the exit status: 1 where a cell failed, 130 where a signal came.

        Raises:
            ConfigError: the cells' folder cannot be written.
        """
        folder = self._cells[0].out.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be the folder of a grid: {error}") from error
        with self._view, self:
            each = "GPU" if self._gpus[0] else "core"
            self._view.say(f"{len(self._cells)} runs in {folder}, one {each} each")
            workers = [self._worker(gpu) for gpu in self._gpus]
            while workers := [worker for worker in workers if next(worker, False)]:
                self._view.look()
                time.sleep(POLL_SECONDS)
            self._write_page()
        for number, why in sorted(self._failures.items()):
            print(f"FAILED {self._cells[number].out.name}: {why}")
        if self._unfinished:
            print("stopped; the same command goes on")
            return INTERRUPTED
        return 1 if self._failures else 0

    def _worker(self, gpu: str) -> Iterator[bool]:
        """Do one cell after the other; yields while its process runs."""
        while self._unfinished and not self.requested:
            number = self._unfinished.popleft()
            try:
                yield from self._do(number, gpu)
            except (ConfigError, OSError) as error:
                self._fail(number, str(error))

    def _do(self, number: int, gpu: str) -> Iterator[bool]:
        cell = self._cells[number]
        # A process that inherits the log has its lock too, so that a run which outlives its sweep
        # keeps its folder. The kernel ends the lock when all of them are gone, however they went.
        with cell.log.open("a+b") as log:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._view.ended(number, "skipped, another sweep is training it")
                return
            if how := cell.over():
                self._view.ended(number, f"kept, {how}")
                return
            self._view.began(number, "resumed" if "--resume" in cell.words() else "started")
            for _ in range(1 + RETRIES):
                command = [sys.executable, "-m", *cell.words()]
                where = f"{socket.gethostname()}{gpu and f', GPU {gpu}'}"
                log.write(f"on {where}\n$ {shlex.join(command)}\n".encode())
                log.flush()
                begin = log.tell()
                status = yield from self._run(number, command, gpu, log.fileno())
                if status >= 0 or self.requested:
                    break
            log.seek(begin)
            said = log.read().decode(errors="replace").splitlines()[-SHOWN_LINES:]
        if status == 0 and (how := cell.over()):
            self._view.ended(number, how, trained=True)
        elif self.requested:
            self._unfinished.append(number)
            self._view.ended(number, "stopped")
        else:
            killed = status < 0 and f"killed by {signal.Signals(-status).name}"
            why = f"{killed or f'exit status {status}'}, see {cell.log}"
            self._fail(number, "\n    ".join([why, *said]))
        self._write_page()

    def _run(
        self, number: int, command: Sequence[str], gpu: str, log: int
    ) -> Generator[bool, None, int]:
        """Run a cell's command; yields until it has ended, and returns its exit status."""
        given = {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1", **given},
            # Ctrl-C in the terminal reaches the sweep alone, which passes it on once.
            start_new_session=True,
            preexec_fn=DIE_WITH_SWEEP,
        )
        is_told = False
        try:
            while process.poll() is None:
                if self._insists:
                    os.killpg(process.pid, signal.SIGKILL)
                elif self.requested and not is_told:
                    self._view.show(number, "stopping; Ctrl-C again kills it")
                    process.terminate()
                    is_told = True
                yield True
        finally:  # a sweep that fails leaves no run behind
            process.terminate()
        return process.returncode

    def _fail(self, number: int, why: str) -> None:
        self._failures[number] = why
        self._view.ended(number, f"FAILED, {why}")

    def _write_page(self) -> None:
        try:
            self._write()
        except ConfigError as error:
            self._view.say(f"no table yet: {error}")


def places(device: str, workers: int | None) -> list[str]:
    """Where runs are trained at the same time: the GPU of each, or "" for one of a core.

    Raises:
        ConfigError: there is no GPU, and the device is one.
    """
    count = 0 if device == "cpu" else torch.cuda.device_count()
    if count:
        own = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))
        return own.split(",")[:count][:workers]
    if device == "cuda":
        raise ConfigError("each run is to have a GPU, and there is none; give `-- --device cpu`")
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return [""] * (workers or cores)
