"""Kills an ordinary loop again and again, and compares it with the same loop that nobody killed.

Started as ``python -m tests.recovery.kills_loop FOLDER KILLS`` from the project's root. It has one
thread, so that it may fork. Nothing but ``g.resume()`` knows of the kills. A third of them come
while the disk takes nothing more, a third while a slow one is written to. Prints the kills, how
many went on from a later snapshot than the one before, how many left a file that was being written,
the steps at the end, and what differs.
"""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.recovery.parts import go_on


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def spoil(kind: int, rng: random.Random) -> None:
    """Make this process's disk full after a while, or slow."""
    if kind == 1:
        full = rng.randrange(2_000, 60_000)
        resource.setrlimit(resource.RLIMIT_FSIZE, (full, resource.RLIM_INFINITY))
    elif kind == 2:
        sync = os.fsync

        def slow(descriptor: int) -> None:
            time.sleep(0.05)
            sync(descriptor)

        os.fsync = slow  # type: ignore[assignment]


def main(folder: Path, kills: int) -> None:
    go_on(folder / "first", 2)  # which takes longer
    began = time.monotonic()
    go_on(folder / "timed", 20)
    seconds = time.monotonic() - began
    chance, steps, later, torn = random.Random(0), -1, 0, 0
    for kill in range(kills):
        child = os.fork()
        if not child:
            spoil(kill % 3, chance)
            go_on(folder / "run", 10**9)
        time.sleep(chance.uniform(0.1, 2) * seconds)
        written = (folder / "run" / "kept").glob
        for _ in range(1000 * (kill % 3 == 2)):  # milliseconds
            if any(written("*.partial")):
                break
            time.sleep(0.001)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        torn += any(written("*.partial"))
        kept = [int(x.stem[9:]) for x in written("snapshot-*.pt")]
        later += max(kept, default=-1) > steps
        assert max(kept, default=-1) >= steps, "a snapshot was lost"
        steps = max(kept, default=-1)
    end = steps + 10
    (state, resumed), (whole, _) = go_on(folder / "run", end), go_on(folder / "whole", end)
    assert resumed == steps
    wrong = [name for name in whole if state[name] != whole[name]]
    found, wanted = rows(folder / "run"), rows(folder / "whole")
    wrong += ["the steps of rows"] * ([x["step"] for x in found] != [*range(end)])
    wrong += ["rows"] * (found != wanted)
    print(kills, later, torn, end, *wrong, sep="\n")


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
