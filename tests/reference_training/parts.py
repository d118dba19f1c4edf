"""What the tests of the trainers share: small runs of each, and all that a run leaves behind."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor, nn

from ebmguard.reference_training.bism import deep_train
from ebmguard.reference_training.bism import train as rbm_train
from ebmguard.reference_training.bism.config import BismConfig, DeepConfig
from ebmguard.reference_training.data import ImageData
from ebmguard.reference_training.engine.progress import Reporter
from ebmguard.reference_training.engine.ranks import ONE_RANK, Ranks
from ebmguard.reference_training.engine.run_config import RunConfig
from ebmguard.reference_training.engine.run_folder import ROW_FILES
from ebmguard.reference_training.jem import train as jem_train
from ebmguard.reference_training.jem import trainer as jem_trainer
from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.reference_training.jem.sampler import make_sampler
from ebmguard.reference_training.shortrun import train as shortrun_train
from ebmguard.reference_training.shortrun.config import ShortRunConfig
from ebmguard.reference_training.shortrun.trained import TrainedRun
from ebmguard.reference_training.toy import evaluate
from ebmguard.reference_training.toy import train as toy_train
from ebmguard.reference_training.toy.config import ToyConfig
from ebmguard.reference_training.toy.grid import Grid
from ebmguard.samplers import ReplayBuffer
from ebmguard.sinks import JsonlSink, read_jsonl
from tests.faults.injector import FaultInjector
from tests.parts import PATIENCE

CPU = torch.device("cpu")


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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


@dataclass(frozen=True)
class Trainer:
    """A trainer, and the settings of its smallest run that is one."""

    train: Callable[..., dict[str, Any] | None]
    config: type[RunConfig]
    small: dict[str, Any]

    def config_for(self, out: str | os.PathLike[str], **settings: Any) -> Any:
        """The settings of a small run, some of them others."""
        return self.config(**{"out": Path(out), "device": "cpu", **self.small, **settings})

    def go(
        self, config: RunConfig, reporter: Reporter | None = None, ranks: Ranks = ONE_RANK
    ) -> Any:
        """Train; what results.json holds, or None where Ctrl-C stopped the run."""
        return self.train(*config.open(ranks), reporter or Silent(), ranks)

    def run(self, out: Path, ranks: Ranks = ONE_RANK, **settings: Any) -> Any:
        """The same of a small run."""
        return self.go(self.config_for(out, **settings), ranks=ranks)


JEM = Trainer(
    jem_train.train,
    JemConfig,
    {
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
    },
)
SHORTRUN = Trainer(
    shortrun_train.train,
    ShortRunConfig,
    {
        "data": "digits",
        "iterations": 6,
        "train_images": 64,
        "test_images": 32,
        "batch": 8,
        "nf": 4,
        "sgld_steps": 3,
        "sample_every": 3,
        "checkpoint_every": 3,
    },
)
TOY = Trainer(
    toy_train.train,
    ToyConfig,
    {
        "scenario": "gmm-default",
        "betas": ("0", "0.5", "-0.2"),
        "seeds": 2,
        "iterations": 12,
        "evaluations": 3,
        "checkpoint_every": 5,
        "threads": 1,
    },
)
RBM = Trainer(
    rbm_train.train,
    BismConfig,
    {
        "iterations": 30,
        "batch": 20,
        "evaluations": 3,
        "test_samples": 200,
        "inner_steps": 2,
        "unrolled_steps": 2,
        "checkpoint_every": 7,
    },
)
DEEP = Trainer(
    deep_train.train,
    DeepConfig,
    {
        "iterations": 12,
        "batch": 10,
        "train_images": 50,
        "test_images": 20,
        "channels": 2,
        "evaluations": 2,
        "checkpoint_every": 5,
        "inner_steps": 2,
    },
)
TRAINERS = {"jem": JEM, "shortrun": SHORTRUN, "toy": TOY, "rbm": RBM, "deep": DEEP}


def small_evaluations(monkeypatch: Any) -> None:
    """10,000 samples a toy and 40,000 points of the grid take longer than these trainings."""
    monkeypatch.setattr(evaluate, "SAMPLES", 200)
    monkeypatch.setattr(evaluate, "SAMPLES_AT_ONCE", 100)
    coarse = SimpleNamespace(of=lambda distribution: Grid.of(distribution, 20))
    monkeypatch.setattr(evaluate, "Grid", coarse)


@contextmanager
def nan_samples(*calls: int) -> Iterator[None]:
    """Each of these sampler calls of a JEM run, counted from 0, returns a NaN."""
    faults = FaultInjector()
    for call in calls:
        faults.nan_sample(at=call)

    def faulty(*args: Any, **how: Any) -> Any:
        return faults.sampler(make_sampler(*args, **how))

    with pytest.MonkeyPatch.context() as patched, faults:
        patched.setattr(jem_trainer, "make_sampler", faulty)
        yield


@contextmanager
def in_float64() -> Iterator[None]:
    """Trainers on float64 images, samples, parameters and random numbers."""
    with pytest.MonkeyPatch.context() as patched:
        scale = ImageData.scale
        patched.setattr(ImageData, "scale", lambda self, x: scale(self, x).double())
        for module in (jem_trainer, shortrun_train):
            patched.setattr(module, "ReplayBuffer", partial(ReplayBuffer, dtype=torch.float64))
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


# -- what a run leaves behind ------------------------------------------------------------------


def newest(out: Path, part: str = "") -> Path:
    """The newest checkpoint file of a run; of several ranks, that of `part`."""
    return max((out / "checkpoints").glob(f"step-*{part}.pt"))


def saved(out: Path, part: str = "") -> dict[str, Any]:
    state: dict[str, Any] = torch.load(newest(out, part), weights_only=True)
    return state


def steps_of(out: Path, name: str) -> list[int]:
    return [row["step"] for row in read_jsonl(out / name)]


def results_of(out: Path) -> dict[str, Any]:
    """results.json without what differs between two equal runs: times, and where it lies."""
    results = json.loads((out / "results.json").read_text())
    own = ("wall_seconds", "cpu_seconds", "update_cpu_seconds", "command")
    return {k: v for k, v in results.items() if k not in own}


def same(a: Any, b: Any) -> bool:
    """Equal in every bit; NaN equals NaN."""
    if isinstance(a, Tensor):
        alike = a.shape == b.shape and a.dtype == b.dtype
        return alike and bool(torch.equal(a.isnan(), b.isnan()) and ((a == b) | a.isnan()).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b or (a != a and b != b))


def largest_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Of parameters, relative to the largest entry of each tensor."""
    assert one.keys() == other.keys()
    pairs = [(one[k].detach(), other[k].detach()) for k in one]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-12)) for a, b in pairs)


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


