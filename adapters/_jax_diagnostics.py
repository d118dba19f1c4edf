"""The diagnostics of a step as pure functions of ``jax.numpy``: twin of ebmguard.diagnostics."""

from __future__ import annotations

import math
from typing import TypeAlias

from ebmguard.adapters._jax_objective import Array, Groups, check_energies, per_sample, usable
from ebmguard.adapters._requires import requires

with requires("jax", extra="jax"):
    import jax
    import jax.numpy as jnp

__all__ = ["Row", "diagnostics"]

Row: TypeAlias = "dict[str, Array]"

_QUANTILES = {"q05": 0.05, "median": 0.5, "q95": 0.95}


def diagnostics(
    f_pos: Array,
    f_neg: Array,
    beta_star: float | Array,
    *,
    groups: Groups | None = None,
    output_scale: float | None = None,
    reference_beta_star: float = 0.5,
) -> Row:
    """The row of one step, to be returned from a jitted one: the tags that the guard's rules read.

    Args:
        f_pos, f_neg, beta_star, groups: those of the loss.
        output_scale: adds ``energy_gap_scaled``.
        reference_beta_star: the exponent of the weights under ``ref/``; at β* = 0 the others are
            uniform.

    Returns:
        0-dim arrays without gradients: the diagnostics of the weights, the energies and the lost
        samples, as :mod:`ebmguard.diagnostics` has them, and ``beta_star``.

    Raises:
        EnergyTypeError, ShapeError, ConfigError: as :func:`contrastive_loss`.
    """
    check_energies(f_pos, f_neg, beta_star, "default", groups)
    pos = jax.lax.stop_gradient(per_sample(f_pos))
    neg = jax.lax.stop_gradient(per_sample(f_neg))
    beta = jax.lax.stop_gradient(jnp.asarray(beta_star, pos.dtype))
    reference = _of_weights(pos, neg, reference_beta_star, groups)
    row = {
        **_of_weights(pos, neg, beta, groups),
        **{f"ref/{name}": value for name, value in reference.items()},
        **_of_energies(pos, neg),
        "beta_star": beta,
    }
    lost_pos = jnp.sum(~usable(pos, beta), dtype=pos.dtype)
    lost_neg = jnp.sum(~usable(neg, beta), dtype=pos.dtype)
    row["nonfinite/pos"], row["nonfinite/neg"] = lost_pos, lost_neg
    row["nonfinite/energies"] = (lost_pos + lost_neg) / (pos.size + neg.size)
    if output_scale is not None:
        row["energy_gap_scaled"] = row["energy_gap"] * output_scale
    return row


def _of_weights(pos: Array, neg: Array, beta: float | Array, groups: Groups | None) -> Row:
    n, m = pos.size, neg.size
    spoiler = 0.0 * (jnp.sum(beta * pos) + jnp.sum(beta * neg))  # NaN where one is not finite
    pos, neg = beta * pos, beta * neg
    if groups is None:
        paired: int | Array = n
        log_w = jax.nn.log_softmax(neg)
        log_pull = -jax.nn.softplus(pos - jax.nn.logsumexp(neg))
        log_v = jax.nn.log_softmax(log_pull)
        w, v = jnp.exp(log_w), jnp.exp(log_v)
    else:
        same = groups[0][:, None] == groups[1]
        partnered = same.any(-1)
        paired = jnp.sum(partnered, dtype=pos.dtype)
        rows = jnp.where(same, neg, -jnp.inf)
        log_pull = -jax.nn.softplus(pos - jax.nn.logsumexp(rows, axis=-1))
        log_pull = jnp.where(partnered, log_pull, -jnp.inf)
        log_v = jax.nn.log_softmax(log_pull)
        v = jnp.exp(log_v)
        shares = jnp.where(same, v[:, None] * jax.nn.softmax(rows, axis=-1), 0.0)
        w = jnp.sum(shares, 0) / (paired > 0)
        lowest = jnp.finfo(w.dtype).min
        log_v, log_w = jnp.maximum(log_v, lowest), jnp.maximum(jnp.log(w), lowest)
    square_w, square_v = jnp.sum(w * w), jnp.sum(v * v)
    row = {
        "grad_scale": jnp.sum(jnp.exp(log_pull)) / paired,
        "weight_entropy": jnp.sum(w * log_w) * (-1 / math.log(m) if m > 1 else math.nan),
        "ess": 1 / square_w / m,
        "max_weight": jnp.max(w),
        "positive_weight_entropy": jnp.sum(v * log_v) * (-1 / math.log(n) if n > 1 else math.nan),
        "reweighting_angle": jnp.sqrt((1 / paired + 1 / m) / (square_w + square_v)),
    }
    if groups is not None:
        row["unpaired"] = n - paired
    return {name: value + spoiler for name, value in row.items()}


def _of_energies(pos: Array, neg: Array) -> Row:
    ranked_pos, ranked_neg = jnp.sort(pos), jnp.sort(neg)
    below = jnp.searchsorted(ranked_pos, ranked_neg, side="left")
    not_above = jnp.searchsorted(ranked_pos, ranked_neg, side="right")
    overlap = jnp.sum(below + not_above, dtype=pos.dtype) * (0.5 / (pos.size * neg.size))
    row = {
        "energy_gap": jnp.mean(pos) - jnp.mean(neg),
        # NaN is sorted to the end, where it would count as the highest energy.
        "energy_overlap": overlap + _spoiler(ranked_pos) + _spoiler(ranked_neg),
    }
    for side, ranked in (("f_pos", ranked_pos), ("f_neg", ranked_neg)):
        row |= {f"{side}/{name}": value for name, value in _summary(ranked).items()}
    return row


def _summary(ranked: Array) -> Row:
    spoiler = _spoiler(ranked)
    row = {
        "mean": jnp.mean(ranked),
        "std": jnp.std(ranked),
        "min": ranked[0] + spoiler,
        "max": ranked[-1],
    }
    for name, level in _QUANTILES.items():
        exact = level * (ranked.size - 1)
        low, high = ranked[math.floor(exact)], ranked[math.ceil(exact)]
        part = exact % 1  # 0 must not multiply an infinite difference
        row[name] = (low + part * (high - low) if part else low) + spoiler
    return row


def _spoiler(ranked: Array) -> Array:
    """NaN where the last of sorted energies is NaN, else 0."""
    return 0.0 * jnp.clip(ranked[-1], -1.0, 1.0)
