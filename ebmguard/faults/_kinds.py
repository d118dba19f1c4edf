"""What each fault does, once its step has come. The injector installs the hooks that call it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import ConfigError


@dataclass(eq=False)
class Fault:
    """One armed fault. A hook that it does not override changes nothing."""

    name: ClassVar[str]  # of the injector's method
    at: int
    has_begun: bool = field(default=False, init=False)
    has_acted: bool = field(default=False, init=False)

    def begin(self) -> str | None:
        """The step has come; what was done there and then, in words."""
        return None

    def on_tick(self) -> None:
        """A later step begins."""

    def on_result(self, result: Any) -> tuple[Any, str | None]:
        """The sampler's result, once the fault has begun, and what was done to it."""
        return result, None


@dataclass(eq=False)
class NanSample(Fault):
    name = "nan_sample"
    row: int

    def on_result(self, result: Any) -> tuple[Any, str | None]:
        if self.has_acted:
            return result, None
        samples = _samples(result)
        if self.row >= len(samples) or not samples.is_floating_point():
            raise ConfigError(
                f"nan_sample: row {self.row} of samples of shape {tuple(samples.shape)} and type "
                f"{samples.dtype} cannot be NaN; expected more rows, of floating point."
            )
        here = torch.zeros(samples.shape, dtype=torch.bool, device=samples.device)
        here[self.row].view(-1)[0] = True
        where = f"the first entry of sample {self.row} of {len(samples)} is NaN"
        return _with_samples(result, samples.masked_fill(here, math.nan)), where


@dataclass(eq=False)
class FrozenSampler(Fault):
    name = "frozen_sampler"
    steps: int
    _kept: Any = field(default=None, init=False)

    def on_result(self, result: Any) -> tuple[Any, str | None]:
        if self._kept is None:
            self._kept = _with_samples(result, _samples(result).detach().clone())
            return result, f"this result comes again in the next {self.steps} calls"
        if not self.steps or _samples(result).shape != _samples(self._kept).shape:
            return result, None
        self.steps -= 1
        # A copy, since samplers' results are often changed in place.
        return _with_samples(self._kept, _samples(self._kept).clone()), None


@dataclass(eq=False)
class EnergySpike(Fault):
    name = "energy_spike"
    factor: float
    _is_over: bool = field(default=False, init=False)

    def on_tick(self) -> None:
        # A second sampler call of the same step does not end it: no loss has come between the two.
        self._is_over = self.has_acted

    def on_output(self, output: Any) -> tuple[Any, str | None]:
        if not self.has_begun or self._is_over:
            return output, None
        if not isinstance(output, Tensor):
            raise ConfigError(
                f"energy_spike: the model returned a {type(output).__name__}; name the module that "
                "returns one tensor of energies."
            )
        return output * self.factor, f"the model's outputs are multiplied by {self.factor:g}"


@dataclass(eq=False)
class CorruptBuffer(Fault):
    name = "corrupt_buffer"
    buffer: Any
    row: int
    value: float

    def begin(self) -> str:
        with torch.no_grad():
            chains_of(self.buffer)[self.row] = self.value
        return f"row {self.row} of the replay buffer is {self.value:g}"


@dataclass(eq=False)
class ExplodingLr(Fault):
    name = "exploding_lr"
    optimizer: Optimizer
    factor: float
    steps: int
    # Of the present step: the rates of each group, and what they were multiplied to.
    _usual: list[Any] = field(default_factory=list, init=False)
    _exploded: list[Any] = field(default_factory=list, init=False)

    def on_tick(self) -> None:
        # Another hook may have put the exploded rate back after ours had run.
        self.put_back()
        self._exploded = []

    def explode(self) -> str | None:
        if not self.has_begun or not self.steps:
            return None
        lasts = f" for {self.steps} steps" if self.steps > 1 else ""
        self.steps -= 1
        groups = self.optimizer.param_groups
        self._usual = [group["lr"] for group in groups]
        self._exploded = [usual * self.factor for usual in self._usual]
        for group, exploded in zip(groups, self._exploded, strict=True):
            group["lr"] = exploded
        return f"the learning rate is multiplied by {self.factor:g}{lasts}"

    def put_back(self) -> None:
        rates = zip(self.optimizer.param_groups, self._usual, self._exploded, strict=False)
        for group, usual, exploded in rates:
            if group["lr"] == exploded:  # and not what a rollback in another hook has put there
                group["lr"] = usual


def _samples(result: Any) -> Tensor:
    first = result[0] if isinstance(result, tuple | list) and result else result
    if not isinstance(first, Tensor) or not first.ndim or not first.numel():
        raise ConfigError(
            f"The sampler returned a {type(result).__name__}; expected samples, or a sequence "
            "that begins with them."
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