class Quadratic(nn.Module):
    """f(x) = -a/2 |x - m|², a the strength, whose Langevin chain is a Gaussian process."""

    strength: Tensor

    def __init__(self, strength: float, mean: float = 0.0) -> None:
        super().__init__()
        # Of no gradient: the chain asks for that of the images alone.
        self.register_buffer("strength", torch.tensor(strength))
        self.mean = mean

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B,)."""
        f: Tensor = -self.strength / 2 * (x - self.mean).square().flatten(1).sum(1)
        return f


def tiny_run(
    path: str | os.PathLike[str] = "tiny",
    *,
    network: nn.Module | None = None,
    step: int = 6,
    **settings: Any,
) -> TrainedRun:
    """A run that was never trained, on digits, without a folder; the same for the same seed.

    No network is an EnergyNet of random parameters.
    """
    config = SHORTRUN.config_for(path, **settings)
    data = config.load_data()
    if network is None:
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            network = config.make_network(data)
    network = network.eval().requires_grad_(False)
    return TrainedRun(Path(path), config, network, data, step)


def trained_folder(out: Path, **settings: Any) -> Path:
    """A run folder of a few updates; `load_run` of trained.py opens it."""
    assert SHORTRUN.go(SHORTRUN.config_for(out, **settings)) is not None
    return out


def write_rows(run: Path, columns: Mapping[str, Sequence[float]]) -> None:
    """Add rows to the metrics.jsonl of a run folder, as the guard writes them, by their columns."""
    sink = JsonlSink(run)
    for step, values in enumerate(zip(*columns.values(), strict=True)):
        sink.write_row(step, dict(zip(columns, values, strict=True)), {})
    sink.flush()


def assert_no_text_on_text(figure: Figure) -> None:
    """No text of the picture lies on another, or leaves the picture."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()  # which places everything
    parts = [figure, *figure.subfigs]
    written = [text for part in parts for text in part.texts if text.get_text()]
    for axes in [axes for axes in figure.axes if axes.axison]:
        written += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        labels = (*axes.get_xticklabels(), *axes.get_yticklabels())
        inside = axes.get_window_extent(renderer).padded(2)
        for label in labels:
            x, y = label.get_transform().transform(label.get_position())
            if inside.x0 <= x <= inside.x1 or inside.y0 <= y <= inside.y1:
                written.append(label)
    legends = [axes.get_legend() for axes in figure.axes]
    legends += [legend for part in parts for legend in part.legends]
    for legend in filter(None, legends):
        written += legend.get_texts()
    shown = [(text, text.get_window_extent(renderer)) for text in written if text.get_text()]
    shown = [(text, box) for text, box in shown if box.width]
    for text, box in shown:
        outside = box.x0 < 0 or box.y0 < 0 or box.x1 > figure.bbox.x1 or box.y1 > figure.bbox.y1
        assert not outside, f"{text.get_text()!r} leaves the picture"
    for (a, one), (b, two) in itertools.combinations(shown, 2):
        assert not one.overlaps(two), f"{a.get_text()!r} lies on {b.get_text()!r}"
