"""One rank of two that train latent-variable models; what it saw is written to a file.

Started as ``python -m tests.reference_training.bism.ranks_train_process RANK FOLDER WORLD`` from
the project's root, with the rest of torchrun's variables set.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ebmguard.errors import ConfigError
from ebmguard.reference_training.bism import deep_train
from ebmguard.reference_training.bism.config import BismConfig
from ebmguard.reference_training.bism.deep_config import DeepConfig
from ebmguard.reference_training.bism.methods import Update
from ebmguard.reference_training.bism.rbm import GaussianBernoulliRBM
from ebmguard.reference_training.engine.ranks import Ranks, joined_ranks
from tests.reference_training.bism.parts import Config, attempt
from tests.reference_training.jem.parts import in_float64, newest, saved

WORLD = 2
CASES: dict[str, tuple[Config, dict[str, Any]]] = {
    **{
        f"{method} of an RBM": (BismConfig, {"method": method, "iterations": 6, "lr": 0.01})
        for method in ("bidsm", "bissm", "bimdsm", "dsm", "mdsm", "nce", "vnce", "pcd2")
    },
    "a minibatch for each inner step": (BismConfig, {"iterations": 6, "fresh_inner": True}),
    "a deep model": (DeepConfig, {"iterations": 4, "lr": 0.01}),
    "a deep model, unrolled": (DeepConfig, {"iterations": 4, "unrolled_steps": 2}),
    "deep bits": (DeepConfig, {"iterations": 4, "posterior": "bernoulli", "method": "bidsm"}),
    "visible": (DeepConfig, {"iterations": 4, "model": "visible"}),
    "visible, by chains": (DeepConfig, {"iterations": 4, "model": "visible", "method": "pcd2"}),
}
RUNS: dict[str, tuple[Config, dict[str, Any]]] = {
    "rbm": (BismConfig, {"method": "pcd2", "data": "digits"}),
    "deep": (DeepConfig, {}),
}


@contextmanager
def still() -> Iterator[None]:
    """Chains go the same way in every process."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(GaussianBernoulliRBM, "gibbs", lambda self, v, steps, rng: 0.9 * v + 0.1)
        patched.setattr(deep_train, "sgld", lambda f, v, **options: 0.9 * v + 0.1)
        yield


def trained(name: str, out: Path, ranks: Ranks) -> dict[str, Any]:
    """A few updates in float64, whose chains are not random."""
    make, options = CASES[name]
    with in_float64(), still():
        results = attempt(make, out, ranks, **options)
    assert results is not None
    state = saved(out, f".rank{ranks.rank}of{WORLD}" if ranks.world > 1 else "")
    network = {
        f"model.{k}": x for k, x in state["model" if "model" in state else "network"].items()
    }
    posterior = state["update"].get("posterior", {})
    network |= {f"posterior.{k}": x for k, x in posterior.items()}
    names = ("test_loss", "log_likelihood", "fisher")
    return {"network": network, "results": {k: results[k] for k in names if k in results}}


def runs(name: str, folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Whole runs: one without a stop, one that Ctrl-C on the second rank stops; a refused one."""
    make, options = RUNS[name]
    found: dict[str, Any] = {}

    def go(what: str, **more: Any) -> dict[str, Any] | None:
        return attempt(make, folder / what, ranks, **{**options, **more})

    whole = go("whole")
    found["steps"] = whole and whole["steps"]
    update, calls = Update.__call__, iter(range(100))

    def stopped(self: Update, *args: Any, **named: Any) -> Any:
        if next(calls) == 2 and ranks.rank == 1:
            signal.raise_signal(signal.SIGINT)
        return update(self, *args, **named)

    Update.__call__ = stopped
    found["stopped"] = go("cut")
    Update.__call__ = update
    found["stopped at"] = newest(folder / "cut", f".rank{ranks.rank}of{WORLD}").name
    go("cut", resume=True)
    try:
        go("wrong", batch=9)
    except ConfigError as error:
        found["refused"] = str(error)
    return found


def main(rank: int, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    torch.set_num_threads(1)
    with joined_ranks("cpu") as ranks:
        if ranks.is_first:
            for name in RUNS:
                (folder / name).mkdir()
        ranks.wait()
        results: dict[str, Any] = {
            name: trained(name, folder / str(i), ranks) for i, name in enumerate(CASES)
        }
        results |= {name: runs(name, folder / name, ranks) for name in RUNS}
        torch.save(results, folder / f"{rank}.pt")
        ranks.wait()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
