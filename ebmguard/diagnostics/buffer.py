"""What a replay buffer reports of its latest draw."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import ConfigError

__all__ = ["buffer_diagnostics"]


def buffer_diagnostics(buffer: object) -> dict[str, Tensor]:
    """What ``buffer.diagnostics()`` returns, detached 0-dim tensors, under ``buffer/``.

    :meth:`ebmguard.samplers.ReplayBuffer.diagnostics` is an example. ConfigError if it returned
    something else; nothing of objects without that method.
    """
    ask = getattr(buffer, "diagnostics", None)
    if isinstance(buffer, Tensor) or not callable(ask):
        return {}
    found, method = ask(), f"{type(buffer).__name__}.diagnostics()"
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"{method} returned a {type(found).__name__}; expected 0-dim tensors by name, such as "
            "{'age': ages.mean()}."
        )
    for name, value in found.items():
        kind = type(value).__name__
        if isinstance(value, Tensor):
            if not (value.ndim or value.is_complex() or value.dtype is torch.bool):
                continue
            kind = f"tensor of shape {tuple(value.shape)} and {value.dtype}"
        raise ConfigError(
            f"{method} has a {kind} under {name!r}; expected a 0-dim tensor of a real number."
        )
    return {f"buffer/{name}": value.detach() for name, value in found.items()}
