"""What a sampler's differentiated calls of the energy show, without a pass of its own.

Tensor hooks on the inputs of the module that is sampled see every gradient that passes by.
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

__all__ = ["DifferentiatedCall", "GradientWatcher"]


@dataclass(frozen=True)
class DifferentiatedCall:
    """One differentiated call of the energy module, in copies.

    Attributes:
        output: as the sampler saw it, tempered.
        cotangent: gradient, with respect to the output, of what the sampler differentiated: 1
            where that is the sum over samples, 1/B where it is their mean, -1 where it is negated.
        gradient: the same with respect to x.
    """

    x: Tensor
    output: Tensor
    cotangent: Tensor
    gradient: Tensor


class GradientWatcher:
    """Watches the gradients that a sampler computes of one module.

    A replayed CUDA graph runs none of this. Each one writes its norm and its number on the device,
    where the norm of the call that came last is chosen without waiting for it.

    Attributes:
        norm: gradient norm per sample, ``(*models, B)``, of the latest differentiated call, or None
            where it cannot be told. From the sampler call after the first capture on, replays count
            as calls (but for what ``torch.func`` computes), and NaN means that the norm cannot be
            told. Where graphs differ in batch size, smaller ones are filled up with their mean,
            which changes neither mean nor maximum.
        entries: number of entries of one sample there; 0 where graphs differ in it.
        count: how many calls were differentiated, without replays.
        last: the last two differentiated calls, where they are remembered. None stay where a
            gradient belongs to no one call, and inside functional transforms.
        is_capturing: whether calls are being captured as a CUDA graph. None of them is remembered.
    """

    def __init__(self, models: torch.Size) -> None:
        self.norm: Tensor | None = None
        self.entries = 0
        self.count = 0
        self.last: deque[DifferentiatedCall] = deque(maxlen=2)
        self.is_capturing = False
        self._models = models
        self._graphs: dict[tuple[int, ...], Tensor] = {}  # norms, by the shape of the samples
        self._ran: Tensor | None = None  # the number of the one replayed last; 0 is none of them
        self._chooses = False
        self._remembers = False
        self._is_new = False  # the latest call has not been differentiated yet
        self._handle: RemovableHandle | None = None
        self._leaf: Tensor | None = None
        self._arrived: list[tuple[Tensor, Tensor, Tensor]] = []

    def start(self, *, remember: bool) -> None:
        """A sampler call begins; ``remember`` fills :attr:`last`, with copies of each call."""
        self.norm, self.entries, self.count = None, 0, 0
        self._chooses = self._ran is not None
        self._mark(0)
        self._remembers = remember
        self._arrived = []  # a new one: graphs of earlier sampler calls may still be differentiated
        self.last.clear()

    def stop(self) -> None:
        """The sampler call is over: its samples are watched no longer."""
        self._unhook()
        if self._chooses:  # before the first replay, graphs have written nothing
            self._choose()

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """The module is called; returns the argument whose gradient is watched."""
        if not torch.is_grad_enabled():
            return None
        for x in (*args, *kwargs.values()):
            if isinstance(x, Tensor) and x.requires_grad and x.ndim:
                self._is_new = True
                # A sampler may move one leaf in place: its hook stays, and must not pile up.
                if x is not self._leaf:
                    self._unhook()
                    self._leaf = x if x.is_leaf else None
                    self._handle = x.register_hook(self._record)  # type: ignore[no-untyped-call]
                return x
        return None

    def leave(self, x: Tensor | None, output: Any) -> None:
        """The call with `x`, as :meth:`enter` returned it, returns the output."""
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
        if is_functorch_wrapped_tensor(grad):
            # One sample inside vmap: no norm can be told, nor marked from inside a transform.
            self.norm, self._chooses = None, False
            return
        if self._remembers:
            # Of one output alone: a gradient through several calls is that of no one energy.
            if len(self._arrived) == 1:
                self.last.append(DifferentiatedCall(*self._arrived[0], grad.detach().clone()))
            else:
                self.last.clear()
            self._arrived.clear()
        norm, shape = None, torch.Size([0])  # of samples that all members share
        if has_models(grad, self._models):
            # At once: samplers that clip do it in place on this very tensor.
            each = grad.detach().reshape(*grad.shape[: len(self._models) + 1], -1)
            norm, shape = torch.linalg.vector_norm(each, dim=-1), each.shape
        if not self.is_capturing:
            self.norm, self.entries = norm, shape[-1]
            self._mark(0)
        elif norm is None:
            self._mark(-1)
        else:
            graph = self._graphs.setdefault(shape, norm)
            if graph is not norm:
                graph.copy_(norm)
            if self._ran is None:
                self._ran = torch.empty((), dtype=torch.int64, device=norm.device)
            self._mark(1 + list(self._graphs).index(shape))

    def _mark(self, number: int) -> None:
        if self._ran is not None:
            self._ran.fill_(number)

    def _choose(self) -> None:
        """Set the norm to that of the eager call or the graph that ran last."""
        assert self._ran is not None
        ran = list(enumerate(self._graphs.values(), 1))
        entries = {shape[-1] for shape in self._graphs}
        if self.norm is not None:
            ran.append((0, self.norm.to(self._ran.device)))
            entries.add(self.entries)
        width = max(norm.shape[-1] for _, norm in ran)
        chosen = torch.full((), torch.nan, device=self._ran.device)
        for number, norm in ran:
            if short := width - norm.shape[-1]:
                rest = norm.mean(-1, keepdim=True).expand(*norm.shape[:-1], short)
                norm = torch.cat([norm, rest], -1)
            chosen = torch.where(self._ran == number, norm, chosen)
        self.norm, self.entries = chosen, entries.pop() if len(entries) == 1 else 0

    def _unhook(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._handle = self._leaf = None
