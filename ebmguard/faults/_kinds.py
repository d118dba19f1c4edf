"""What each fault does, once its step has come. Installing them is the injector's business."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import ConfigError

__all__ = [
    "CorruptBuffer",
    "EnergySpike",
    "ExplodingLr",
    "Fault",
    "FrozenSampler",
    "NanSample",
    "chains_of",
]


class Fault:
    """One armed fault. What it does not override, it leaves alone.

    Attributes:
        name: that of the injector's method.
        at: its step.
        has_begun: whether its step has come.
        has_acted: whether it has done anything.
    """

    def __init__(self, name: str, at: int) -> None:
        self.name = name
        self.at = at
        self.has_begun = False
        self.has_acted = False

    def begin(self) -> str | None:
        """The step has come; what was done there and then, in words."""
        return None

    def on_tick(self) -> None:
        """A later step begins."""

    def on_result(self, result: Any) -> tuple[Any, str | None]:
        """The sampler's result, once the fault has begun, and what was done to it."""
        return result, None


class NanSample(Fault):
    """A NaN in one sampler result."""

    def __init__(self, name: str, at: int, row: int) -> None:
        super().__init__(name, at)
        self._row: int | None = row

    def on_result(self, result: Any) -> tuple[Any, str | None]:
        row, self._row = self._row, None
        if row is None:
            return result, None
        samples = _samples(result)
        if row >= len(samples) or not samples.is_floating_point():
            raise ConfigError(
                f"nan_sample: row {row} of samples of shape {tuple(samples.shape)} and type "
                f"{samples.dtype} cannot be NaN; expected more rows, of floating point."
            )
        here = torch.zeros(samples.shape, dtype=torch.bool, device=samples.device)
        here[row].view(-1)[0] = True
        where = f"the first entry of sample {row} of {len(samples)} is NaN"
        return _with_samples(result, samples.masked_fill(here, math.nan)), where


class FrozenSampler(Fault):
    """One result, again and again."""

    def __init__(self, name: str, at: int, steps: int) -> None:
        super().__init__(name, at)
        self._left = steps
        self._kept: Any = None

    def on_result(self, result: Any) -> tuple[Any, str | None]:
        if self._kept is None:
            self._kept = _with_samples(result, _samples(result).detach().clone())
            return result, f"this result comes again in the next {self._left} calls"
        if not self._left or _samples(result).shape != _samples(self._kept).shape:
            return result, None
        self._left -= 1
        # A copy, since samplers' results are often changed in place.
        return _with_samples(self._kept, _samples(self._kept).clone()), None


class EnergySpike(Fault):
    """Outputs multiplied in one step."""

    def __init__(self, name: str, at: int, factor: float) -> None:
        super().__init__(name, at)
        self._factor = factor
        self._has_hit = self._is_over = False

    def on_tick(self) -> None:
        # Of two sampler calls in a step the second is no end: no loss has come between them.
        self._is_over = self._has_hit

    def on_output(self, output: Any) -> tuple[Any, str | None]:
        if not self.has_begun or self._is_over:
            return output, None
        if not isinstance(output, Tensor):
            raise ConfigError(
                f"energy_spike: the model returned a {type(output).__name__}; expected one tensor "
                "of energies. Name the module that returns it."
            )
        what = None if self._has_hit else f"the model's outputs are multiplied by {self._factor:g}"
        self._has_hit = True
        return output * self._factor, what


class CorruptBuffer(Fault):
    """A row overwritten."""

    def __init__(self, name: str, at: int, buffer: Any, row: int, value: float) -> None:
        super().__init__(name, at)
        self._buffer = buffer
        self._row = row
        self._value = value

    def begin(self) -> str:
        with torch.no_grad():
            chains_of(self._buffer)[self._row] = self._value
        return f"row {self._row} of the replay buffer is {self._value:g}"


class ExplodingLr(Fault):
    """Learning rates multiplied inside some steps of an optimizer."""

    def __init__(self, name: str, at: int, optimizer: Optimizer, factor: float, steps: int) -> None:
        super().__init__(name, at)
        self._optimizer = optimizer
        self._factor = factor
        self._steps = self._left = steps
        self._usual: list[Any] = []
        self._exploded: list[Any] = []

    def on_tick(self) -> None:
        # Another hook may have put the exploded rate back after ours had run.
        self.put_back()
        self._exploded = []

    def explode(self) -> str | None:
        if not self.has_begun or not self._left:
            return None
        is_first = self._left == self._steps
        self._left -= 1
        groups = self._optimizer.param_groups
        self._usual = [group["lr"] for group in groups]
        self._exploded = [usual * self._factor for usual in self._usual]
        for group, exploded in zip(groups, self._exploded, strict=True):
            group["lr"] = exploded
        if not is_first:
            return None
        lasts = f" for {self._steps} steps" if self._steps > 1 else ""
        return f"the learning rate is multiplied by {self._factor:g}{lasts}"

    def put_back(self) -> None:
        rates = zip(self._optimizer.param_groups, self._usual, self._exploded, strict=False)
        for group, usual, exploded in rates:
            if group["lr"] == exploded:  # and not what a rollback in another hook has put there
                group["lr"] = usual


def _samples(result: Any) -> Tensor:
    first = result[0] if isinstance(result, tuple | list) and result else result
    if not isinstance(first, Tensor) or not first.ndim or not first.numel():
        raise ConfigError(
            f"The sampler returned a {type(result).__name__}; expected samples, or a tuple or list "
            "in which they come first."
        )
    return first


def _with_samples(result: Any, samples: Tensor) -> Any:
    if isinstance(result, Tensor):
        return samples
    rest = (samples, *result[1:])
    return type(result)(*rest) if hasattr(result, "_fields") else type(result)(rest)


def chains_of(buffer: Any) -> Tensor:
    chains = buffer if isinstance(buffer, Tensor) else getattr(buffer, "samples", None)
    if not isinstance(chains, Tensor) or not chains.ndim:
        raise ConfigError(
            f"buffer is a {type(buffer).__name__}; expected a tensor with one chain in each row, "
            "or an object with such a tensor as its samples."
        )
    return chains
