"""Check that the drift of a tempered chain is the factor times its untempered drift."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from .measured import end_point
from .recording import Draw, Evaluation, Recording, is_capturing, is_opaque
from .regression import Step, solve
from .sampler_update import all_alike, differ, followed_function
from .substeps import Substeps

__all__ = ["JOINED", "Drift"]

JOINED = (
    "Other terms join the network's gradient in the sampler (a prior, another network) and stay "
    "untempered: that is right only for a base measure, which is no part of the loss's energies."
)
"""The warning about terms that join the gradient in the sampler."""
_BENT = (
    "The sampler follows a function of {0} that is not linear: of a tempered {0}, another energy"
)
_ELSEWHERE = (
    "The gradients that the sampler took did not come through its calls of {0}: a copy, a forward "
    "that was kept from before, single layers or a compiled twin are untempered"
)
_KEPT = (
    "The sampler takes the values of several outputs of {0}, and no gradient: where gradients are "
    "enabled such values are untempered, so that what flows back to them can be tempered. Let it "
    "return one number a sample"
)
_BY_HAND = (
    "The sampler calls {0} only where its chains have ended, and takes no gradient of it: what "
    "moves them, a score that is written by hand perhaps, is untempered"
)
_VALUES = (
    "The sampler follows a function of several outputs ({1}). What flows back to them is tempered: "
    "its drift is exact. Their values, as a Metropolis test takes them, are those of the whole "
    "energy; for such a test return one number from {0}, or use g.temper(energy) in the sampler."
)
_APART = (
    "The sampler takes no gradient, but the values of several outputs. Each is tempered by itself: "
    "right for their sum, one of them or a draw among them, and wrong for another function such as "
    "their logsumexp. For that return one number from {0}."
)


class Drift(Recording):
    """A recorded sampler call, with everything that flows back through the energy's outputs.

    Any function of several numbers a sample may be followed, see :func:`.tempering.scale`; of one
    number, which is scaled itself, only a linear one.

    Args:
        batch_dim: the dimension of the outputs that counts samples.
        looking: takes the gradient that comes through the network alone; None if nobody does.
        ends: see :class:`Recording`.

    Attributes:
        is_hidden: whether there are calls that are not seen, inside of transforms or compiled code.
    """

    def __init__(self, batch_dim: int, looking: Substeps | None, ends: int | None) -> None:
        super().__init__(ends=ends, on_evaluation=self._take_evaluation, on_call=self._take_call)
        self.looking, self._joins, self._function = looking, False, ""
        self._leading: list[Evaluation] | None = None  # until they are asked for
        self._batch_dim, self._calls = batch_dim, Counter[int]()  # that a backward pass reached
        self._uneven: list[Tensor] = []  # what came back to one number a sample, if not all alike
        self.is_hidden = self._is_wide = self._has_kept = False
        self._uniform = -1
        self._inputs: list[Tensor | None] = []  # until two are unlike

    @property
    def is_tested(self) -> bool:
        """Return whether uniform numbers were drawn after the energy was called (Metropolis)."""
        return 0 <= self._uniform < self.draws.uniform

    @property
    def follows(self) -> str:
        """The function of several outputs: "sum", "logsumexp", "one output", "another function".

        "values" where it takes no more than these; empty where it is not seen.
        """
        is_alone = self._is_wide and not (self.draws.reached or self.is_hidden)
        return "values" if is_alone else self._function

    @property
    def caveat(self) -> str:
        """A caveat about the values of several outputs, with {0} for the energy; or empty."""
        if self.follows == "values":
            return _APART
        is_other = self.follows not in ("", "sum") or (self.follows and self.is_tested)
        return _VALUES.format("{0}", self.follows) if is_other else ""

    def untempered(self, result: object) -> str:
        """The reason why the gradient is untempered, with {0} for the energy; or empty."""
        if not (self.draws.reached or self.is_hidden):
            if self.draws.strays:
                return _ELSEWHERE
            if self._has_kept:
                return _KEPT
            if self._is_by_hand(result):
                return _BY_HAND
        if any(stray.note for stray in self._leading_strays(result)):
            return _ELSEWHERE
        is_known = len(self._uneven) > 1 or all(c.numel() == 1 for c in self._uneven)
        return "" if is_known and all_alike(self._uneven) else _BENT

    def _is_by_hand(self, result: object) -> bool:
        """Return whether chains were where they end when the energy was first called.

        One draw may be where they start, as in the first call of an independence sampler.
        """
        ends = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.numel()]
        is_over = len(self._inputs) == 1 and all(_are_same(x, self._inputs[0]) for x in ends)
        draws = [d for d in self.draws.log if ends and d and d.values.numel() == ends[0].numel()]
        return len(draws) > 1 and is_over and not self.is_tested

    def is_joined(self, result: object) -> bool:
        """Return whether other terms join the gradient, in a call that has returned ``result``."""
        return self._joins or self._is_joined_behind() or bool(self._leading_strays(result))

    def _leading_strays(self, result: object) -> list[Evaluation]:
        """The strays that lead the chain."""
        if self._leading is None:
            ways = (self._joined_strays, self._alternating_strays) if self.draws.strays else ()
            self._leading = [stray for way in ways for stray in way(result)]
        return self._leading

    def _take_call(self, energy: Any, args: Any, kwargs: Any, output: Any) -> None:
        if self._uniform < 0:
            self._uniform = self.draws.uniform
        if not isinstance(output, Tensor) or is_opaque(output) or is_capturing():
            self.is_hidden = True
            return
        if len(self._inputs) < 2 and not self.draws.reached:
            tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.ndim)
            x = next((x.detach() for x in tensors if x.is_floating_point()), None)
            if not self._inputs or not _are_same(x, self._inputs[0]):
                self._inputs.append(None if x is None else x.clone())
        self.is_hidden |= forward_ad._current_level >= 0
        is_wide = output.numel() > output.shape[: self._batch_dim + 1].numel()
        self._is_wide |= is_wide
        if output.requires_grad:
            self._has_kept |= is_wide
            copy = output.detach().clone()
            output.register_hook(lambda c: self._take_cotangent(copy, c))  # type: ignore[no-untyped-call]

    def _take_cotangent(self, output: Tensor, cotangent: Tensor) -> None:
        self.draws.reached += 1
        self._calls[torch._C._current_graph_task_id()] += 1
        if is_opaque(cotangent) or not cotangent.numel():
            return
        c, name = cotangent.detach(), followed_function(output, cotangent)
        is_even = not differ(c, c.flatten()[0])
        if math.prod(output.shape[self._batch_dim + 1 :]) > 1:
            # Where all outputs are one number, the two have the same gradient.
            self._function = "" if is_even and name == "logsumexp" else name
        elif not is_even or c.numel() == 1:
            self._uneven.append(c.clone())

    def _take_evaluation(self, evaluation: Evaluation) -> None:
        if self.looking is not None:
            self.looking.look(evaluation)
        inner, whole = evaluation.inner_gradient, evaluation.gradient
        # A second call of the pass, at -x, gives x a gradient, too.
        is_alone = self._calls[torch._C._current_graph_task_id()] == 1
        self._joins |= is_alone and inner is not None and whole is not None and differ(inner, whole)

    def _is_joined_behind(self) -> bool:
        """Return whether terms join where the input is what the sampler moves, in another shape."""
        for point in self.evaluations if max(self._calls.values(), default=0) == 1 else ():
            inner, whole = point.gradient, point.leaf_gradient
            if inner is not None and whole is not None:
                is_same = torch.equal(point.leaf.flatten(), point.x.flatten())
                return is_same and differ(inner.flatten(), whole.flatten())
        return False

    def _joined_strays(self, result: object) -> list[Evaluation]:
        """The strays of which a step is made together with the energy's gradient, but not alone."""
        draws, points = self.draws, self.evaluations[:2]
        points += end_point(points[-1], result, len(draws.log)) if len(points) == 1 else []
        if len(points) < 2 or points[0].leaf.shape != points[1].leaf.shape:
            return []
        (x, gradient), (end, _) = points[0].point, points[1].point
        log = draws.log[: points[1].draws_before]
        noises = [d for d in log if d is not None and not torch.equal(d.values, x)][-4:]
        if not solve(x, gradient, end, noises).why:
            return []
        strays = (stray for stray in draws.strays if stray.x.shape == x.shape)
        terms = ((stray, [*noises, Draw(stray.point[1], None)]) for stray in strays)
        return [stray for stray, parts in terms if _step_along(gradient, x, end, parts)]

    def _alternating_strays(self, result: object) -> list[Evaluation]:
        """The strays that make a step alone, amid those of the energy or of its layers.

        A chain may start from where another network has led it, and be denoised by one at its end.
        """
        draws, points, leading = self.draws, self.evaluations, list[Evaluation]()
        for stray in draws.strays if points else ():
            (x, gradient), now = stray.point, stray.draws_before
            is_amid = stray.note or points[0].draws_before < now
            if not is_amid or any(e.leaf.shape == x.shape and e.leaf.equal(x) for e in points):
                continue
            later = [e for e in (*points, *draws.strays) if e.draws_before > now]
            later.sort(key=lambda e: e.draws_before)
            later += end_point(stray, result, len(draws.log))
            if later and later[0].leaf.shape == x.shape and x.numel():
                log = draws.log[max(0, now - 4) : later[0].draws_before]
                noises = [d for d in log if d is not None and not torch.equal(d.values, x)]
                step = _step_along(gradient, x, later[0].leaf, noises)
                if step and (stray.note or now < points[-1].draws_before or step.noises):
                    leading.append(stray)
        return leading


def _are_same(x: Tensor | None, y: Tensor | None) -> bool:
    """Return whether both are plain tensors of the same numbers."""
    if x is None or y is None or not type(x) is type(y) is Tensor or x.is_meta or is_opaque(x):
        return False
    kinds = [(z.shape, z.dtype, z.device, z.layout) for z in (x, y)]
    return kinds[0] == kinds[1] and torch.equal(x, y)


def _step_along(gradient: Tensor, x: Tensor, end: Tensor, draws: Sequence[Draw]) -> Step | None:
    """The solved step from x to end; None where it has no part along the gradient."""
    step = solve(x, gradient, end, draws)
    least = 1e-3 * (end - x).abs().mean() / gradient.abs().mean()
    return step if not step.why and bool(abs(step.step) > least) else None
