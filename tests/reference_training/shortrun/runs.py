"""What the tests of the short-run trainer itself share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from ebmguard.reference_training.data import ImageData
from ebmguard.reference_training.engine.progress import Reporter
from ebmguard.reference_training.shortrun import train as train_module
from ebmguard.reference_training.shortrun.config import ShortRunConfig
from ebmguard.reference_training.shortrun.train import train
from ebmguard.samplers import ReplayBuffer
from tests.reference_training.jem.parts import Silent, assert_same_run, newest, same, saved

__all__ = ["Silent", "assert_same_run", "go", "in_float64", "newest", "same", "saved"]


def go(config: ShortRunConfig, reporter: Reporter | None = None) -> dict[str, Any] | None:
    """Train; what results.json holds, or None where Ctrl-C stopped the run."""
    results: dict[str, Any] | None = train(*config.open(), reporter or Silent())
    return results


@contextmanager
def in_float64() -> Iterator[None]:
    """The trainer on float64 images, samples, parameters and random numbers."""
    scale = ImageData.scale
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ImageData, "scale", lambda self, x: scale(self, x).double())
        patched.setattr(train_module, "ReplayBuffer", partial(ReplayBuffer, dtype=torch.float64))
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)
