"""Wide residual networks whose output is a negative energy.

The architecture is that of JEM (Grathwohl et al. 2020): the wide residual network of Zagoruyko and
Komodakis (2016) without normalisation, with LeakyReLU 0.2, convolutions with bias and PyTorch's
default initialisation. A block halves the resolution in its second convolution, as in JEM's
published code, which may normalise before each activation and drop entries after a block's first
convolution, too. Instead of LeakyReLU it may have SiLU (Swish), which JEM's author names among
what helps a run that diverges. The class logits double as an energy,
f(x) = logsumexp_y logits(x)[y] (their Eq. 7), and each of them as the energy of its class,
f(x, y) = logits(x)[y] (their Eq. 5); or f(x) has an output of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

N = TypeVar("N", bound=nn.Module)

NEGATIVE_SLOPE = 0.2
STEM_CHANNELS = 16
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "leaky_relu": partial(F.leaky_relu, negative_slope=NEGATIVE_SLOPE),
    "silu": F.silu,
}
"""By name: JEM's, whose slope is 0.2, and a smooth one."""
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "none": nn.Identity,
    "batch": partial(nn.BatchNorm2d, momentum=0.9),
    "instance": partial(nn.InstanceNorm2d, affine=True),
    "layer": partial(nn.GroupNorm, 1),
}
"""By name: of so many channels, as JEM's published code has them."""


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with pre-activation and a 1x1 shortcut where the shape changes.

    The resolution is divided by `stride` in the second convolution, or in the first one with
    `early_stride`; and in the shortcut.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        stride: int,
        *,
        early_stride: bool,
        activation: Callable[[Tensor], Tensor],
        norm: Callable[[int], nn.Module] = nn.Identity,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.norm1, self.norm2 = norm(in_channels), norm(out_channels)
        self.dropout = nn.Dropout(dropout)
        first, second = (stride, 1) if early_stride else (1, stride)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=first, padding=1)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, stride=second, padding=1)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C', H / stride, W / stride), rounded up."""
        hidden = self.dropout(self.conv1(self.activation(self.norm1(x))))
        out: Tensor = self.conv2(self.activation(self.norm2(hidden)))
        shortcut: Tensor = self.shortcut(x)
        return shortcut + out


