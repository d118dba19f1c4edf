"""A mixture of samplers that contribute to one set of negatives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, SamplerError, typed

__all__ = ["Mixture"]


@typed
class Mixture:
    """A sampler that joins the samples of several samplers.

    The weights of the robust objective go to the negatives that are likely under the model: one
    sampler that delivers is enough. Every sampler gets the arguments of the call, and returns as
    many samples as it likes. ::

        sample_q = Mixture({
            "buffer": lambda f: mala(f, from_buffer(64), ...),
            "noise": lambda f: sgld(f, torch.rand(16, 3, 32, 32) * 2 - 1, ...),
        })

    Called with labels y, the labels of the negatives are ``torch.cat([y] * len(samplers))``.

    Args:
        samplers: by name, which becomes part of tags; each returns one tensor of samples.
        dim: the batch dimension of the samples; 1 for an ensemble's (models, B, ...).

    Attributes:
        parts: the samples of the latest call along ``dim`` by sampler; empty before it.

    Raises:
        ConfigError: no sampler, a name that is not text, or a sampler that cannot be called.
    """

    def __init__(self, samplers: Mapping[str, Callable[..., Tensor]], *, dim: int = 0) -> None:
        if not samplers:
            raise ConfigError('Mixture: expected at least one sampler, as in {"noise": draw}.')
        if dim < 0:
            raise ConfigError(f"Mixture: dim is {dim}; expected a dimension from the left, from 0.")
        for name, sampler in samplers.items():
            if not isinstance(name, str) or not name:
                raise ConfigError(f"Mixture: {name!r} is no name; expected text.")
            if not callable(sampler):
                raise ConfigError(
                    f"Mixture: the sampler {name!r} is a {type(sampler).__name__}, which cannot be "
                    "called. Pass its method that draws samples."
                )
        self.samplers, self.dim = dict(samplers), dim
        self.parts: dict[str, slice] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Draw negatives from every sampler, joined along ``dim`` in their order.

        Raises:
            SamplerError: what a sampler returned is no tensor, or does not fit the others'.
        """
        drawn = {name: sampler(*args, **kwargs) for name, sampler in self.samplers.items()}
        first_name, first = next(iter(drawn.items()))
        parts, start = {}, 0
        for name, x in drawn.items():
            if not isinstance(x, Tensor):
                raise SamplerError(
                    f"Mixture: the sampler {name!r} returned a {type(x).__name__}; expected one "
                    "tensor of samples. Wrap it in a function that returns that alone."
                )
            if x.ndim <= self.dim:
                raise SamplerError(
                    f"Mixture: the sampler {name!r} returned {_described(x)}, which has no "
                    f"dimension {self.dim} for the batch."
                )
            if self._common(x) != self._common(first):
                raise SamplerError(
                    f"Mixture: the sampler {name!r} returned {_described(x)}, and {first_name!r} "
                    f"{_described(first)}; expected the same but for dimension {self.dim}."
                )
            parts[name] = slice(start, start + x.shape[self.dim])
            start = parts[name].stop
        self.parts = parts
        return torch.cat(list(drawn.values()), self.dim)

    def _common(self, x: Tensor) -> tuple[object, ...]:
        return x.shape[: self.dim], x.shape[self.dim + 1 :], x.dtype, x.device


def _described(x: Tensor) -> str:
    return f"samples of shape {tuple(x.shape)} ({x.dtype} on {x.device})"
