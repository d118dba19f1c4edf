"""What a sampler's differentiated calls of the energy show, read from gradients as they pass by.

Tensor hooks on the inputs of the module that is sampled see every gradient that the sampler
computes, so that nothing here needs a pass of its own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils.hooks import RemovableHandle

from ..energies import has_models

__all__ = ["Evaluation", "Evaluations"]


@dataclass(frozen=True)
class Evaluation:
    """One differentiated call of the energy module, in copies.

    Attributes:
        x: its input.
        output: its output as the sampler saw it, tempered.
        cotangent: gradient, with respect to the output, of what the sampler differentiated: 1
            where that is the sum over samples, 1/B where it is their mean, -1 where it is negated.
        gradient: the same with respect to x.
    """

    x: Tensor
    output: Tensor
    cotangent: Tensor
    gradient: Tensor


class Evaluations:
    """Watches the calls of one module during a sampler call.

    Args:
        models: model dimensions of an ensemble.

    Attributes:
        norm: gradient norm per sample of the latest differentiated call, or None where it cannot
            be told.
        entries: number of entries of one sample there.
        count: how many calls were differentiated.
        is_capturing: whether calls are being captured as a CUDA graph. Their norm has no value
            before the first replay, and every replay refreshes it; no call is remembered.
    """

    def __init__(self, models: torch.Size) -> None:
        self.norm: Tensor | None = None
        self.entries = 0
        self.count = 0
        self.is_capturing = False
        self._captured_norm: Tensor | None = None  # what the latest graph writes
        self._models = models
        self._remembers = False
        self._is_new = False  # the latest call has not been differentiated yet
        self._handle: RemovableHandle | None = None
        self._leaf: Tensor | None = None
        self._arrived: list[tuple[Tensor, Tensor, Tensor]] = []
        self._ends: deque[Evaluation] = deque(maxlen=2)

    @property
    def last_step(self) -> tuple[Evaluation, Evaluation] | None:
        """The last two differentiated calls, in their order.

        None where there were fewer, where a gradient belongs to no one call, and inside functional
        transforms.
        """
        if len(self._ends) < 2:
            return None
        first, second = self._ends
        return first, second

    def start(self, *, remember: bool) -> None:
        """A sampler call begins.

        Args:
            remember: keep :attr:`last_step`, at the price of copies of each call's samples.
        """
        self.norm = self._captured_norm
        if self.norm is not None:
            self.norm.fill_(torch.nan)  # until a replay refreshes it
        self.count = 0
        self._remembers = remember
        self._arrived = []  # a new one: graphs of earlier sampler calls may still be differentiated
        self._ends.clear()

    def stop(self) -> None:
        """The sampler call is over: its samples are watched no longer."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = self._leaf = None

    def forget(self) -> None:
        """Let go of the memory behind :attr:`last_step`."""
        self._ends.clear()

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """The module is called; returns those of its arguments whose gradient is watched."""
        if not torch.is_grad_enabled():
            return None
        for x in (*args, *kwargs.values()):
            if isinstance(x, Tensor) and x.requires_grad and x.ndim:
                self._is_new = True
                # A sampler may move one leaf in place: its hook stays, and must not pile up.
                if x is not self._leaf:
                    self.stop()
                    self._leaf = x if x.is_leaf else None
                    self._handle = x.register_hook(self._record)  # type: ignore[no-untyped-call]
                return x
        return None

    def leave(self, x: Tensor | None, output: Any) -> None:
        """The call returns.

        Args:
            x: what :meth:`enter` returned.
            output: the energies, or whatever the module returns.
        """
        if not self._remembers or self.is_capturing or x is None:
            return
        if not isinstance(output, Tensor) or output.grad_fn is None:
            return  # on a leaf the hook would stay
        if is_functorch_wrapped_tensor(x) or is_functorch_wrapped_tensor(output):
            return  # what is wrapped must not outlive its transform
        # Copies: samplers move the one in place, compiled networks may reuse the other's memory.
        copies = x.detach().clone(), output.detach().clone()
        arrived = self._arrived

        def arrive(cotangent: Tensor) -> None:
            arrived.append((*copies, cotangent.detach().clone()))

        output.register_hook(arrive)  # type: ignore[no-untyped-call]

    def _record(self, grad: Tensor) -> None:
        self.count += self._is_new
        self._is_new = False
        is_wrapped = is_functorch_wrapped_tensor(grad)
        if self._remembers and not is_wrapped:
            self._conclude(grad)
        # At once: samplers that clip do it in place on this very tensor.
        if is_wrapped or not has_models(grad, self._models):
            # One sample inside vmap, or samples that all members share: no norms can be told.
            self._saw(None)
            return
        each = grad.detach().reshape(*grad.shape[: len(self._models) + 1], -1)
        self.entries = each.shape[-1]
        self._saw(torch.linalg.vector_norm(each, dim=-1))

    def _saw(self, norm: Tensor | None) -> None:
        if self.is_capturing:
            self._captured_norm = norm
        else:
            self.norm = norm

    def _conclude(self, grad: Tensor) -> None:
        # Of one output alone: a gradient through several calls is that of no one energy.
        arrived = self._arrived.copy()
        self._arrived.clear()
        if len(arrived) == 1:
            self._ends.append(Evaluation(*arrived[0], grad.detach().clone()))
        else:
            self._ends.clear()
