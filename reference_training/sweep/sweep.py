"""The work on a grid: cells go to Ray, begin, end, fail and are stopped."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ebmguard.errors import ConfigError

from ..engine.interrupt import DeferredInterrupt
from .cell import Cell
from .grid import Grid
from .task import POLL_SECONDS, lock, train_cell
from .view import View

RETRIES = 3
"""How often a cell is tried again whose run, worker or node was killed."""
STORE_BYTES = 80 * 2**20
"""Ray's memory for objects on this machine, of which a sweep needs next to none: the least."""
TABLE = "table.md"


class Stop(DeferredInterrupt):
    """Context in which a second Ctrl-C does not interrupt: it `insists`."""

    insists = False

    def insist(self) -> None:
        """The runs are not even to write checkpoints."""
        self.insists = True


class Sweep:
    """A grid on its way, or whatever else has cells that are commands, as benchmarks do.

    Of a grid it takes out, address, workers, words and page; of a cell title, log,
    device, begun_by (None where nothing goes on with `--resume`), over and progress.

    Attributes:
        failures: why cells failed, by their number.
        unfinished: cells that were stopped, or not begun when the sweep was.
    """

    def __init__(self, grid: Grid, cells: Sequence[Cell], view: View) -> None:
        self.failures: dict[int, str] = {}
        self.unfinished: list[Cell] = []
        self._grid = grid
        self._cells = cells
        self._view = view
        self._waiting = deque(range(len(cells)))
        self._tasks: dict[Any, int] = {}

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Ray, started here or found at the grid's address; left when the runs are over.

        Raises:
            ConfigError: there is no such cluster, or it has no GPU.
            ImportError: Ray is not installed.
        """
        is_local = self._grid.address == "local"
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if is_local:
            # Whatever its name says: off, all of Ray listens on the loopback address alone.
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        try:
            import ray
        except ImportError as error:
            raise ImportError(
                'a sweep needs Ray: pip install "ebmguard[sweep]"; or print the commands of the '
                "runs with --print"
            ) from error
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        own: dict[str, Any] = {"include_dashboard": False, "object_store_memory": STORE_BYTES}
        if hasattr(os, "sched_getaffinity"):
            own["num_cpus"] = len(os.sched_getaffinity(0))
        try:
            ray.init(self._grid.address, **quiet, **(own if is_local else {}))
        except (ConnectionError, ValueError) as error:
            raise ConfigError(
                f"no Ray cluster at --address {self._grid.address}: {error}; expected auto or "
                "HOST:PORT of one that `ray start --head` has begun"
            ) from error
        try:
            self._kind = self._kind_of(ray)
            yield
        finally:
            for task in self._tasks:  # something went wrong here: nothing goes on unwatched
                ray.cancel(task)
            if self._tasks:
                ray.wait(list(self._tasks), num_returns=len(self._tasks))
            ray.shutdown()

    def run(self, stop: Stop) -> None:
        """Work until nothing is left, or until `stop` asks."""
        import ray

        kind = self._kind.replace("CPU", "core")
        self._view.say(f"{len(self._cells)} runs in {self._grid.out}, one {kind} each")
        is_told = False
        while self._tasks or (self._waiting and not stop.requested):
            # No more than there is room for: Ray would take them in an order of its own.
            most = self._grid.workers or max(1, self._count(self._kind, ray))
            while self._waiting and len(self._tasks) < most and not stop.requested:
                self._submit(self._waiting.popleft(), ray)
            if stop.requested and not is_told:
                self._view.say(
                    "stopping: the runs write checkpoints first; Ctrl-C again kills them"
                )
            if stop.insists or (stop.requested and not is_told):
                is_told = True
                for task in self._tasks:
                    ray.cancel(task)
            done, _ = ray.wait(list(self._tasks), timeout=POLL_SECONDS) if self._tasks else ([], [])
            for task in done:
                self._end(task, stop, ray)
            self._view.refresh()
        self.unfinished += [self._cells[number] for number in self._waiting]
        self._write_table()

    def _kind_of(self, ray: Any) -> str:
        """What each cell has one of: "GPU" where there are some, else "CPU"."""
        device, has_gpus = self._cells[0].device, self._count("GPU", ray) > 0
        if device == "cuda" and not has_gpus:
            raise ConfigError(
                "each run is to have a GPU, but no machine has one; give `-- --device cpu`"
            )
        return "GPU" if has_gpus and device != "cpu" else "CPU"

    @staticmethod
    def _count(kind: str, ray: Any) -> int:
        """How many of a kind the machines have now."""
        alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return sum(int(node.get(kind, 0)) for node in alive)

    def _submit(self, number: int, ray: Any) -> None:
        cell = self._cells[number]
        try:
            how = cell.over()
            with cell.log.open("ab") as log:
                is_free = how is not None or lock(log)
        except (ConfigError, OSError) as error:
            self._fail(number, str(error))
            return
        if how is not None or not is_free:
            kept = "skipped, another sweep is training it" if how is None else f"kept, {how}"
            self._view.ended(number, kept)
            return
        need = {"num_cpus": 1} if self._kind == "CPU" else {"num_cpus": 0, "num_gpus": 1}
        remote = ray.remote(train_cell).options(**need, max_retries=RETRIES, retry_exceptions=True)
        begun = cell.begun_by and cell.begun_by.absolute()
        task = remote.remote(self._grid.words(cell), begun, cell.log.absolute(), os.getcwd())
        self._tasks[task] = number
        self._view.began(number, "resumed" if begun and begun.is_file() else "started")

    def _end(self, task: Any, stop: Stop, ray: Any) -> None:
        number = self._tasks.pop(task)
        cell = self._cells[number]
        try:
            why = ray.get(task)
            outcome = None if why else cell.over()
        except ray.exceptions.TaskCancelledError:
            why, outcome = "", cell.over()
        except ray.exceptions.RayError as error:
            why, outcome = str(getattr(error, "cause", error)), None
        if outcome is not None:
            self._view.ended(number, outcome, trained=True)
        elif stop.requested:
            self.unfinished.append(cell)
            self._view.ended(number, "stopped")
        else:
            self._fail(number, why or f"ended without results, see {cell.log}")
        self._write_table()

    def _fail(self, number: int, why: str) -> None:
        self.failures[number] = why
        self._view.ended(number, f"FAILED, {why}")

    def _write_table(self) -> None:
        """Write OUT/table.md, whole at every moment, whoever else writes it."""
        try:
            text = self._grid.page()
        except ConfigError as error:
            self._view.say(f"no {TABLE} yet: {error}")
            return
        if text is None:
            return
        partial = self._grid.out / f".{TABLE}.{socket.gethostname()}.{os.getpid()}"
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, self._grid.out / TABLE)
