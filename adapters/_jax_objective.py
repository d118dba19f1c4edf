"""The robust objective as pure functions of ``jax.numpy``: twin of :mod:`ebmguard.objective`."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any, TypeAlias

import torch

from ebmguard.adapters._requires import requires
from ebmguard.energies import SMALLEST, Variant
from ebmguard.energies import check_energies as check_tensors
from ebmguard.errors import ConfigError, ShapeError
from ebmguard.retrofit.strength import Strength

with requires("jax", extra="jax"):
    import jax
    import jax.numpy as jnp
    import numpy as np

__all__ = [
    "Array",
    "Groups",
    "check_energies",
    "contrastive_loss",
    "per_sample",
    "temper",
    "usable",
]

Array: TypeAlias = "jax.Array"
Groups: TypeAlias = "tuple[Array, Array]"

# As in ebmguard.objective: β* f beyond it counts as infinite.
_LARGEST = 1e30


def contrastive_loss(
    f_pos: Array,
    f_neg: Array,
    beta_star: float | Array,
    *,
    variant: Variant = "default",
    groups: Groups | None = None,
) -> Array:
    """Compute the contrastive loss; :func:`ebmguard.contrastive_loss` in JAX.

    Args:
        f_pos: negative energies of the positives, high on data, ``(N,)`` or ``(N, heads)``, which
            are summed.
        f_neg: the same for M negatives.
        beta_star: β*, a number or a 0-dim array, also a traced one. 0 is the standard loss.
        variant: "default", "no_pos", "batch" or "true" (Eqs. 8, 7, 33 and 34).
        groups: class labels ``(y_pos, y_neg)``, for "default" and "no_pos".

    Returns:
        0-dim array. Samples whose energy is not finite have no part in it and no gradient; they
        are counted by :func:`diagnostics`.

    Raises:
        EnergyTypeError, ShapeError, ConfigError: energies that are no vectors of floating-point
            numbers, a β* that is no number or not finite, an unknown variant, or groups with one
            that has none.
    """
    check_energies(f_pos, f_neg, beta_star, variant, groups)
    pos, neg = per_sample(f_pos), per_sample(f_neg)
    if isinstance(beta_star, int | float) and abs(beta_star) < SMALLEST:
        return jnp.mean(neg) - jnp.mean(pos)
    exponent = jnp.asarray(beta_star, pos.dtype)
    is_zero = jnp.abs(exponent) < SMALLEST
    beta = jnp.where(is_zero, 1.0, exponent)
    is_pos, is_neg = usable(pos, beta), usable(neg, beta)
    pos, neg = jnp.where(is_pos, pos, 0.0), jnp.where(is_neg, neg, 0.0)
    visible = is_neg if groups is None else (groups[0][:, None] == groups[1]) & is_neg
    # Before β* multiplies: an offset is nothing to the objective, but much to float32. Each class
    # has its offset, since classes may lie far apart.
    shift = jax.lax.stop_gradient(_dominant(neg, visible, beta))
    near_pos, near_neg = pos - shift[..., 0], neg - shift
    if groups is None:
        pos, neg = near_pos, near_neg
    else:
        is_pos = is_pos & (visible.any(-1) | is_zero)
    # Instead of -inf, whose differences are NaN in the backward pass.
    void = jnp.finfo(neg.dtype).min / 16
    log_sum = jax.nn.logsumexp(jnp.where(visible, beta * near_neg, void), axis=-1)
    loss = _loss(near_pos, is_pos, log_sum, beta, variant)
    loss = jnp.where(is_zero, _mean(neg, is_neg) - _mean(pos, is_pos), loss)
    return jnp.where(is_pos.any() & is_neg.any(), loss, 0.0)


def _loss(pos: Array, is_pos: Array, log_sum: Array, beta: Array, variant: Variant) -> Array:
    margin = log_sum - beta * pos

    def scale(part: Array) -> Array:
        return jax.lax.stop_gradient(_mean(jax.nn.sigmoid(margin), part))

    def no_pos(part: Array) -> Array:
        return _mean(log_sum / beta - pos, part)

    if variant == "default":
        return _mean(jax.nn.softplus(margin) / beta, is_pos)
    if variant == "no_pos":
        return no_pos(is_pos)
    if variant == "batch":
        return scale(is_pos) * no_pos(is_pos)
    is_first = jnp.arange(pos.shape[0]) < pos.shape[0] // 2
    first, second = is_pos & is_first, is_pos & ~is_first
    return 0.5 * (scale(second) * no_pos(first) + scale(first) * no_pos(second))


def temper(
    f: Callable[..., Array], beta_star: float | Array, output_scale: float
) -> Callable[..., Array]:
    """Return ``(1 - β*/o) f``, the function for the sampler (Eq. 7).

    Args:
        f: negative energies of samples (or energies: the factor is the same).
        beta_star: as for :func:`contrastive_loss`; also a traced one.
        output_scale: o, ``2 * step_size / noise_std**2``.

    Returns:
        a function of the same arguments.

    Raises:
        ConfigError: an output scale that is not positive, or a β* that is no number, or known to
            be above it or not finite.
    """
    _check_exponent(beta_star, output_scale)
    factor = 1.0 - beta_star / output_scale

    def tempered(*args: Any, **kwargs: Any) -> Array:
        energies = f(*args, **kwargs)
        return energies * jnp.asarray(factor, energies.dtype)

    return tempered


def per_sample(f: Array) -> Array:
    """Return energies ``(samples,)`` in float32 at least, with heads summed."""
    f = f.astype(jnp.promote_types(f.dtype, jnp.float32))
    return f if f.ndim == 1 else jnp.sum(f.reshape(f.shape[0], -1), axis=1)


def usable(f: Array, beta: Array) -> Array:
    """Return which energies the objective uses: finite ones with ``|β* f| <= 1e30``."""
    # A comparison with NaN is False. The second limit keeps sums of energies finite.
    largest = 1e-4 * jnp.finfo(f.dtype).max
    return (jnp.abs(beta * f) <= _LARGEST) & (jnp.abs(f) <= largest)


def _dominant(neg: Array, visible: Array, beta: Array) -> Array:
    """Return the visible negative of the largest weight, ``(1,)`` or ``(N, 1)``; 0 without any."""
    sign = jnp.where(beta < 0, -1.0, 1.0).astype(neg.dtype)
    largest = jnp.max(jnp.where(visible, sign * neg, -jnp.inf), axis=-1, keepdims=True)
    return jnp.where(visible.any(-1, keepdims=True), sign * largest, 0.0)


def _mean(x: Array, valid: Array) -> Array:
    return jnp.sum(jnp.where(valid, x, 0.0)) / jnp.maximum(jnp.sum(valid), 1)


def check_energies(
    f_pos: Array, f_neg: Array, beta_star: float | Array, variant: str, groups: Groups | None
) -> None:
    """Raise the errors of :func:`contrastive_loss`, already while a function is traced."""
    _check_exponent(beta_star)
    if groups is not None and len(groups) != 2:
        raise ShapeError("groups must be a pair (y_pos, y_neg) of arrays of labels.")
    labels: Any = groups and tuple(_like(y, jax.Array, np.ndarray) for y in groups)
    check_tensors(_like(f_pos, jax.Array), _like(f_neg, jax.Array), variant=variant, groups=labels)


def _like(x: Any, *kinds: type) -> Any:
    """Return an array as a tensor of its shape and dtype, without numbers; other values as is."""
    is_array = isinstance(x, kinds)
    if not is_array:
        return x
    return torch.empty(x.shape, dtype=getattr(torch, x.dtype.name), device="meta")


def _check_exponent(beta_star: float | Array, output_scale: float | None = None) -> None:
    is_known = isinstance(beta_star, Real)  # else its value may be traced
    if not is_known and getattr(beta_star, "shape", None) != ():
        raise ConfigError(
            f"beta_star={beta_star!r}; expected a finite number or a 0-dim array. For several "
            "models with a beta_star each, take jax.vmap."
        )
    Strength.of(beta_star=beta_star if is_known else 0.0, output_scale=output_scale)
