"""What the tests of the trainers share: small runs of each, and all that a run leaves behind."""

from __future__ import annotations

import json
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ebmguard.energies import Variant
from ebmguard.reference_training.bism import deep_train
from ebmguard.reference_training.bism import train as rbm_train
from ebmguard.reference_training.bism.config import BismConfig, DeepConfig
from ebmguard.reference_training.bism.posterior import BernoulliPosterior
from ebmguard.reference_training.bism.rbm import GaussianBernoulliRBM
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
from ebmguard.reference_training.shortrun.network import EnergyNet
from ebmguard.reference_training.shortrun.trained import TrainedRun
from ebmguard.reference_training.toy import evaluate
from ebmguard.reference_training.toy import train as toy_train
from ebmguard.reference_training.toy.config import ToyConfig
from ebmguard.reference_training.toy.grid import Grid
from ebmguard.samplers import ReplayBuffer
from ebmguard.sinks import read_jsonl
from tests.faults.injector import FaultInjector
from tests.objective.oracles import textbook
from tests.runs import frozen

CPU = torch.device("cpu")


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def uniform(*shape: int, seed: int = 0) -> Tensor:
    """Images, from U(-1, 1)."""
    return torch.rand(shape, generator=rng(seed)) * 2 - 1


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


def pulled(
    f_pos: Tensor,
    f_neg: Tensor,
    beta_star: float,
    variant: Variant = "default",
    labels: Tensor | None = None,
) -> Tensor:
    """What has the gradient of the objective, with energies of one class each where it is told."""
    groups = None if labels is None else (labels, labels)
    known = textbook(f_pos.detach(), f_neg.detach(), beta_star, variant, groups=groups)
    parts = ((f_pos, known.to_pos), (f_neg, known.to_neg))
    return torch.stack([f @ f.new_tensor(list(map(float, to))) for f, to in parts]).sum()


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
    """Equal in every bit."""
    return bool(frozen(a) == frozen(b))


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


# -- models ------------------------------------------------------------------------------------


def binary_states(bits: int) -> Tensor:
    """Every state of at least two bits, (2^bits, bits), in float64."""
    return torch.cartesian_prod(*[torch.arange(2.0, dtype=torch.float64)] * bits)


def rbm(visible: int = 2, hidden: int = 4, seed: int = 0) -> GaussianBernoulliRBM:
    """One whose modes are well apart but meet, with a scale of its own for each entry."""
    model = GaussianBernoulliRBM(visible, hidden, rng(seed)).double()
    with torch.no_grad():
        model.weight.mul_(3)
        model.log_std.copy_(torch.linspace(-0.4, 0.3, visible))
    return model


def exact_posterior(model: GaussianBernoulliRBM) -> BernoulliPosterior:
    posterior = BernoulliPosterior(*model.weight.shape).double()
    with torch.no_grad():
        posterior.weight.copy_(model.weight.T)
        posterior.bias.copy_(model.hidden_bias)
    return posterior


def energy_net(factor: float = 1.0, **settings: Any) -> EnergyNet:
    """Of 8x8 images, the same each time, with a factor on f."""
    torch.manual_seed(0)
    net = EnergyNet(**{"in_channels": 1, "image_size": 8, "nf": 4, **settings})
    net.head.weight.data *= factor
    return net


def published_layers(
    nf: int, act: Callable[[], nn.Module] = nn.GELU, *, channels: int = 1, halvings: int = 1
) -> nn.Sequential:
    """The layers of Nijkamp et al.'s script: of images of 8x8 pixels, or of twice as many a side
    for each further halving."""
    layers = [nn.Conv2d(channels, nf, 3, 1, 1), act()]
    for width in (nf * 2**i for i in range(halvings)):
        layers += [nn.Conv2d(width, 2 * width, 4, 2, 1), act()]
    return nn.Sequential(*layers, nn.Conv2d(nf * 2**halvings, 1, 4, 1, 0), nn.Flatten(0))


class Calls(TorchDispatchMode):
    """The arguments of each call of every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.args: dict[Any, list[Any]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.args[func].append(args)
        return func(*args, **(kwargs or {}))


class Function(nn.Module):
    """A network without parameters: f of images as rows, (B, C H W) -> (B,)."""

    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x.flatten(1))


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
