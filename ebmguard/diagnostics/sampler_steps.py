"""The sampler: steps that are too long, too short, stopped by a clamp, or none; its buffer.

The Langevin step is x' = x + s ∇h(x) + σ z with z ~ N(0, I), where h = (1 - β) f is the energy that
the sampler climbs. It is a correct step for the density ∝ exp(o h) with o = 2 s / σ² (Welling and
Teh 2011; Appendix A.3 of the paper).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ConfigError
from .raw_energies import T

__all__ = [
    "ChainState",
    "buffer_diagnostics",
    "drift_to_noise",
    "energy_unit",
    "metropolis_acceptance",
    "named_samples",
    "oriented",
    "sample_shares",
]


def drift_to_noise(grad_norm: T, *, entries: int, step_size: float, noise_std: float) -> T:
    """The move of the drift divided by that of the noise, s ‖∇h‖ / (σ √d); NaN without noise."""
    noise = noise_std * math.sqrt(entries)
    return grad_norm * (step_size / noise if noise else math.nan)


def energy_unit(*, step_size: float, noise_std: float) -> float:
    """A unit of f from the sampler, 0.01 / (s σ), without noise 1 / s; measured, not derived.

    A run of c times f with s / c is the same run, and its unit is c times as large. See
    ``docs/alerts.md``.
    """
    return (0.01 / noise_std if noise_std else 1.0) / step_size


def sample_shares(
    samples: Tensor, before: Tensor | None = None, clamp: tuple[float, float] | None = None
) -> tuple[Tensor, Tensor]:
    """The shares for :func:`named_samples`, and sums that identify the samples.

    Args:
        samples: ``(..., B, d)``.
        before: the identifying sums of the sampler's previous call.
        clamp: lowest and highest value of an entry.

    Returns:
        ``(..., 3)``, without a clamp 2, float32: the shares of finite samples, of samples equal to
        those at the same place in the previous call (NaN if it had others), and of entries at an
        end of the clamp or beyond; and ``(..., 3, B)``, sums and extremes.
    """
    lowest, highest = samples.amin(-1), samples.amax(-1)  # on a CPU quicker than by aminmax
    known_by = torch.stack((samples.sum(-1), lowest, highest), -2)
    # NaN and the infinities show in the extremes, without a mask of the samples' size.
    largest = torch.finfo(samples.dtype).max
    counts = [(lowest >= -largest) * (highest <= largest)]
    # A chain that moves or restarts never repeats itself to the last bit; one that hangs does.
    *_, n, d = samples.shape
    sizes = [n, math.nan, n * d]
    if before is not None and before.shape == known_by.shape:
        counts.append((known_by == before.to(known_by)).all(-2))
        sizes[1] = n
    else:
        counts *= 2
    if clamp is not None:
        counts.append(((samples <= clamp[0]) + (samples >= clamp[1])).sum(-1))
    totals = _sizes(tuple(sizes[: len(counts)]), samples.device)
    return torch.stack(counts, -1).sum(-2) / totals, known_by


@lru_cache(maxsize=64)
def _sizes(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    # Cached, since making it copies from the host.
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.float32, device=device)


def named_samples(shares: Sequence[float]) -> dict[str, float]:
    """The shares by tag."""
    tags = "nonfinite/samples", "sampler/repeated", "sampler/clamped"
    return dict(zip(tags, (1.0 - shares[0], *shares[1:]), strict=False))


class ChainState(NamedTuple):
    """A point of a chain, copied."""

    x: Tensor  # the samples, (..., d)
    h: Tensor  # the energy that the sampler climbs, (...,)
    gradient: Tensor  # ∇h, (..., d)


def metropolis_acceptance(
    start: ChainState, end: ChainState, *, step_size: float, noise_std: float
) -> Tensor:
    """The probability that the Metropolis test of MALA would accept a Langevin step.

    Roberts and Tweedie, "Exponential convergence of Langevin distributions and their discrete
    approximations", Bernoulli 2(4), 1996: min(1, p(x') q(x | x') / (p(x) q(x' | x))) with
    p ∝ exp(o h) and the proposal q(· | x) = N(x + s ∇h(x), σ²). With o = 2 s / σ² the logarithm of
    the ratio is o times the error of a quadrature:

        h(x') - h(x) - ½ (x' - x)·(∇h(x) + ∇h(x')) - ¼ s (‖∇h(x')‖² - ‖∇h(x)‖²)

    which keeps its digits where both densities of the proposal are tiny. Only drift and noise may
    have moved the samples from x (start) to x' (end): the effect of a clamp counts as noise.
    ``(...,)``, float64 (float32 on MPS); NaN without noise, or where inputs leave it undefined.
    """
    if noise_std == 0:
        return torch.full_like(start.h, torch.nan, dtype=_wide(start.h))
    x, h, g, x_end, h_end, g_end = (tensor.to(_wide(tensor)) for tensor in (*start, *end))
    path = ((x_end - x) * (g + g_end)).sum(-1)
    squares = (g_end * g_end).sum(-1) - (g * g).sum(-1)
    error = h_end - h - 0.5 * path - 0.25 * step_size * squares
    return (2 * step_size / noise_std**2 * error).clamp(max=0.0).exp()


def oriented(
    x: Tensor, output: Tensor, cotangent: Tensor, gradient: Tensor, *, sign: int
) -> ChainState:
    """A point of a chain with h and ∇h high on data, from what the sampler differentiated.

    Samplers differentiate sums or means over the batch, of f or of an energy, negated or not. The
    cotangent shows which: h is |c| times the output if every entry is one number c, else NaN.
    ``x`` and ``gradient`` are ``(..., d)``. ``output`` and ``cotangent`` belong to the network's
    output, ``(..., heads)``; ``sign`` is 1 if that is high on data, -1 if it is low.
    """
    c = cotangent.flatten()[0]
    c = torch.where((cotangent == c).all(), c, torch.nan)
    h = (output.to(_wide(output)) * (sign * c.abs())).sum(-1)
    return ChainState(x, h, gradient * (sign * c / c.abs()))


def buffer_diagnostics(buffer: object) -> dict[str, Tensor]:
    """The detached 0-dim tensors of ``buffer.diagnostics()``, under ``buffer/``.

    Raises a ConfigError if it returned something else; empty for objects without that method.
    """
    ask = getattr(buffer, "diagnostics", None)
    if isinstance(buffer, Tensor) or not callable(ask):
        return {}
    values, method = ask(), f"{type(buffer).__name__}.diagnostics()"
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{method} returned a {type(values).__name__}; expected 0-dim tensors by name, such as "
            "{'age': ages.mean()}."
        )
    for name, value in values.items():
        kind = type(value).__name__
        if isinstance(value, Tensor):
            if not (value.ndim or value.is_complex() or value.dtype is torch.bool):
                continue
            kind = f"tensor of shape {tuple(value.shape)} and {value.dtype}"
        raise ConfigError(
            f"{method} has a {kind} under {name!r}; expected a 0-dim tensor of a real number."
        )
    return {f"buffer/{name}": value.detach() for name, value in values.items()}


def _wide(x: Tensor) -> torch.dtype:
    return torch.float32 if x.device.type == "mps" else torch.float64
