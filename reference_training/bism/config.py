"""Settings of the trainer of latent-variable models: one frozen dataclass, its command line too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..engine.ranks import ONE_RANK, Ranks
from ..engine.run_config import RunConfig, below, refuse
from .presets import UpdateSettings

DataName = Literal["checkerboard", "gmm", "circles", "digits", "frey"]


@dataclass(frozen=True)
class BismConfig(UpdateSettings, RunConfig):
    """Train a Gaussian-Bernoulli RBM, bi-level or by one of the methods to compare with.

    A guard watches the model's own samples, persistent Gibbs chains, beside the data, whatever the
    method. The run folder gets config.json, metrics.jsonl and alerts.jsonl (the guard's, with the
    update's loss and drift), evaluations.jsonl, TensorBoard events, results.json and checkpoints/.
    """

    data: DataName = "checkerboard"
    """Points in the plane; or images: frey reads frey_rawface.mat."""
    data_root: str | None = None
    """Folder of the Frey faces; None is the environment variable EBMGUARD_DATA."""
    hidden: int = 4
    """Binary latents. Up to 20, log Z is a sum over all their states; of more, at the end of the
    run, annealed importance sampling brackets it from both sides."""
    iterations: int = 100_000
    """Updates."""
    batch: int = 100
    """Samples in a minibatch."""
    gibbs_steps: int = 1
    """Gibbs steps of the chains that the guard watches, between updates."""
    evaluations: int = 20
    """Evaluations over the run."""
    test_samples: int = 10_000
    """Held-out samples of an evaluation, at most; the digits have 360, the Frey faces 265."""
    temperatures: int = 1000
    """Of the annealing."""
    ais_chains: int = 100
    """Of each of its sides."""
    checkpoint_every: int = 5000
    """Updates between checkpoints; evaluations and Ctrl-C write one too."""

    words: ClassVar[tuple[str, ...]] = ("ebmguard", "train", "bism")
    shown: ClassVar[tuple[str, ...]] = ("out", "method")
    may_change: ClassVar[tuple[str, ...]] = (*RunConfig.may_change, "data_root")

    def check(self, ranks: Ranks = ONE_RANK) -> None:
        """Refuse settings that cannot be meant, or not be divided among the processes."""
        problems = [*self.problems(), *self.update_problems()]
        counts = ("hidden", "iterations", "batch", "gibbs_steps", "evaluations", "test_samples")
        problems += below(self, **dict.fromkeys(counts, 1), temperatures=1, ais_chains=2)
        if self.lower != "elbo":
            problems.append(f"lower is {self.lower!r}, expected 'elbo': an RBM's latents are bits")
        problems += ranks.undivided(batch=self.batch)
        refuse(problems)
        from .images import open_data

        open_data(self.data, self.data_root)  # before there is a folder

    @property
    def total_steps(self) -> int:
        """Updates that the run is to have."""
        return self.iterations
