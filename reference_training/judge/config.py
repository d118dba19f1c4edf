"""Settings of `ebmguard evaluate`; this file needs no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import tyro

from ..engine.run_config import below, refuse
from ..jem.scenarios import DataName

CheckpointName = Literal["best", "last"]
ChainName = Literal["buffer", "fresh"]
OodName = Literal["uniform", "constant", "interpolated", DataName, "celeba64"]


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """What every `ebmguard evaluate` is told."""

    run: tyro.conf.Positional[Path]
    """Run folder, as `ebmguard train` left it."""
    device: str = "auto"
    """auto takes a GPU where there is one; or a name that PyTorch knows, such as cpu or cuda:1."""
    likelihood: bool = False
    """Bracket log Z, and with it the log-likelihood of held-out samples, by annealed importance
    sampling from both sides."""
    temperatures: int = 500
    """Of the annealing; more narrow the bracket."""
    ais_chains: int = 100
    """Chains of each side."""

    least: ClassVar[dict[str, int]] = {"temperatures": 1, "ais_chains": 2}
    """Of counts."""

    @property
    def effort(self) -> dict[str, int]:
        """What the annealing is given."""
        return {"temperatures": self.temperatures, "chains": self.ais_chains}

    def check(self) -> None:
        """Refuse settings that cannot be meant, all of them in one error."""
        refuse([*below(self, **self.least), *self.problems()], "an evaluation")

    def problems(self) -> list[str]:
        """What else is wrong."""
        return []


@dataclass(frozen=True, kw_only=True)
class ImageEvaluateConfig(EvaluateConfig):
    """What the evaluation of a model of images is told beside that."""

    features: str | None = None
    """Network that judges samples: the folder of a JEM run on the same data at the same image size;
    inception:FILE with the published weights; or a TorchScript file."""
    data_root: str | None = None
    """Folder of the data sets; None is that of the run, else the environment variable
    EBMGUARD_DATA."""

    def _own_judge(self) -> list[str]:
        """A model that is no classifier cannot judge its samples."""
        words = (
            f'features is "{self.features}", and the model has no classifier of its own: name the '
            "folder of a JEM run on the same data at the same image size, such as one of `ebmguard "
            "train jem --p-x-weight 0 --valid-images 100`, or inception:FILE with the published "
            "weights"
        )
        return [words] if self.features in (None, "own") else []


@dataclass(frozen=True, kw_only=True)
class EvaluateJem(ImageEvaluateConfig):
    """Evaluate a JEM run: classifier, samples, and what it takes for its data.

    The results are printed, and written to evaluation.json in the run folder.
    """

    checkpoint: CheckpointName | None = None
    """The network that is evaluated: the best by validation accuracy, or the newest. None is the
    best, and the newest of a run without validation images, such as one on the digits."""
    chains: tuple[ChainName, ...] = ("buffer", "fresh")
    """Samples that are judged: the replay buffer of the newest checkpoint, and fresh chains of the
    evaluated network, from uniform noise on f(x)."""
    samples: int = 10_000
    """Samples of each kind; all of the buffer where it has fewer."""
    chain_steps: int | None = None
    """Langevin steps of a fresh chain; None is sgld_steps / reinit_rate of the run, the mean number
    of steps between two restarts of a chain in the buffer."""
    features: str = "own"
    """Network that judges samples: "own" is the evaluated classifier; the folder of another run;
    inception:FILE with the published weights; or a TorchScript file."""
    ood: tuple[OodName, ...] = ("uniform", "constant", "interpolated")
    """What the test images are told from: noise, single colours, means of two test images, or
    another data set with images of the same shape; faces of celeba64 are averaged down to it."""
    attacks: tuple[str, ...] = ()
    """Attacks of the classifier by projected gradient descent, each as NORM:RADIUS with a radius in
    255ths of a pixel's range, such as linf:8 or l2:128."""
    attack_images: int = 300
    """Test images that are attacked."""
    refine_steps: int = 0
    """Langevin steps on f(x) from an image before it is classified, attacked or not: JEM-0, JEM-1
    and JEM-10 of the JEM paper."""

    least: ClassVar[dict[str, int]] = EvaluateConfig.least | {
        **dict.fromkeys(("samples", "attack_images"), 1),
        **dict.fromkeys(("chain_steps", "refine_steps"), 0),
    }

    @property
    def balls(self) -> list[tuple[str, float]]:
        """The attacks as norms and radii."""
        parts = (attack.partition(":") for attack in self.attacks)
        return [(norm, float(radius)) for norm, _, radius in parts]

    def problems(self) -> list[str]:
        """Attacks that are none."""
        return [
            f"attacks has {attack!r}, expected linf:RADIUS or l2:RADIUS, such as linf:8"
            for attack in self.attacks
            if not re.fullmatch(r"(linf|l2):\d+(\.\d+)?", attack)
        ]


@dataclass(frozen=True, kw_only=True)
class EvaluateShortRun(ImageEvaluateConfig):
    """Judge the samples of a short-run model: Fréchet inception distance and Inception score.

    Fresh samples, held-out images and uniform noise are compared with the training images: the
    second is what no model can do better than, the third is where its chains start. The scores are
    printed, and written to evaluation.json in the run folder. With --likelihood, --features may be
    left out, and FID and Inception score with it.
    """

    run: Path
    """Run folder of `ebmguard train shortrun`."""
    count: int | None = None
    """Samples; the default is as many as there are held-out images."""

    least: ClassVar[dict[str, int]] = {**EvaluateConfig.least, "count": 2}

    def problems(self) -> list[str]:
        """No network judges."""
        return [] if self.features is None and self.likelihood else self._own_judge()


@dataclass(frozen=True, kw_only=True)
class EvaluateBism(ImageEvaluateConfig):
    """Draw samples of a deep model by annealed Langevin dynamics, and judge them and the latents.

    Of a model of short runs they are short runs, and test images are reconstructed.

    Fréchet inception distance and Inception score of samples: of chains in (v, h); of chains in v
    whose h are the posterior's, and of such chains without annealing; and of chains in v at the
    posterior means of training images. A linear classifier is trained on posterior means. Pictures
    of these, of samples given the h of four test images and of a way between two are in figures/ of
    the run.
    """

    samples: int = 1000
    """Samples of each kind."""
    chain_steps: int = 2700
    """Langevin steps of a chain, as published."""

    least: ClassVar[dict[str, int]] = {**EvaluateConfig.least, "samples": 2, "chain_steps": 1}

    def problems(self) -> list[str]:
        """No network judges, or a likelihood that nobody can compute."""
        words = "likelihood is on, expected it off: a deep model's f(v) is known by a bound only"
        return [*self._own_judge(), *([words] if self.likelihood else [])]


@dataclass(frozen=True, kw_only=True)
class EvaluateToy(EvaluateConfig):
    """Evaluate each member of a toy run: how far p_θ is from the truth, by quadrature.

    With --likelihood its log Z by annealed importance sampling stands beside that of the
    quadrature, both over the square that pictures show. The results are printed, and written to
    evaluation.json in the run folder.
    """
