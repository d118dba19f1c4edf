"""The samples that a JEM run keeps to be looked at."""

from __future__ import annotations

from collections import deque

import numpy as np
from torch import Tensor

from ..engine.run_folder import RunFolder
from ..plots.images import as_bytes, save_sample_figures

SHOWN = 64
"""Samples of a step that are kept."""
EVERY, BEFORE = 100, 5
"""Samples are remembered every so many steps; so many of them are written when a run is lost."""


class KeptSamples:
    """Samples of a run: its first, last and last healthy ones, and files of those in between.

    samples/ gets the negatives of evaluated steps as bytes (n, C, H, W), and those of every
    hundredth step around a divergence and after it.

    Args:
        folder: the run's.
        data: images of the data set, (n, C, H, W) in the units of the samples, to be shown beside.

    Attributes:
        shown: by name, what is drawn at the end.
        recent: the last remembered steps and their samples as bytes.
    """

    def __init__(self, folder: RunFolder, data: Tensor) -> None:
        self.folder = folder
        self.shown: dict[str, Tensor] = {"data": data[:SHOWN]}
        self.recent: deque[tuple[int, Tensor]] = deque(maxlen=BEFORE)

    def see(
        self, step: int, x: Tensor, *, evaluated: bool, healthy: bool, lost: bool
    ) -> Tensor | None:
        """Take in the samples of a step, (n, C, H, W); what is written waits for the device alone.

        Args:
            step: its number.
            x: the samples.
            evaluated: the step is one of those that are written, and returned as bytes.
            healthy: the network that they are of is as good as it was.
            lost: the run has diverged.
        """
        x = x[:SHOWN]
        if step == 0:
            self.shown["start"] = x
        self.shown["end"] = x
        if healthy:
            self.shown["healthy"] = x
        is_remembered = step % EVERY == 0
        if not (evaluated or is_remembered):
            return None
        pixels = as_bytes(x)
        if is_remembered:
            self.recent.append((step, pixels))
        if evaluated or lost:
            self._write(step, pixels)
        return pixels if evaluated else None

    def write_recent(self) -> None:
        """Write the samples of the last remembered steps: the run is lost."""
        for step, pixels in self.recent:
            self._write(step, pixels)

    def forget(self, step: int) -> None:
        """The run goes back to `step`: the samples after it are of a course given up."""
        self.recent = deque((pair for pair in self.recent if pair[0] < step), BEFORE)

    def draw(self) -> None:
        """Draw the first, last and last healthy samples beside the data, into figures/."""
        if self.folder.writes:
            save_sample_figures(self.folder.figures, self.shown)

    def _write(self, step: int, pixels: Tensor) -> None:
        if self.folder.writes:
            np.save(self.folder.samples / f"{step:08d}.npy", pixels.cpu().numpy())
