"""What a sampler call was, from its evaluations: a Langevin chain of which size, or why not."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .recording import Draw, Evaluation
from .steps import Step, solve

__all__ = ["Measured", "end_of", "spread", "steps_of"]

EXACT = "exact"
_NO_NOISE = "gradient steps without noise"
_ALONE = "one step alone was told, and no other call has the same scale"
_FEW = 8  # draws before the first evaluation that may belong to the chain
_SAME = 0.01  # sizes that differ by less are one
_SURE = 4.0  # standard errors
_ROUNDING = 1e-6
_ALIKE = 1e-4  # of numbers that are the same but for rounding
_MOST = 0.7  # of the steps must agree


@dataclass(frozen=True)
class Measured:
    """A sampler, measured: ``x += step * gradient + noise * randn``, NaN where unknown.

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
    def of(
        cls,
        evaluations: Sequence[Evaluation],
        draws: Sequence[Draw | None],
        result: object = None,
    ) -> Measured:
        """What a chain is, from its evaluations of one energy and ``recording.draws.log``.

        ``result`` is what the sampler returned: with one evaluation or two, their last step's end.
        """
        last = evaluations[-1] if evaluations else None
        if last is not None and len(evaluations) < 3:
            evaluations = [*evaluations, *end_of(last, result, len(draws))]
        points = [seen.point[0] for seen in evaluations]
        if len(points) < 2:
            return cls(f"no step could be seen (differentiated calls: {len(points)})")
        if all(torch.equal(x, x.round()) for x in points):
            return cls("discrete samples")
        pairs = [(seen, step) for seen, step in steps_of(evaluations, draws) if step.moved > 0]
        if not pairs:
            return cls("nothing moves between its calls, or their shapes change")
        momenta = [step.momentum for _, step in pairs if abs(step.momentum) > _ALIKE]
        if momenta:
            is_free = all(math.isclose(each, 1, rel_tol=_ALIKE) for each in momenta)
            return cls("HMC" if is_free else f"momentum ({momenta[-1]:.4g})")
        # What is returned may be no step's end, and lacks noise that steps begin with.
        if pairs[1:] and pairs[-1][0] is last and not pairs[-1][1].noise > 0:
            pairs.pop()
        told = [pair for pair in pairs if not pair[1].why]
        if len(told) < max(1, _MOST * len(pairs)):
            return cls(statistics.mode(step.why for _, step in pairs if step.why))
        found = _pooled(told)
        if len(told) > 1:
            return found
        ((seen, _),) = told
        drawn = [d.values for d in draws[: seen.draws_before] if d is not None]
        if found.has_no_noise and not all(torch.equal(x, seen.point[0]) for x in drawn):
            return cls("one step without noise, which may have come before it")
        return replace(found, verdict=_ALONE) if found.is_exact else found

    def after(self, earlier: Measured | None) -> Measured:
        """The same, exact if it is one step alone and that of an earlier call had its scale."""
        if earlier is None or not self.verdict == earlier.verdict == _ALONE:
            return self
        error = math.hypot(self.output_scale_error, earlier.output_scale_error)
        most = max(_ALIKE * self.output_scale, _SURE * error)
        same = abs(self.output_scale - earlier.output_scale) <= most
        return replace(self, verdict=EXACT) if same else self

    @property
    def is_exact(self) -> bool:
        """Whether the numbers hold to rounding."""
        return self.verdict == EXACT

    @property
    def has_no_noise(self) -> bool:
        """Whether it descends, and so has no output scale."""
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


def end_of(last: Evaluation, result: object, draws: int) -> list[Evaluation]:
    """The first samples of a result that have moved since, as a point without a gradient."""
    x = last.point[0]
    for each in tree_leaves(result):
        if isinstance(each, Tensor) and each.is_floating_point() and each.shape == x.shape:
            end = each.detach().to(x)
            if not torch.equal(end, x):
                return [Evaluation(last.energy, end, draws, end, gradient=end.new_empty(0))]
    return []


def steps_of(
    evaluations: Sequence[Evaluation], draws: Sequence[Draw | None]
) -> Iterator[tuple[Evaluation, Step]]:
    """Each evaluation that another one follows, and the step between them."""
    first = evaluations[0].draws_before
    start = max(0, first - _FEW)
    earlier: Evaluation | None = None
    for seen, after in pairwise(evaluations):
        (x, gradient), (end, _) = seen.point, after.point
        if x.numel() and not after.follows_gap and x.shape == end.shape and x.dtype == end.dtype:
            begin = start if earlier is None else earlier.draws_before
            # The noise of all steps may have been drawn before the first one.
            near = (*draws[begin : after.draws_before], *draws[start:first])
            before = None
            if earlier is not None and not seen.follows_gap and earlier.leaf.shape == x.shape:
                before = earlier.point[0]
            # A chain that starts from noise: where it stands is no noise of the step.
            noise = [d for d in near if d is not None and not torch.equal(d.values, x)]
            yield seen, solve(x, gradient, end, noise, before)
            if torch.equal(x, end):
                continue  # differentiated twice, as by a leapfrog
        earlier = seen


