"""Faults on purpose, to see that a guard notices them and that a run survives them."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from math import nan
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ebmguard.samplers import ReplayBuffer

__all__ = ["FaultInjector", "Injected"]

_log = logging.getLogger("ebmguard")


@dataclass(frozen=True)
class Injected:
    """A fault, named by the method that arms it, and the step at which it came."""

    fault: str
    step: int


@dataclass(eq=False)
class _Fault:
    """What a fault does as its step begins, and to the result of every sampler call from then."""

    name: str
    at: int
    begin: Callable[[], object] = lambda: None
    of_result: Callable[[Tensor], Tensor] = lambda result: result
    left: int = 1  # times that it is to act once it has begun
    has_begun: bool = False
    is_now: bool = False


class FaultInjector(ExitStack):
    """Arms faults on a training loop. Each comes once, also where a rollback repeats its step.

    A fault is armed by the method of its name, for the step ``at``. A step begins where the sampler
    that :meth:`sampler` returned is called. Leaving the ``with`` block takes every hook off. No
    random number is drawn. ``records`` has what has come so far, oldest first.

    Args:
        step: returns the number of the present step, such as ``lambda: g.step``; None counts the
            sampler calls from 0.
    """

    def __init__(self, step: Callable[[], int] | None = None) -> None:
        super().__init__()
        self.records: list[Injected] = []
        self._step = step or itertools.count().__next__
        self._is_sampling = False
        self._faults: list[_Fault] = []

    def sampler(self, sampler: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The sampler with room for faults: same arguments, same results. Guard what comes back."""

        @functools.wraps(sampler, updated=())
        def faulty(*args: Any, **kwargs: Any) -> Tensor:
            step = self._step()
            for fault in self._faults:
                fault.is_now = fault.at == step and not fault.has_begun
                if fault.is_now:
                    fault.has_begun = True
                    self.records.append(Injected(fault.name, step))
                    _log.warning("injected fault %s at step %d", fault.name, step)
                    fault.begin()
            self._is_sampling = True
            result = sampler(*args, **kwargs)
            self._is_sampling = False
            for fault in self._faults:
                result = fault.of_result(result) if fault.has_begun and fault.left else result
            return result

        return faulty

    def nan_sample(self, at: int, *, row: int = 0) -> None:
        """An entry of sample ``row`` is NaN, in the result of one sampler call."""

        def spoil(samples: Tensor) -> Tensor:
            fault.left = 0
            spoiled = samples.clone()
            spoiled[(row, *[0] * (samples.ndim - 1))] = nan
            return spoiled

        self._faults.append(fault := _Fault("nan_sample", at, of_result=spoil))

    def frozen_sampler(self, at: int, *, steps: int = 50) -> None:
        """The sampler hangs: what it returned at the step comes again in ``steps`` calls after it.

        It is still called.
        """
        kept = list[Tensor]()

        def hang(samples: Tensor) -> Tensor:
            if not kept:
                kept.append(samples.detach().clone())
                return samples
            fault.left -= 1
            # A copy, since samplers' results are often changed in place.
            return kept[0].clone()

        self._faults.append(fault := _Fault("frozen_sampler", at, of_result=hang, left=steps))

    def energy_spike(self, at: int, model: nn.Module, *, factor: float = 1e6) -> None:
        """The outputs of the energy module are multiplied in one step, but for the sampler."""

        def after(_model: nn.Module, _args: Any, output: Tensor) -> Tensor:
            return factor * output if fault.is_now and not self._is_sampling else output

        self._faults.append(fault := _Fault("energy_spike", at))
        self.callback(model.register_forward_hook(after).remove)

    def corrupt_buffer(
        self, at: int, buffer: ReplayBuffer, *, row: int = 0, value: float = nan
    ) -> None:
        """A row of the buffer's samples becomes ``value`` before a draw."""

        def overwrite() -> None:
            buffer.samples[row] = value

        self._faults.append(_Fault("corrupt_buffer", at, overwrite))

    def exploding_lr(
        self, at: int, optimizer: Optimizer, *, factor: float = 1e3, steps: int = 1
    ) -> None:
        """The learning rate of all groups is multiplied, inside ``steps`` steps of the optimizer.

        Arm this before ``g.attach(optimizer=...)``, so that snapshots see the rate put back.
        """
        exploded: list[
            tuple[dict[str, Any], float, float]
        ] = []  # groups, their rates, the high ones

        def explode(*_: Any) -> None:
            if fault.has_begun and fault.left:
                fault.left -= 1
                exploded[:] = [(x, x["lr"], x["lr"] * factor) for x in optimizer.param_groups]
                for group, _usual, high in exploded:
                    group["lr"] = high

        def put_back(*_: Any) -> None:
            for group, usual, high in exploded:
                if group["lr"] == high:  # and not what a rollback in another hook has put there
                    group["lr"] = usual

        self._faults.append(fault := _Fault("exploding_lr", at, left=steps))
        self.callback(optimizer.register_step_pre_hook(explode).remove)
        self.callback(optimizer.register_step_post_hook(put_back).remove)
