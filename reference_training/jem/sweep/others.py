"""The end of a grid that several ranks share."""

from __future__ import annotations

import os
import time

import torch.distributed as dist

from .place import Place
from .stop import Stop

POLL_SECONDS = 0.5
KEY = "ebmguard/sweep/done"


class Others:
    """The other ranks of torchrun.

    torchrun ends all ranks as soon as one of them fails, and a machine that leaves early takes the
    meeting place of the others with it. So every rank stays until all are done with their cells.
    """

    def __init__(self, place: Place) -> None:
        """Meet them, where torchrun has started several."""
        self._world = place.world
        self._store = None
        if place.world > 1 and dist.is_torchelastic_launched():
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            # A client: torchrun itself is the server.
            self._store = dist.TCPStore(host, port)  # type: ignore[attr-defined]

    def wait(self, stop: Stop) -> None:
        """Until all of them are done, or `stop` asks."""
        if self._store is None:
            return
        try:
            done = self._store.add(KEY, 1)
            while done < self._world and not stop.asked:
                time.sleep(POLL_SECONDS)
                done = self._store.add(KEY, 0)
        except dist.DistError:
            # The server ends with its torchrun: when all are done, or when a machine is lost.
            return
