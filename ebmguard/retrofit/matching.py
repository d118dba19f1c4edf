"""The comparison of energies: equal numbers show which are which."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import ConfigError

__all__ = [
    "check_scale",
    "contains",
    "functions",
    "functions_of",
    "host_rows",
    "is_linear",
    "is_mean",
    "nonlinear_function",
    "row_hashes",
]

_AT_ONCE = 2**20  # numbers that are marked
_NONLINEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "softplus or log-sigmoid": functional.softplus,  # which is -softplus(-f)
    **{name: getattr(torch, name) for name in ("sigmoid", "tanh", "square")},
    "exponential": torch.exp,
}


def row_hashes(x: Tensor) -> Tensor:
    """Return a whole number for every row, in practice the same for equal rows only."""
    rows = x.detach().as_subclass(Tensor).reshape(len(x), -1)
    width = rows.shape[1]
    factors = torch.arange(1, width + 1, device=x.device) * 0x1E3779B97F4A7C15
    factors = factors ^ (factors >> 31)
    parts = torch.split(rows, max(1, _AT_ONCE // width))
    bits = (part.float().contiguous().view(torch.int32).long() for part in parts)
    return torch.cat([(block * factors).sum(1) for block in bits])


def host_rows(x: Tensor) -> Tensor:
    """Return energies on the host, one row a sample."""
    return x.detach().as_subclass(Tensor).cpu().double().reshape(len(x), -1)


def check_scale(f_neg: Tensor, calls: Sequence[tuple[Tensor, Tensor]], scale: float) -> None:
    """Refuse a scale that was measured for the network's output where the loss gets a multiple."""
    energies = host_rows(f_neg).sum(1)
    for output in (x.sum(1) for _, x in calls if len(x) == len(energies) > 2):
        ratio = float(energies @ output / (output @ output).clamp(min=1e-300))
        is_one = torch.allclose(energies, ratio * output, 1e-4, 0.0) and bool(energies.std() > 0)
        if is_one and not math.isclose(abs(ratio), 1, rel_tol=1e-3):
            raise ConfigError(
                f"The loss gets {ratio:.4g} times what the network returns, and the measured "
                f"output_scale={scale:g} is that of the network's output. Pass that of the energy "
                f"of the loss: output_scale={scale / abs(ratio):.6g}."
            )


def contains(values: Iterable[Tensor], x: Tensor) -> bool:
    """Tell whether they hold all of x, or its negatives."""
    pool = [value.flatten().abs() for value in values]
    return bool(pool) and bool(torch.isin(x.abs(), torch.cat(pool)).all())


def is_mean(values: Iterable[Tensor], x: Tensor) -> bool:
    """Tell whether x is certainly the mean of many rows, or its negative, and no energy."""
    rows = [value for value in values if len(value) > 1 and value.shape[1] == x.numel()]
    x = x.abs().flatten()
    return any(torch.allclose(x, y.mean(0).abs(), 1e-5, 0) for y in rows) and not contains(rows, x)


def functions_of(outputs: Iterable[Tensor], f: Tensor) -> set[str]:
    """The functions of some of these outputs that f may be."""
    return {n for x in outputs if x.shape[1] > 1 and len(x) == len(f) for n in functions(x, f)}


def functions(outputs: Tensor, f: Tensor) -> list[str]:
    """The functions of several outputs of a sample that f may be."""
    values = {
        "sum": [outputs.sum(1), outputs.mean(1)],
        "logsumexp": [outputs.logsumexp(1)],
        "one output": [*outputs.unbind(1), outputs.amax(1)],
        "log-probability": [*outputs.log_softmax(1).unbind(1)],
    }
    is_f = {x: any(torch.allclose(f.abs(), y.abs(), 1e-3, 1e-6) for y in values[x]) for x in values}
    return [name for name in values if is_f[name]]


def is_linear(f: Tensor, energy: Tensor) -> bool | None:
    """Tell if f is linear in the energy, but for a constant; None where too few numbers tell."""
    x, y = energy - energy.mean(), f - f.mean()
    if len(set(energy.tolist())) < 4 or not y.any():
        return None
    return bool((y - x * ((x @ y) / (x @ x))).abs().max() <= 1e-3 * y.abs().max())


def nonlinear_function(f: Tensor, energy: Tensor) -> str | None:
    """The function of the energy that f certainly is; None where it may be linear."""
    if is_linear(f, energy) is not False:
        return None
    for name, function in _NONLINEAR.items():
        for turned in (energy, -energy):
            if torch.allclose(f.abs(), function(turned).abs(), 1e-3, 1e-6):
                return name
    return None
