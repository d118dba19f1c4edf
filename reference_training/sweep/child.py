"""Becomes the Python of a run, which is told to stop when the process that started it dies.

`python -m ebmguard.reference_training.sweep.child PARENT -m ebmguard train ...`
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""From <linux/prctl.h>."""


def main(parent: int, words: list[str]) -> None:
    """Replace this process; `parent` is who started it."""
    if sys.platform == "linux":
        # Without it a run would outlive a worker or a node that is killed. SIGTERM lets it write a
        # checkpoint; who goes on with it waits for its lock.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if parent != os.getppid():
        sys.exit("who started this run is gone already")
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # Ray keeps Ctrl-C from what it starts
    os.execv(sys.executable, [sys.executable, *words])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
