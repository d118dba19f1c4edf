"""One rank of two that train each model; what it saw is written to a file."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ebmguard.reference_training.bism import deep_train
from ebmguard.reference_training.bism.rbm import GaussianBernoulliRBM
from ebmguard.reference_training.engine.ranks import Ranks
from ebmguard.reference_training.jem import trainer as jem_trainer
from ebmguard.reference_training.shortrun import train as shortrun_train
from ebmguard.reference_training.shortrun.sampler import Draws
from ebmguard.sinks import read_jsonl
from tests.ranks import be_rank
from tests.reference_training.parts import (
    DEEP,
    JEM,
    RBM,
    SHORTRUN,
    Trainer,
    in_float64,
    nan_samples,
    newest,
    rng,
    saved,
)

WORLD = 2
UNEVEN: dict[str, Any] = {"n_pos": 7, "n_neg": 5, "n_labelled": 5, "seed": 2}
"""Of two ranks, the first one has 3, 2 and 2 of them."""
JEMS: dict[str, dict[str, Any]] = {
    "default": {},
    "true": {"variant": "true"},
    "labels of the positives": {"n_labelled": 0},
    "weights": {"p_x_weight": 0.6, "p_y_x_weight": 0.3, "class_conditional": True},
    "a classifier": {"p_x_weight": 0.0},
    "what holds energies and gradients": {"energy_l2": 0.3, "clip_norm": 0.6},
    "published options": {
        "unconditional": True,
        "norm": "layer",
        "optimizer": "sgd",
        "lr": 0.03,
        "labels_per_class": 3,
    },
    "no guard": {"beta_star": 0.0, "n_pos": 8, "n_neg": 6},
}
SHORTRUNS: dict[str, dict[str, Any]] = {
    "a short run without a guard": {"beta_star": 0.0},
    "one guarded, of random length": {"beta_star": 2000.0, "most_sgld_steps": 6},
    "one persistent": {"beta_star": 2000.0, "init": "persistent", "buffer_size": 12},
}
CASES: dict[str, tuple[Trainer, dict[str, Any]]] = {
    **{
        name: (JEM, {"iterations": 5, **UNEVEN, "buffer_size": 40, **own})
        for name, own in JEMS.items()
    },
    **{
        name: (SHORTRUN, {"iterations": 5, "checkpoint_every": 100, "lr": 3e-3, **own})
        for name, own in SHORTRUNS.items()
    },
    **{
        f"{method} of an RBM": (RBM, {"method": method, "iterations": 6, "lr": 0.01})
        for method in ("bidsm", "pcd2")
    },
    "visible, by chains": (DEEP, {"iterations": 4, "model": "visible", "method": "pcd2"}),
}
TAGS = ("energy_gap", "grad_scale", "ess", "f_pos/mean", "f_neg/mean", "outside", "sgld_steps")
NUMBERS = ("test_loss", "log_likelihood", "fisher")
RUN: dict[str, Any] = {
    **UNEVEN,
    "valid_images": 30,
    "quality_samples": 12,
    "buffer_size": 31,
    "class_conditional": False,
}


@contextmanager
def still(ranks: Ranks) -> Iterator[None]:
    """Chains of all processes together end where those of one do."""
    images: list[Any] = []
    positives = Draws.positives

    def kept(self: Draws) -> Any:
        images.append(positives(self))
        return images[-1]

    def near_the_images(*_: Any) -> Any:
        def sample_q(network: Any, x0: Any, noise: Any) -> Any:
            network(x0[:1])  # the guard is right to ask for it
            return 0.9 * images[-1] + 0.2

        return sample_q

    def of_the_step(settings: Any, count: int, *_: Any, **how: Any) -> Any:
        steps = itertools.count()

        def sample_q(network: Any, buffer: Any, labels: Any = None) -> Any:
            network(buffer.samples[:1])
            shape = settings.n_neg, *buffer.samples.shape[1:]
            own = torch.rand(shape, generator=rng(next(steps)))[ranks.part(settings.n_neg)]
            assert len(own) == count
            return 2 * own - 1

        return sample_q

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Draws, "positives", kept)
        patched.setattr(shortrun_train, "make_sampler", near_the_images)
        patched.setattr(jem_trainer, "make_sampler", of_the_step)
        patched.setattr(GaussianBernoulliRBM, "gibbs", lambda self, v, steps, rng: 0.9 * v + 0.1)
        patched.setattr(deep_train, "sgld", lambda f, v, **options: 0.9 * v + 0.1)
        yield


def trained(name: str, out: Path, ranks: Ranks) -> dict[str, Any]:
    """A few updates in float64, whose chains are not random."""
    trainer, settings = CASES[name]
    with in_float64(), still(ranks):
        results = trainer.run(out, ranks, **settings)
    state = saved(out, f".rank{ranks.rank}of{WORLD}" if ranks.world > 1 else "")
    network = {
        f"model.{k}": x for k, x in state["model" if "model" in state else "network"].items()
    }
    posterior = state.get("update", {}).get("posterior", {})
    network |= {f"posterior.{k}": x for k, x in posterior.items()}
    # The others' guards see noise that each rank draws by itself.
    is_joined = ranks.is_first and trainer in (JEM, SHORTRUN)
    rows = read_jsonl(out / "metrics.jsonl") if is_joined else []
    return {
        "network": network,
        "results": {k: results[k] for k in NUMBERS if k in results},
        "rows": [{tag: row[tag] for tag in TAGS if tag in row} for row in rows],
    }


def runs(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Whole runs: one without a stop, and one that Ctrl-C on the second rank stops."""
    found: dict[str, Any] = {}
    whole, cut = folder / "whole", folder / "cut"
    found["results"] = JEM.run(whole, ranks, **RUN)["steps"]

    step_of = jem_trainer.Trainer.step

    def stopped(self: Any, step: int) -> Any:
        if step == 4 and ranks.rank == 1:
            signal.raise_signal(signal.SIGINT)
        return step_of(self, step)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(jem_trainer.Trainer, "step", stopped)
        found["stopped"] = JEM.run(cut, ranks, **RUN)
    found["stopped at"] = newest(cut, f".rank{ranks.rank}of2").name
    JEM.run(cut, ranks, resume=True, **RUN)
    # A NaN among the samples of the second rank takes both back.
    with nan_samples(*[5] * ranks.rank):
        found["rollbacks"] = JEM.run(folder / "back", ranks, action="rollback", **RUN)["rollbacks"]
    return found


if __name__ == "__main__":
    be_rank(
        lambda ranks, folder: {
            **{name: trained(name, folder / str(i), ranks) for i, name in enumerate(CASES)},
            "runs": runs(ranks, folder),
        }
    )
