"""Whether the drift of a tempered chain is the factor times the gradient that it had without."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .measured import end_of
from .moves import are_one, differ, function_of
from .recording import Draw, Evaluation, Recording, is_opaque
from .steps import solve
from .substeps import Substeps

__all__ = ["Drift"]

_JOINED = (
    "Other terms join {0}'s gradient in the sampler, such as a prior or another network's. They "
    "are not tempered"
)
_BENT = (
    "The sampler follows a function of {0} that is not linear, which is another energy of a "
    "tempered {0}"
)
_ELSEWHERE = (
    "The gradients that the sampler took did not come through its calls of {0}: a copy, a forward "
    "that was kept from before, single layers or a compiled twin are untempered"
)


class Drift(Recording):
    """Records a sampler call, and looks at all that flows back through the energy's outputs.

    Several numbers a sample may be followed by any function, see :func:`.tempering.scale`. One
    number a sample is scaled itself, so that what is followed must be linear in it.

    Args:
        batch_dim: of the outputs, that which counts samples.
        looking: takes the gradient that comes through the network alone; None if nobody does.
        ends: see :class:`Recording`.

    Attributes:
        is_sure: whether outputs that differ were followed: where all are one, all functions are.
        follows: the function of several outputs that the sampler follows: "sum", "logsumexp",
            "one output" or "another function"; empty where it is not seen.
    """

    def __init__(self, batch_dim: int, looking: Substeps | None, ends: int | None) -> None:
        super().__init__(ends=ends)
        self.looking, self.follows, self.is_sure = looking, "", False
        # Of each backward pass: how many calls it reached; their inputs, and what joined there.
        self._calls = Counter[int]()
        self._joined: dict[int, list[tuple[int, bool]]] = {}
        self._batch_dim, self._first = batch_dim, torch.empty(0)
        # What came back to outputs of one number a sample, unless all samples have the same.
        self._uneven: list[Tensor] = []
        self._is_hidden, self._uniform = False, -1

    @property
    def joins(self) -> bool:
        """Whether other terms joined the gradient that came through the network alone."""
        # A call at -x gives x a gradient, too.
        passes = [(self._calls[i], each) for i, each in self._joined.items()]
        alone = [x for calls, x in passes if len({of for of, _ in x}) == 1 and len(x) == calls]
        return any(differs for each in alone for _, differs in each)

    @property
    def is_tested(self) -> bool:
        """Whether uniform numbers were drawn after the energy was called, as by Metropolis."""
        return 0 <= self._uniform < self.draws.uniform

    def wrong(self, result: object) -> str:
        """Why the drift of a call that has returned this is not tempered, with {0} for the energy.

        Empty where nothing is seen.
        """
        if self.draws.strays and not (self.draws.reached or self._is_hidden):
            return _ELSEWHERE
        if self.joins or self._is_joined_behind() or self._is_joined_beside(result):
            return _JOINED
        is_told = len(self._uneven) > 1 or all(c.numel() == 1 for c in self._uneven)
        return "" if is_told and are_one(self._uneven) else _BENT

    def call(
        self, energy: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """See :meth:`Recording.call`."""
        is_nested = self._is_inside
        output = super().call(energy, function, args, kwargs)
        if is_nested:
            return output
        if self._uniform < 0:
            self._uniform = self.draws.uniform
        if not isinstance(output, Tensor) or is_opaque(output):
            self._is_hidden = True
        elif output.requires_grad:
            kept = output.detach().clone()
            output.register_hook(lambda c: self._came_back(kept, c))  # type: ignore[no-untyped-call]
        return output

    def _came_back(self, output: Tensor, cotangent: Tensor) -> None:
        self.draws.reached += 1
        self._calls[torch._C._current_graph_task_id()] += 1
        if is_opaque(cotangent) or not cotangent.numel():
            return
        c, per_sample = cotangent.detach(), output.shape[self._batch_dim + 1 :]
        self._first = self._first if self._first.numel() else output.flatten()[0]
        self.is_sure |= differ(output, self._first)
        is_even = not differ(c, c.flatten()[0])
        if math.prod(per_sample) > 1:
            name = function_of(output, c)
            # Where all outputs are one number, the two have the same gradient.
            self.follows = name if not is_even else "" if name == "logsumexp" else "sum"
        elif not is_even or c.numel() == 1:
            self._uneven.append(c.clone())

    def _keep(self, seen: Evaluation) -> None:
        if self.looking is not None:
            self.looking.look(seen)
        inner, whole = seen.inner_gradient, seen.gradient
        joins = inner is not None and whole is not None and differ(inner, whole)
        at = torch._C._current_graph_task_id()
        self._joined.setdefault(at, []).append((seen.of, joins))
        super()._keep(seen)

    def _is_joined_beside(self, result: object) -> bool:
        """Whether a step is made of the energy's gradient and draws with another gradient alone."""
        draws, seen = self.draws, self.evaluations[:2]
        seen += end_of(seen[-1], result, len(draws.log)) if len(seen) == 1 else []
        others = [Draw(x, None) for x in draws.strays if seen and x.shape == seen[0].leaf.shape]
        if not others or len(seen) < 2 or seen[0].leaf.shape != seen[1].leaf.shape:
            return False
        (x, gradient), (end, _) = seen[0].point, seen[1].point
        noises = [
            d for d in draws.log[: seen[1].draws_before] if d and not torch.equal(d.values, x)
        ]
        if not solve(x, gradient, end, noises[-4:]).why:
            return False
        joined = (solve(x, gradient, end, [*noises[-4:], other]) for other in others)
        least = 1e-3 * (end - x).abs().mean() / gradient.abs().mean()
        return any(not step.why and bool(abs(step.step) > least) for step in joined)

    def _is_joined_behind(self) -> bool:
        """Whether terms join where the input is what the sampler moves, in another shape."""
        if not self.evaluations:
            return False
        first, *others = self.evaluations
        if first.leaf_gradient is None or first.gradient is None:
            return False
        is_alone = not (others and torch.equal(others[0].leaf, first.leaf))
        is_same = torch.equal(first.leaf.flatten(), first.x.flatten())
        flat = first.gradient.flatten(), first.leaf_gradient.flatten()
        return is_alone and is_same and differ(*flat)
