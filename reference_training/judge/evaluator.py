"""One line of evaluations.jsonl: what the network of a training step is worth."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..data import ImageData
from ..networks import WideResNet, evaluation_mode
from .classification import accuracy, classification, classify
from .quality import SampleQuality


class Evaluator:
    """Evaluates a network in training, and leaves no trace in it.

    Neither the network's mode or gradients nor PyTorch's global random numbers are touched, so that
    a run takes the same course however often it is evaluated.

    Args:
        data: the images, on the network's device.
        noise_std: standard deviation of the noise on validation and test images.
        quality: judges samples; None where none are judged.
    """

    def __init__(self, data: ImageData, *, noise_std: float, quality: SampleQuality | None) -> None:
        self.data = data
        self.noise_std = noise_std
        self.quality = quality

    def test_accuracy(self, network: WideResNet) -> float:
        """Share of the test images whose label the network gives."""
        data = self.data
        logits = classify(network, data.test_x, data.scale, noise_std=self.noise_std)
        return accuracy(logits, data.test_y)

    def evaluate(
        self, network: WideResNet, step: int, epoch: float, buffer: Tensor | None
    ) -> dict[str, Any]:
        """Evaluate the parameters as they are.

        Args:
            network: on the device of the data.
            step: the training step that starts with these parameters.
            epoch: the same in epochs.
            buffer: samples (N, C, H, W) whose quality is measured, or None.

        Returns:
            `step`, `epoch`, `valid_accuracy` (None without validation images), `test_accuracy` and
            `ece` of the test images; with samples also `buffer_is`, `buffer_is_std`, `buffer_fid`,
            `buffer_samples` (their number), `features` (what judged them), `features_comparable`
            (with published scores) and `features_fixed` (or of the network in training).
        """
        found = classification(network, self.data, noise_std=self.noise_std)
        row: dict[str, Any] = {
            "step": step,
            "epoch": epoch,
            "valid_accuracy": found["validation"]["accuracy"] if "validation" in found else None,
            "test_accuracy": found["test"]["accuracy"],
            "ece": found["test"]["ece"],
        }
        if buffer is not None and self.quality is not None:
            with evaluation_mode(network):
                scores = self.quality.measure(buffer)
            row |= {f"buffer_{name}": value for name, value in scores.items()}
            row |= self.quality.features.described()
        return row
