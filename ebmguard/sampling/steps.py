"""One step of a sampler, solved: x' - x = a g + s n, from the gradient g and the draws n.

Noise that is known is taken off to the last bit, so that few entries tell a and s to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .recording import Draw

__all__ = ["Step", "solve"]

_ENTRIES = 32_768  # that are looked at
_ROWS = 64
_MOST_DRAWS = 6
_TRIALS = 300
_SHARE = 0.3  # of the entries that must obey to rounding
_ALL = 0.97  # of them is all: the rest are accidents of rounding
_AT_ONCE = 512  # steps whose noise may be drawn at once


@dataclass(frozen=True)
class Step:
    """What one step did: a and s with their standard errors, NaN where no entries tell them."""

    step: float = math.nan
    noise: float = math.nan
    step_error: float = math.nan
    noise_error: float = math.nan
    exact: float = 0.0  # share of the free entries that obey to rounding
    momentum: float = 0.0  # factor of the move before this one in the same update
    decay: float = 0.0  # factor of -x there
    moved: float = 1.0  # share of the samples
    clamp: tuple[float | None, float | None] = (None, None)  # ends at which many entries lie
    clip: str = ""  # how the gradient is clipped, in words
    why: str = ""  # the step is not what it should be, in words; empty where it is


def solve(
    x: Tensor, gradient: Tensor, end: Tensor, draws: Sequence[Draw], before: Tensor | None = None
) -> Step:
    """The step from ``x`` to ``end``.

    Args:
        x, end: samples, ``(B, ...)``, before and after.
        gradient: what the sampler got at ``x``, in its shape.
        draws: those that may have entered, of ``x``'s shape, of as many entries, shared by the
            first dimension, or with that of the steps in front.
        before: the samples of one step earlier, for momentum.
    """
    pick = _Pick(x)
    start, g, y = pick(x), pick(gradient), pick(end)
    dx = y - start
    back = None if before is None else pick(before)
    moves = (dx != 0).any(1)
    if back is not None:
        moves &= (y != back).any(1)  # a rejected proposal is left again
    at_end, clamp = _at_ends(y)
    free = ~at_end & moves[:, None]
    known: dict[str, Any] = {"moved": float(moves.double().mean()), "clamp": clamp}
    if not all(bool(each.isfinite().all()) for each in (start, g, y)):
        return Step(why="values that are not finite", **known)
    if not bool(moves.any()):
        return Step(why="nothing moved", **known)
    if not bool(free.any()):
        return Step(why="too few entries are free", **known)
    noises, stds = _noises(pick, draws, x, dx, g, free)
    # The rounding of x + a g + s n.
    eps = torch.finfo(x.dtype).eps
    tolerance = 4 * eps * (start.abs() + y.abs() + dx.abs()) + torch.finfo(x.dtype).tiny
    data = _Data(dx, free, tolerance)
    if data.count < 4 * (len(noises) + 1) or not bool(g.any()):
        return Step(why="too few entries are free", **known)
    if tolerance[free].mean() > 0.05 * dx[free].square().mean().sqrt():
        return Step(why="rounding hides the step", **known)
    models: dict[str, list[Tensor]] = {"": [], "decay": [-start]}
    if back is not None:
        models |= {"momentum": [start - back], "both": [start - back, -start]}
    best, name = _Fit(), ""
    for further, columns in models.items():
        fit = data.fit([g, *noises, *columns])
        # Where the gradient does not count, a move may repeat itself for another reason.
        counts = further in ("", "decay") or abs(fit.values[0]) > 4 * fit.errors[0]
        if fit.share > best.share + 0.1 and counts:
            best, name = fit, further
        if best.share > _ALL:
            break
    if best.share < _SHARE:
        return Step(exact=best.share, why=_why(data, g, noises), **known)
    values, errors = best.values, best.errors
    last = len(noises) + 1
    parts = [v * std for v, std in zip(values[1:last], stds, strict=True)]
    noise = math.hypot(*parts)
    if noise <= 1e-6 * float(dx[free].abs().mean()):
        noise = 0.0
    names = {"both": ("momentum", "decay")}.get(name, (name,))
    rest = dict(zip(names, values[last:], strict=False))
    drift = dx - sum(v * n for v, n in zip(values[1:], [*noises, *models[name]], strict=True))
    return Step(
        step=values[0],
        noise=noise,
        step_error=errors[0],
        noise_error=math.hypot(*(e * std for e, std in zip(errors[1:last], stds, strict=True))),
        exact=best.share,
        clip=_clip(drift / values[0], free, best.obeys) if best.share < _ALL else "",
        momentum=rest.get("momentum", 0.0),
        decay=rest.get("decay", 0.0),
        **known,
    )


class _Pick:
    """Chooses the same entries of every tensor: ``(rows, columns)``, in double precision."""

    def __init__(self, x: Tensor) -> None:
        self.shape = x.shape
        size = max(x[0].numel(), 1)
        self.rows = min(len(x), max(_ENTRIES // size, _ROWS))
        width = max(min(size, _ENTRIES // self.rows), 1)
        chance = torch.Generator("cpu").manual_seed(0)
        self.columns = torch.randperm(size, generator=chance, device="cpu")[:width]

    def __call__(self, x: Tensor) -> Tensor:
        flat = x.reshape(self.shape)[: self.rows].reshape(self.rows, -1)
        return flat[:, self.columns.to(x.device)].cpu().double()


def _noises(
    pick: _Pick, draws: Sequence[Draw], x: Tensor, dx: Tensor, g: Tensor, free: Tensor
) -> tuple[list[Tensor], list[float]]:
    """The draws that fit the samples, and their standard deviations: those likest to the move."""
    found: list[tuple[Tensor, float]] = []
    for draw in draws:
        values, each = draw.values, []
        if values.numel() == x.numel():
            each = [values]
        elif values.ndim == x.ndim + 1 and values.shape[1:] == x.shape and len(values) <= _AT_ONCE:
            each = list(values)  # of all steps
        elif values.shape in (x.shape[1:], (1, *x.shape[1:])):
            each = [values.expand(x.shape)]  # shared by the members of an ensemble
        for one in each:
            column = pick(one)
            std = float(column.std()) if draw.std is None else draw.std
            if std > 0 and not any(torch.equal(column, other) for other, _ in found):
                found.append((column, std))
    rest, by = dx[free], g[free]
    rest = rest - by * (by @ rest) / (by @ by).clamp(min=1e-300)

    def likeness(one: tuple[Tensor, float]) -> float:
        column = one[0][free]
        return abs(float(column @ rest)) / max(float(column.norm()), 1e-300)

    found.sort(key=likeness, reverse=True)
    return [n for n, _ in found[:_MOST_DRAWS]], [std for _, std in found[:_MOST_DRAWS]]


def _at_ends(y: Tensor) -> tuple[Tensor, tuple[float | None, float | None]]:
    """Entries at a smallest or largest value that many share, and these values."""
    mask, ends = torch.zeros_like(y, dtype=torch.bool), []
    for end in (y.min(), y.max()):
        here = y == end
        is_shared = int(here.sum()) > max(3, 1e-4 * y.numel())
        mask |= here & is_shared
        ends.append(float(end) if is_shared else None)
    return mask, (ends[0], ends[1])


@dataclass(frozen=True)
class _Fit:
    share: float = 0.0
    obeys: Tensor = field(default_factory=lambda: torch.empty(0))  # of the free entries
    values: Sequence[float] = (math.nan,)
    errors: Sequence[float] = (math.nan,)


class _Data:
    """What is to be explained: the moves of the free entries, to within rounding."""

    def __init__(self, dx: Tensor, free: Tensor, tolerance: Tensor) -> None:
        self.dx, self.free, self.tolerance = dx, free, tolerance
        self.y, self.limit = dx[free], tolerance[free]
        self.count = len(self.y)

    def fit(self, columns: Sequence[Tensor]) -> _Fit:
        """Coefficients that most entries obey to rounding, by consensus of small subsets."""
        a = torch.stack([column[self.free] for column in columns], 1)
        size = a.square().mean(0).sqrt().clamp(min=1e-300)
        a, y, k = a / size, self.y, len(columns)
        chance = torch.Generator("cpu").manual_seed(0)
        chosen = torch.randint(self.count, (_TRIALS, k), generator=chance, device="cpu")
        judges = torch.randint(self.count, (min(self.count, 4096),), generator=chance, device="cpu")
        tried = torch.linalg.lstsq(a[chosen], y[chosen].unsqueeze(-1)).solution.squeeze(-1)
        loose = 1e-3 * y.abs().mean() + self.limit.mean()
        misses = (y[judges] - tried @ a[judges].T).abs()
        values = tried[(misses < loose).sum(1).argmax()]
        # From what nearly obeys to what obeys to rounding.
        for halving in range(0, 16, 2):
            obeys = (y - a @ values).abs() <= torch.maximum(self.limit, loose * 0.5**halving)
            if int(obeys.sum()) < k + 4:
                return _Fit()
            values = _least_squares(a[obeys], y[obeys])
        obeys = (y - a @ values).abs() <= self.limit
        inverse = torch.linalg.pinv(a[obeys].T @ a[obeys], hermitian=True)
        spread = (y - a @ values)[obeys].square().mean()
        errors = (inverse.diagonal().clamp(min=0) * spread).sqrt() / size
        return _Fit(float(obeys.double().mean()), obeys, (values / size).tolist(), errors.tolist())

    def by_rows(self, columns: list[Tensor]) -> tuple[float, Tensor]:
        """The share of entries that obey coefficients of their row, and these, ``(rows, k)``."""
        a = torch.stack(columns, -1) * self.free.unsqueeze(-1)
        y = (self.dx * self.free).unsqueeze(-1)
        values = torch.linalg.pinv(a) @ y
        miss = (y - a @ values).squeeze(-1).abs()
        obeys = (miss <= self.tolerance) & (self.free.sum(1, keepdim=True) >= 4 * len(columns))
        return float((obeys & self.free).sum() / self.count), values.squeeze(-1)


def _least_squares(a: Tensor, y: Tensor) -> Tensor:
    solution: Tensor = torch.linalg.lstsq(a, y.unsqueeze(-1), driver="gelsd").solution
    return solution.squeeze(-1)


def _is_one_number(x: Tensor, share: float = 1.0) -> bool:
    """Whether this share of four numbers or more, at least, are their median."""
    near = (x - x.median()).abs() < 1e-3 * x.median() if len(x) > 3 else x.new_zeros(1)
    return bool(near.double().mean() >= share)


def _clip(drift: Tensor, free: Tensor, obeys: Tensor) -> str:
    """How the gradient was clipped where entries do not obey. ``drift``: what was left of it."""
    wrong = free.clone()
    wrong[free] = ~obeys
    cut = drift[wrong].abs()
    # Others may have met a clamp before the noise came.
    if _is_one_number(cut, 0.5):
        return f"entries at {float(cut.median()):.4g}"
    rows = (wrong.sum(1) > 0.9 * free.sum(1)) & free.any(1)
    if _is_one_number(drift[rows].norm(dim=1)):
        return f"norm, of {float(rows.double().mean()):.0%} of the samples"
    return ""


def _why(data: _Data, g: Tensor, noises: Sequence[Tensor]) -> str:
    """Why the move is not a constant times the gradient plus known noise."""
    if data.fit([g.sign(), *noises]).share > _SHARE:
        return "sign of the gradient alone"
    share, values = data.by_rows([g, *noises])
    if share > _SHARE:
        moving = values[:, 0].abs() * g.norm(dim=1)
        if _is_one_number(moving[moving > 0]):
            return "gradient clipped by norm in every sample"
        return "step sizes differ between samples"
    a = torch.stack([column[data.free] for column in (g, *noises)], 1)
    values = _least_squares(a, data.y)
    drift = data.y - a[:, 1:] @ values[1:]
    slope = a[:, 0] * values[0]
    alike = (drift * slope > 0)[drift.abs() > drift.abs().median()].double().mean()
    if noises and alike > 0.9 and torch.corrcoef(torch.stack([drift, slope]))[0, 1] < 0.99:
        return "preconditioned gradient"
    without = data.y - a[:, 0] * (a[:, 0] @ data.y) / (a[:, 0] @ a[:, 0])
    if noises and (drift - slope).square().mean() < 0.5 * without.square().mean():
        return "more than the gradient and the noise"
    z = without / without.square().mean().sqrt()
    if abs(float(z.pow(4).mean()) - 3) > max(0.3, 6 * math.sqrt(24 / len(z))):
        return "preconditioned gradient" if alike > 0.9 else "non-Gaussian noise"
    return "noise that torch did not draw in Python"
