"""Kills processes while they write checkpoints, and looks at what they leave.

Started as ``python -m tests.reference_training.engine.checkpoints_process FOLDER KILLS`` from the
project's root. It has one thread and no thread pool, so that it may fork. Prints the number of
kills, how many of them left a file that was being written, and the last step.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from ebmguard.reference_training.engine.checkpoints import Checkpoints

NUMBERS = 100_000


def save(checkpoints: Checkpoints, step: int) -> None:
    x = torch.full((NUMBERS,), float(step))
    checkpoints.save(step, {"step": step, "x": x, "next": {"x": -x}})


def save_forever(checkpoints: Checkpoints, step: int) -> None:
    while True:
        step += 1
        save(checkpoints, step)


def main(folder: Path, kills: int) -> None:
    checkpoints = Checkpoints(folder)
    rng = random.Random(0)
    began = time.monotonic()
    for last in range(5):
        save(checkpoints, last)
    seconds = (time.monotonic() - began) / 5  # of one, on this machine
    torn = 0
    for _ in range(kills):
        for partial in folder.glob("*.partial"):
            partial.unlink()
        child = os.fork()
        if not child:
            save_forever(checkpoints, last)
        time.sleep(rng.uniform(0, 4) * seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        torn += any(folder.glob("*.partial"))
        state = checkpoints.load(torch.device("cpu"))
        assert state is not None
        step = state["step"]
        assert checkpoints.steps()[-1] == step, "the newest one could not be read"
        assert step >= last, "a checkpoint was lost"
        expected = torch.full((NUMBERS,), float(step))
        assert torch.equal(state["x"], expected)
        assert torch.equal(state["next"]["x"], -expected)
        last = step
    print(kills, torn, last)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
