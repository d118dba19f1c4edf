"""The Inception network of the published Inception scores and Fréchet Inception distances.

FID and IS are comparable between papers only where the features are those of one network: the
classifier of TensorFlow's archive of 2015-12-05 (Szegedy et al. 2016, "Rethinking the Inception
Architecture for Computer Vision"; Heusel et al. 2017 for the FID). Its weights are widely used in
PyTorch as the file `pt_inception-2015-12-05-6726825d.pth`, with the names of parameters that are
used here. It differs from torchvision's Inception in three ways: average pooling does not count
the padding, the last block pools by the maximum, and there are 1,008 classes.

The file is a dictionary of tensors, and is read as one: nothing in it is executed. The published
readers of it either need torchvision, or come as TorchScript, whose loading PyTorch deprecates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIZE = 299
"""Height and width that every image is brought to."""
CLASSES = 1008

Convolution = tuple[int, int, int]
"""Output channels, height and width of the kernel."""
Step = Convolution | tuple[Convolution, Convolution]
"""A convolution, or two on the same input whose outputs are joined."""


class ConvNormRelu(nn.Module):
    """Convolution without bias, batch normalisation, ReLU."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: tuple[int, int],
        *,
        stride: int = 1,
        padding: str = "valid",
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(
            in_channels, out_channels, kernel, stride=stride, padding=padding, bias=False
        )
        self.bn = nn.BatchNorm2d(out_channels, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C', H', W')."""
        return F.relu(self.bn(self.conv(x)))


def average(x: Tensor) -> Tensor:
    """Mean of 3x3 neighbours inside the image."""
    return F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)


def largest(x: Tensor) -> Tensor:
    """Maximum of 3x3 neighbours."""
    return F.max_pool2d(x, 3, stride=1, padding=1)


def halve(x: Tensor) -> Tensor:
    """Maximum of 3x3 neighbours, every second row and column."""
    return F.max_pool2d(x, 3, stride=2)


class Mixed(nn.Module):
    """Branches of convolutions on one input, joined by channel.

    A branch's convolutions are named as in the published weights: by the branch alone where it has
    one, else with their number, and with a and b where a step has two.

    Args:
        in_channels: channels of the input.
        pool: what the branch `branch_pool` does before its convolutions. With :func:`halve` the
            last convolution of every other branch has stride 2 and no padding.
        branches: each branch's steps, in the order in which they are joined.
    """

    def __init__(
        self, in_channels: int, pool: Callable[[Tensor], Tensor], **branches: Sequence[Step]
    ) -> None:
        super().__init__()
        self.pool = pool
        self.branches: list[tuple[str, list[list[str]]]] = []
        self.out_channels = 0
        for branch, steps in branches.items():
            names: list[list[str]] = []
            channels = in_channels
            for number, step in enumerate(steps, start=1):
                name = f"{branch}_{number}" if len(steps) > 1 else branch
                if isinstance(step[0], tuple):
                    convolutions = dict(zip((f"{name}a", f"{name}b"), step, strict=True))
                else:
                    convolutions = {name: step}
                halves = pool is halve and number == len(steps)
                how: Any = {"stride": 2} if halves else {"padding": "same"}
                for own_name, (out, height, width) in convolutions.items():
                    module = ConvNormRelu(channels, out, (height, width), **how)
                    self.add_module(own_name, module)
                names.append(list(convolutions))
                channels = sum(out for out, _, _ in convolutions.values())
            self.branches.append((branch, names))
            self.out_channels += channels

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, out_channels, H', W')."""
        outputs = []
        for branch, names in self.branches:
            hidden = self.pool(x) if branch == "branch_pool" else x
            for step in names:
                hidden = torch.cat([self.get_submodule(name)(hidden) for name in step], dim=1)
            outputs.append(hidden)
        return torch.cat(outputs, dim=1)


def mixed_35(in_channels: int, pooled: int) -> Mixed:
    """A block of the stage of 35x35."""
    return Mixed(
        in_channels,
        average,
        branch1x1=[(64, 1, 1)],
        branch5x5=[(48, 1, 1), (64, 5, 5)],
        branch3x3dbl=[(64, 1, 1), (96, 3, 3), (96, 3, 3)],
        branch_pool=[(pooled, 1, 1)],
    )


def mixed_17(inner: int) -> Mixed:
    """A block of the stage of 17x17."""
    return Mixed(
        768,
        average,
        branch1x1=[(192, 1, 1)],
        branch7x7=[(inner, 1, 1), (inner, 1, 7), (192, 7, 1)],
        branch7x7dbl=[(inner, 1, 1), (inner, 7, 1), (inner, 1, 7), (inner, 7, 1), (192, 1, 7)],
        branch_pool=[(192, 1, 1)],
    )


def mixed_8(in_channels: int, pool: Callable[[Tensor], Tensor]) -> Mixed:
    """A block of the stage of 8x8."""
    split: Step = ((384, 1, 3), (384, 3, 1))
    return Mixed(
        in_channels,
        pool,
        branch1x1=[(320, 1, 1)],
        branch3x3=[(384, 1, 1), split],
        branch3x3dbl=[(448, 1, 1), (384, 3, 3), split],
        branch_pool=[(192, 1, 1)],
    )


class Inception(nn.Module):
    """Features and logits of the Inception network of 2015-12-05.

    Images of any size are quantised to 256 levels, as saved pictures are, and resized to 299x299
    by the bilinear rule of TensorFlow 1, which the published numbers were taken with: output row i
    reads input row i * height / 299, without the half-pixel shift of later libraries.
    """

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = ConvNormRelu(3, 32, (3, 3), stride=2)
        self.Conv2d_2a_3x3 = ConvNormRelu(32, 32, (3, 3))
        self.Conv2d_2b_3x3 = ConvNormRelu(32, 64, (3, 3), padding="same")
        self.Conv2d_3b_1x1 = ConvNormRelu(64, 80, (1, 1))
        self.Conv2d_4a_3x3 = ConvNormRelu(80, 192, (3, 3))
        self.Mixed_5b = mixed_35(192, 32)
        self.Mixed_5c = mixed_35(256, 64)
        self.Mixed_5d = mixed_35(288, 64)
        self.Mixed_6a = Mixed(
            288,
            halve,
            branch3x3=[(384, 3, 3)],
            branch3x3dbl=[(64, 1, 1), (96, 3, 3), (96, 3, 3)],
            branch_pool=[],
        )
        self.Mixed_6b = mixed_17(128)
        self.Mixed_6c = mixed_17(160)
        self.Mixed_6d = mixed_17(160)
        self.Mixed_6e = mixed_17(192)
        self.Mixed_7a = Mixed(
            768,
            halve,
            branch3x3=[(192, 1, 1), (320, 3, 3)],
            branch7x7x3=[(192, 1, 1), (192, 1, 7), (192, 7, 1), (192, 3, 3)],
            branch_pool=[],
        )
        self.Mixed_7b = mixed_8(1280, average)
        self.Mixed_7c = mixed_8(2048, largest)
        self.fc = nn.Linear(2048, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
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
        x = (resize(pixels) - 128) / 128
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(halve(x)))
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(halve(x))))
        x = self.Mixed_6e(self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x)))))
        x = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x)))
        features = x.mean(dim=(2, 3))
        return features, features @ self.fc.weight.T


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
