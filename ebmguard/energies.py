"""Energies as the objective takes them: per-sample vectors of matching layout.

``(B,)`` or ``(B, *heads)`` with any number of positives and of negatives; with a β* tensor of
``ndim >= 1``, ``(*models, B)``: one independent model per entry of β*.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from .errors import ConfigError, EnergyTypeError, ShapeError

__all__ = ["BetaStar", "Groups", "Reduce", "Variant", "check_energies", "per_sample"]

BetaStar: TypeAlias = float | Tensor
Groups: TypeAlias = tuple[Tensor, Tensor]
Variant: TypeAlias = Literal["default", "no_pos", "batch", "true"]
Reduce: TypeAlias = Literal["sum", "mean"]


def check_energies(
    f_pos: Tensor,
    f_neg: Tensor,
    beta_star: BetaStar | Sequence[float] = 1.0,
    *,
    variant: str = "default",
    groups: Groups | None = None,
    reduce: str = "sum",
) -> None:
    """Refuse energies that are not per-sample vectors of matching layout. Reads no tensor's values.

    Raises:
        EnergyTypeError: not tensors, or not floating point.
        ShapeError: means instead of vectors, empty sides, shapes that would broadcast, model
            dimensions that do not match β*, labels that do not match the energies.
        ConfigError: an exponent that is no finite number, an unknown variant or reduction, or
            groups with a variant that has none.
    """
    _check_exponent(beta_star)
    for name, f in (("f_pos", f_pos), ("f_neg", f_neg)):
        if not isinstance(f, Tensor):
            raise EnergyTypeError(
                f"{name} is of type {type(f).__name__}; expected a tensor, one energy per sample."
            )
        if not f.is_floating_point():
            raise EnergyTypeError(
                f"{name} has dtype {f.dtype}; energies must be floating point. "
                "Pass the network's raw output, not labels or counts."
            )
        if f.ndim == 0:
            raise ShapeError(
                f"{name} is a single number, probably a batch mean; the weights need one energy "
                "per sample. Pass the vector before `.mean()` (in JEM: fp_all, fq_all)."
            )
        if f.numel() == 0:
            raise ShapeError(f"{name} has shape {tuple(f.shape)}: it holds no sample.")
    models = beta_star.shape if isinstance(beta_star, Tensor) else torch.Size()
    if len(models):
        for name, f in (("f_pos", f_pos), ("f_neg", f_neg)):
            if f.ndim != len(models) + 1 or f.shape[:-1] != models:
                raise ShapeError(
                    f"beta_star has model dimensions {tuple(models)}, so {name} must have shape "
                    f"({', '.join(map(str, models))}, samples); got {tuple(f.shape)}."
                )
    elif f_pos.shape[1:] != f_neg.shape[1:]:
        raise ShapeError(
            f"f_pos has shape {tuple(f_pos.shape)} and f_neg {tuple(f_neg.shape)}: after the batch "
            "dimension both must agree, or their difference would broadcast to a matrix. "
            "Squeeze or index the extra dimension of one of them."
        )
    if f_pos.device != f_neg.device:
        raise ShapeError(f"f_pos is on {f_pos.device} and f_neg on {f_neg.device}; use one device.")
    if variant not in get_args(Variant):
        raise ConfigError(f"variant={variant!r}; expected one of {', '.join(get_args(Variant))}.")
    if reduce not in get_args(Reduce):
        raise ConfigError(f"reduce={reduce!r}; expected one of {', '.join(get_args(Reduce))}.")
    n_pos = f_pos.shape[len(models)]
    if variant == "true" and n_pos < 2:
        raise ShapeError('variant="true" halves the positives and needs at least two; got one.')
    if groups is not None:
        if variant not in ("default", "no_pos"):
            raise ConfigError(
                f'groups are defined for variant="default" and "no_pos", not for {variant!r}.'
            )
        if len(groups) != 2 or not all(isinstance(labels, Tensor) for labels in groups):
            raise ShapeError("groups must be a pair (y_pos, y_neg) of tensors of labels.")
        n_neg = f_neg.shape[len(models)]
        for name, labels, n in (("y_pos", groups[0], n_pos), ("y_neg", groups[1], n_neg)):
            if labels.shape != (n,):
                raise ShapeError(
                    f"groups: {name} has shape {tuple(labels.shape)}; expected ({n},), one label "
                    "per sample."
                )


def _check_exponent(beta_star: object) -> None:
    if isinstance(beta_star, Tensor):
        return
    if isinstance(beta_star, Sequence) and not isinstance(beta_star, str) and beta_star:
        for one in beta_star:
            _check_exponent(one)
    elif not isinstance(beta_star, Real) or not math.isfinite(beta_star):
        raise ConfigError(
            f"beta_star={beta_star!r}; expected a finite number, a tensor, or a sequence of "
            "numbers with at least one entry."
        )


def per_sample(f: Tensor, beta_star: BetaStar | Sequence[float], reduce: Reduce) -> Tensor:
    """Energies in float32 at least, heads reduced: ``(samples,)`` or ``(*models, samples)``."""
    f = f.to(torch.promote_types(f.dtype, torch.float32))
    if f.ndim == 1 or (isinstance(beta_star, Tensor) and beta_star.ndim):
        return f
    heads = f.flatten(1)
    if reduce == "mean":
        return heads.mean(1)
    # One head is a view: summing it would only add a kernel.
    return heads.squeeze(1) if heads.shape[1] == 1 else heads.sum(1)
