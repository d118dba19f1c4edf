"""Kills processes while they write checkpoints, and looks at what they leave.

Started as ``python -m tests.reference_training.engine.checkpoints_process FOLDER KILLS`` from the
project's root. It has one thread and no thread pool, so that it may fork. Prints the number of
kills, how many of them left a file that was being written, and the last step.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import NoReturn

import torch

from ebmguard.reference_training.engine.checkpoints import Checkpoints
from tests.kills import kill

NUMBERS = 100_000


def save(checkpoints: Checkpoints, step: int) -> None:
    x = torch.full((NUMBERS,), float(step))
    checkpoints.save(step, {"step": step, "x": x, "next": {"x": -x}})


def save_forever(checkpoints: Checkpoints, step: int) -> NoReturn:
    while True:
        step += 1
        save(checkpoints, step)


def main(folder: Path, kills: int) -> None:
    checkpoints = Checkpoints(folder)
    began = time.monotonic()
    for last in range(5):
        save(checkpoints, last)
    seconds = (time.monotonic() - began) / 5  # of one, on this machine

    def check() -> None:
        nonlocal last
        state = checkpoints.load(torch.device("cpu"))
        assert state is not None
        step = state["step"]
        assert checkpoints.steps()[-1] == step, "the newest one could not be read"
        assert step >= last, "a checkpoint was lost"
        expected = torch.full((NUMBERS,), float(step))
        assert torch.equal(state["x"], expected)
        assert torch.equal(state["next"]["x"], -expected)
        last = step

    torn = kill(lambda: save_forever(checkpoints, last), kills, 4 * seconds, folder, check)
    print(kills, torn, last)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
