"""One rank of two that train a short-run model; what it saw is written to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ebmguard.reference_training.engine.ranks import Ranks
from ebmguard.reference_training.shortrun import train as train_module
from ebmguard.reference_training.shortrun.draws import Draws
from ebmguard.reference_training.shortrun.sampler import make_sampler
from ebmguard.reference_training.shortrun.train import train
from tests.ranks import be_rank
from tests.reference_training.jem.parts import Silent, in_float64, saved
from tests.reference_training.shortrun.parts import config_for

WORLD = 2
STEPS = 5
CASES: dict[str, dict[str, Any]] = {
    "no guard": {"beta_star": 0.0},
    "guarded, of random length": {"beta_star": 2000.0, "most_sgld_steps": 6},
    "persistent, finer": {
        "beta_star": 2000.0,
        "init": "persistent",
        "buffer_size": 13,
        "most_steps": 4,
    },
}
ALL: dict[str, Any] = {"iterations": STEPS, "checkpoint_every": 100, "lr": 3e-3}


def trained(ranks: Ranks, folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """A few updates in float64: what went in, and what came out."""
    images: list[Any] = []
    samples: list[Any] = []
    positives, make = Draws.positives, make_sampler

    def kept(self: Draws) -> Any:
        images.append(positives(self))
        return images[-1]

    def watched(*args: Any) -> Any:
        sampler = make(*args)

        def sample_q(*call: Any) -> Any:
            samples.append((len(call[2]), sampler(*call)))
            return samples[-1][1]

        return sample_q

    Draws.positives = kept
    train_module.make_sampler = watched
    try:
        with in_float64():
            config, run_folder = config_for(folder, **ALL, **case).open(ranks)
            results = train(config, run_folder, Silent(), ranks)
    finally:
        Draws.positives = positives
        train_module.make_sampler = make
    state = saved(folder, f".rank{ranks.rank}of{WORLD}")
    return {
        "images": images,
        "steps": [steps for steps, _ in samples],
        "samples": [x for _, x in samples],
        "network": state["network"],
        "draws": state["draws"],
        "results": results and results["median_last_100"],
    }


if __name__ == "__main__":
    be_rank(
        lambda ranks, folder: {
            name: trained(ranks, folder / str(i), case)
            for i, (name, case) in enumerate(CASES.items())
        }
    )
