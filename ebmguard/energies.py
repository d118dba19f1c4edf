"""Energies as the objective takes them: ``(B,)`` or ``(B, *heads)`` of one model, on both sides."""

from __future__ import annotations

import sys
from numbers import Rational, Real
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from .errors import ConfigError, EnergyTypeError, ShapeError

__all__ = [
    *("SMALLEST", "BetaStar", "Groups", "Labels", "LogQ", "Variant", "check_energies"),
    *("check_log_q", "check_variant", "heads_summed", "in_rows", "per_sample", "unwrapped"),
    *("widened", "wraps"),
]

BetaStar: TypeAlias = float | Tensor  # the exponent: a number, or a 0-dim tensor
Labels: TypeAlias = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]  # y_pos, y_neg, scale
Groups: TypeAlias = Labels | Literal["rows"]
"""The class of each sample, or "rows": row i of the negatives belongs to positive i."""
LogQ: TypeAlias = tuple[Tensor, Tensor]  # log densities of the positives, of the negatives
Variant: TypeAlias = Literal["default", "no_pos", "batch", "true"]  # of contrastive_loss
_VARIANTS = get_args(Variant)

SMALLEST = 1e-35
"""Below this β* counts as 0: 1/β* would overflow float32."""


def check_energies(
    f_pos: Tensor,
    f_neg: Tensor,
    beta_star: BetaStar = 1.0,
    *,
    variant: str = "default",
    groups: Groups | None = None,
    log_q: LogQ | None = None,
) -> None:
    """Refuse energies that are not per-sample vectors of matching layout, without reading values.

    Raises:
        EnergyTypeError: not tensors, or not floating point.
        ShapeError: means instead of vectors, empty sides, shapes that do not fit together.
        ConfigError: an exponent that is no finite number or 0-dim tensor, an unknown variant,
            groups with a variant that has none, or ``log_q`` at 0, where there are no weights.
    """
    if isinstance(beta_star, Tensor):
        _check_ordinary("beta_star", beta_star)
        if beta_star.ndim:
            raise ShapeError(
                f"beta_star has shape {tuple(beta_star.shape)}; expected a number or a 0-dim "
                "tensor, since there is one model. Map over an ensemble with torch.vmap."
            )
    elif not isinstance(beta_star, float | Real) or not abs(beta_star) <= sys.float_info.max:
        value: object = beta_star  # whole numbers of that length cannot even be printed
        got = " is beyond any float" if isinstance(value, Rational) else f"={value!r}"
        raise ConfigError(f"beta_star{got}; expected a finite number or a 0-dim tensor.")
    for name, f in (("f_pos", f_pos), ("f_neg", f_neg)):
        if not isinstance(f, Tensor):
            raise EnergyTypeError(
                f"{name} is of type {type(f).__name__}; expected a tensor, one energy per sample."
            )
        if not f.is_floating_point():
            what = f"{name} has dtype {f.dtype}; energies must be floating point."
            raise EnergyTypeError(f"{what} Pass the network's raw output, not labels or counts.")
        _check_ordinary(name, f)
        if f.ndim == 0:
            raise ShapeError(
                f"{name} is a single number, probably a batch mean; the weights need one energy "
                "per sample. Pass the vector before `.mean()` (in JEM: fp_all, fq_all)."
            )
        if f.numel() == 0:
            raise ShapeError(f"{name} has shape {tuple(f.shape)}: it holds no sample.")
    if f_pos.shape[1:] != f_neg.shape[1:]:
        raise ShapeError(
            f"f_pos has shape {tuple(f_pos.shape)} and f_neg {tuple(f_neg.shape)}: after the batch "
            "dimension both must agree, or their difference would broadcast to a matrix. Squeeze "
            "or index the extra dimension of one of them. If each row of f_neg holds the negatives "
            'of one positive, as in conditional models f(x, y), pass groups="rows".'
        )
    if f_pos.device != f_neg.device:
        raise ShapeError(f"f_pos is on {f_pos.device} and f_neg on {f_neg.device}; use one device.")
    if isinstance(beta_star, Tensor) and beta_star.is_meta and not f_pos.is_meta:
        raise ConfigError("beta_star is on the device meta, where no tensor has a value.")
    check_variant(variant)
    n, m = len(f_pos), len(f_neg)
    if variant == "true" and n < 2:
        raise ShapeError('variant="true" halves the positives and needs at least two; got one.')
    if groups is not None:
        if variant not in ("default", "no_pos"):
            raise ConfigError(
                f'groups are defined for variant="default" and "no_pos", not for {variant!r}.'
            )
        if isinstance(groups, str):
            groups = (f_pos, f_neg)
        is_known = isinstance(groups, tuple | list) and len(groups) in (2, 3)
        if not is_known or not all(isinstance(x, Tensor) for x in groups):
            what = "groups must be a pair (y_pos, y_neg) of tensors of labels"
            raise ShapeError(f'{what}, or these and the positives\' output scales, or "rows".')
        for name, x, count in zip(("y_pos", "y_neg", "scale"), groups, (n, m, n), strict=False):
            _check_ordinary(f"groups: {name}", x)
            if x.shape != (count,) or x.device != f_pos.device:
                what = "number" if name == "scale" else "label"
                raise ShapeError(
                    f"groups: {name} has shape {tuple(x.shape)}; expected ({count},), one {what} "
                    f"per sample. It is on {x.device}, the energies on {f_pos.device}."
                )
        if not all(x.is_floating_point() for x in groups[2:]):
            raise EnergyTypeError(
                f"groups: the output scales have dtype {groups[-1].dtype}; expected floating point."
            )
    if log_q is not None:
        if not isinstance(log_q, tuple | list) or len(log_q) != 2:
            raise ShapeError(
                "log_q must be a pair (log_q_pos, log_q_neg), the proposal's log-densities."
            )
        check_log_q(log_q[0], f_pos, beta_star, name="log_q_pos")
        check_log_q(log_q[1], f_neg, beta_star, name="log_q_neg")


