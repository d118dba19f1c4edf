"""What the gradients tell that a sampler computes: their norms, and how sharply its drifts turn."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from .recording import is_opaque

__all__ = ["Gradients"]


class Gradients:
    """Norms of the gradients that a sampler computes of one module, by a hook without a pass.

    A hook copies each, since samplers clip and zero gradients in place, by ``.data``, and sums what
    tells their sharpness. The norm is taken of the last one alone.
    A replayed CUDA graph runs none of this. Each one writes its norm and its number on the device,
    where the norm of the call that came last is chosen without waiting for it.

    Attributes:
        is_told: of its drifts by :meth:`follow`, instead of seeing gradients.
    """

    def __init__(self, batch_dim: int) -> None:
        self._known: Tensor | None = None  # the norm, once it was asked for
        self.is_told = False
        self.count = 0  # of the differentiated calls, without replays
        self.output_shape = torch.Size()  # of the latest call: who makes it writes this
        self.is_capturing = False  # as a CUDA graph: likewise
        self._batch_dim = batch_dim
        # The gradient whose norm it will be, and the shape of its output.
        self._last: tuple[Tensor, torch.Size] | None = None
        self._shape: tuple[int, ...] = ()  # of that one
        self._graphs: dict[tuple[int, ...], Tensor] = {}  # norms, by the shape of the samples
        self._ran: Tensor | None = None  # the number of the one replayed last; 0 is none of them
        self._chooses = False
        self._is_new = False  # the latest call has not been differentiated yet
        self._handle: RemovableHandle | None = None
        self._leaf: Tensor | None = None
        self._before: Tensor | None = None
        self._products: list[Tensor] = []  # ⟨g, g'⟩ and ⟨g, g⟩ of consecutive drifts, in turn

    @property
    def norm(self) -> Tensor | None:
        """Gradient norm per sample, of the shape of the output up to ``batch_dim``.

        Of the latest differentiated call, or None where it cannot be told. From the sampler call
        after the first capture on, replays count as calls (but for what ``torch.func`` computes),
        and NaN means that the norm cannot be told. Where graphs differ in batch size, smaller ones
        are filled up with their mean, which changes neither mean nor maximum.
        """
        if self._last is not None:
            self._known, self._last = self._norm(*self._last), None
        return self._known

    @property
    def entries(self) -> int:
        """The number of entries of one sample; 0 where it is unknown, or graphs differ in it."""
        shapes = {*self._graphs, self._shape} if self._chooses else {self._shape}
        found = {math.prod(each[self._batch_dim + 1 :]) for each in shapes if each}
        return found.pop() if len(found) == 1 else 0

    def start(self) -> None:
        """A sampler call begins."""
        self._known, self._last, self._shape, self.count = None, None, (), 0
        self._before, self._products = None, []
        self._chooses = self._ran is not None
        if self._ran is not None:
            self._ran.fill_(0)

    def stop(self) -> None:
        """The sampler call is over: the norm becomes that of the eager call or graph run last."""
        if self._handle is not None:
            self._handle.remove()
        norm = self.norm
        self._handle = self._leaf = self._before = None
        if self._ran is None or not self._chooses:  # before the first replay nothing is written
            return
        ran = list(enumerate(self._graphs.values(), 1))
        if norm is not None:
            ran.append((0, norm.to(self._ran.device)))
        width = max(norm.shape[-1] for _, norm in ran)
        chosen = torch.full((), torch.nan, device=self._ran.device)
        for number, norm in ran:
            if short := width - norm.shape[-1]:
                rest = norm.mean(-1, keepdim=True).expand(*norm.shape[:-1], short)
                norm = torch.cat([norm, rest], -1)
            chosen = torch.where(self._ran == number, norm, chosen)
        self._known = chosen

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The module is called: the first argument that may be differentiated is watched."""
        if not torch.is_grad_enabled():
            return
        for x in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(x, Tensor) and x.requires_grad and x.ndim:
                self._is_new = True
                # A sampler may move one leaf in place: its hook stays, and must not pile up.
                if x is not self._leaf:
                    if self._handle is not None:
                        self._handle.remove()
                    self._leaf = x if x.is_leaf else None
                    self._handle = x.register_hook(self._record)  # type: ignore[no-untyped-call]
                return

    @property
    def follows(self) -> Tensor | None:
        """Sums over chains and consecutive drifts g, g' of the call, of ⟨g, g'⟩ and of ⟨g, g⟩.

        ``(2,)``, or ``(*models, 2)``; None before the second drift, or where they are not seen, or
        not told apart by model throughout.
        """
        if len({x.shape for x in self._products}) != 1:
            return None
        pairs = torch.stack(self._products, -1)
        return pairs.reshape(*pairs.shape[:-1], -1, 2).sum(-2)

    def follow(self, drift: Tensor) -> None:
        """The chain takes a step along this drift, which stays as it is."""
        drift = torch.view_as_real(drift) if drift.is_complex() else drift
        before, self._before = self._before, drift
        if before is None or before.shape != drift.shape:
            return
        at = self._batch_dim
        at = at if drift.shape[:at] == self.output_shape[:at] else 0
        wide = torch.promote_types(drift.dtype, torch.float32)
        one, other = before.flatten(at).to(wide), drift.flatten(at).to(wide)
        self._products += [torch.linalg.vecdot(one, other), torch.linalg.vecdot(one, one)]

    def _record(self, grad: Tensor) -> None:
        if self._is_new:
            self._is_new = False
            self.count += 1
        if is_opaque(grad):
            # As one sample inside vmap: no norm can be told, nor marked from inside a transform.
            self._known, self._last, self._chooses = None, None, False
            self._before, self._products = None, []
            return
        if grad.requires_grad:
            grad = grad.detach()
        number = 0
        if not self.is_capturing:
            own = grad.clone()
            self._last, self._shape = (own, self.output_shape), grad.shape
            if not self.is_told:
                self.follow(own)
        elif (norm := self._norm(grad, self.output_shape)) is None:
            number = -1
        else:
            shape = grad.shape
            graph = self._graphs.setdefault(shape, norm)
            if graph is not norm:
                graph.copy_(norm)
            if self._ran is None:
                self._ran = torch.empty((), dtype=torch.int64, device=norm.device)
            number = 1 + list(self._graphs).index(shape)
        if self._ran is not None:
            self._ran.fill_(number)

    def _norm(self, grad: Tensor, output: torch.Size) -> Tensor | None:
        """Of each sample; None where the members of an ensemble share theirs."""
        shape, at = grad.shape, self._batch_dim
        if at and (len(shape) <= at or shape[:at] != output[:at]):
            return None
        inner = tuple(range(at + 1, len(shape)))
        norm: Tensor = torch.linalg.vector_norm(grad, 2, inner) if inner else grad.abs()
        return norm
