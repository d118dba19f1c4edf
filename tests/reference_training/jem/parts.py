"""What the tests of the JEM trainer share."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ebmguard.reference_training.data import ImageData
from ebmguard.reference_training.engine.progress import Reporter
from ebmguard.reference_training.engine.run_folder import ROW_FILES
from ebmguard.reference_training.jem import trainer
from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.reference_training.jem.course import SEEN
from ebmguard.reference_training.jem.sampler import make_sampler
from ebmguard.reference_training.jem.train import train
from ebmguard.reference_training.jem.trainer import Trainer
from ebmguard.reference_training.shortrun import train as shortrun_train
from ebmguard.samplers import ReplayBuffer
from ebmguard.sinks import read_jsonl
from tests.faults.injector import FaultInjector
from tests.parts import PATIENCE

SMALL: dict[str, Any] = {
    "data": "digits",
    "iterations": 8,
    "n_pos": 8,
    "n_neg": 6,
    "sgld_steps": 2,
    "buffer_size": 30,
    "test_images": 40,
    "eval_every": 3,
    "checkpoint_every": 4,
    "alert_context": 2,
}


class Silent(Reporter):  # type: ignore[misc]
    """A reporter that counts steps, and presses Ctrl-C after one of them."""

    def __init__(self, interrupt_after: int | None = None) -> None:
        self.interrupt_after = interrupt_after
        self.notes: list[str] = []
        self.states: list[tuple[int, dict[str, float | str]]] = []

    def start(self, name: str, done: int, total: int) -> None:
        self.started = (name, done, total)

    def step(self, done: int, state: Mapping[str, float | str]) -> None:
        self.states.append((done, dict(state)))
        if done == self.interrupt_after:
            os.kill(os.getpid(), signal.SIGINT)

    def note(self, text: str) -> None:
        self.notes.append(text)


def config_for(out: Path, **settings: Any) -> JemConfig:
    return JemConfig(**{"out": out, "device": "cpu", **SMALL, **settings})


def go(config: JemConfig, reporter: Reporter | None = None) -> dict[str, Any] | None:
    results: dict[str, Any] | None = train(*config.open(), reporter or Silent())
    return results


def newest(out: Path, part: str = "") -> Path:
    """The newest checkpoint file of a run; of several ranks, that of `part`."""
    return max((out / "checkpoints").glob(f"step-*{part}.pt"))


def saved(out: Path, part: str = "") -> dict[str, Any]:
    state: dict[str, Any] = torch.load(newest(out, part), weights_only=True)
    return state


def same(a: Any, b: Any) -> bool:
    """Equal in every bit; NaN equals NaN."""
    if isinstance(a, torch.Tensor):
        alike = a.shape == b.shape and a.dtype == b.dtype
        return alike and bool(torch.equal(a.isnan(), b.isnan()) and ((a == b) | a.isnan()).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b or (a != a and b != b))


def own_numbers(trainer: Trainer) -> dict[str, float]:
    """What the guard's last row has of the classifier, and the gaps."""
    row = trainer.guards["p_x"].last
    return {name: row[name] for name in SEEN if name in row}


def steps_of(out: Path, name: str) -> list[int]:
    return [row["step"] for row in read_jsonl(out / name)]


def results_of(out: Path) -> dict[str, Any]:
    """results.json without what differs between two equal runs: times, and where it lies."""
    results = json.loads((out / "results.json").read_text())
    own = ("wall_seconds", "cpu_seconds", "update_cpu_seconds", "command")
    return {k: v for k, v in results.items() if k not in own}


def kill_at_a_checkpoint(child: BaseProcess, run: Path) -> None:
    """SIGKILL a training after its first checkpoint."""
    try:
        deadline = time.monotonic() + PATIENCE
        while not list((run / "checkpoints").glob("step-*.pt")):
            assert child.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        child.kill()
        child.join()


def arrays_of(out: Path) -> dict[str, Any]:
    """Samples and figures of a run, by their files."""
    files = {str(file.relative_to(out)): np.load(file) for file in out.rglob("*.np[yz]")}
    return {
        name: found if isinstance(found, np.ndarray) else dict(found.items())
        for name, found in files.items()
    }


def assert_same_run(one: Path, other: Path, part: str = "") -> None:
    """Two finished runs of any trainer are the same to the last bit, in all that they left."""
    a, b = saved(one, part), saved(other, part)
    for state in (a, b):
        del state["record"]["elapsed"]
        state.pop("clock", None)
        if part and ".rank0of" not in part:  # what another rank has written by then is its own
            del state["row_sizes"]
    for whole, cut in ((a, b), (a["guards"], b["guards"]), (a["record"], b["record"])):
        assert whole.keys() == cut.keys()
        for name in whole:
            assert same(whole[name], cut[name]), name
    for name in ROW_FILES:
        files = [out / name for out in (one, other)]
        assert files[0].is_file() == files[1].is_file(), name
        assert not files[0].is_file() or files[0].read_bytes() == files[1].read_bytes(), name
    assert results_of(one) == results_of(other)
    np.testing.assert_equal(arrays_of(one), arrays_of(other))
    best = [out / "checkpoints" / "best.pt" for out in (one, other)]
    assert best[0].is_file() == best[1].is_file()
    if best[0].is_file():
        assert same(*(torch.load(file, weights_only=True) for file in best))


@contextmanager
def nan_samples(*calls: int) -> Iterator[None]:
    """Each of these sampler calls of a run, counted from 0, returns a NaN."""
    faults = FaultInjector()
    for call in calls:
        faults.nan_sample(at=call)

    def faulty(*args: Any, **how: Any) -> Any:
        return faults.sampler(make_sampler(*args, **how))

    with pytest.MonkeyPatch.context() as patched, faults:
        patched.setattr(trainer, "make_sampler", faulty)
        yield


@contextmanager
def in_float64() -> Iterator[None]:
    """Trainers on float64 images, samples, parameters and random numbers."""
    with pytest.MonkeyPatch.context() as patched:
        scale = ImageData.scale
        patched.setattr(ImageData, "scale", lambda self, x: scale(self, x).double())
        for module in (trainer, shortrun_train):
            patched.setattr(module, "ReplayBuffer", partial(ReplayBuffer, dtype=torch.float64))
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


def largest_difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """Of parameters, relative to the largest entry of each tensor."""
    assert one.keys() == other.keys()
    pairs = [(one[k].detach(), other[k].detach()) for k in one]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