def in_rows(
    f_pos: Tensor, f_neg: Tensor, groups: Groups | None, log_q: LogQ | None
) -> tuple[Tensor, Tensor, LogQ | None]:
    """Return energies and log-densities as vectors if ``groups="rows"``, else as they are.

    Energies are ``(N,)`` or ``(N, 1)``, and ``(N, M)``: row i holds the negatives of positive i.

    Raises:
        ShapeError: other shapes, or another word.
    """
    if not isinstance(groups, str):
        return f_pos, f_neg, log_q
    if groups != "rows":
        raise ShapeError(f'groups={groups!r}; expected "rows", or tensors of labels.')
    for pos, neg in ((f_pos, f_neg), log_q or (f_pos, f_neg)):
        shapes = [tuple(getattr(x, "shape", ())) for x in (pos, neg)]
        if len(shapes[1]) != 2 or shapes[0] not in (shapes[1][:1], (*shapes[1][:1], 1)):
            raise ShapeError(
                f'groups="rows": shapes {shapes[0]} of positives and {shapes[1]} of negatives; '
                "expected (N,) or (N, 1), and (N, M): in row i the M negatives of positive i."
            )
    flat = None if log_q is None else (log_q[0].flatten(), log_q[1].flatten())
    return f_pos.flatten(), f_neg.flatten(), flat


def check_log_q(log_q: Tensor, f: Tensor, beta_star: BetaStar, *, name: str = "log_q") -> None:
    """Refuse log-densities, called ``name``, unless there is one per energy; refuse β* = 0.

    Raises:
        EnergyTypeError, ShapeError, ConfigError: see :func:`check_energies`.
    """
    expected = "one log-density per sample"
    if not isinstance(log_q, Tensor) or not log_q.is_floating_point():
        kind = log_q.dtype if isinstance(log_q, Tensor) else type(log_q).__name__
        raise EnergyTypeError(f"{name} is {kind}; expected a floating-point tensor, {expected}.")
    _check_ordinary(name, log_q)
    if log_q.shape != f.shape[:1]:
        raise ShapeError(
            f"{name} has shape {tuple(log_q.shape)}; expected {tuple(f.shape[:1])}, {expected}: "
            "log q(x), summed over the dimensions of x."
        )
    if log_q.device != f.device:
        raise ShapeError(f"{name} is on {log_q.device} and the energies on {f.device}; use one.")
    if not isinstance(beta_star, Tensor) and abs(beta_star) < SMALLEST:
        raise ConfigError(
            "log_q= is divided out of the weights exp(beta_star * f), but with beta_star = 0 there "
            "are none. Pass beta_star=, the exponent of f that the proposal lacks, or no log_q=."
        )


def _check_ordinary(name: str, x: Tensor) -> None:
    is_dense = x.layout is torch.strided and not x.is_nested
    if is_dense and (x.dtype.itemsize > 1 or not x.is_floating_point()):
        return
    kind = f"{x.dtype if is_dense else x.layout}{', nested' * x.is_nested}"
    method = "float()" if is_dense else "unbind()" if x.is_nested else "to_dense()"
    raise EnergyTypeError(
        f"{name} is {kind}, with which little can be computed; expected an ordinary tensor. "
        f"Convert it: {name}.{method}."
    )


def check_variant(variant: object) -> None:
    """Refuse a value that is not the name of a variant, with a ``ConfigError``."""
    if not isinstance(variant, str) or variant not in _VARIANTS:
        raise ConfigError(f"variant={variant!r}; expected one of {', '.join(_VARIANTS)}.")


def widened(f: Tensor) -> Tensor:
    """Return the energies in float32 at least."""
    return f.to(torch.promote_types(f.dtype, torch.float32))


def per_sample(f: Tensor) -> Tensor:
    """Return energies ``(samples,)`` in float32 at least, with heads summed, as gradients are."""
    return heads_summed(widened(f))


def heads_summed(f: Tensor) -> Tensor:
    """Return energies ``(samples,)`` in the dtype of ``f``."""
    if f.ndim == 1:
        return f
    heads = f.flatten(1)
    # A sum over one head would only add a kernel.
    return heads.squeeze(1) if heads.shape[1] == 1 else heads.sum(1)


def wraps(x: Tensor) -> bool:
    """Return whether a tensor has another one inside, as DTensor has."""
    return type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__


def unwrapped(x: Tensor) -> Tensor:
    """Return a tensor that wraps another one as a plain tensor; others as they are."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x) if wraps(x) else x
