"""The convolutional network of short-run models, whose output is a negative energy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from ebmguard.errors import ConfigError

from ..engine.checkpoints import load_all_ranks
from ..engine.run_folder import read_config
from ..networks import NEGATIVE_SLOPE, casting

SMALLEST = 4
"""The resolution is halved until an image has at most so many pixels a side."""
WIDEST = 8
"""The most channels, as a multiple of nf."""
_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "leaky_relu": lambda: nn.LeakyReLU(NEGATIVE_SLOPE),
    "gelu": nn.GELU,
}


class EnergyNet(nn.Module):
    """The network of Nijkamp et al. (2019): f(x), high on data.

    A 3x3 convolution to `nf` channels, 4x4 convolutions of stride 2 that double them, up to 8 nf,
    until the image has at most 4 pixels a side, and one convolution over all that is left. Between
    them the activation; no normalisation; PyTorch's default initialisation. For 32x32 images this
    is the published network; the paper's public code has none for other sizes.

    Args:
        nf: width. Published: 64 (the public script), 128 (the paper's CIFAR-10 model).
        activation: "leaky_relu", with slope 0.2; or "gelu", as for the authors' likelihoods: the
            K-step map of a piecewise linear f has no second derivatives.
        autocast: bfloat16 for all convolutions but the last, or None.
    """

    def __init__(
        self,
        in_channels: int,
        image_size: int,
        nf: int,
        activation: str = "leaky_relu",
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.autocast = autocast
        make_activation = _ACTIVATIONS[activation]
        layers: list[nn.Module] = [nn.Conv2d(in_channels, nf, 3, padding=1), make_activation()]
        channels, size = nf, image_size
        while size > SMALLEST:
            wider = min(2 * channels, WIDEST * nf)
            layers += [nn.Conv2d(channels, wider, 4, stride=2, padding=1), make_activation()]
            channels, size = wider, size // 2
        self.features = nn.Sequential(*layers)
        self.head = nn.Conv2d(channels, 1, size)

    def forward(self, x: Tensor) -> Tensor:
        """Negative energy of images: (B, C, S, S) -> (B,)."""
        with casting(self.autocast, x.device):
            maps: Tensor = self.features(x)
        f: Tensor = self.head(maps.to(self.head.weight.dtype))
        return f.flatten()


def start_from(network: EnergyNet, path: Path, activation: str) -> None:
    """Give a network the parameters of another run's last checkpoint.

    They do not tell their network's activation, which has to be the same.
    """
    other = f"start_from is {path}, whose network is another than this run's"
    stored = read_config(path).get("settings", {})
    if stored.get("activation") != activation:
        raise ConfigError(
            f"{other}: its activation is {stored.get('activation')}, here it is {activation}"
        )
    _, (first, *_) = load_all_ranks(path / "checkpoints")
    try:
        network.load_state_dict(first["network"])
    except (KeyError, RuntimeError) as error:
        raise ConfigError(
            f"{other}: its parameters have other shapes; give the same data, image_size and nf"
        ) from error
