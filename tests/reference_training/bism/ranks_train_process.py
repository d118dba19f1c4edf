"""One rank of two that train latent-variable models; what it saw is written to a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ebmguard.reference_training.bism import deep_train
from ebmguard.reference_training.bism.config import BismConfig, DeepConfig
from ebmguard.reference_training.bism.rbm import GaussianBernoulliRBM
from ebmguard.reference_training.engine.ranks import Ranks
from tests.ranks import be_rank
from tests.reference_training.bism.parts import Config, attempt
from tests.reference_training.jem.parts import in_float64, saved

WORLD = 2
CASES: dict[str, tuple[Config, dict[str, Any]]] = {
    **{
        f"{method} of an RBM": (BismConfig, {"method": method, "iterations": 6, "lr": 0.01})
        for method in ("bidsm", "vnce", "pcd2")
    },
    "a minibatch for each inner step": (BismConfig, {"iterations": 6, "fresh_inner": True}),
    "a deep model, unrolled": (DeepConfig, {"iterations": 4, "unrolled_steps": 2, "lr": 0.01}),
    "deep bits": (DeepConfig, {"iterations": 4, "posterior": "bernoulli", "method": "bidsm"}),
    "visible, by chains": (DeepConfig, {"iterations": 4, "model": "visible", "method": "pcd2"}),
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


if __name__ == "__main__":
    be_rank(
        lambda ranks, folder: {
            name: trained(name, folder / str(i), ranks) for i, name in enumerate(CASES)
        }
    )
