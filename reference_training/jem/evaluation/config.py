"""Settings of `ebmguard evaluate jem`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from ebmguard.errors import ConfigError

from ...likelihood import LikelihoodOptions
from .ood import OodName
from .stored import CheckpointName

ChainName = Literal["buffer", "fresh"]


@dataclass(frozen=True)
class EvaluateConfig(LikelihoodOptions):
    """Evaluate a JEM run: classifier, samples, and what it takes for its data.

    The results are printed, and written to evaluation.json in the run folder.
    """

    run: tyro.conf.Positional[Path]
    """Run folder of `ebmguard train jem`."""
    checkpoint: CheckpointName = "best"
    """The network that is evaluated: the best by validation accuracy, or the newest."""
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
    inception:FILE with the published weights; a TorchScript file; or MODULE:FACTORY."""
    features_sha256: str | None = None
    """SHA-256 of the file of the features, checked before it is read; the published Inception
    weights need none."""
    ood: tuple[OodName, ...] = ("uniform", "constant", "interpolated")
    """What the test images are told from: noise, single colours, means of two test images, or
    another data set with images of the same shape."""
    data_root: Path | None = None
    """Folder of the data sets; None is that of the run, else the environment variable
    EBMGUARD_DATA."""
    device: str = "auto"
    """auto takes a GPU where there is one; or a name that PyTorch knows, such as cpu or cuda:1."""

    def check(self) -> None:
        """Refuse settings that cannot be meant.

        Raises:
            ConfigError: names the setting, its value and what was expected.
        """
        if self.samples < 1:
            raise ConfigError(f"samples is {self.samples}, expected at least 1")
        if self.chain_steps is not None and self.chain_steps < 0:
            raise ConfigError(f"chain_steps is {self.chain_steps}, expected 0 or more")
        self.check_likelihood()
