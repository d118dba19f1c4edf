"""How a sampler moves its chains, as finer steps need to know it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .measured import end_of, spread, steps_of
from .recording import Draw, Evaluation
from .steps import Step

__all__ = ["Moves", "are_one", "differ", "function_of"]

_ALIKE = 1e-4  # of numbers that are the same but for rounding
_SURE = 4.0  # standard errors
_KNOWN = 0.01  # by which a size may be off
_MOST = 0.7  # of the steps must be told


@dataclass(frozen=True)
class Moves:
    """How a sampler moves: x' = clamp(x + a t - decay x + c n), with t = cut(gradient - pull x).

    The gradient is that of the module's output as the sampler differentiates it; n is normal.
    """

    sizes: list[list[float]]  # a and c of each step; one pair where they are alike
    places: list[list[int]]  # of n among a call's draws: its number less those before; row or -1
    std: float = 1.0  # of the draws
    decay: float = 0.0
    pull: float = 0.0
    low: float = -math.inf
    high: float = math.inf
    bound: float = math.inf  # of the drift's entries; below 0, less that of its norm
    is_logsumexp: bool = False  # whether the sampler follows that of the output, else the output
    # Where each gradient follows its noise: the number of the call's first, and the end of them.
    noise_first: tuple[int, int] | None = None

    def cotangent(self, output: Tensor, seen: Tensor) -> Tensor:
        """What comes back to an output, where ``seen`` came back to another one of the step."""
        if not self.is_logsumexp:
            return seen
        return output.detach().softmax(-1) * seen.sum(-1, keepdim=True)

    def drift(self, x: Tensor, gradient: Tensor) -> Tensor:
        """t at x, where the module's own gradient is this."""
        drift = gradient - self.pull * x if self.pull else gradient
        if self.bound == math.inf:
            return drift
        if self.bound > 0:
            return drift.clamp(-self.bound, self.bound)
        norm = torch.linalg.vector_norm(drift.flatten(1), 2, 1)
        by: Tensor = (-self.bound / norm).clamp(max=1.0)
        return drift * by.reshape(-1, *[1] * (drift.ndim - 1))

    def clamped(self, x: Tensor) -> Tensor:
        """x in the range that the sampler keeps to."""
        return x if self.low == -math.inf == -self.high else x.clamp(self.low, self.high)

    @classmethod
    def of(
        cls,
        evaluations: Sequence[Evaluation],
        draws: Sequence[Draw | None],
        result: object = None,
    ) -> Moves | str:
        """From a recorded call that has returned this; or why it cannot be told, in words."""
        if not evaluations:
            return "no gradient is seen"
        pulls = list[float]()
        for seen in evaluations:
            if isinstance(pull := _pull(seen), str):
                return pull
            pulls.append(pull)
        is_logsumexp = not are_one([seen.cotangent for seen in evaluations])
        functions = {function_of(seen.output, seen.cotangent) for seen in evaluations}
        if is_logsumexp and functions != {"logsumexp"}:
            return "it follows a function of the network's output"
        last = evaluations[-1]
        every = [*evaluations, *end_of(last, result, len(draws))]
        steps = [(seen, step) for seen, step in steps_of(every, draws) if step.moved > 0]
        told = [(seen, step) for seen, step in steps if not step.why]
        if any(a.uniform_before < b.uniform_before for a, b in pairwise(evaluations)):
            return "it draws uniform numbers between its steps, as for a Metropolis test"
        if len(told) < max(1, _MOST * len(steps)):
            return next((step.why for _, step in steps if step.why), "nothing moves between calls")
        if any(abs(step.momentum) > _ALIKE for _, step in told):
            return "it has momentum"
        if any(len(step.noises) > 1 for _, step in told):
            return "a step uses several draws"
        if any(_SURE * step.step_error > _KNOWN * abs(step.step) for _, step in told):
            return "rounding hides the gradient"
        sizes = [[step.step, sum(x.factor for x in step.noises)] for _, step in told]
        noises = [x for _, step in told for x in step.noises]
        places = [
            next(([x.number - seen.draws_before, x.row] for x in step.noises), [0, -1])
            for seen, step in told
            if noises
        ]
        noise_first, clamps = None, [step.clamp for _, step in told]
        if (found := _noise_first(told, draws, ends=told[-1][0] is last)) is not None:
            noise_first = (found, last.draws_before)
            if told[-1][0] is last:
                told, steps, sizes, places = told[:-1], steps[:-1], sizes[:-1], places[:-1]
        error = max(step.step_error / abs(step.step) for _, step in told)
        varies = max(spread(of) if any(of) else 0.0 for of in zip(*sizes, strict=True))
        moved = [step.step * float(seen.point[1].norm()) for seen, step in told]
        is_one = varies <= max(_ALIKE, _SURE * error) and all(x == places[0] for x in places)
        if is_one:
            sizes, places = sizes[-1:], places[-1:]
        elif spread(moved) < 0.1 * spread([a for a, _ in sizes]):
            return "its gradient is clipped by the norm of the batch"
        elif len(told) < len(steps) or any(seen.follows_gap for seen in evaluations):
            return "its steps differ along the chain, and not all of them were seen"
        elif noise_first:
            return "its noise comes before its gradient, in steps that differ along the chain"
        elif len(told) < len(evaluations):  # the last one goes on as they did
            sizes.append([each * each / before for before, each in zip(*sizes[-2:], strict=True)])
            places.append([2 * each - before for before, each in zip(*places[-2:], strict=True)])
        bound = min((step.bound for _, step in told), key=abs)
        scalable = all(_is_one_of(draws[x.number], last.x, x.row) for x in noises)
        is_cut = bound < math.inf and (noise_first or (places and places[0][0] < 0))
        if is_cut or (noise_first and noise_first[0] < 0):
            scalable = False  # what the gradient is given for a draw would be cut
        if noises and not scalable:
            (a, c), g = sizes[-1], last.point[1]
            if abs(a) * float(g.square().mean().sqrt()) < abs(c):
                return "its draws cannot be scaled, and are larger than its drift"
            places, noise_first = [], None
        lows, highs = zip(*clamps, strict=True)
        return cls(
            sizes,
            places,
            std=noises[-1].std if noises else 1.0,
            decay=statistics.median(step.decay for _, step in told),
            pull=max(pulls, key=abs),
            low=min((x for x in lows if x is not None), default=-math.inf),
            high=max((x for x in highs if x is not None), default=math.inf),
            bound=bound,
            is_logsumexp=is_logsumexp,
            noise_first=noise_first,
        )