class WideResNet(nn.Module):
    """Wide residual network WRN-`depth`-`width` as a classifier and as a negative energy.

    Three stages of (depth - 4) / 6 blocks with 16, 32 and 64 times `width` channels; the last two
    halve the resolution. Images may have any size: what is left of them is averaged.

    Args:
        in_channels: image channels.
        classes: number of labels.
        depth: 6 n + 4 with n blocks a stage; 10 is the smallest, JEM's CIFAR network has 28.
        width: channel multiplier; 10 in JEM's CIFAR network.
        early_stride: halve the resolution in the first convolution of a block, not in the second:
            cheaper, and another function of the same parameters.
        activation: "leaky_relu" or "silu".
        norm: "none", "batch", "instance" or "layer"; all but the second treat each image alone.
        dropout: share of the entries after a block's first convolution that training sets to 0, by
            PyTorch's global generator.
        unconditional: f(x) is an output beside the logits, so that f(x, y) is not defined.
        autocast: bfloat16 for convolutions in that type (float32 parameters, inputs and
            gradients); pooling, head and logsumexp keep the type of the parameters. Gradients of
            samples are small: float16 would need a gradient scaler for them. None computes
            everything in the type of the parameters.

    Raises:
        ValueError: depth is not 6 n + 4.
    """

    def __init__(
        self,
        *,
        in_channels: int = 1,
        classes: int = 10,
        depth: int = 10,
        width: int = 2,
        early_stride: bool = False,
        activation: str = "leaky_relu",
        norm: str = "none",
        dropout: float = 0.0,
        unconditional: bool = False,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise ValueError(f"depth is {depth}, expected 6 n + 4, such as 10, 16, 22 or 28")
        self.autocast = autocast
        self.activation = ACTIVATIONS[activation]
        self.stem = nn.Conv2d(in_channels, STEM_CHANNELS, 3, padding=1)
        block = partial(
            ResidualBlock,
            early_stride=early_stride,
            activation=self.activation,
            norm=NORMS[norm],
            dropout=dropout,
        )
        self.blocks, channels = nn.Sequential(), STEM_CHANNELS
        for stage, stride in ((16 * width, 1), (32 * width, 2), (64 * width, 2)):
            for i in range((depth - 4) // 6):
                self.blocks.append(block(channels, stage, 1 if i else stride))
                channels = stage
        self.norm = NORMS[norm](channels)
        self.classes, self.unconditional = classes, unconditional
        self.head = nn.Linear(channels, classes + unconditional)

    def features(self, x: Tensor) -> Tensor:
        """What the head sees, averaged over the image: (B, C, H, W) -> (B, 64 * width)."""
        with casting(self.autocast, x.device):
            maps = self.blocks(self.stem(x))
        pooled: Tensor = self.activation(self.norm(maps.to(self.head.weight.dtype))).mean((2, 3))
        return pooled

    def outputs(self, x: Tensor) -> Tensor:
        """The logits, and f(x) beside them where the network is unconditional: (B, outputs)."""
        outputs: Tensor = self.head(self.features(x))
        return outputs

    def logits(self, outputs: Tensor) -> Tensor:
        """The class logits among the outputs, (B, classes)."""
        return outputs[:, : self.classes] if self.unconditional else outputs

    def energies(self, outputs: Tensor) -> Tensor:
        """f(x) of the outputs, (B,)."""
        return outputs[:, -1] if self.unconditional else torch.logsumexp(outputs, dim=1)

    def classify(self, x: Tensor) -> Tensor:
        """Class logits: (B, C, H, W) -> (B, classes)."""
        return self.logits(self.outputs(x))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Negative energy of images, or of images of given classes.

        Args:
            x: images, (B, C, H, W).
            y: classes, (B,) int64 in [0, classes); a range that the host does not check.

        Returns:
            f(x), the logsumexp of the logits, or f(x, y), the logit of the class: (B,).

        Raises:
            ValueError: of classes, but the network is unconditional.
        """
        outputs = self.outputs(x)
        if y is None:
            return self.energies(outputs)
        if self.unconditional:
            raise ValueError("the network is unconditional: it has no f(x, y), leave y out")
        return of_class(outputs, y)


def casting(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[Any]:
    """Convolutions inside are of that type; None: of their parameters'."""
    # Without autocast's cache of converted weights. A call uses each weight once, so that it saves
    # nothing; and inside a caller's autocast it would outlive the call: a CUDA graph would read
    # copies of the weights from before its capture, or leave behind copies in memory of its own,
    # which its replays overwrite.
    return torch.autocast(device.type, dtype, cache_enabled=False) if dtype else nullcontext()


def seeded(make: Callable[[], N], seed: int, device: torch.device) -> N:
    """A network as a seed initialises it on the CPU; PyTorch's global generators are left alone.

    It is in channels_last, the faster memory layout for convolutions on CPUs and GPUs alike.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # GPUs' would stay seeded
        network = make()
    network.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network


def of_class(logits: Tensor, y: Tensor) -> Tensor:
    """f(x, y), the logit of each class: (B, classes) and (B,) int64 -> (B,)."""
    return logits.gather(1, y[:, None]).squeeze(1)


@contextmanager
def evaluation_mode(network: nn.Module) -> Iterator[None]:
    """`network` in evaluation mode; afterwards each of its modules is as it was."""
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def frozen(network: nn.Module) -> Iterator[Callable[..., Tensor]]:
    """The network with constant parameters inside the block, in evaluation mode, for sampling.

    Samplers differentiate for the samples alone. Eager autograd then leaves the gradients of the
    parameters out; a compiled network computes in its backward pass those of everything that
    requires a gradient, which costs half as much again. Frozen, it is compiled once more, without
    them. Afterwards each parameter requires a gradient as it did before, also where the block
    raises. Gradients that are stored, optimizers and the hooks of DistributedDataParallel stay.

    Args:
        network: the network, or the module inside a wrapper.

    Yields:
        the network as a function. Where it casts for its convolutions (`autocast`), it gets their
        weights cast already, to the same bits: once for all calls in the block, and not in each.
        A CUDA graph that captures the block casts them anew at every replay.
    """
    before = [(parameter, parameter.requires_grad) for parameter in network.parameters()]
    try:
        for parameter, _ in before:
            parameter.requires_grad_(False)
        weights = _cast_weights(network)
        with evaluation_mode(network):
            yield (lambda *x: functional_call(network, weights, x)) if weights else network
    finally:
        for parameter, required in before:
            parameter.requires_grad_(required)


def _cast_weights(network: nn.Module) -> dict[str, Tensor]:
    """Copies of what a forward pass would cast, by name: of the convolutions, but for the head."""
    dtype: torch.dtype | None = getattr(network, "autocast", None)
    if dtype is None:
        return {}
    weights = {
        f"{name}.{own}": weight.detach()
        for name, module in network.named_modules()
        if isinstance(module, nn.Conv2d) and name != "head"
        for own, weight in module.named_parameters()
    }
    copies = {name: torch.empty_like(weight, dtype=dtype) for name, weight in weights.items()}
    torch._foreach_copy_(list(copies.values()), list(weights.values()))
    return copies
