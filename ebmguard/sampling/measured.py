"""The measured sampler: step, noise and scale of a Langevin chain, or why it is none."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .recording import Evaluation, Log
from .regression import Step, solve

__all__ = ["ALIKE", "MOST", "SURE", "Measured", "Solved", "end_point", "solved_steps", "spread"]

Solved: TypeAlias = tuple[Evaluation, Step]

EXACT = "exact"
_NO_NOISE = "gradient steps without noise"
_ALONE = "one step alone was measured, and no other call has the same scale"
_FEW = 8  # draws before the first evaluation that may belong to the chain
_SAME = 0.01  # sizes that differ by less are one
_ROUNDING = 1e-6
ALIKE = 1e-4  # relative difference of numbers that are the same but for rounding
SURE = 4.0  # standard errors
MOST = 0.7  # of the steps must be solved


@dataclass(frozen=True)
class Measured:
    """A measured sampler: ``x += step * gradient + noise * randn``, NaN where unknown.

    The gradient is that of the energy itself, whatever multiple of it the sampler differentiates.
    """

    verdict: str  # "exact" where the numbers hold to rounding; else, in words, why not
    step: float = math.nan  # negative where the sampler goes down
    noise: float = math.nan  # standard deviation
    output_scale: float = math.nan  # 2 |step| / noise², the o of exp(o f)
    step_error: float = math.nan  # standard errors
    noise_error: float = math.nan
    output_scale_error: float = math.nan
    multiple: float = 1.0  # of the energy, which the sampler differentiates; a mean over B is 1
    convention: str | None = None  # "log_density": it goes up; "energy": down
    share: float = 0.0  # of the free entries that obey to rounding, the smallest of the steps
    sizes: tuple[tuple[float, float], ...] = ()  # step and noise of each step, where they differ
    clamp: tuple[float | None, float | None] = (None, None)  # the ends of the samples' range
    clip: str = ""  # how the gradient is clipped, in words; empty where it is not
    decay: float = 0.0  # factor of -x in the update
    notes: tuple[str, ...] = ()  # further facts, in words

    @classmethod
    def of(cls, evaluations: Sequence[Evaluation], draws: Log, result: object = None) -> Measured:
        """Measure a chain by its evaluations of one energy and ``recording.draws.log``.

        ``result`` is what the sampler returned: after one evaluation or two, the end of their step.
        """
        last = evaluations[-1] if evaluations else None
        if last is not None and len(evaluations) < 3:
            evaluations = [*evaluations, *end_point(last, result, len(draws))]
        points = [evaluation.point[0] for evaluation in evaluations]
        if len(points) < 2:
            return cls(f"no step could be seen (differentiated calls: {len(points)})")
        if all(torch.equal(x, x.round()) for x in points):
            return cls("discrete samples")
        pairs = [pair for pair in solved_steps(evaluations, draws) if pair[1].moved > 0]
        if not pairs:
            return cls("nothing moves between its calls, or their shapes change")
        momenta = [step.momentum for _, step in pairs if abs(step.momentum) > ALIKE]
        if momenta:
            usual = statistics.median(momenta)  # short steps round more than others
            is_hmc = math.isclose(usual, 1, rel_tol=ALIKE)
            return cls("HMC" if is_hmc else f"momentum ({usual:.4g})")
        # What is returned may be no step's end, and lacks noise that steps begin with.
        if pairs[1:] and pairs[-1][0] is last and not pairs[-1][1].noise > 0:
            pairs.pop()
        solved = [pair for pair in pairs if not pair[1].why]
        if len(solved) < max(1, MOST * len(pairs)):
            return cls(statistics.mode(step.why for _, step in pairs if step.why))
        pooled = _pooled(solved)
        if len(solved) > 1:
            return pooled
        start = solved[0][0]
        drawn = [d.values for d in draws[: start.draws_before] if d is not None]
        if pooled.has_no_noise and not all(torch.equal(x, start.point[0]) for x in drawn):
            return cls("one step without noise, which may have come before it")
        return replace(pooled, verdict=_ALONE) if pooled.is_exact else pooled

    def after(self, earlier: Measured | None) -> Measured:
        """Make one step alone exact if that of an earlier call had its scale."""
        if earlier is None or not self.verdict == earlier.verdict == _ALONE:
            return self
        error = math.hypot(self.output_scale_error, earlier.output_scale_error)
        most = max(ALIKE * self.output_scale, SURE * error)
        same = abs(self.output_scale - earlier.output_scale) <= most
        return replace(self, verdict=EXACT) if same else self

    @property
    def is_exact(self) -> bool:
        """Return whether the numbers hold to rounding."""
        return self.verdict == EXACT

    @property
    def has_no_noise(self) -> bool:
        """Return whether the sampler takes no noise, and so has no output scale."""
        return self.verdict == _NO_NOISE

    def __str__(self) -> str:
        notes = "".join(f"; {note}" for note in self.notes)
        if not self.is_exact:
            return f"The sampler could not be measured: {self.verdict}{notes}."
        return (
            f"Each step of the sampler is {self.step:.6g} times the gradient and noise of "
            f"{self.noise:.6g}: output_scale={self.output_scale:.6g} (± "
            f"{self.output_scale_error:.1g}), convention={self.convention!r}; {self.share:.0%} of "
            f"the free entries agree to rounding{notes}."
        )


def end_point(last: Evaluation, result: object, draws: int) -> list[Evaluation]:
    """The first samples of a result that have moved since, as a point without a gradient."""
    x = last.point[0]
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.shape == x.shape:
            end = leaf.detach().to(x)
            if not torch.equal(end, x):
                return [Evaluation(last.energy, end, draws, end, gradient=end.new_empty(0))]
    return []


def solved_steps(evaluations: Sequence[Evaluation], draws: Log) -> Iterator[Solved]:
    """Solve for the step from every evaluation that another one follows."""
    first = evaluations[0].draws_before
    start = max(0, first - _FEW)
    earlier: Evaluation | None = None
    for now, after in pairwise(evaluations):
        (x, gradient), (end, _) = now.point, after.point
        if x.numel() and not after.follows_gap and x.shape == end.shape and x.dtype == end.dtype:
            begin = start if earlier is None else earlier.draws_before
            # The noise of all steps may have been drawn before the first one.
            near = (*draws[begin : after.draws_before], *draws[start:first])
            before = None
            if earlier is not None and not now.follows_gap and earlier.leaf.shape == x.shape:
                before = earlier.point[0]
            # A chain that starts from noise: where it stands is no noise of the step.
            noise = [d for d in near if d is not None and not torch.equal(d.values, x)]
            yield now, solve(x, gradient, end, noise, before)
            if torch.equal(x, end):
                continue  # differentiated twice, as by a leapfrog
        earlier = now


def _pooled(solved: Sequence[Solved]) -> Measured:
    """Pool the steps of one chain; the verdict says why where they are not one sampler's."""
    steps = [step for _, step in solved]
    clamp, decay = steps[-1].clamp, statistics.median(step.decay for step in steps)
    clip = next((step.clip for step in steps if step.clip), "")
    ends = " and ".join(f"{end:.4g}" for end in clamp if end is not None)
    stays = 1 - min(step.moved for step in steps)
    facts = {
        f"clamped at {ends}": ends,
        f"gradient clipped ({clip})": clip,
        f"decay {decay:.4g}": decay,
        f"{stays:.0%} of the samples stay (a rejection?)": stays > 0,
    }
    notes = tuple(fact for fact, holds in facts.items() if holds)
    if not any(step.noise for step in steps):
        return Measured(_NO_NOISE, notes=notes)
    factor, *others = (_factor(start.cotangent) for start, _ in solved)
    if not all(math.isclose(other, factor, rel_tol=ALIKE) for other in (factor, *others)):
        return Measured("the output is not differentiated as it is, and alike for all samples")
    sizes = [(step.step * factor, step.noise) for step in steps]
    size, size_error = _mean([(s.step * factor, s.step_error * abs(factor)) for s in steps])
    noise, noise_error = _mean([(s.noise, s.noise_error) for s in steps])
    moved = [a * float(x.point[1].norm()) for (a, _), (x, _) in zip(sizes, solved, strict=True)]
    # A step that rounding blurs says nothing of a change.
    blur = max(step.step_error / max(abs(step.step), 1e-300) for step in steps)
    varies = 0.0 if SURE * blur > _SAME else spread([a for a, _ in sizes])
    changes = max(varies, spread([s for _, s in sizes])) > _SAME
    scales = [_scale(*pair) for pair in sizes]
    verdict = EXACT
    if abs(size) <= SURE * size_error:
        verdict = "not identifiable yet: the gradient is lost in rounding"
    elif varies > max(_ROUNDING, SURE * blur) and spread(moved) < 0.1 * varies:
        verdict = "gradient clipped by the norm of the batch"
    elif changes and spread(scales) > _SAME:
        texts = [f"o = {o:.4g}" if o < math.inf else "no noise" for o in (scales[0], scales[-1])]
        verdict = f"sizes change along the chain (from {' to '.join(texts)})"
    elif changes:
        size, noise = sizes[0]
    scale = _scale(size, noise)
    error = scale * math.hypot(size_error / abs(size or 1), 2 * noise_error / (noise or 1))
    count = len(solved[0][0].point[0])
    # The shortest number in reach is what its author would have typed.
    tolerance = max(SURE * error, _ROUNDING * scale)
    near = (float(f"{scale:.{digits}g}") for digits in range(1, 17))
    return Measured(
        verdict,
        step=size,
        noise=noise,
        output_scale=next((short for short in near if abs(short - scale) <= tolerance), scale),
        step_error=size_error,
        noise_error=noise_error,
        output_scale_error=error,
        multiple=1.0 if math.isclose(abs(factor) * count, 1, rel_tol=ALIKE) else factor,
        convention=("log_density" if size > 0 else "energy") if verdict == EXACT else None,
        share=min(step.exact for step in steps),
        sizes=tuple(sizes) if changes else (),
        clamp=clamp,
        clip=clip,
        decay=decay,
        notes=notes,
    )


