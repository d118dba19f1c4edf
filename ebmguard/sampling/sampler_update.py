"""The update by which a sampler moves its chains, as finer steps need to know it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .measured import ALIKE, MOST, SURE, Solved, end_point, solved_steps, spread
from .recording import Evaluation, Log

__all__ = ["SamplerUpdate", "all_alike", "differ", "followed_function"]

_KNOWN = 0.01  # by which a size may be off


@dataclass(frozen=True)
class SamplerUpdate:
    """A sampler's update: x' = clamp(x + a t - decay x + c n), with t = cut(gradient - pull x).

    The gradient is that of the module's output as the sampler differentiates it; n is normal.
    """

    sizes: list[list[float]]  # a and c of the steps; one pair where they are alike
    places: list[list[int]]  # of n among a call's draws: its number less those before; row or -1
    std: float = 1.0  # of the draws
    decay: float = 0.0
    pull: float = 0.0
    low: float = -math.inf
    high: float = math.inf
    bound: float = math.inf  # of the drift's entries; below 0, less that of its norm
    is_logsumexp: bool = False  # whether the sampler follows that of the output, else the output
    # Where gradients follow their noise: the number of the call's first, and the end of them.
    noise_first: tuple[int, int] | None = None

    def cotangent(self, output: Tensor, cotangent: Tensor) -> Tensor:
        """The gradient by an output, where that by another output of the step is known."""
        if not self.is_logsumexp:
            return cotangent
        return output.detach().softmax(-1) * cotangent.sum(-1, keepdim=True)

    def drift(self, x: Tensor, gradient: Tensor) -> Tensor:
        """The drift t at x, from the module's gradient there."""
        drift = gradient - self.pull * x if self.pull else gradient
        if self.bound == math.inf:
            return drift
        if self.bound > 0:
            return drift.clamp(-self.bound, self.bound)
        norm = torch.linalg.vector_norm(drift.flatten(1), 2, 1)
        factor: Tensor = (-self.bound / norm).clamp(max=1.0)
        return drift * factor.reshape(-1, *[1] * (drift.ndim - 1))

    def clamped(self, x: Tensor) -> Tensor:
        """The samples x, clamped as the sampler does."""
        return x if self.low == -math.inf == -self.high else x.clamp(self.low, self.high)

    @classmethod
    def of(
        cls, evaluations: Sequence[Evaluation], draws: Log, result: object = None
    ) -> SamplerUpdate | str:
        """Infer the update from a recorded call and its result; or say in words why not."""
        if not evaluations:
            return "no gradient is seen"
        pulls = list[float]()
        for evaluation in evaluations:
            if isinstance(pull := _pull(evaluation), str):
                return pull
            pulls.append(pull)
        is_logsumexp = not all_alike([x.cotangent for x in evaluations])
        functions = {followed_function(x.output, x.cotangent) for x in evaluations}
        if is_logsumexp and functions != {"logsumexp"}:
            return "it follows a function of the network's output"
        last = evaluations[-1]
        points = [*evaluations, *end_point(last, result, len(draws))]
        steps = [pair for pair in solved_steps(points, draws) if pair[1].moved > 0]
        solved = [pair for pair in steps if not pair[1].why]
        if any(a.uniform_before < b.uniform_before for a, b in pairwise(evaluations)):
            return "it draws uniform numbers between its steps, as for a Metropolis test"
        if len(solved) < max(1, MOST * len(steps)):
            return next((step.why for _, step in steps if step.why), "nothing moves between calls")
        if any(abs(step.momentum) > ALIKE for _, step in solved):
            return "it has momentum"
        if any(len(step.noises) > 1 for _, step in solved):
            return "a step uses several draws"
        if any(SURE * step.step_error > _KNOWN * abs(step.step) for _, step in solved):
            return "rounding hides the gradient"
        sizes = [[step.step, sum(noise.factor for noise in step.noises)] for _, step in solved]
        noises = [noise for _, step in solved for noise in step.noises]
        places = [
            next(([n.number - start.draws_before, n.row] for n in step.noises), [0, -1])
            for start, step in solved
            if noises
        ]
        noise_first, clamps = None, [step.clamp for _, step in solved]
        has_end = solved[-1][0] is last
        if (number := _first_noise(solved, draws, has_end=has_end)) is not None:
            noise_first = (number, last.draws_before)
            if has_end:
                solved, steps, sizes, places = solved[:-1], steps[:-1], sizes[:-1], places[:-1]
        error = max(step.step_error / abs(step.step) for _, step in solved)
        varies = max(spread(x) if any(x) else 0.0 for x in zip(*sizes, strict=True))
        moved = [step.step * float(start.point[1].norm()) for start, step in solved]
        if varies <= max(ALIKE, SURE * error) and all(place == places[0] for place in places):
            sizes, places = sizes[-1:], places[-1:]
        elif spread(moved) < 0.1 * spread([a for a, _ in sizes]):
            return "its gradient is clipped by the norm of the batch"
        elif len(solved) < len(steps) or any(x.follows_gap for x in evaluations):
            return "its steps differ along the chain, and not all of them were seen"
        elif noise_first:
            return "its noise comes before its gradient, in steps that differ along the chain"
        elif len(solved) < len(evaluations):  # the last one goes on as they did
            sizes.append([now * now / before for before, now in zip(*sizes[-2:], strict=True)])
            places.append([2 * now - before for before, now in zip(*places[-2:], strict=True)])
        bound = min((step.bound for _, step in solved), key=abs)
        # A draw that may be scaled has a number for every entry of x, and for nothing else.
        drawn = [(draws[n.number], n.row >= 0) for n in noises]
        scalable = all(d and (is_row or d.values.numel() == last.x.numel()) for d, is_row in drawn)
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
            decay=statistics.median(step.decay for _, step in solved),
            pull=max(pulls, key=abs),
            low=min((x for x in lows if x is not None), default=-math.inf),
            high=max((x for x in highs if x is not None), default=math.inf),
            bound=bound,
            is_logsumexp=is_logsumexp,
            noise_first=noise_first,
        )


