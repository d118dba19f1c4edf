"""The sampler: steps that are too long, too short, stopped by a clamp, or none; its buffer.

The Langevin step is x' = x + s ∇h(x) + σ z with z ~ N(0, I), where h = (1 - β) f is the energy that
the sampler climbs. It is a correct step for the density ∝ exp(o h) with o = 2 s / σ² (Welling and
Teh 2011; Appendix A.3 of the paper).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ConfigError
from .raw_energies import wide

__all__ = [
    "ChainState",
    "buffer_diagnostics",
    "drift_to_noise",
    "energy_unit",
    "metropolis_acceptance",
    "norm_diagnostics",
    "oriented",
    "sample_diagnostics",
    "sample_marks",
    "sharpness",
]


def drift_to_noise(
    grad_norm: Tensor, *, entries: int, step_size: float, noise_std: float
) -> Tensor:
    """The move of the drift divided by that of the noise, s ‖∇h‖ / (σ √d); NaN without noise."""
    noise = noise_std * math.sqrt(entries)
    return grad_norm * (step_size / noise if noise else math.nan)


def sharpness(products: Tensor) -> dict[str, Tensor]:
    """How sharply drifts turn, 1 - ⟨g, g'⟩ / ⟨g, g⟩, of these two sums: ``(..., 2)``."""
    product, squared = wide(products).unbind(-1)
    return {"sampler/sharpness": torch.where(squared == 0, math.nan, 1 - product / squared)}


def norm_diagnostics(
    norms: Tensor, size: float | None, entries: int, steps: tuple[float, float] | None
) -> dict[str, Tensor]:
    """Return mean and largest of norms ``(..., B)`` over the factor, their last entry without a
    ``size``; and the drift's move over the noise's of steps of such a size and noise."""
    divisor: float | Tensor = math.nan if size == 0 else size or wide(norms[..., -1])
    norms = norms if size is not None else norms[..., :-1]
    mean, largest = wide(norms.mean(-1)), wide(norms.amax(-1))
    if isinstance(divisor, Tensor):
        divisor = torch.where(divisor == 0, math.nan, divisor)
    numbers = {"sampler/grad_norm": mean / divisor, "sampler/grad_norm_max": largest / divisor}
    if steps is not None:
        noise = drift_to_noise(mean, entries=entries, step_size=steps[0], noise_std=steps[1])
        numbers["sampler/drift_to_noise"] = noise
    return numbers


def energy_unit(*, step_size: float, noise_std: float) -> float:
    """A unit of f from the sampler, 0.01 / (s σ), without noise 1 / s; measured, not derived.

    A run of c times f with s / c is the same run, and its unit is c times as large. See
    ``docs/alerts.md``.
    """
    return (0.01 / noise_std if noise_std else 1.0) / step_size


def sample_marks(samples: Tensor, clamp: tuple[float, float] | None = None) -> Tensor:
    """What :func:`sample_diagnostics` reads of samples ``(..., B, d)``, so that none is copied.

    ``(..., 3, B)``: the sum of each sample's entries, the lowest and the highest; with a clamp
    ``(..., 4, B)``: the number of entries at an end of it or beyond, too.
    """
    # On a CPU two extremes are quicker than aminmax.
    marks = [samples.sum(-1), samples.amin(-1), samples.amax(-1)]
    if clamp is not None:
        marks.append(((samples <= clamp[0]) + (samples >= clamp[1])).sum(-1))
    dtype = torch.promote_types(samples.dtype, torch.float32)  # half precision would not count far
    return torch.stack([x.to(dtype) for x in marks], -2)


def sample_diagnostics(marks: Tensor, before: Tensor | None, *, entries: int) -> dict[str, Tensor]:
    """The shares of samples that are not finite, of those equal to the sample at the same place in
    the previous call, and of entries at an end of the clamp: ``(...,)`` by tag.

    Args:
        marks: of :func:`sample_marks`.
        before: those of the sampler's previous call; None if it had others: then NaN.
        entries: d of a sample.
    """
    lowest, highest = marks[..., 1, :], marks[..., 2, :]
    # NaN and the infinities show in the extremes, without a mask of the samples' size.
    largest = torch.finfo(marks.dtype).max
    shares = {"nonfinite/samples": ~((lowest >= -largest) & (highest <= largest))}
    # A chain that moves or restarts never repeats itself to the last bit; one that hangs does.
    if before is not None:
        same = marks[..., :3, :] == before[..., :3, :]
        shares["sampler/repeated"] = same.all(-2)
    numbers = {tag: wide(share).mean(-1) for tag, share in shares.items()}
    numbers.setdefault("sampler/repeated", torch.full_like(numbers["nonfinite/samples"], math.nan))
    if marks.shape[-2] > 3:
        numbers["sampler/clamped"] = wide(marks[..., 3, :]).mean(-1) / entries
    return numbers


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
        return torch.full_like(start.h, torch.nan, dtype=wide(start.h).dtype)
    x, h, g, x_end, h_end, g_end = map(wide, (*start, *end))
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
    h = (wide(output) * (sign * c.abs())).sum(-1)
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
