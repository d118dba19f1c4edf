"""What the tests of the short-run trainer itself share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ebmguard.reference_training.data import ImageData
from ebmguard.reference_training.engine.progress import Reporter
from ebmguard.reference_training.engine.run_folder import ROW_FILES
from ebmguard.reference_training.shortrun import train as train_module
from ebmguard.reference_training.shortrun.config import ShortRunConfig
from ebmguard.reference_training.shortrun.train import train
from ebmguard.samplers import ReplayBuffer
from tests.reference_training.jem.parts import Silent, newest, results_of, same, saved

__all__ = ["Silent", "assert_same_run", "go", "in_float64", "newest", "same", "saved"]


def go(config: ShortRunConfig, reporter: Reporter | None = None) -> dict[str, Any] | None:
    """Train; what results.json holds, or None where Ctrl-C stopped the run."""
    results: dict[str, Any] | None = train(*config.open(), reporter or Silent())
    return results


def assert_same_run(one: Path, other: Path, part: str = "") -> None:
    """Two finished runs are the same to the last bit, in all that they left behind."""
    a, b = saved(one, part), saved(other, part)
    for state in (a, b):
        del state["record"]["elapsed"]
        if part and ".rank0of" not in part:  # what another rank has written by then is its own
            del state["row_sizes"]
    assert a.keys() == b.keys()
    for name in a:
        assert same(a[name], b[name]), name
    for name in ROW_FILES:
        files = [out / name for out in (one, other)]
        assert files[0].is_file() == files[1].is_file(), name
        if files[0].is_file():
            assert files[0].read_bytes() == files[1].read_bytes(), name
    assert results_of(one) == results_of(other)
    names = [sorted(path.name for path in (out / "samples").iterdir()) for out in (one, other)]
    assert names[0] == names[1]
    for name in names[0]:
        assert np.array_equal(*(np.load(out / "samples" / name) for out in (one, other))), name
    with (
        np.load(one / "figures" / "samples.npz") as x,
        np.load(other / "figures" / "samples.npz") as y,
    ):
        assert x.files == y.files
        assert all(np.array_equal(x[name], y[name]) for name in x.files)


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