def _noise_first(
    told: Sequence[tuple[Evaluation, Step]], draws: Sequence[Draw | None], *, ends: bool
) -> int | None:
    """The number of a call's first noise where each gradient follows its own, as in IGEBM.

    Such a chain begins with a noise, and ends without one. None: it is another chain; -1: that is
    not sure. ``ends``: whether the last step is told.
    """
    (seen, step), *others = told
    if not (others and step.noises) or (ends and told[-1][1].noises):
        return None
    noise, after = step.noises[0], others[0][0]
    number = noise.number - (after.draws_before - seen.draws_before)
    draw = draws[number] if 0 <= number < seen.draws_before else None
    y = seen.point[0].cpu().double().flatten()
    if draw is None or draw.values.numel() != y.numel():
        return None
    n = draw.values.cpu().double().flatten() / noise.std
    n, y = n - n.mean(), y - y.mean()
    factor = float(n @ y / (n @ n))
    error = float((y - factor * n).norm() / n.norm()) / len(y) ** 0.5
    is_all = error < _ALIKE * abs(factor)  # the chain may as well start from noise
    if not is_all and abs(factor - noise.factor) > _SURE * error:
        return None
    is_sure = not is_all and abs(noise.factor) > _SURE * error
    if ends and is_sure:
        return number
    return -1 if ends or is_sure else None


def are_one(tensors: Sequence[Tensor | None]) -> bool:
    """Whether all are the same but for rounding."""
    first, *others = tensors or [None]
    return all(
        first is not None and x is not None and x.shape == first.shape and _near(x, first)
        for x in others
    )


def _near(x: Tensor, y: Tensor) -> bool:
    return bool((x - y).abs().max() <= _ALIKE * y.abs().max())


def differ(x: Tensor, y: Tensor) -> bool:
    """Whether two gradients differ by more than rounding."""
    if not x.numel():
        return False
    rounding = 8 * torch.finfo(x.dtype).eps * torch.maximum(x.abs().max(), y.abs().max())
    return bool((x - y).abs().max() > rounding)


def function_of(output: Tensor | None, cotangent: Tensor | None) -> str:
    """The function of several outputs of a sample that this came back from, but for a factor."""
    if output is None or cotangent is None or cotangent.ndim < 2 or cotangent.shape[-1] < 2:
        return ""
    if _near(cotangent, output.softmax(-1) * cotangent.sum(-1, keepdim=True)):
        return "logsumexp"
    if not differ(cotangent, cotangent[..., :1].expand_as(cotangent)):
        return "sum"
    is_one = bool(((cotangent != 0).sum(-1) == 1).all())
    return "one output" if is_one else "another function"


def _is_one_of(draw: Draw | None, x: Tensor, row: int) -> bool:
    """Whether a draw has a number for each entry of x, and for nothing else."""
    return draw is not None and (row >= 0 or draw.values.numel() == x.numel())


def _pull(seen: Evaluation) -> float | str:
    """The factor of -x that joins the module's gradient; or why it is not of that alone."""
    x, inner, whole = seen.x, seen.inner_gradient, seen.gradient
    if seen.cotangent is None or seen.is_joint or inner is None or whole is None:
        return "its gradient is not that of one call of the network"
    if seen.leaf_gradient is not None and not torch.equal(seen.leaf.flatten(), x.flatten()):
        return "the network's input is made of what the sampler moves"
    rest, at = (whole - inner).cpu().double(), x.cpu().double()  # MPS has no float64
    factor = -float((rest * at).sum() / at.square().sum().clamp(min=1e-300))
    rounding = 8 * torch.finfo(x.dtype).eps * float(max(whole.abs().max(), inner.abs().max()))
    if float((rest + factor * at).abs().max()) > rounding:
        return "other terms join the network's gradient"
    return factor if bool(rest.any()) else 0.0
