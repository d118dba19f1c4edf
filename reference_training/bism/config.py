"""Settings of the trainers of latent-variable models, which are also their command lines."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..engine.ranks import ONE_RANK, Ranks
from ..engine.run_config import RunConfig, below, refuse
from ..image_config import DataConfig
from .presets import PUBLISHED, SMALL, DeepSettings, LowerName, UpdateSettings

if TYPE_CHECKING:  # the help needs no torch
    from ..data import ImageData


@dataclass(frozen=True)
class BismConfig(UpdateSettings, RunConfig):
    """Train a Gaussian-Bernoulli RBM, bi-level or by one of the methods to compare with.

    A guard watches the model's own samples, persistent Gibbs chains, beside the data, whatever the
    method. The run folder gets config.json, metrics.jsonl and alerts.jsonl (the guard's, with the
    update's loss and drift), evaluations.jsonl, TensorBoard events, results.json and checkpoints/.
    """

    data: Literal["checkerboard", "gmm", "circles", "digits", "frey"] = "checkerboard"
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
        refuse(problems + ranks.undivided(batch=self.batch))
        from .images import open_data

        open_data(self.data, self.data_root)  # before there is a folder


@dataclass(frozen=True)
class DeepConfig(DataConfig):
    """Train a deep energy-based model of images, with latents or fully visible.

    A guard watches Langevin chains of the model beside the data. What the data set's preset sets
    can be overridden by name; None is the preset's value: the published one, or that of two cores
    with --small. The run folder is that of `ebmguard train bism`; `ebmguard evaluate bism` draws
    samples of its model and judges them.
    """

    data: Literal["digits", "mnist", "cifar10"] = "digits"
    """Data set; pixels are in [0, 1], with a border of 0 to a multiple of 8 a side."""
    small: bool = False
    """Sizes that two cores train in ten minutes; the digits have no others."""
    model: Literal["latent", "visible", "wide"] = "latent"
    """latent: E(v, h). visible: one of the same size without latents. wide: that without its
    bottleneck, 3 to 4 times larger at the published sizes."""
    posterior: Literal["gaussian", "bernoulli"] = "gaussian"
    """gaussian: three strided convolutions, real h. bernoulli: one linear layer, bits, by elbo."""
    method: str | None = None
    """bimdsm, bidsm, bissm; srK or psrK, where K Langevin steps stand for the posterior, from noise
    or from where they came; of a visible model mdsm, dsm, ssm, cdK or pcdK by K Langevin steps."""
    hidden: int | None = None
    """Latents; of a visible model the width of its bottleneck."""
    channels: int | None = None
    """Channels of the network's first convolution."""
    image_size: int | None = None
    """Pixels a side to which images are averaged down."""
    train_images: int | None = None
    """Training images that are used."""
    test_images: int | None = None
    """Test images that are used."""
    iterations: int | None = None
    """Updates, over which the learning rate falls to 0 as a cosine."""
    batch: int | None = None
    """Images in a minibatch."""
    lr: float | None = None
    """Learning rate of Adam at the start, for the model and for the posterior."""
    noise_std: float | None = None
    """Noise of (bi)dsm."""
    noise_range: tuple[float, float] | None = None
    """Noise of (bi)mdsm over a minibatch, from the least to the most."""
    lower: LowerName | None = None
    """What the posterior is trained by: elbo, or fisher, the conditional Fisher divergence."""
    inner_steps: int | None = None
    """K: Adam steps of the posterior on each minibatch."""
    unrolled_steps: int | None = None
    """N: further steps that the model's gradient goes through."""
    langevin_steps: int = 1
    """Langevin steps of the chains that the guard watches, between updates."""
    evaluations: int = 20
    """Evaluations over the run, on test images."""

    words: ClassVar[tuple[str, ...]] = ("ebmguard", "train", "bism", "deep")
    shown: ClassVar[tuple[str, ...]] = ("out", "data", "model")

    def check(self, ranks: Ranks = ONE_RANK) -> None:
        """Refuse settings that cannot be meant, or not be divided among the processes."""
        settings = self.settings
        problems = self.problems() + below(self, langevin_steps=1, evaluations=1)
        problems += [] if self.is_short_run else settings.update_problems()
        problems += below(settings, hidden=1, channels=1, iterations=1, batch=1)
        method, is_latent = settings.method, self.model == "latent"
        with_latents = method.startswith("bi") or self.is_short_run
        if with_latents != is_latent or method in ("nce", "vnce"):
            expected = (
                "bimdsm, bidsm, bissm, srK or psrK" if is_latent else "mdsm, dsm, ssm, cdK or pcdK"
            )
            problems.append(f"method is {method!r}, expected {expected} of model {self.model!r}")
        if self.posterior == "bernoulli" and settings.lower != "elbo":
            problems.append(f"lower is {settings.lower!r}, expected 'elbo' of bits")
        problems += ranks.undivided(batch=settings.batch)
        if self.is_short_run and ranks.world > 1:
            problems.append(f"{method} is trained by one process, not by {ranks.world}")
        refuse(problems)
        self.load_data()  # before there is a folder

    @property
    def settings(self) -> DeepSettings:
        """The preset with what is overridden, and what follows from that."""
        base = (SMALL if self.small or self.data not in PUBLISHED else PUBLISHED)[self.data]
        if self.model != "latent":
            base = replace(base, method="mdsm")
        if self.posterior == "bernoulli":
            base = replace(base, lower="elbo")
        return self.over(base)

    @property
    def is_short_run(self) -> bool:
        """Whether short runs stand for the posterior."""
        return bool(re.fullmatch(r"p?sr[1-9]\d*", self.settings.method))

    def to_json(self) -> dict[str, Any]:
        """The settings as given, and under `settings` those that count."""
        return {**super().to_json(), "settings": {**self.settings.__dict__}}

    def load_data(self) -> ImageData:
        """The images; raises ConfigError where they are not there."""
        from ..data import kept_data

        s = self.settings
        counts = {n: getattr(s, n) for n in ("train_images", "test_images", "image_size")}
        return kept_data(self.data, self.data_root, self.download, **counts)
