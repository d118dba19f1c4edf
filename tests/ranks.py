"""Ranks as processes of their own, and what they tell each other."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ebmguard.ranks import leave_time_at_exit
from ebmguard.reference_training.engine.ranks import Ranks, joined_ranks
from tests import forks


def run_ranks(module: str, world: int, folder: Path) -> list[Any]:
    """Start ``python -m MODULE RANK FOLDER WORLD`` for every rank.

    Ranks that wait for each other for ever are an error in the end.

    Returns:
        what each saved as FOLDER/RANK.pt.
    """
    logs = [folder / f"{rank}.log" for rank in range(world)]
    ranks = [
        forks.start("-m", module, str(rank), str(folder), str(world), stdout=logs[rank])
        for rank in range(world)
    ]
    assert not any(forks.statuses(*ranks)), "\n".join(log.read_text() for log in logs)
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


def be_rank(found: Callable[[Ranks, Path], Any]) -> None:
    """In a process of :func:`run_ranks`: join the others, and save what is found."""
    rank, folder, world = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
    torch.set_num_threads(1)
    with joined_ranks("cpu") as ranks:
        torch.save(found(ranks, folder), folder / f"{rank}.pt")
        ranks.wait()


def ranks_of(module: str, world: int, factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The same from one start, however many workers of pytest-xdist ask for it; with its folder."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder = base / f"{module}-{world}"
    with (base / f"{module}-{world}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            folder.mkdir()
            return folder, run_ranks(module, world, folder)
    return folder, [torch.load(folder / f"{rank}.pt") for rank in range(world)]


@contextmanager
def free_port() -> Iterator[None]:
    """A port for the ranks to meet at, in the environment of the processes started inside."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MASTER_ADDR", "127.0.0.1")
        patched.setenv("MASTER_PORT", str(port))
        yield


def rank_fixtures(module: str, world: int) -> tuple[Any, Any, Any]:
    """Fixtures of a test file: `started`, its `folder`, and `seen`, what each rank saw."""

    @pytest.fixture(scope="module", name="started")
    def of_one_start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
        with free_port():
            return ranks_of(module, world, tmp_path_factory)

    @pytest.fixture(name="folder")
    def of_folder(started: tuple[Path, list[Any]]) -> Path:
        return started[0]

    @pytest.fixture(name="seen")
    def of_ranks(started: tuple[Path, list[Any]]) -> list[Any]:
        return started[1]

    return of_one_start, of_folder, of_ranks


def torchrun(*words: str) -> str:
    """What two ranks of ``python *words`` print, with the variables that torchrun would set."""
    with free_port(), TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        ranks = [
            forks.start(*words, stdout=out, stderr=err, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2")
            for rank in ("0", "1")
        ]
        assert forks.statuses(*ranks) == [0, 0], err.read_text()
        return out.read_text()


@contextmanager
def joined(rank: int, world: int, folder: Path) -> Iterator[None]:
    """The process group of these processes, by gloo."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    yield
    dist.barrier()
    dist.destroy_process_group()
    leave_time_at_exit()
