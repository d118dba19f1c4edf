"""Python processes forked from one that has imported torch: importing it takes seconds."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from tests.parts import PATIENCE

ROOT = Path(__file__).parents[1]
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        # Found here: wandb puts packages of its own on the path, and one of them is named `tests`.
        "tests.forks",
        # Beside torch what takes long as well: an optimizer imports the first, digits the last.
        "torch._dynamo",
        "torch.distributed",
        "torch.utils.tensorboard",
        "sklearn.datasets",
    ]
)


def start(
    *words: str,
    stdout: str | Path = os.devnull,
    stderr: str | Path | None = None,
    cwd: Path = ROOT,
    **environment: str,
) -> BaseProcess:
    """Start what ``python *words`` would, a script or ``-m`` and a module, or ``-c`` and code.

    Args:
        stdout, stderr: files; without the second both go into the first.
        environment: beside this process's.
    """
    files = (str(stdout), str(stderr or stdout))
    child = SERVER.Process(target=_python, args=(words, files, cwd, os.environ | environment))
    child.start()
    return child


def run(*words: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """The same, waited for, with what it has printed."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        (status,) = statuses(start(*words, stdout=out, stderr=err, cwd=cwd, **environment))
        return subprocess.CompletedProcess(words, status, out.read_text(), err.read_text())


def statuses(*children: BaseProcess) -> list[int]:
    """Exit statuses, waited for; processes that hang are killed."""
    deadline = time.monotonic() + PATIENCE
    try:
        for child in children:
            child.join(deadline - time.monotonic())
    finally:
        for child in children:
            child.kill()
            child.join()
    return [child.exitcode or 0 for child in children]


def _python(
    words: tuple[str, ...], files: tuple[str, str], cwd: Path, environment: dict[str, str]
) -> None:
    gc.freeze()  # what was imported before stays: to look through it takes a quarter of a second
    for number, name in enumerate(files, 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    kind, *rest = words if words[0] in ("-m", "-c") else ("", *words)
    sys.argv = list(rest)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # not read again
    sys.path.insert(0, str(Path(rest[0]).parent if not kind else cwd))
    try:
        if kind == "-m":
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_path(rest[0], run_name="__main__")
    finally:
        # multiprocessing ends its children without them.
        atexit._run_exitfuncs()