def spread(values: Sequence[float]) -> float:
    """The share by which the largest of numbers of one sign exceeds the smallest."""
    low, high = sorted((min(values), max(values)), key=abs)
    return abs(high / low - 1) if low else math.inf


def _scale(size: float, noise: float) -> float:
    return 2 * abs(size) / noise**2 if noise else math.inf


def _factor(cotangent: Tensor | None) -> float:
    """The factor by which energies were differentiated; NaN where samples have several."""
    if cotangent is None or not cotangent.numel():
        return math.nan
    heads = cotangent.cpu().double().reshape(len(cotangent) if cotangent.ndim else 1, -1)
    # Heads taken alike are one energy, their sum; weights of a logsumexp add up to the factor.
    first = heads[:, :1]
    is_alike = bool((heads - first).abs().max() <= 1e-6 * heads.abs().max())
    factors = first[:, 0] if is_alike else heads.sum(1)
    mean = float(factors.mean())
    return mean if float((factors - mean).abs().max()) <= ALIKE * abs(mean) else math.nan


def _mean(values: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The mean of numbers, weighted by their standard errors, and its standard error."""
    least = 1e-12 * max(abs(value) for value, _ in values) or 1.0
    weights = [1 / max(error, least) ** 2 for _, error in values]
    total = sum(weights)
    mean = sum(w * value for w, (value, _) in zip(weights, values, strict=True)) / total
    return mean, total**-0.5