def _pooled(told: Sequence[tuple[Evaluation, Step]]) -> Measured:
    steps = [step for _, step in told]
    clamp, decay = steps[-1].clamp, statistics.median(step.decay for step in steps)
    clip = next((step.clip for step in steps if step.clip), "")
    ends = " and ".join(f"{end:.4g}" for end in clamp if end is not None)
    stays = 1 - min(step.moved for step in steps)
    said = {
        f"clamped at {ends}": ends,
        f"gradient clipped ({clip})": clip,
        f"decay {decay:.4g}": decay,
        f"{stays:.0%} of the samples stay (a rejection?)": stays > 0,
    }
    notes = tuple(note for note, holds in said.items() if holds)
    if not any(step.noise for step in steps):
        return Measured(_NO_NOISE, notes=notes)
    factor, *others = (_factor(seen) for seen, _ in told)
    if not all(math.isclose(each, factor, rel_tol=_ALIKE) for each in (factor, *others)):
        return Measured("the output is not differentiated as it is, and alike for all samples")
    sizes = [(step.step * factor, step.noise) for step in steps]
    size, size_error = _mean([(s.step * factor, s.step_error * abs(factor)) for s in steps])
    noise, noise_error = _mean([(s.noise, s.noise_error) for s in steps])
    moved = [a * float(seen.point[1].norm()) for (a, _), (seen, _) in zip(sizes, told, strict=True)]
    # A step that rounding blurs says nothing of a change.
    blur = max(step.step_error / max(abs(step.step), 1e-300) for step in steps)
    varies = 0.0 if _SURE * blur > _SAME else spread([a for a, _ in sizes])
    changes = max(varies, spread([s for _, s in sizes])) > _SAME
    scales = [_scale(*each) for each in sizes]
    verdict = EXACT
    if abs(size) <= _SURE * size_error:
        verdict = "not identifiable yet: the gradient is lost in rounding"
    elif varies > max(_ROUNDING, _SURE * blur) and spread(moved) < 0.1 * varies:
        verdict = "gradient clipped by the norm of the batch"
    elif changes and spread(scales) > _SAME:
        told_o = [f"o = {o:.4g}" if o < math.inf else "no noise" for o in (scales[0], scales[-1])]
        verdict = f"sizes change along the chain (from {' to '.join(told_o)})"
    elif changes:
        size, noise = sizes[0]
    scale = _scale(size, noise)
    error = scale * math.hypot(size_error / abs(size or 1), 2 * noise_error / (noise or 1))
    count = len(told[0][0].point[0])
    # The shortest number in reach is what its author would have typed.
    tolerance = max(_SURE * error, _ROUNDING * scale)
    near = (float(f"{scale:.{digits}g}") for digits in range(1, 17))
    return Measured(
        verdict,
        step=size,
        noise=noise,
        output_scale=next((each for each in near if abs(each - scale) <= tolerance), scale),
        step_error=size_error,
        noise_error=noise_error,
        output_scale_error=error,
        multiple=1.0 if math.isclose(abs(factor) * count, 1, rel_tol=_ALIKE) else factor,
        convention=("log_density" if size > 0 else "energy") if verdict == EXACT else None,
        share=min(step.exact for step in steps),
        sizes=tuple(sizes) if changes else (),
        clamp=clamp,
        clip=clip,
        decay=decay,
        notes=notes,
    )


def spread(values: Sequence[float]) -> float:
    """By how much the largest of numbers of one sign exceeds the smallest, as a share."""
    low, high = sorted((min(values), max(values)), key=abs)
    return abs(high / low - 1) if low else math.inf


def _scale(size: float, noise: float) -> float:
    return 2 * abs(size) / noise**2 if noise else math.inf


def _factor(seen: Evaluation) -> float:
    """How much of each sample's energy was differentiated; NaN where that has no one answer."""
    cotangent = seen.cotangent
    if cotangent is None or not cotangent.numel():
        return math.nan
    each = cotangent.cpu().double().reshape(len(cotangent) if cotangent.ndim else 1, -1)
    # Heads taken alike are one energy, their sum; weights of a logsumexp add up to the factor.
    first = each[:, :1]
    is_alike = bool((each - first).abs().max() <= 1e-6 * each.abs().max())
    of_rows = first[:, 0] if is_alike else each.sum(1)
    mean = float(of_rows.mean())
    return mean if float((of_rows - mean).abs().max()) <= _ALIKE * abs(mean) else math.nan


def _mean(values: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The mean of numbers and standard errors, weighted by these, and its own."""
    least = 1e-12 * max(abs(value) for value, _ in values) or 1.0
    weights = [1 / max(error, least) ** 2 for _, error in values]
    total = sum(weights)
    mean = sum(w * value for w, (value, _) in zip(weights, values, strict=True)) / total
    return mean, total**-0.5
