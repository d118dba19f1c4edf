"""The Inception network of the published Inception scores and Fréchet Inception distances.

FID and IS are comparable between papers only where the features are those of one network: the
classifier of TensorFlow's archive of 2015-12-05 (Szegedy et al. 2016, "Rethinking the Inception
Architecture for Computer Vision"; Heusel et al. 2017 for the FID). Its weights are widely used in
PyTorch as the file `pt_inception-2015-12-05-6726825d.pth`, and say all of its layers but for what
is here. It differs from torchvision's Inception in three ways: average pooling does not count the
padding, the last block pools by the maximum, and there are 1,008 classes.

The file is a dictionary of tensors, and is read as one: nothing in it is executed. The published
readers of it, torchmetrics' among them, need torch-fidelity and torchvision, or come as
TorchScript, whose loading PyTorch deprecates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

SIZE = 299
"""Height and width that every image is brought to."""

BLOCKS = {
    "5": {"branch1x1": 1, "branch5x5": 2, "branch3x3dbl": 3, "branch_pool": 1},
    "6a": {"branch3x3": 1, "branch3x3dbl": 3, "branch_pool": 0},
    "6": {"branch1x1": 1, "branch7x7": 3, "branch7x7dbl": 5, "branch_pool": 1},
    "7a": {"branch3x3": 2, "branch7x7x3": 4, "branch_pool": 0},
    "7": {"branch1x1": 1, "branch3x3": 2, "branch3x3dbl": 3, "branch_pool": 1},
}
"""Of each kind of block its branches, in the order in which they are joined, and their steps."""


def average(x: Tensor) -> Tensor:
    """Mean of 3x3 neighbours inside the image."""
    return F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)


def largest(x: Tensor) -> Tensor:
    """Maximum of 3x3 neighbours."""
    return F.max_pool2d(x, 3, stride=1, padding=1)


def halve(x: Tensor) -> Tensor:
    """Maximum of 3x3 neighbours, every second row and column."""
    return F.max_pool2d(x, 3, stride=2)


class Inception:
    """Features and logits of the Inception network of 2015-12-05.

    Images of any size are quantised to 256 levels, as saved pictures are, and resized to 299x299
    by the bilinear rule of TensorFlow 1, which the published numbers were taken with: output row i
    reads input row i * height / 299, without the half-pixel shift of later libraries.

    Args:
        weights: by the names of the published file, on the device of the images.

    Raises:
        AttributeError, KeyError, RuntimeError: they are those of another network.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = {name: weight.to("meta") for name, weight in weights.items()}
        self(torch.zeros(1, 3, 8, 8, device="meta"))  # whether they fit
        self._weights = dict(weights)

    def _convolve(self, x: Tensor, name: str, stride: int = 1, padding: str = "same") -> Tensor:
        parts = ("conv.weight", "bn.running_mean", "bn.running_var", "bn.weight", "bn.bias")
        kernel, mean, var, scale, shift = (self._weights[f"{name}.{part}"] for part in parts)
        x = F.conv2d(x, kernel, stride=stride, padding=padding)
        return F.relu(F.batch_norm(x, mean, var, scale, shift, eps=0.001))

    def _mixed(self, x: Tensor, block: str, pool: Callable[[Tensor], Tensor]) -> Tensor:
        """Branches of convolutions on one input, joined by channel.

        A branch's convolutions are named by it alone where it has one, else with their number, and
        with a and b where a step has two, whose outputs are joined. Where the block halves, the
        last convolution of each branch has stride 2 and no padding.
        """
        outputs = []
        for branch, steps in (BLOCKS.get(block) or BLOCKS[block[0]]).items():
            hidden = pool(x) if branch == "branch_pool" else x
            for step in range(1, steps + 1):
                name = f"Mixed_{block}.{branch}" + (f"_{step}" if steps > 1 else "")
                names = [name + end for end in "ab" if f"{name}{end}.conv.weight" in self._weights]
                how = (2, "valid") if pool is halve and step == steps else (1, "same")
                parts = [self._convolve(hidden, own, *how) for own in names or [name]]
                hidden = torch.cat(parts, dim=1)
            outputs.append(hidden)
        return torch.cat(outputs, dim=1)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Images in [-1, 1] -> pooled features, and logits.

        Args:
            x: (B, 3, H, W) float, or (B, 1, H, W): grey images are repeated in each channel.

        Returns:
            (B, 2048), and (B, 1008) logits without their bias, as the published Inception scores
            have them (Salimans et al. 2016).
        """
        pixels = x.float().clamp(-1, 1).add(1).mul(127.5).round()
        if pixels.shape[1] == 1:
            pixels = pixels.expand(-1, 3, -1, -1)
        x = self._convolve((resize(pixels) - 128) / 128, "Conv2d_1a_3x3", 2, "valid")
        x = self._convolve(self._convolve(x, "Conv2d_2a_3x3", 1, "valid"), "Conv2d_2b_3x3")
        x = self._convolve(self._convolve(halve(x), "Conv2d_3b_1x1"), "Conv2d_4a_3x3", 1, "valid")
        x = halve(x)
        for block in ("5b", "5c", "5d", "6a", "6b", "6c", "6d", "6e", "7a", "7b", "7c"):
            pool = halve if block.endswith("a") else largest if block == "7c" else average
            x = self._mixed(x, block, pool)
        features = x.mean(dim=(2, 3))
        return features, features @ self._weights["fc.weight"].T


def resize(x: Tensor) -> Tensor:
    """Bilinear interpolation as in TensorFlow 1: (B, C, H, W) -> (B, C, 299, 299)."""
    height, width = x.shape[2:]
    return interpolation(height, x) @ x @ interpolation(width, x).T


def interpolation(length: int, like: Tensor) -> Tensor:
    """The matrix (299, length) that resizes one axis, in the type and on the device of `like`."""
    position = torch.arange(SIZE, dtype=torch.float64) * length / SIZE
    low = position.long()
    high = (low + 1).clamp(max=length - 1)
    share = position - low
    rows = torch.arange(SIZE)
    matrix = torch.zeros(SIZE, length, dtype=torch.float64)
    matrix[rows, low] += 1 - share
    matrix[rows, high] += share
    return matrix.to(like)
