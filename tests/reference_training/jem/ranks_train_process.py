"""One rank of two that train a JEM; what it saw is written to a file."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from ebmguard.reference_training.data import load_data
from ebmguard.reference_training.engine.ranks import Ranks
from ebmguard.reference_training.jem.draws import Draws
from ebmguard.reference_training.jem.train import train
from ebmguard.reference_training.jem.trainer import Trainer, make_network
from tests.ranks import be_rank
from tests.reference_training.jem.parts import (
    Silent,
    config_for,
    in_float64,
    nan_samples,
    newest,
    own_numbers,
)

WORLD = 2
STEPS = 5
UNEVEN: dict[str, Any] = {"n_pos": 7, "n_neg": 5, "n_labelled": 5, "seed": 2}
"""Of two ranks, the first one has 3, 2 and 2 of them."""
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "no_pos": {"variant": "no_pos"},
    "batch": {"variant": "batch"},
    "true": {"variant": "true"},
    "labels of the positives": {"n_labelled": 0},
    "weights": {"p_x_weight": 0.6, "p_y_x_weight": 0.3, "class_conditional": True},
    "a classifier": {"p_x_weight": 0.0},
    "what holds energies and gradients": {"energy_l2": 0.3, "clip_norm": 0.6},
    "one sample each": {"n_neg": 2},
    "published options": {
        "unconditional": True,
        "norm": "layer",
        "optimizer": "sgd",
        "lr": 0.03,
        "labels_per_class": 3,
    },
    "no guard": {"beta_star": 0.0, "n_pos": 8, "n_neg": 6},
}
RUN: dict[str, Any] = {
    **UNEVEN,
    "valid_images": 30,
    "quality_samples": 12,
    "buffer_size": 31,
    "class_conditional": False,
}


def trained(ranks: Ranks, folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """A few steps in float64: what went in, and what came out."""
    config = config_for(folder, **{**UNEVEN, "buffer_size": 40, **case})
    batches: list[Any] = []
    batch_of = Draws.batch

    class Seen(Draws):  # type: ignore[misc]
        def batch(self, step: int) -> Any:
            batches.append(batch_of(self, step))
            return batches[-1]

    with in_float64():
        data = load_data("digits")
        network = make_network(config, data)
        start = {k: v.detach().clone() for k, v in network.named_parameters()}
        trainer = Trainer(config, network, data, ranks=ranks)
        trainer.draws.__class__ = Seen
        samples, numbers = [], []
        for step in range(STEPS):
            samples.append(trainer.step(step))
            numbers.append(own_numbers(trainer))
        last = dict(trainer.loss_fn.guard.last)
    return {
        "start": start,
        "batches": batches,
        "samples": samples,
        "numbers": numbers,
        "network": {k: v.detach() for k, v in network.named_parameters()},
        "last": last,
    }


def runs(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Whole runs: one without a stop, and one that Ctrl-C on the second rank stops."""
    found: dict[str, Any] = {}

    def go(out: Path, **settings: Any) -> Any:
        config, run_folder = config_for(out, **settings).open(ranks)
        return train(config, run_folder, Silent(), ranks)

    whole, cut = folder / "whole", folder / "cut"
    found["results"] = go(whole, **RUN)["steps"]
    step_of = Trainer.step

    def stopped(self: Trainer, step: int) -> Any:
        if step == 4 and ranks.rank == 1:
            signal.raise_signal(signal.SIGINT)
        return step_of(self, step)

    Trainer.step = stopped
    found["stopped"] = go(cut, **RUN)
    Trainer.step = step_of
    found["stopped at"] = newest(cut, f".rank{ranks.rank}of2").name
    go(cut, resume=True, **RUN)
    # A NaN among the samples of the second rank takes both back.
    with nan_samples(*[5] * ranks.rank):
        found["rollbacks"] = go(folder / "back", action="rollback", **RUN)["rollbacks"]
    return found


if __name__ == "__main__":
    be_rank(
        lambda ranks, folder: {
            **{name: trained(ranks, folder, case) for name, case in CASES.items()},
            "runs": runs(ranks, folder),
        }
    )
