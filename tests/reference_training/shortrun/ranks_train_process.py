"""One rank of two that train a short-run model; what it saw is written to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ebmguard.reference_training.engine.ranks import Ranks
from ebmguard.reference_training.shortrun import train as train_module
from ebmguard.reference_training.shortrun.sampler import Draws
from ebmguard.reference_training.shortrun.train import train
from ebmguard.sinks import read_jsonl
from tests.ranks import be_rank
from tests.reference_training.jem.parts import Silent, in_float64, saved
from tests.reference_training.shortrun.parts import config_for

WORLD = 2
CASES: dict[str, dict[str, Any]] = {
    "no guard": {"beta_star": 0.0},
    "guarded, of random length": {"beta_star": 2000.0, "most_sgld_steps": 6},
    "persistent": {"beta_star": 2000.0, "init": "persistent", "buffer_size": 12},
}
ALL: dict[str, Any] = {"iterations": 5, "checkpoint_every": 100, "lr": 3e-3}
SEEN = ("energy_gap", "grad_scale", "ess", "f_pos/mean", "f_neg/mean", "outside", "sgld_steps")


def trained(name: str, out: Path, ranks: Ranks) -> dict[str, Any]:
    """A few updates in float64, whose chains end near the images."""
    images: list[Any] = []
    positives = Draws.positives

    def kept(self: Draws) -> Any:
        images.append(positives(self))
        return images[-1]

    def sampler(*_: Any) -> Any:
        def sample_q(network: Any, x0: Any, noise: Any) -> Any:
            network(x0[:1])  # the guard is right to ask for it
            return 0.9 * images[-1] + 0.2

        return sample_q

    with in_float64(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(Draws, "positives", kept)
        patched.setattr(train_module, "make_sampler", sampler)
        results = train(*config_for(out, **ALL, **CASES[name]).open(ranks), Silent(), ranks)
    assert results is not None
    network = saved(out, f".rank{ranks.rank}of{WORLD}" if ranks.world > 1 else "")["network"]
    rows = read_jsonl(out / "metrics.jsonl") if ranks.is_first else []
    return {"network": network, "rows": [{tag: row[tag] for tag in SEEN} for row in rows]}


if __name__ == "__main__":
    be_rank(
        lambda ranks, folder: {
            name: trained(name, folder / str(i), ranks) for i, name in enumerate(CASES)
        }
    )
