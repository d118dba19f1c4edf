"""One rank of two that train a short-run model; what it saw is written to a file.

Started as ``python -m tests.reference_training.shortrun.ranks_train_process RANK FOLDER WORLD``
from the project's root, with the rest of torchrun's variables set.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from ebmguard.errors import ConfigError
from ebmguard.reference_training.engine.ranks import Ranks, joined_ranks
from ebmguard.reference_training.shortrun import train as train_module
from ebmguard.reference_training.shortrun.draws import Draws
from ebmguard.reference_training.shortrun.sampler import make_sampler
from ebmguard.reference_training.shortrun.train import train
from tests.reference_training.shortrun.parts import config_for
from tests.reference_training.shortrun.runs import Silent, in_float64, newest, saved

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


def runs(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Whole runs: one without a stop, one that Ctrl-C on the second rank stops; a lost one."""
    found: dict[str, Any] = {}
    persistent = {"init": "persistent", "buffer_size": 13}

    def go(name: str, **settings: Any) -> Any:
        config, run_folder = config_for(folder / name, **settings).open(ranks)
        return train(config, run_folder, Silent(), ranks)

    found["whole"] = go("whole", **persistent)["steps"]
    positives = Draws.positives

    def stopped(self: Draws) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 2 and ranks.rank == 1:
            signal.raise_signal(signal.SIGINT)
        return positives(self)

    Draws.positives = stopped
    found["stopped"] = go("cut", **persistent)
    Draws.positives = positives
    found["stopped at"] = newest(folder / "cut", f".rank{ranks.rank}of{WORLD}").name
    go("cut", resume=True, **persistent)

    def spoiled(self: Draws) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        x = positives(self)
        return x * float("nan") if self.calls == 3 and ranks.rank == 1 else x

    Draws.positives = spoiled
    ended = go("ended", action="raise")
    found["ended"] = {name: ended[name] for name in ("steps", "ended")}
    Draws.positives = positives
    try:
        go("wrong", batch=9)
    except ConfigError as error:
        found["refused"] = str(error)
    return found


def main(rank: int, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    torch.set_num_threads(1)
    with joined_ranks("cpu") as ranks:
        results: dict[str, Any] = {
            name: trained(ranks, folder / str(i), case)
            for i, (name, case) in enumerate(CASES.items())
        }
        results["runs"] = runs(ranks, folder)
        torch.save(results, folder / f"{rank}.pt")
        ranks.wait()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
