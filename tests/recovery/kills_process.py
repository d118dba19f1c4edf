"""Kills processes while they train and write snapshots, and looks at what they leave.

Started as ``python -m tests.recovery.kills_process FOLDER KILLS`` from the project's root. It has
one thread, so that it may fork. Prints the number of kills, how many of them left a file that was
being written, and the last step.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

import torch

from ebmguard import Recovery
from tests.recovery.parts import Run, Scripted


def make(folder: Path) -> Run:
    recovery = Recovery(every=2, certify_after=2, folder=folder, folder_every=2)
    run = Run(recovery, detector=Scripted([]))
    # Large enough that a kill often hits the writing.
    run.ema.register_buffer("ballast", torch.zeros(200_000))
    return run


def train(run: Run) -> None:
    run.ema.get_buffer("ballast").fill_(float(run.guard.step))
    run.step()


def train_forever(folder: Path) -> NoReturn:
    run = make(folder)
    run.guard.resume()
    while True:
        train(run)


def main(folder: Path, kills: int) -> None:
    run = make(folder)
    for _ in range(5):
        train(run)
    began = time.monotonic()
    for _ in range(5):
        train(run)
    seconds = time.monotonic() - began  # of a few steps and snapshots, on this machine
    last = run.guard.resume() or 0
    run.guard.close()
    assert last
    rng, torn = random.Random(0), 0
    for _ in range(kills):
        for partial in folder.glob("*.partial"):
            partial.unlink()
        child = os.fork()
        if not child:
            train_forever(folder)
        time.sleep(rng.uniform(0, 2 * seconds))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        torn += any(folder.glob("*.partial"))
        run = make(folder)
        step = run.guard.resume()
        assert step is not None
        assert step >= last, "a snapshot was lost"
        # The ballast is of where the next step began.
        assert torch.equal(run.ema.get_buffer("ballast"), torch.full((200_000,), float(step)))
        assert run.guard.step == step
        run.guard.close()
        last = step
    print(kills, torn, last)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
