"""Where chains start and what bounds them, against where the data lies."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..alerts import Level
from .problem import Problem
from .setup import Setup

__all__ = ["of_chains"]

# Of the data's width, by which start points may miss it: noise on the data, or a few dark images.
_SLACK = 0.1
# Of the data's width: [-1, 1] for images in [0, 1] is 2.
_WIDE = 1.8


def of_chains(setup: Setup) -> Iterator[Problem]:
    """Clamp and replay buffer against the range of the example."""
    example = setup.example
    data = None
    if example is not None and example.is_floating_point() and example.numel():
        low, high = float(example.min()), float(example.max())
        if low < high:
            data = low, high
    clamp = setup.trainer.clamp
    if clamp is not None and data is not None:
        slack = _SLACK * (data[1] - data[0])
        if clamp[0] > data[0] + slack or clamp[1] < data[1] - slack:
            yield Problem(
                Level.ERROR,
                "clamp",
                "g.attach(clamp=)",
                f"The sampler keeps samples in [{clamp[0]:g}, {clamp[1]:g}], but the data lies in "
                f"[{data[0]:.3g}, {data[1]:.3g}]: no negative can get where data is, and the gap "
                "grows without end.",
                "a clamp as wide as the data or none, or data scaled to it.",
            )
    samples = getattr(setup.trainer.buffer, "samples", setup.trainer.buffer)
    if not isinstance(samples, Tensor) or not samples.numel():
        return
    if not samples.is_floating_point():
        return
    broken = int((~torch.isfinite(samples)).flatten(1).any(1).sum()) if samples.ndim > 1 else 0
    if broken:
        yield Problem(
            Level.ERROR,
            "buffer_nonfinite",
            "the replay buffer",
            f"{broken} of its {len(samples)} rows hold NaN or infinity.",
            "start it anew, or replace these rows by fresh start points.",
        )
    elif data is not None and example is not None:
        if samples.shape[1:] != example.shape[1:]:
            yield Problem(
                Level.WARN,
                "buffer_shape",
                "the replay buffer",
                f"Its rows have shape {tuple(samples.shape[1:])}, but samples of data have "
                f"{tuple(example.shape[1:])}.",
                "build the buffer with the shape of one sample; nothing, if the model takes other "
                "inputs than its sampler.",
            )
            return
        low, high = float(samples.min()), float(samples.max())
        slack = _SLACK * (data[1] - data[0])
        if low > data[0] + slack or high < data[1] - slack:
            yield Problem(
                Level.WARN,
                "buffer_range",
                "the replay buffer",
                f"Chains start in [{low:.3g}, {high:.3g}], but the data lies in "
                f"[{data[0]:.3g}, {data[1]:.3g}].",
                "start points uniform over the range of the data.",
            )
        elif high - low > _WIDE * (data[1] - data[0]):
            yield Problem(
                Level.INFO,
                "buffer_range",
                "the replay buffer",
                f"Chains start in [{low:.3g}, {high:.3g}], much wider than the data in "
                f"[{data[0]:.3g}, {data[1]:.3g}].",
                "start points in [0, 1] for images in [0, 1]; nothing, where space beside the data "
                "should be searched.",
            )
