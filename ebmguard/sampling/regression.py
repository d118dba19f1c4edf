"""A regression of one sampler step on gradient g and draws n: x' - x = a g + s n, to rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .recording import Draw

__all__ = ["Step", "solve"]

_ENTRIES = 32_768  # the most that are used
_ROWS = 64
_MOST_DRAWS = 6
_TRIALS = 300
_SHARE = 0.3  # of the entries that must obey to rounding
_ALL = 0.97  # of the entries is all: the rest are accidents of rounding
_LEAST_MISS = 1 / 16  # of its limit, that an entry may be off by rounding: half of the most
_AT_ONCE = 512  # steps whose noise may be drawn at once


class UsedDraw(NamedTuple):
    """A draw that a step used."""

    number: int  # of the draw
    row: int  # of a draw for all steps; else -1
    std: float  # of the draw
    factor: float = math.nan  # on the draw at a standard deviation of 1


class Step(NamedTuple):
    """A solved step: a and s with their standard errors, NaN where no entries determine them."""

    step: float = math.nan
    noise: float = math.nan
    step_error: float = math.nan
    noise_error: float = math.nan
    exact: float = 0.0  # share of the free entries that obey to rounding
    momentum: float = 0.0  # factor of the move before this one in the same update
    decay: float = 0.0  # factor of -x in it
    moved: float = 1.0  # share of the samples
    clamp: tuple[float | None, float | None] = (None, None)  # ends at which many entries lie
    clip: str = ""  # how the gradient is clipped, in words
    bound: float = math.inf  # of the entries of the gradient, or below 0 less that of its norm
    noises: tuple[UsedDraw, ...] = ()
    why: str = ""  # why there is no solution, in words; empty where there is one


def solve(
    x: Tensor, gradient: Tensor, end: Tensor, draws: Sequence[Draw], before: Tensor | None = None
) -> Step:
    """Solve for the step from samples x to end, ``(B, ...)``, with the gradient at x.

    A draw has x's shape, as many entries, no first dimension, or one of the steps in front. The
    samples ``before`` are those of one step earlier, for momentum.
    """
    pick = _picker(x)
    start, g, y = map(pick, (x, gradient, end))
    dx, back = y - start, start if before is None else pick(before)
    moves = (dx != 0).any(1) & (y != back).any(1)  # a rejected proposal is left again
    # Values at either end that many entries share.
    least = max(3, 1e-4 * y.numel())
    low, high = (float(end) if (y == end).sum() > least else None for end in (y.min(), y.max()))
    at_end = torch.isin(y, y.new_tensor([end for end in (low, high) if end is not None]))
    free = ~at_end & moves[:, None]
    known = partial(Step, moved=float(moves.double().mean()), clamp=(low, high))
    if not all(bool(values.isfinite().all()) for values in (start, g, y)):
        return known(why="values that are not finite")
    move, slope = dx[free], g[free]
    # The draws that are likest to what the gradient leaves of the move.
    left = move - slope * (slope @ move) / (slope @ slope).clamp(min=1e-300)
    drawn = _noises(pick, draws, x)
    drawn.sort(key=lambda n: -abs(float(n[0][free] @ left)) / max(float(n[0][free].norm()), 1e-300))
    del drawn[_MOST_DRAWS:]
    noises, sources = [noise for noise, _ in drawn], [source for _, source in drawn]
    rounding = torch.finfo(x.dtype)  # of x + a g + s n
    tolerance = 4 * rounding.eps * (start.abs() + y.abs() + dx.abs()) + rounding.tiny
    limit = tolerance[free]
    if len(move) < 4 * (len(noises) + 1) or not bool(g.any()):
        return known(why="too few entries are free")
    if limit.mean() > 0.05 * move.square().mean().sqrt():
        return known(why="rounding hides the step")
    models: dict[tuple[str, ...], list[Tensor]] = {(): [], ("decay",): [-start]}
    if before is not None:
        models |= {("momentum",): [start - back], ("momentum", "decay"): [start - back, -start]}
    best, names = _Fit(), tuple[str, ...]()
    for further, columns in models.items():
        fit = _fit(torch.stack([g, *noises, *columns], -1)[free], move, limit)
        # Where the gradient does not count, a move may repeat itself for another reason.
        counts = "momentum" not in further or abs(fit.values[0]) > 4 * fit.errors[0]
        if fit.share > best.share + 0.1 and counts:
            best, names = fit, further
        if best.share > _ALL:
            break
    if best.share < _SHARE:
        return known(exact=best.share, why=_why(g, noises, dx, free, tolerance))
    values, last = best.values, len(noises) + 1
    noise = math.hypot(*values[1:last])
    noise_error = math.hypot(*best.errors[1:last])
    # Others may obey it with different numbers; those that met a clamp know no gradient.
    design, wrong = torch.stack([g, *noises, *models[names]], -1)[free], ~best.inliers
    rest = _fit(design[wrong], move[wrong], limit[wrong]) if wrong.any() else _Fit()
    has_slope = rest.share > _SHARE and abs(rest.values[0]) > 4 * rest.errors[0]
    sizes = (values[0], rest.values[0]), (noise, math.hypot(*rest.values[1:last]))
    if has_slope and not all(math.isclose(*pair, rel_tol=0.01) for pair in sizes):
        return known(exact=best.share, why="noise or step sizes differ between samples")
    drift = dx - sum(v * n for v, n in zip(values[1:], [*noises, *models[names]], strict=True))
    clip, bound = "", math.inf
    if best.share < _ALL:
        clip, bound = _clip(drift / values[0], free, best.inliers)
    least = max(1e-6 * float(move.abs().mean()), 4 * noise_error)
    factors = zip(sources, values[1:last], strict=True)
    return known(
        step=values[0],
        noise=noise if noise > least else 0.0,
        step_error=best.errors[0],
        noise_error=noise_error,
        exact=best.share,
        clip=clip,
        bound=bound,
        noises=tuple(source._replace(factor=v) for source, v in factors if abs(v) > least),
        **dict[str, Any](zip(names, values[last:], strict=True)),
    )


def _picker(x: Tensor) -> Callable[[Tensor], Tensor]:
    """A choice of the same entries of every tensor: ``(rows, columns)``, in double precision."""
    size = max(x[0].numel(), 1)
    rows = min(len(x), max(_ENTRIES // size, _ROWS))
    chance = torch.Generator("cpu").manual_seed(0)
    columns = torch.randperm(size, generator=chance, device="cpu")[: max(_ENTRIES // rows, 1)]

    def pick(values: Tensor) -> Tensor:
        flat = values.reshape(x.shape)[:rows].reshape(rows, -1)
        return flat[:, columns.to(values.device)].cpu().double()

    return pick


def _noises(
    pick: Callable[[Tensor], Tensor], draws: Sequence[Draw], x: Tensor
) -> list[tuple[Tensor, UsedDraw]]:
    """The draws that fit the samples, at a variance of 1, with their sources."""
    noises: list[tuple[Tensor, UsedDraw]] = []
    for draw in draws:
        values, rows, is_row = draw.values, list[Tensor](), False
        if values.numel() == x.numel():
            rows = [values]
        elif values.ndim == x.ndim + 1 and values.shape[1:] == x.shape and len(values) <= _AT_ONCE:
            rows, is_row = list(values), True  # one for every step
        elif values.shape in (x.shape[1:], (1, *x.shape[1:])):
            rows = [values.expand(x.shape)]  # shared by the members of an ensemble
        for row, column in enumerate(map(pick, rows)):
            std = float(column.std()) if draw.std is None else draw.std
            if std > 0 and not any(torch.equal(column / std, other) for other, _ in noises):
                noises.append((column / std, UsedDraw(draw.number, row if is_row else -1, std)))
    return noises


class _Fit(NamedTuple):
    share: float = 0.0
    inliers: Tensor = torch.empty(0, device="cpu")  # which free entries obey to rounding
    values: Sequence[float] = (math.nan,)
    errors: Sequence[float] = (math.nan,)


def _fit(columns: Tensor, y: Tensor, limit: Tensor) -> _Fit:
    """The coefficients that most entries obey to rounding, by consensus of small subsets."""
    size = columns.square().mean(0).sqrt().clamp(min=1e-300)
    a, (count, k) = columns / size, columns.shape
    chance = torch.Generator("cpu").manual_seed(0)
    subsets = torch.randint(count, (_TRIALS, k), generator=chance, device="cpu")
    judges = torch.randint(count, (min(count, 4096),), generator=chance, device="cpu")
    tried = torch.linalg.lstsq(a[subsets], y[subsets].unsqueeze(-1)).solution.squeeze(-1)
    loose = 1e-3 * y.abs().mean() + limit.mean()
    misses = (y[judges] - tried @ a[judges].T).abs()
    values = tried[(misses < loose).sum(1).argmax()]
    # From entries that nearly obey to those that obey to rounding.
    for halving in range(0, 16, 2):
        inliers = (y - a @ values).abs() <= torch.maximum(limit, loose * 0.5**halving)
        if int(inliers.sum()) < k + 4:
            return _Fit()
        values = torch.linalg.lstsq(a[inliers], y[inliers, None], driver="gelsd").solution[:, 0]
    misses = (y - a @ values).abs()
    inliers = misses <= limit
    # An entry that alone decides a coefficient misses nothing, and is rounded as others are.
    rounded = torch.maximum(misses, _LEAST_MISS * limit)[inliers, None]
    errors = (torch.linalg.pinv(a[inliers]).T * rounded).norm(dim=0) / size
    return _Fit(float(inliers.double().mean()), inliers, (values / size).tolist(), errors.tolist())


def _is_one_number(x: Tensor, share: float = 1.0) -> bool:
    """Return whether this share of four numbers or more, at least, are their median."""
    near = (x - x.median()).abs() < 1e-3 * x.median() if len(x) > 3 else x.new_zeros(1)
    return bool(near.double().mean() >= share)


def _clip(drift: Tensor, free: Tensor, inliers: Tensor) -> tuple[str, float]:
    """Describe how the gradient was clipped where entries do not obey, and give its bound."""
    wrong = free.masked_scatter(free, ~inliers)
    cut = drift[wrong].abs()
    # Others may have met a clamp before the noise came.
    if _is_one_number(cut, 0.5):
        return f"entries at {float(cut.median()):.4g}", float(cut.median())
    rows = (wrong.sum(1) > 0.9 * free.sum(1)) & free.any(1)
    norms = drift[rows].norm(dim=1)
    if _is_one_number(norms):
        share = f"norm, of {float(rows.double().mean()):.0%} of the samples"
        return share, -float(norms.median())
    return "", math.inf


def _why(g: Tensor, noises: Sequence[Tensor], dx: Tensor, free: Tensor, tolerance: Tensor) -> str:
    """Explain why the move is not a constant times the gradient plus known noise."""
    y, columns = dx[free], torch.stack([g, *noises], -1)
    if _fit(torch.stack([g.sign(), *noises], -1)[free], y, tolerance[free]).share > _SHARE:
        return "sign of the gradient alone"
    # The same with different coefficients for every row.
    masked, moves = columns * free.unsqueeze(-1), (dx * free).unsqueeze(-1)
    values = torch.linalg.pinv(masked) @ moves
    inliers = (moves - masked @ values).squeeze(-1).abs() <= tolerance
    inliers &= free & (free.sum(1, keepdim=True) >= 4 * columns.shape[-1])
    if int(inliers.sum()) > _SHARE * len(y):
        moving = values[:, 0, 0].abs() * g.norm(dim=1)
        if _is_one_number(moving[moving > 0]):
            return "gradient clipped by norm in every sample"
        return "step sizes differ between samples"
    a = columns[free]
    values = torch.linalg.lstsq(a, y[:, None], driver="gelsd").solution[:, 0]
    drift, slope = y - a[:, 1:] @ values[1:], a[:, 0] * values[0]
    alike = (drift * slope > 0)[drift.abs() > drift.abs().median()].double().mean()
    if noises and alike > 0.9 and torch.corrcoef(torch.stack([drift, slope]))[0, 1] < 0.99:
        return "preconditioned gradient"
    without = y - a[:, 0] * (a[:, 0] @ y) / (a[:, 0] @ a[:, 0])
    if noises and (drift - slope).square().mean() < 0.5 * without.square().mean():
        return "more than the gradient and the noise"
    z = without / without.square().mean().sqrt()
    if abs(float(z.pow(4).mean()) - 3) > max(0.3, 6 * math.sqrt(24 / len(z))):
        return "preconditioned gradient" if alike > 0.9 else "non-Gaussian noise"
    return "noise that torch did not draw in Python"