def _first_noise(solved: Sequence[Solved], draws: Log, *, has_end: bool) -> int | None:
    """The number of a call's first noise where gradients follow their noise, as in IGEBM.

    Such a chain begins with a noise, and ends without one. None: it is another chain; -1: that is
    not sure. ``has_end``: whether the last step is among the solved ones.
    """
    (now, step), *others = solved
    if not (others and step.noises) or (has_end and solved[-1][1].noises):
        return None
    noise, after = step.noises[0], others[0][0]
    number = noise.number - (after.draws_before - now.draws_before)
    draw = draws[number] if 0 <= number < now.draws_before else None
    y = now.point[0].cpu().double().flatten()
    if draw is None or draw.values.numel() != y.numel():
        return None
    n = draw.values.cpu().double().flatten() / noise.std
    n, y = n - n.mean(), y - y.mean()
    factor = float(n @ y / (n @ n))
    error = float((y - factor * n).norm() / n.norm()) / len(y) ** 0.5
    is_all = error < ALIKE * abs(factor)  # the chain may as well start from noise
    if not is_all and abs(factor - noise.factor) > SURE * error:
        return None
    is_sure = not is_all and abs(noise.factor) > SURE * error
    if has_end and is_sure:
        return number
    return -1 if has_end or is_sure else None


def all_alike(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether all are the same but for rounding."""
    first, *others = tensors or [None]
    return all(
        first is not None and x is not None and x.shape == first.shape and _near(x, first)
        for x in others
    )


def _near(x: Tensor, y: Tensor) -> bool:
    return bool((x - y).abs().max() <= ALIKE * y.abs().max())


def differ(x: Tensor, y: Tensor) -> bool:
    """Return whether two gradients differ by more than rounding."""
    if not x.numel():
        return False
    rounding = 8 * torch.finfo(x.dtype).eps * torch.maximum(x.abs().max(), y.abs().max())
    return bool((x - y).abs().max() > rounding)


def followed_function(output: Tensor | None, cotangent: Tensor | None) -> str:
    """The function of several outputs of a sample that this came back from, but for a factor."""
    if output is None or cotangent is None or cotangent.ndim < 2 or cotangent.shape[-1] < 2:
        return ""
    if _near(cotangent, output.softmax(-1) * cotangent.sum(-1, keepdim=True)):
        return "logsumexp"
    if not differ(cotangent, cotangent[..., :1].expand_as(cotangent)):
        return "sum"
    is_one = bool(((cotangent != 0).sum(-1) == 1).all())
    return "one output" if is_one else "another function"


def _pull(evaluation: Evaluation) -> float | str:
    """The factor of -x that joins the module's gradient; or why other terms do."""
    x, inner, whole = evaluation.x, evaluation.inner_gradient, evaluation.gradient
    if evaluation.cotangent is None or evaluation.is_joint or inner is None or whole is None:
        return "its gradient is not that of one call of the network"
    is_leaf = evaluation.leaf_gradient is None
    if not is_leaf and not torch.equal(evaluation.leaf.flatten(), x.flatten()):
        return "the network's input is made of what the sampler moves"
    rest, wide = (whole - inner).cpu().double(), x.cpu().double()  # MPS has no float64
    factor = -float((rest * wide).sum() / wide.square().sum().clamp(min=1e-300))
    rounding = 8 * torch.finfo(x.dtype).eps * float(max(whole.abs().max(), inner.abs().max()))
    if float((rest + factor * wide).abs().max()) > rounding:
        return "other terms join the network's gradient"
    return factor if bool(rest.any()) else 0.0
