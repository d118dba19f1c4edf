"""Networks of the population: logits of small images, points and rows of a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from reference_training.networks import WideResNet, of_class

_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "leaky_relu": lambda: nn.LeakyReLU(0.2),
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "elu": nn.ELU,
    "softplus": nn.Softplus,
}


class Energy(nn.Module):
    """A classifier as a negative energy, or a network with a single output.

    Args:
        shape: of one sample.
        classes: number of logits; 1 is the negative energy itself.
        kind: "mlp", "cnn", "wrn", "residual" (an MLP whose blocks add to their input), "gru" of a
            sequence, or "set" (the mean over what an MLP makes of each point).
        width: hidden units; of "cnn", channels of the first layer; of "wrn", its factor.
        activation: what follows each layer.
        norm: "none", "layer" or "spectral"; "wrn" has none.
        scale: factor of the negative energy.
    """

    def __init__(
        self,
        shape: Sequence[int],
        classes: int,
        kind: str,
        width: int,
        activation: str,
        norm: str,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.classes, self.scale = classes, scale
        act = _ACTIVATIONS[activation]
        wrap = spectral_norm if norm == "spectral" else lambda layer: layer

        def normed(channels: int, *, flat: bool) -> list[nn.Module]:
            if norm != "layer":
                return []
            return [nn.LayerNorm(channels) if flat else nn.GroupNorm(1, channels)]

        if kind == "wrn":
            wide = WideResNet(
                in_channels=shape[0], classes=classes, width=width, activation=activation
            )
            self.body: Callable[[Tensor], Tensor] = wide.classify
            self.layers: nn.Module = wide
            return
        layers: list[nn.Module] = []
        if kind == "cnn":
            channels, size = shape[0], shape[1]
            out = width
            while size > 4:
                layers += [wrap(nn.Conv2d(channels, out, 3, padding=1)), *normed(out, flat=False)]
                layers += [act(), wrap(nn.Conv2d(out, out, 4, stride=2, padding=1)), act()]
                channels, out, size = out, 2 * out, size // 2
            layers += [nn.Flatten(), wrap(nn.Linear(channels * size * size, classes))]
        elif kind == "gru":
            layers += [LastState(shape[1], width), nn.Linear(width, width), act()]
            layers += [nn.Linear(width, classes)]
        elif kind == "set":
            layers += [nn.Linear(shape[1], width), act(), nn.Linear(width, width), act()]
            layers += [MeanOfPoints(), nn.Linear(width, width), act(), nn.Linear(width, classes)]
        else:
            layers += [nn.Flatten(), wrap(nn.Linear(math.prod(shape), width)), act()]
            for _ in range(2):
                block = [*normed(width, flat=True), wrap(nn.Linear(width, width)), act()]
                layers += [Residual(*block)] if kind == "residual" else block
            layers += [wrap(nn.Linear(width, classes))]
        self.layers = nn.Sequential(*layers)
        self.body = self.layers

    def classify(self, x: Tensor) -> Tensor:
        """Logits, (B, classes)."""
        return self.body(x)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """f(x), or f(x, y): (B,)."""
        logits = self.body(x)
        if self.scale != 1:
            logits = self.scale * logits
        if y is not None:
            return of_class(logits, y)
        return logits.squeeze(1) if self.classes == 1 else torch.logsumexp(logits, dim=1)


class LastState(nn.GRU):
    """Of a sequence (B, T, C): (B, width)."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__(channels, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        last: Tensor = super().forward(x)[1][0]
        return last


class MeanOfPoints(nn.Module):
    """(B, points, width) to (B, width)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class Residual(nn.Sequential):
    """x + layers(x)."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return x + out
