"""Kills of a process that writes files, at random moments."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


def kill(
    write: Callable[[], NoReturn],
    kills: int,
    seconds: float,
    folder: Path,
    check: Callable[[], None],
) -> int:
    """Fork this process, which has one thread, and kill the child; so many times.

    Args:
        write: what the child does for ever.
        seconds: after which it is killed at the latest.
        folder: what it writes into.
        check: looks at what is left.

    Returns:
        how many kills left a file that was being written.
    """
    rng, torn = random.Random(0), 0
    for _ in range(kills):
        for partial in folder.glob("*.partial"):
            partial.unlink()
        child = os.fork()
        if not child:
            write()
        time.sleep(rng.uniform(0, seconds))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        torn += any(folder.glob("*.partial"))
        check()
    return torn
