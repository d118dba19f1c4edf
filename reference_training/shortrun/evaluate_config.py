"""Settings of `ebmguard evaluate shortrun`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ebmguard.errors import ConfigError

from ..likelihood import LikelihoodOptions


@dataclass(frozen=True)
class EvaluateConfig(LikelihoodOptions):
    """Judge the samples of a short-run model: Fréchet inception distance and Inception score.

    Fresh samples, held-out images and uniform noise are compared with the training images: the
    second is what no model can do better than, the third is where its chains start. The scores are
    printed, and written to evaluation.json in the run folder.
    """

    run: Path
    """Run folder of `ebmguard train shortrun`."""
    features: str | None = None
    """Network that judges: the folder of a JEM run on the same data at the same image size;
    inception:FILE with the published weights; a TorchScript file; or MODULE:FACTORY. With
    --likelihood it may be left out, and FID and Inception score with it."""
    features_sha256: str | None = None
    """SHA-256 of the file of the features, checked before it is read; the published Inception
    weights need none."""
    count: int | None = None
    """Samples; the default is as many as there are held-out images."""
    data_root: str | None = None
    """Folder of the data sets; None is that of the run, else the environment variable
    EBMGUARD_DATA."""
    device: str = "auto"
    """auto takes a GPU where there is one; or a name that PyTorch knows, such as cpu or cuda:1."""

    def check(self) -> None:
        """Refuse settings that cannot be meant.

        Raises:
            ConfigError: names the setting, its value and what was expected.
        """
        if self.count is not None and self.count < 2:
            raise ConfigError(f"count is {self.count}, expected at least 2: one has no covariance")
        self.check_likelihood()
        if self.features == "own" or (self.features is None and not self.likelihood):
            raise ConfigError(
                f'features is "{self.features}", and a short-run model has no classifier of its '
                "own: name the folder of a JEM run on the same data at the same image size, such "
                "as one of `ebmguard train jem --p-x-weight 0 --valid-images 100`, or "
                "inception:FILE with the published weights"
            )
