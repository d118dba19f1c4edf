"""What a sampler call was, from its evaluations: a Langevin chain of which size, or why not."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .recording import Draw, Evaluation
from .steps import Step, solve

__all__ = ["Measured", "Moves"]

EXACT = "exact"
_NO_NOISE = "gradient steps without noise"
_FEW = 8  # draws before the first evaluation that may belong to the chain
_SAME = 0.01  # sizes that differ by less are one
_SURE = 4.0  # standard errors
_ROUNDING = 1e-6
_ALIKE = 1e-4  # of numbers that are the same but for rounding
_MOST = 0.7  # of the steps must agree
_KNOWN = 0.01  # by which a size may be off


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
    convention: str | None = None  # "log_density": it goes up; "energy": down
    share: float = 0.0  # of the free entries that obey to rounding, the smallest of the steps
    sizes: tuple[tuple[float, float], ...] = ()  # step and noise of each step, where they differ
    clamp: tuple[float | None, float | None] = (None, None)  # the ends of the samples' range
    clip: str = ""  # how the gradient is clipped, in words; empty where it is not
    decay: float = 0.0  # factor of -x in the update
    notes: tuple[str, ...] = ()  # further facts, in words

    @classmethod
    def of(cls, evaluations: Sequence[Evaluation], draws: Sequence[Draw | None]) -> Measured:
        """What a chain is, from its evaluations of one energy and ``recording.draws.log``."""
        points = [seen.point[0] for seen in evaluations]
        if points and all(torch.equal(x, x.round()) for x in points):
            return cls("discrete samples")
        if len(points) < 3:
            return cls(f"fewer than three differentiated calls ({len(points)})")
        pairs = [(seen, step) for seen, step in _steps(evaluations, draws) if step.moved > 0]
        if not pairs:
            return cls("nothing moves between its calls, or their shapes change")
        momenta = [step.momentum for _, step in pairs if abs(step.momentum) > _ALIKE]
        if momenta:
            is_free = all(math.isclose(each, 1, rel_tol=_ALIKE) for each in momenta)
            return cls("HMC" if is_free else f"momentum ({momenta[-1]:.4g})")
        told = [pair for pair in pairs if not pair[1].why]
        if len(told) < max(2, _MOST * len(pairs)):
            why = [step.why for _, step in pairs if step.why]
            return cls(statistics.mode(why) if why else "one step alone was told")
        return _pooled(told)

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
        end: Tensor | None = None,
    ) -> Moves | str:
        """From a recorded call that has returned ``end``; or why it cannot be told, in words."""
        if not evaluations:
            return "no gradient is seen"
        pulls = list[float]()
        for seen in evaluations:
            if isinstance(pull := _pull(seen), str):
                return pull
            pulls.append(pull)
        is_logsumexp = not _are_one([seen.cotangent for seen in evaluations])
        if is_logsumexp and not all(map(_is_softmax, evaluations)):
            return "it follows a function of the network's output"
        last, every = evaluations[-1], [*evaluations]
        if end is not None and end.shape == last.x.shape and not torch.equal(end, last.x):
            every.append(Evaluation(last.energy, end, len(draws), 0, end, gradient=end))
        steps = [(seen, step) for seen, step in _steps(every, draws) if step.moved > 0]
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
        error = max(step.step_error / abs(step.step) for _, step in told)
        varies = max(_spread(of) if any(of) else 0.0 for of in zip(*sizes, strict=True))
        moved = [step.step * float(seen.point[1].norm()) for seen, step in told]
        is_one = varies <= max(_ALIKE, _SURE * error) and all(x == places[0] for x in places)
        if is_one:
            sizes, places = sizes[-1:], places[-1:]
        elif (of_step := _spread([a for a, _ in sizes])) > _ALIKE and _spread(
            moved
        ) < 0.1 * of_step:
            return "its gradient is clipped by the norm of the batch"
        elif len(told) < len(steps) or any(seen.follows_gap for seen in evaluations):
            return "its steps differ along the chain, and not all of them were seen"
        elif len(told) < len(evaluations):  # the last one goes on as they did
            sizes.append([each * each / before for before, each in zip(*sizes[-2:], strict=True)])
            places.append([2 * each - before for before, each in zip(*places[-2:], strict=True)])
        bound = min((step.bound for _, step in told), key=abs)
        scalable = all(_is_one_of(draws[x.number], last.x, x.row) for x in noises)
        if bound < math.inf and places and places[0][0] < 0:
            scalable = False  # what the gradient is given for a draw would be cut
        if noises and not scalable:
            (a, c), g = sizes[-1], last.point[1]
            if abs(a) * float(g.square().mean().sqrt()) < abs(c):
                return "its draws cannot be scaled, and are larger than its drift"
            places = []
        lows, highs = zip(*(step.clamp for _, step in told), strict=True)
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
        )


def _are_one(tensors: Sequence[Tensor | None]) -> bool:
    """Whether all are the same but for rounding."""
    first, *others = tensors
    return all(
        first is not None and x is not None and x.shape == first.shape and _near(x, first)
        for x in others
    )


def _near(x: Tensor, y: Tensor) -> bool:
    return bool((x - y).abs().max() <= _ALIKE * y.abs().max())


def _is_softmax(seen: Evaluation) -> bool:
    """Whether what came back to the output is that of its logsumexp over heads, times a number."""
    c, output = seen.cotangent, seen.output
    if c is None or output is None or c.ndim < 2 or c.shape[-1] < 2:
        return False
    return _near(c, output.softmax(-1) * c.sum(-1, keepdim=True))


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
    rest = (whole - inner).double()
    factor = -float((rest * x).sum() / x.double().square().sum().clamp(min=1e-300))
    rounding = 8 * torch.finfo(x.dtype).eps * float(max(whole.abs().max(), inner.abs().max()))
    if float((rest + factor * x).abs().max()) > rounding:
        return "other terms join the network's gradient"
    return factor if bool(rest.any()) else 0.0


def _steps(
    evaluations: Sequence[Evaluation], draws: Sequence[Draw | None]
) -> Iterator[tuple[Evaluation, Step]]:
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
    if not all(math.isclose(each, factor, rel_tol=_ALIKE) for each in others):
        return Measured("the output is not differentiated as it is, and alike for all samples")
    sizes = [(step.step * factor, step.noise) for step in steps]
    size, size_error = _mean([(s.step * factor, s.step_error * abs(factor)) for s in steps])
    noise, noise_error = _mean([(s.noise, s.noise_error) for s in steps])
    moved = [a * float(seen.point[1].norm()) for (a, _), (seen, _) in zip(sizes, told, strict=True)]
    # A step that rounding blurs says nothing of a change.
    blurred = any(_SURE * step.step_error > _SAME * abs(step.step) for step in steps)
    varies = 0.0 if blurred else _spread([a for a, _ in sizes])
    changes = max(varies, _spread([s for _, s in sizes])) > _SAME
    scales = [_scale(*each) for each in sizes]
    verdict = EXACT
    if abs(size) <= _SURE * size_error:
        verdict = "not identifiable yet: the gradient is lost in rounding"
    elif varies > _ALIKE and _spread(moved) < 0.1 * varies:
        verdict = "gradient clipped by the norm of the batch"
    elif changes and _spread(scales) > _SAME:
        told_o = [f"o = {o:.4g}" if o < math.inf else "no noise" for o in (scales[0], scales[-1])]
        verdict = f"sizes change along the chain (from {' to '.join(told_o)})"
    elif changes:
        size, noise = sizes[0]
    scale = _scale(size, noise)
    error = scale * math.hypot(size_error / abs(size or 1), 2 * noise_error / noise)
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
        convention=("log_density" if size > 0 else "energy") if verdict == EXACT else None,
        share=min(step.exact for step in steps),
        sizes=tuple(sizes) if changes else (),
        clamp=clamp,
        clip=clip,
        decay=decay,
        notes=notes,
    )


def _spread(values: Sequence[float]) -> float:
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
    weights = [1 / max(error, 1e-12 * abs(value), 1e-300) ** 2 for value, error in values]
    total = sum(weights)
    mean = sum(w * value for w, (value, _) in zip(weights, values, strict=True)) / total
    return mean, total**-0.5
