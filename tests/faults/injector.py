"""Faults on purpose, to see that a guard notices them and that a run survives them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ebmguard.errors import ConfigError
from ebmguard.trainer import finite_number

__all__ = ["FaultInjector", "Injected"]

_log = logging.getLogger("ebmguard")

Result = TypeVar("Result")


@dataclass(frozen=True)
class Injected:
    """What a fault, named by the method that arms it, did at a step."""

    fault: str
    step: int
    what: str


@dataclass(eq=False)
class _Fault:
    """What a fault does from its step on, and returns in words where it acts."""

    name: str
    at: int
    on_tick: Callable[[], str | None] = lambda: None  # where its step, or a later one, begins
    on_result: Callable[[Any], tuple[Any, str | None]] = lambda result: (result, None)
    left: int = 1  # times that it is to act
    has_begun: bool = False
    has_acted: bool = False


class FaultInjector:
    """Arms faults on a training loop. Each happens once, also where a rollback repeats its step.

    A fault is armed by the method of its name, for the step ``at``: a ConfigError for a step that
    is over and for settings out of range. A step begins where the sampler that :meth:`sampler`
    returned is called, or, where it is written inline, :meth:`tick`. Leaving the ``with`` block, or
    :meth:`remove`, takes every hook off. No random number is drawn. ``records`` says what has
    happened so far, oldest first.

    Args:
        step: returns the number of the present step, such as ``lambda: g.step``; None counts the
            steps from 0 as they begin.
    """

    def __init__(self, step: Callable[[], int] | None = None) -> None:
        if step is not None and not callable(step):
            raise ConfigError(f"step is a {type(step).__name__}; expected None or a function.")
        self.records: list[Injected] = []
        self._ask = step
        self._ticks, self._step = 0, -1
        self._is_sampling = self._is_removed = False
        self._faults: list[_Fault] = []
        self._undo: list[Callable[[], None]] = []

    @property
    def pending(self) -> list[str]:
        """Names of the faults to come, oldest first."""
        return [fault.name for fault in self._faults if not fault.has_acted]

    def sampler(self, sampler: Callable[..., Result]) -> Callable[..., Result]:
        """The sampler with room for faults: same arguments, same results.

        It returns samples, or a tuple or list in which they come first. Guard what comes back. Of
        an object wrap the method: ``s.draw = faults.sampler(s.draw)``.
        """
        if not callable(sampler):
            raise ConfigError(f"The sampler is a {type(sampler).__name__}: it cannot be called.")
        self._refuse_when_removed()

        @functools.wraps(sampler, updated=())
        def faulty(*args: Any, **kwargs: Any) -> Any:
            if self._is_removed or self._is_sampling:
                return sampler(*args, **kwargs)
            self.tick()
            self._is_sampling = True
            try:
                result: Any = sampler(*args, **kwargs)
            finally:
                self._is_sampling = False
            for fault in self._faults:
                if fault.has_begun and fault.left:
                    result, what = fault.on_result(result)
                    self._note(fault, what)
            return result

        # Where the guard finds a model.
        faulty.__self__ = getattr(sampler, "__self__", None)  # type: ignore[attr-defined]
        return faulty

    def tick(self) -> None:
        """A step begins; wrapped samplers say so themselves."""
        if self._is_removed:
            return
        self._step = self._ticks if self._ask is None else int(self._ask())
        self._ticks += 1
        for fault in self._faults:
            fault.has_begun = fault.has_begun or fault.at == self._step
            if fault.has_begun:
                self._note(fault, fault.on_tick())

    def remove(self) -> None:
        """Take every hook off; no fault happens any more."""
        self._is_removed = True
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> FaultInjector:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def nan_sample(self, at: int, *, row: int = 0) -> None:
        """An entry of sample ``row`` is NaN, in the result of one sampler call."""
        self._check(at, row=row)

        def spoil(result: Any) -> tuple[Any, str | None]:
            samples = _samples(result)
            if row >= len(samples) or not samples.is_floating_point():
                found = f"{tuple(samples.shape)} of {samples.dtype}"
                raise ConfigError(f"nan_sample: no row {row} of floating point in samples {found}.")
            fault.left = 0
            spoiled = samples.clone()
            spoiled[(row, *[0] * (samples.ndim - 1))] = nan
            where = f"the first entry of sample {row} of {len(samples)} is NaN"
            return _with_samples(result, spoiled), where

        self._faults.append(fault := _Fault("nan_sample", at, on_result=spoil))

    def frozen_sampler(self, at: int, *, steps: int = 50) -> None:
        """The sampler hangs: what it returned at the step comes again in ``steps`` calls after it.

        It is still called; samples of another shape are left alone.
        """
        self._check(at, steps=steps)
        kept: Any = None

        def hang(result: Any) -> tuple[Any, str | None]:
            nonlocal kept
            if kept is None:
                kept = _with_samples(result, _samples(result).detach().clone())
                return result, f"this result comes again in the next {steps} calls"
            if _samples(result).shape != _samples(kept).shape:
                return result, None
            fault.left -= 1
            # A copy, since samplers' results are often changed in place.
            return _with_samples(kept, _samples(kept).clone()), None

        self._faults.append(fault := _Fault("frozen_sampler", at, on_result=hang, left=steps))

    def energy_spike(self, at: int, model: nn.Module, *, factor: float = 1e6) -> None:
        """The outputs of the energy module are multiplied in one step, but for the sampler."""
        self._check(at)
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model is a {type(model).__name__}; expected the energy module.")
        factor = finite_number("factor", factor)

        def end() -> None:
            # A second sampler call of the same step does not end it: no loss has come between.
            fault.left = 0 if fault.has_acted else 1

        def after(_model: nn.Module, _args: Any, output: Any) -> Any:
            if self._is_sampling or not fault.has_begun or not fault.left:
                return output
            if not isinstance(output, Tensor):
                raise ConfigError(f"f returned a {type(output).__name__}; expected energies.")
            self._note(fault, f"the model's outputs are multiplied by {factor:g}")
            return output * factor

        self._faults.append(fault := _Fault("energy_spike", at, on_tick=end))
        self._undo.append(model.register_forward_hook(after).remove)

    def corrupt_buffer(self, at: int, buffer: Any, *, row: int = 0, value: float = nan) -> None:
        """A row of the buffer, or of its ``samples``, becomes ``value`` before a draw."""
        self._check(at, row=row)
        chains = _chains_of(buffer)
        if row >= len(chains):
            raise ConfigError(f"row={row}, but the buffer has {len(chains)} rows.")
        if not chains.is_floating_point() and (not isfinite(value) or value != int(value)):
            raise ConfigError(f"value={value!r} is no {chains.dtype}; give an integer.")

        def overwrite() -> str:
            if not fault.has_acted:
                with torch.no_grad():
                    _chains_of(buffer)[row] = value
            return f"row {row} of the replay buffer is {value:g}"

        self._faults.append(fault := _Fault("corrupt_buffer", at, on_tick=overwrite))

    def exploding_lr(
        self, at: int, optimizer: Optimizer, *, factor: float = 1e3, steps: int = 1
    ) -> None:
        """The learning rate of all groups is multiplied, inside ``steps`` steps of the optimizer.

        Arm this before ``g.attach(optimizer=...)``, so that snapshots see the rate put back.
        """
        self._check(at, steps=steps)
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(f"optimizer is a {type(optimizer).__name__}, no torch Optimizer.")
        factor = finite_number("factor", factor)
        exploded: list[tuple[Any, Any]] = []  # each group's rate, and what it is in this step

        def explode(*_: Any) -> None:
            if fault.has_begun and fault.left:
                fault.left -= 1
                groups = optimizer.param_groups
                exploded[:] = [(group["lr"], group["lr"] * factor) for group in groups]
                for group, (_, high) in zip(groups, exploded, strict=True):
                    group["lr"] = high
                self._note(fault, f"learning rate multiplied by {factor:g} in {steps} step(s)")

        def put_back(*_: Any) -> None:
            for group, (usual, high) in zip(optimizer.param_groups, exploded, strict=False):
                if group["lr"] == high:  # and not what a rollback in another hook has put there
                    group["lr"] = usual

        def end() -> None:
            put_back()  # another hook may have put the exploded rate back after ours had run
            exploded.clear()

        self._faults.append(fault := _Fault("exploding_lr", at, on_tick=end, left=steps))
        before = optimizer.register_step_pre_hook(explode)
        after = optimizer.register_step_post_hook(put_back)
        self._undo += [put_back, before.remove, after.remove]

    def _check(self, at: int, *, row: int = 0, steps: int = 1) -> None:
        self._refuse_when_removed()
        for name, value, least in (("at", at, 0), ("row", row, 0), ("steps", steps, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name}={value!r}; expected a whole number, {least} or more.")
        if self._ask is None and at < self._ticks:
            raise ConfigError(f"at={at}, but {self._ticks} steps have begun; choose a later one.")

    def _refuse_when_removed(self) -> None:
        if self._is_removed:
            raise ConfigError("This injector has been removed; make another one.")

    def _note(self, fault: _Fault, what: str | None) -> None:
        if what and not fault.has_acted:
            fault.has_acted = True
            self.records.append(Injected(fault.name, self._step, what))
            _log.warning("injected fault %s at step %d: %s", fault.name, self._step, what)


def _samples(result: Any) -> Tensor:
    first = result[0] if isinstance(result, tuple | list) and result else result
    if not isinstance(first, Tensor) or not first.ndim or not first.numel():
        raise ConfigError(f"The sampler returned a {type(result).__name__}; expected samples.")
    return first


def _with_samples(result: Any, samples: Tensor) -> Any:
    if isinstance(result, Tensor):
        return samples
    rest = (samples, *result[1:])
    return type(result)(*rest) if hasattr(result, "_fields") else type(result)(rest)


def _chains_of(buffer: Any) -> Tensor:
    chains = buffer if isinstance(buffer, Tensor) else getattr(buffer, "samples", None)
    if not isinstance(chains, Tensor) or not chains.ndim:
        raise ConfigError(f"buffer is a {type(buffer).__name__}; expected chains, or .samples.")
    return chains
