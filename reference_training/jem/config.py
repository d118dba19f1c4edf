"""Settings of the JEM reference trainer: one frozen dataclass, which is also its command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from ebmguard.errors import ConfigError

from ..engine.ranks import ONE_RANK, Ranks
from ..engine.run_config import below, not_positive, refuse
from ..image_config import ImageConfig
from .scenarios import SCENARIOS, DataName, Scenario, ScenarioName

ActivationName = Literal["leaky_relu", "silu"]
NormName = Literal["none", "batch", "instance", "layer"]
OptimizerName = Literal["adam", "sgd"]
VariantName = Literal["default", "no_pos", "batch", "true"]
ActionName = Literal["warn", "raise", "rollback"]


@dataclass(frozen=True)
class JemConfig(ImageConfig):
    """Train a joint energy-based model: a classifier that is also an EBM, watched by the guard.

    What a scenario sets can be overridden by name. Counts of images and samples are those of
    all GPUs together. The run folder gets config.json, metrics.jsonl and
    alerts.jsonl (the guard's), accuracy.jsonl and evaluations.jsonl (the trainer's), TensorBoard
    events, results.json, samples/, figures/ and checkpoints/.
    """

    data: DataName | None = None
    """Data set. The digits are scikit-learn's 1,797 real 8x8 images, which need no download."""
    scenario: ScenarioName | None = None
    """A scenario of the paper's Appendix M.1, or that of the digits."""
    beta_star: float = 2.0
    """Exponent of the guard's weights on raw outputs; 0 is the standard trainer."""
    finer_steps: bool = False
    """Take the sampler's steps finer once they are too long for f (guard's substeps="auto")."""
    variant: VariantName = "default"
    """Variant of the guarded loss."""
    action: ActionName = "warn"
    """What an alert of level ERROR leads to: raise ends the run; rollback goes back to a certified
    snapshot, changes something and goes on."""
    p_x_weight: float = 1.0
    """Weight of log p(x); 0 trains a plain classifier, without samples."""
    p_y_x_weight: float = 1.0
    """Weight of log p(y|x), the cross-entropy."""
    p_x_y_weight: float = 0.0
    """Weight of log p(x, y), with chains of their own for the labels of the classifier's batch."""
    energy_l2: float = 0.0
    """Weight of mean f(x+)^2 + mean f(x-)^2 in the terms of p(x) and p(x, y), for which 0.1 is
    common; it holds the energies near 0. 0: no such term."""
    clip_norm: float | None = None
    """Largest norm of the gradient of all parameters; a longer one is shortened to it."""
    activation: ActivationName = "leaky_relu"
    """leaky_relu is JEM's, silu a smooth one."""
    norm: NormName = "none"
    """Normalisation before each activation. With batch, each batch of a step has statistics of its
    own, and samples are drawn by the running ones."""
    dropout: float = 0.0
    """Share of the entries after a block's first convolution that a step sets to 0; none is while
    samples are drawn."""
    unconditional: bool = False
    """Give f(x) an output beside the logits: classifier and EBM have common features alone."""
    optimizer: OptimizerName = "adam"
    """adam, or sgd with a momentum of 0.9."""
    weight_decay: float = 0.0
    """The optimizer's factor of an L2 penalty of the parameters; 0: none."""
    labels_per_class: int | None = None
    """Train the classifier with the labels of so many images of each class, p(x) with all images.
    Needs a classifier's own batch, n_labelled."""
    class_conditional: bool = False
    """Draw the samples of p(x) from p(x|y) for random labels y."""
    depth: int | None = None
    """Depth of the wide residual network, 6 n + 4."""
    width: int | None = None
    """Its channel multiplier: stages of 16, 32 and 64 times the width."""
    lr: float | None = None
    """Learning rate."""
    warmup: int | None = None
    """Steps over which the learning rate rises linearly from 0."""
    n_pos: int | None = None
    """Images per step."""
    n_neg: int | None = None
    """Samples per step, of all GPUs together: 8 GPUs draw one each of scenario 3's 8. Losses and
    weights are those of all of them."""
    n_labelled: int | None = None
    """Images of the classifier's own batch; with 0 it learns from the labels of the positives."""
    reinit_rate: float | None = None
    """Share of the drawn chains that starts afresh."""
    valid_images: int | None = None
    """Validation images that are used; they choose checkpoints/best.pt."""
    eval_every: int | None = None
    """Steps between evaluations."""
    quality_samples: int | None = None
    """Samples of the replay buffer whose Inception score and FID an evaluation takes; 0: none."""
    alert_context: int | None = None
    """Steps before the first WARN and ERROR whose test accuracy is evaluated too. Costs that many
    copies of the network's parameters."""
    alert_window: int | None = None
    """Steps after an alert that are evaluated one by one."""
    stop_after: int | None = None
    """Steps that a diverged run goes on for."""
    features: str = "own"
    """Network whose features Inception score and FID are taken of: "own" is the one in training;
    the folder of another run; inception:FILE with the published weights; or a TorchScript
    file."""

    words: ClassVar[tuple[str, ...]] = ("ebmguard", "train", "jem")

    @property
    def has_samples(self) -> bool:
        """Whether there are negatives: a term of p(x) or of p(x, y)."""
        return bool(self.p_x_weight or self.p_x_y_weight)

    @property
    def scenario_name(self) -> str:
        """The scenario that counts."""
        return self.scenario or ("digits" if self.data in (None, "digits") else "1")

    @property
    def data_name(self) -> str:
        """The data set that counts."""
        return self.data or ("digits" if self.scenario in (None, "digits") else "cifar10")

    @property
    def settings(self) -> Scenario:
        """The scenario with what is overridden."""
        return self.over(SCENARIOS[self.scenario_name])

    def resumed(self, stored: Mapping[str, Any]) -> Self:
        """These settings over those of the run; features that run code are never the folder's."""
        from ..judge.features import runs_code

        resumed = super().resumed(stored)
        if self.features != resumed.features and runs_code(resumed.features):
            raise ConfigError(
                f"the run in {self.out} has the features {resumed.features!r}, which run code "
                "of their own: a folder may not say so alone. Resume it with these --features "
                "if you trust them"
            )
        return resumed

    def check(self, ranks: Ranks = ONE_RANK) -> None:
        """Refuse settings that cannot be meant, or not be divided among the processes."""
        problems = self.problems()
        weights = ("p_x_weight", "p_y_x_weight", "p_x_y_weight", "energy_l2", "weight_decay")
        problems += below(self, labels_per_class=1)
        problems += not_positive(self, *weights, or_0=True) + not_positive(self, "clip_norm")
        wrong: dict[str, Any] = {
            "all three weights are 0, expected at least one term to train": not (
                self.has_samples or self.p_y_x_weight
            ),
            f"action is {self.action!r} without samples, of which alone alerts speak; expected "
            "warn": self.action != "warn" and not self.has_samples,
            "action is 'rollback' with p_x_y_weight, whose guard is one of its own and cannot go "
            "back together with that of p(x); expected warn or raise": self.action == "rollback"
            and self.p_x_y_weight,
            "energy_l2 belongs to the terms of p(x) and p(x, y), which both weigh 0": self.energy_l2
            and not self.has_samples,
            f"variant is {self.variant!r} with p_x_y_weight, whose negatives are weighted within "
            "their class; expected default or no_pos": self.p_x_y_weight
            and self.variant not in ("default", "no_pos"),
            "class_conditional needs the term of p(x), whose p_x_weight is 0": (
                self.class_conditional and not self.p_x_weight
            ),
            f"dropout is {self.dropout}, expected a share from 0 to less than 1": (
                not 0 <= self.dropout < 1
            ),
            "finer_steps needs samples, and a network that is not compiled: expected a positive "
            "p_x_weight or p_x_y_weight, and compile auto or no": self.finer_steps
            and (not self.has_samples or self.compile == "yes"),
            "unconditional needs the term of p(x), and has no f(x, y): expected a positive "
            "p_x_weight, p_x_y_weight 0 and class_conditional off": self.unconditional
            and (not self.p_x_weight or self.p_x_y_weight or self.class_conditional),
        }
        problems += [words for words, is_wrong in wrong.items() if is_wrong]
        if self.scenario_name in SCENARIOS:
            problems += self.settings.problems()
        refuse(problems)
        self._check_sizes(ranks)
        if self.features != "own" and self.settings.quality_samples and self.has_samples:
            # Tried here, before there is a folder. A run's own network needs no trial.
            import torch

            from ..judge.features import load_features

            load_features(self.features, torch.device("cpu"))

    def _check_sizes(self, ranks: Ranks) -> None:
        """Refuse what the data do not allow, or what the processes cannot share."""
        settings, data, labels = self.settings, self.load_data(), self.labels_per_class
        n_pos, n_neg, world = settings.n_pos, settings.n_neg, ranks.world
        batch = max(n_pos, settings.n_labelled)
        smallest = min(n_pos, n_neg, settings.n_labelled or n_pos)
        has_classes, parts = self.p_x_y_weight or self.class_conditional, world * data.classes
        several = 0 if labels is None else int(data.train_y.bincount().clamp(max=labels).sum())
        wrong: dict[str, Any] = {
            f"n_labelled is {settings.n_labelled} with labels_per_class {labels}: expected a batch "
            f"of 1 to {several:,} of the labelled images for the classifier": labels is not None
            and not 0 < settings.n_labelled <= several,
            "norm is 'instance', which needs images of 5x5 pixels or more": self.norm == "instance"
            and min(data.sample_shape[1:]) <= 4,
            f"a batch of {batch} images was asked for, {self.data_name} has {len(data.train_x)} to "
            "train with; make n_pos and n_labelled smaller, or train_images larger": batch
            > len(data.train_x),
            f"buffer_size is {settings.buffer_size}, expected a multiple of {parts}: "
            "each class has chains of its own, on each process": has_classes
            and settings.buffer_size % parts,
            f"{smallest} images or samples a step, of all processes together: expected one for "
            "each process; start fewer, or raise n_pos, n_neg and n_labelled": smallest < world,
            "norm is 'batch', whose statistics are of one process: expected another": world > 1
            and self.norm == "batch",
            "p_x_y_weight weighs samples within their class: expected one process": world > 1
            and self.p_x_y_weight,
        }
        problems = [words for words, is_wrong in wrong.items() if is_wrong]
        if self.p_x_weight and not self.beta_star:
            # The loss of β* = 0 is the caller's own: means of each rank's part.
            problems += ranks.undivided(n_pos=n_pos, n_neg=n_neg)
        refuse(problems, "a run" if world == 1 else f"a run of {world} processes")

    def to_json(self) -> dict[str, Any]:
        """The settings and the resolved scenario as plain JSON values."""
        return {
            **super().to_json(),
            "data": self.data_name,
            "scenario": self.scenario_name,
            "settings": self.settings.to_json(),
        }
