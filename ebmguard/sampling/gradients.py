"""The norms of the gradients that a sampler computes, and how sharply its drifts turn."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from .recording import is_opaque

__all__ = ["Gradients"]


class Gradients:
    """The norms of the gradients that a sampler computes of one module, by a hook without a pass.

    A hook copies every gradient, since samplers clip and zero gradients in place, by ``.data``, and
    adds to the sums that tell the sharpness. The norm is taken of the last gradient alone.
    A replayed CUDA graph runs none of this. It writes its norm and its number on the device, where
    the norm of the call that came last is chosen without waiting for it.

    Attributes:
        has_drifts: whether :meth:`follow` gets the chain's drifts; else the hook takes gradients.
        count: number of differentiated calls, without replays.
        output_shape: of the latest call. This and ``is_capturing`` are written by the caller.
        is_capturing: whether a CUDA graph captures that call.
    """

    def __init__(self, batch_dim: int) -> None:
        self.has_drifts = self.is_capturing = False
        self.output_shape = torch.Size()
        self._batch_dim = batch_dim
        self._graphs: dict[tuple[int, ...], Tensor] = {}  # norms, by the shape of the samples
        self._replayed: Tensor | None = None  # the number of the graph that came last; 0 is none
        self._is_new = False  # the latest call has not been differentiated yet
        self._handle: RemovableHandle | None = None
        self._leaf: Tensor | None = None
        self.start()

    def start(self) -> None:
        """Begin a sampler call."""
        self.count = 0
        self._known: Tensor | None = None  # the norm, once it was asked for
        # The gradient whose norm it will be, with the shape of its output.
        self._last: tuple[Tensor, torch.Size] | None = None
        self._shape: tuple[int, ...] = ()  # of that gradient
        self._before: Tensor | None = None  # the drift of the step before
        self._products: list[Tensor] = []  # ⟨g, g'⟩ and ⟨g, g⟩ of consecutive drifts, in turn
        self._chooses = self._replayed is not None
        if self._replayed is not None:
            self._replayed.fill_(0)

    @property
    def norm(self) -> Tensor | None:
        """The gradient norm per sample, of the shape of the output up to ``batch_dim``.

        It is that of the latest differentiated call, or None where it is unknown. From the sampler
        call after the first capture on, replays count as calls (but for what ``torch.func``
        computes), and NaN means unknown. Where graphs differ in batch size, smaller ones are filled
        up with their mean, which changes neither mean nor maximum.
        """
        if self._last is not None:
            self._known, self._last = self._norm(*self._last), None
        return self._known

    @property
    def entries(self) -> int:
        """The number of entries of one sample; 0 where it is unknown, or graphs differ in it."""
        shapes = {*self._graphs, self._shape} if self._chooses else {self._shape}
        sizes = {math.prod(shape[self._batch_dim + 1 :]) for shape in shapes if shape}
        return sizes.pop() if len(sizes) == 1 else 0

    def stop(self) -> None:
        """End the sampler call: the norm becomes that of the eager call or graph run last."""
        if self._handle is not None:
            self._handle.remove()
        norm = self.norm
        self._handle = self._leaf = self._before = None
        if (
            self._replayed is None or not self._chooses
        ):  # before the first replay nothing is written
            return
        norms = list(enumerate(self._graphs.values(), 1))
        if norm is not None:
            norms.append((0, norm.to(self._replayed.device)))
        width = max(norm.shape[-1] for _, norm in norms)
        chosen = torch.full((), torch.nan, device=self._replayed.device)
        for number, norm in norms:
            if short := width - norm.shape[-1]:
                mean = norm.mean(-1, keepdim=True).expand(*norm.shape[:-1], short)
                norm = torch.cat([norm, mean], -1)
            chosen = torch.where(self._replayed == number, norm, chosen)
        self._known = chosen

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Watch the first argument of a module's call that may be differentiated."""
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
    def products(self) -> Tensor | None:
        """The sums over chains and consecutive drifts g, g' of the call, of ⟨g, g'⟩ and ⟨g, g⟩.

        ``(2,)``, or ``(*models, 2)``; None before the second drift, or where drifts are not seen,
        or not all of them separately for every model.
        """
        if len({x.shape for x in self._products}) != 1:
            return None
        pairs = torch.stack(self._products, -1)
        return pairs.reshape(*pairs.shape[:-1], -1, 2).sum(-2)

    def follow(self, drift: Tensor) -> None:
        """Add a step of the chain along this drift, which nobody may change afterwards."""
        drift = torch.view_as_real(drift) if drift.is_complex() else drift
        dims = self._batch_dim
        later = drift.flatten(dims if drift.shape[:dims] == self.output_shape[:dims] else 0)
        later = later.float() if later.dtype.itemsize < 4 else later
        earlier, self._before = self._before, later
        if earlier is None or earlier.shape != later.shape:
            return
        self._products.append(torch.linalg.vecdot(earlier, later))
        self._products.append(torch.linalg.vecdot(earlier, earlier))

    def _record(self, gradient: Tensor) -> None:
        if self._is_new:
            self._is_new = False
            self.count += 1
        if is_opaque(gradient):
            # As one sample inside vmap: it has no norm, and a transform can mark nothing.
            self._known, self._last, self._chooses = None, None, False
            self._before, self._products = None, []
            return
        if gradient.requires_grad:
            gradient = gradient.detach()
        number, shape = 0, gradient.shape
        if not self.is_capturing:
            gradient = gradient.clone()
            self._last, self._shape = (gradient, self.output_shape), shape
            if not self.has_drifts:
                self.follow(gradient)
        elif (norm := self._norm(gradient, self.output_shape)) is None:
            number = -1
        else:
            graph = self._graphs.setdefault(shape, norm)
            if graph is not norm:
                graph.copy_(norm)
            if self._replayed is None:
                self._replayed = torch.empty((), dtype=torch.int64, device=norm.device)
            number = 1 + list(self._graphs).index(shape)
        if self._replayed is not None:
            self._replayed.fill_(number)

    def _norm(self, gradient: Tensor, output: torch.Size) -> Tensor | None:
        """The norm of every sample; None where the members of an ensemble share their samples."""
        shape, dims = gradient.shape, self._batch_dim
        if dims and (len(shape) <= dims or shape[:dims] != output[:dims]):
            return None
        entries = tuple(range(dims + 1, len(shape)))
        norm: Tensor = torch.linalg.vector_norm(gradient, 2, entries) if entries else gradient.abs()
        return norm
