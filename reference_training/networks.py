"""Wide residual networks without normalisation, whose output is a negative energy.

The architecture follows JEM (Grathwohl et al. 2020): pre-activation residual blocks, LeakyReLU 0.2,
convolutions with bias, PyTorch's default initialisation, no normalisation. One thing differs from
its published code: a block halves the resolution in its first convolution, not in its second,
which makes a step cheaper. The class logits double as an energy, f(x) = logsumexp_y logits(x)[y]
(their Eq. 7).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NEGATIVE_SLOPE = 0.2
STEM_CHANNELS = 16


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with pre-activation and a 1x1 shortcut where the shape changes."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C', H / stride, W / stride)."""
        hidden = self.conv1(F.leaky_relu(x, NEGATIVE_SLOPE))
        out: Tensor = self.conv2(F.leaky_relu(hidden, NEGATIVE_SLOPE))
        shortcut: Tensor = self.shortcut(x)
        return shortcut + out


class WideResNet(nn.Module):
    """Wide residual network WRN-`depth`-`width` as a classifier and as a negative energy.

    Three stages of (depth - 4) / 6 blocks with 16, 32 and 64 times `width` channels; the last two
    halve the resolution.

    Args:
        in_channels: image channels.
        classes: number of labels.
        depth: 6 n + 4 with n blocks a stage; 10 is the smallest, JEM's CIFAR network has 28.
        width: channel multiplier.

    Raises:
        ValueError: depth is not 6 n + 4, or a size is not positive.
    """

    def __init__(
        self, *, in_channels: int = 1, classes: int = 10, depth: int = 10, width: int = 2
    ) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise ValueError(f"depth is {depth}, expected 6 n + 4, such as 10, 16, 22 or 28")
        for name, value in (("in_channels", in_channels), ("classes", classes), ("width", width)):
            if value < 1:
                raise ValueError(f"{name} is {value}, expected at least 1")
        blocks_per_stage = (depth - 4) // 6
        self.stem = nn.Conv2d(in_channels, STEM_CHANNELS, 3, padding=1)
        blocks: list[nn.Module] = []
        channels = STEM_CHANNELS
        stages: Sequence[tuple[int, int]] = ((16 * width, 1), (32 * width, 2), (64 * width, 2))
        for stage_channels, stage_stride in stages:
            for i in range(blocks_per_stage):
                stride = stage_stride if i == 0 else 1
                blocks.append(ResidualBlock(channels, stage_channels, stride))
                channels = stage_channels
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def classify(self, x: Tensor) -> Tensor:
        """Class logits: (B, C, H, W) -> (B, classes)."""
        features = F.leaky_relu(self.blocks(self.stem(x)), NEGATIVE_SLOPE)
        logits: Tensor = self.head(features.mean(dim=(2, 3)))
        return logits

    def forward(self, x: Tensor) -> Tensor:
        """Negative energy f(x) = logsumexp of the logits: (B, C, H, W) -> (B,)."""
        return torch.logsumexp(self.classify(x), dim=1)
