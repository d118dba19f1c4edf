"""Settings of the trainers of latent-variable models, which are also their command lines."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from ..engine.ranks import ONE_RANK, Ranks
from ..engine.run_config import RunConfig, below, not_positive, refuse
from ..image_config import DataConfig

LowerName = Literal["elbo", "fisher"]
MATCHING = ("dsm", "ssm", "mdsm")
BILEVEL = tuple(f"bi{name}" for name in MATCHING)
POSTERIORS = (*BILEVEL, "vnce")
METHODS = (
    *(*MATCHING, *BILEVEL, "nce", "vnce"),
    *(f"{name}{steps}" for name in ("cd", "pcd") for steps in (1, 5, 10)),
)
"""All, chains by three lengths."""
CHAINS = re.compile(r"(p?)cd([1-9]\d*)")
HELD = 0.1
"""Noise at which a model of many levels is the density, as published."""


@dataclass(frozen=True)
class UpdateSettings:
    """What an update does; the defaults are the published ones for two-dimensional data."""

    method: str = "bidsm"
    """bidsm, bissm, bimdsm: score matching through a posterior, bi-level. dsm, ssm, mdsm: of f.
    nce, vnce: noise contrast. cdK, pcdK: contrastive divergence by K Gibbs steps (cd1, pcd10)."""
    lr: float = 1e-3
    """Learning rate of Adam, for the model and for the posterior."""
    noise_std: float = 0.05
    """Noise of (bi)dsm."""
    noise_range: tuple[float, float] = (0.1, 3.0)
    """Noise of (bi)mdsm over a minibatch, from the least to the most."""
    noise_spacing: Literal["geometric", "linear"] = "geometric"
    """Steps of that noise."""
    lower: LowerName = "elbo"
    """What the posterior is trained by: elbo, or fisher, the conditional Fisher divergence."""
    inner_steps: int = 5
    """K: Adam steps of the posterior on each minibatch."""
    unrolled_steps: int = 5
    """N: further steps that the model's gradient goes through."""
    fresh_inner: bool = False
    """A minibatch of its own for each of the K steps, instead of that of the update."""

    @property
    def has_chains(self) -> bool:
        """Whether chains are all that is random in an update; then ranks draw numbers apart."""
        return CHAINS.fullmatch(self.method) is not None

    @property
    def held(self) -> float:
        """Noise of the data whose density the model learns; 0 of a method without noise."""
        return {"dsm": self.noise_std, "mdsm": HELD}.get(self.method.removeprefix("bi"), 0.0)

    def rate(self, step: int) -> float:
        """The learning rate's factor at an update."""
        return 1.0

    def update_problems(self) -> list[str]:
        """What cannot be meant, and what was expected."""
        problems = below(self, inner_steps=0, unrolled_steps=0)
        problems += not_positive(self, "lr", "noise_std")
        low, high = self.noise_range
        if not 0 < low < high:
            problems.append(f"noise_range is {low} to {high}, expected 0 < least < most")
        named = (*MATCHING, *POSTERIORS, "nce")
        if self.method not in named and not CHAINS.fullmatch(self.method):
            problems.append(f"method is {self.method!r}, expected {', '.join(named)}, cdK or pcdK")
        return problems


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
class DeepSettings(UpdateSettings):
    """One training setup, by the names of the options; those of MNIST as published.

    Attributes:
        blocks: residual blocks of the network, a multiple of 3.
        widths: channels of the Gaussian posterior's three convolutions.
    """

    method: str = "bimdsm"
    lr: float = 1e-4
    unrolled_steps: int = 0
    lower: LowerName = "fisher"
    image_size: int | None = None
    train_images: int | None = None
    test_images: int | None = None
    hidden: int = 50
    channels: int = 64
    blocks: int = 6
    widths: tuple[int, int, int] = (64, 128, 256)
    iterations: int = 100_000
    batch: int = 100

    def rate(self, step: int) -> float:
        """A cosine from 1 to 0."""
        return (1 + math.cos(math.pi * step / self.iterations)) / 2


PUBLISHED: dict[str, DeepSettings] = {
    "mnist": DeepSettings(),
    "cifar10": DeepSettings(
        lr=5e-5,
        noise_range=(0.05, 1.2),
        noise_spacing="linear",
        channels=128,
        blocks=9,
        iterations=300_000,
    ),
}
"""By data set."""
_SMALL = DeepSettings(
    lr=1e-3, hidden=20, channels=8, blocks=3, widths=(8, 16, 32), iterations=3000, batch=50
)
SMALL: dict[str, DeepSettings] = {
    "digits": replace(_SMALL, channels=16),
    "mnist": replace(_SMALL, image_size=14, test_images=2000),
    "cifar10": replace(_SMALL, image_size=16, noise_range=(0.05, 1.2), noise_spacing="linear"),
}
"""Ours, for two CPU cores. Of the digits there are no published ones."""


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
