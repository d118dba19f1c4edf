"""Energies as the objective takes them: per-sample vectors of matching layout.

``(B,)`` or ``(B, *heads)`` with any number of positives and of negatives; with a β* tensor of
``ndim >= 1``, ``(*models, B)``: one independent model per entry of β*.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import accumulate, groupby
from numbers import Real
from typing import Any, Literal, TypeAlias, TypeVar, cast, get_args

import torch
from torch import Tensor

from .errors import ConfigError, EnergyTypeError, ShapeError, typed

__all__ = [
    "ONE_MODEL",
    "SMALLEST",
    "BetaStar",
    "Groups",
    "LogQ",
    "Reduce",
    "Variant",
    "Variants",
    "check_energies",
    "check_log_q",
    "check_variants",
    "exponents",
    "has_models",
    "model_dimensions",
    "of_tensors",
    "per_sample",
    "variant_runs",
]

BetaStar: TypeAlias = float | Tensor
Groups: TypeAlias = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]
LogQ: TypeAlias = tuple[Tensor, Tensor]
Variant: TypeAlias = Literal["default", "no_pos", "batch", "true"]
Variants: TypeAlias = Variant | Sequence[Variant]
Reduce: TypeAlias = Literal["sum", "mean"]

F = TypeVar("F", bound=Callable[..., Any])

# What torch and Python raise of tensors that do not fit; not their subclasses.
_UNTYPED = (AttributeError, IndexError, RuntimeError, TypeError, ValueError, ZeroDivisionError)

ONE_MODEL = torch.Size()
"""Model dimensions of a single model: none."""

SMALLEST = 1e-35
"""Below this β* counts as 0: 1/β* would overflow float32."""


def of_tensors(function: F) -> F:
    """A pure function of tensors: what it does not declare, or torch cannot compute, is refused.

    Raises:
        ConfigError: from its calls, see :func:`ebmguard.errors.typed`.
        ShapeError: tensors whose shapes, dtypes or devices do not fit.
    """
    checked = typed(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            # Not every version of Dynamo can follow annotations.
            return (function if torch.compiler.is_compiling() else checked)(*args, **kwargs)
        except _UNTYPED as error:
            if type(error) not in _UNTYPED:
                raise  # out of memory, a lost rank, an error of ours
            given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            shapes = ", ".join(f"{tuple(x.shape)} {x.dtype} on {x.device}" for x in given)
            raise ShapeError(
                f"{function.__name__} got what does not fit ({shapes or 'no tensor'}); see the "
                f"shapes and ranges that it documents. The error was: {error}"
            ) from error

    return cast("F", call)


def check_energies(
    f_pos: Tensor,
    f_neg: Tensor,
    beta_star: BetaStar | Sequence[BetaStar] = 1.0,
    *,
    variant: str | Sequence[str] = "default",
    groups: Groups | None = None,
    log_q: LogQ | None = None,
    reduce: str = "sum",
) -> None:
    """Refuse energies that are not per-sample vectors of matching layout. Reads no tensor's values.

    Raises:
        EnergyTypeError: not tensors, or not floating point.
        ShapeError: means instead of vectors, empty sides, shapes that would broadcast, or that do
            not match those of β*, the labels or the log-densities.
        ConfigError: an exponent that is no finite number, an unknown variant or reduction, variants
            that do not match the models, groups with a variant that has none, or ``log_q`` at 0.
    """
    _check_exponent(beta_star)
    models = model_dimensions(beta_star)
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
        if len(models) and (f.ndim != len(models) + 1 or f.shape[:-1] != models):
            raise ShapeError(
                f"beta_star has model dimensions {tuple(models)}, so {name} must have shape "
                f"({', '.join(map(str, models))}, samples); got {tuple(f.shape)}."
            )
    if not len(models) and f_pos.shape[1:] != f_neg.shape[1:]:
        raise ShapeError(
            f"f_pos has shape {tuple(f_pos.shape)} and f_neg {tuple(f_neg.shape)}: after the batch "
            "dimension both must agree, or their difference would broadcast to a matrix. "
            "Squeeze or index the extra dimension of one of them."
        )
    if f_pos.device != f_neg.device:
        raise ShapeError(f"f_pos is on {f_pos.device} and f_neg on {f_neg.device}; use one device.")
    variants = check_variants(variant, models)
    if not isinstance(reduce, str) or reduce not in get_args(Reduce):
        raise ConfigError(f"reduce={reduce!r}; expected one of {', '.join(get_args(Reduce))}.")
    n, m = f_pos.shape[len(models)], f_neg.shape[len(models)]
    if "true" in variants and n < 2:
        raise ShapeError('variant="true" halves the positives and needs at least two; got one.')
    if groups is not None:
        for name in set(variants) - {"default", "no_pos"}:
            raise ConfigError(
                f'groups are defined for variant="default" and "no_pos", not for {name!r}.'
            )
        is_known = isinstance(groups, tuple | list) and len(groups) in (2, 3)
        if not is_known or not all(isinstance(x, Tensor) for x in groups):
            raise ShapeError(
                "groups must be a pair (y_pos, y_neg) of tensors of labels, or these and the "
                "output scale of each positive's group."
            )
        for name, x, count in zip(("y_pos", "y_neg", "scale"), groups, (n, m, n), strict=False):
            if x.shape != (count,):
                raise ShapeError(
                    f"groups: {name} has shape {tuple(x.shape)}; expected ({count},), one "
                    f"{'label' if name[0] == 'y' else 'number'} per sample."
                )
        if len(groups) == 3 and not groups[2].is_floating_point():
            raise EnergyTypeError(
                f"groups: the output scales have dtype {groups[2].dtype}; expected floating point."
            )
    if log_q is not None:
        if not isinstance(log_q, tuple | list) or len(log_q) != 2:
            raise ShapeError(
                "log_q must be a pair (log_q_pos, log_q_neg): the log-density of the proposal at "
                "each positive and at each negative."
            )
        check_log_q(log_q[0], f_pos, beta_star, name="log_q_pos")
        check_log_q(log_q[1], f_neg, beta_star, name="log_q_neg")


def check_log_q(
    log_q: Tensor,
    f: Tensor,
    beta_star: BetaStar | Sequence[BetaStar],
    *,
    name: str = "log_q",
) -> None:
    """Refuse log-densities of a proposal, called ``name``, that are not one for each energy in f.

    Raises:
        EnergyTypeError: not a tensor, or not floating point.
        ShapeError: another shape or device than the energies', heads apart.
        ConfigError: an exponent that is the number 0: there are no weights to divide q out of.
    """
    if not isinstance(log_q, Tensor) or not log_q.is_floating_point():
        kind = log_q.dtype if isinstance(log_q, Tensor) else type(log_q).__name__
        raise EnergyTypeError(
            f"{name} is {kind}; expected a floating-point tensor, one log-density per sample."
        )
    shape = f.shape[: len(model_dimensions(beta_star)) + 1]
    if log_q.shape != shape:
        raise ShapeError(
            f"{name} has shape {tuple(log_q.shape)}; expected {tuple(shape)}, one log-density per "
            "sample: log q(x), summed over the dimensions of x."
        )
    if log_q.device != f.device:
        raise ShapeError(f"{name} is on {log_q.device} and the energies on {f.device}; use one.")
    for each in beta_star if isinstance(beta_star, Sequence) else (beta_star,):
        if not isinstance(each, Tensor) and abs(each) < SMALLEST:
            raise ConfigError(
                "log_q= is divided out of the weights exp(beta_star * f), but with beta_star = 0 "
                "there are none. Pass beta_star=, the exponent of f that the proposal lacks (1 "
                "where it knows nothing of f), or leave log_q= out for the standard loss."
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
            "numbers or tensors with at least one entry."
        )


def check_variants(variant: str | Sequence[str], models: torch.Size) -> tuple[str, ...]:
    """Refuse variants that do not exist or do not match the model dimensions.

    Returns:
        the names: one for each entry of the first model dimension, or the one that all share.

    Raises:
        ConfigError: an unknown name, or not one for each entry.
    """
    several = not isinstance(variant, str) and isinstance(variant, Sequence)
    names: tuple[Any, ...] = tuple(variant) if several else (variant,)
    for name in names:
        if not isinstance(name, str) or name not in get_args(Variant):
            raise ConfigError(f"variant={name!r}; expected one of {', '.join(get_args(Variant))}.")
    if several and not models:
        raise ConfigError(
            f"variant={list(names)!r} names one variant for each model, but beta_star has no model "
            "dimensions. Pass one name, or a beta_star tensor with one entry for each model."
        )
    if several and len(names) != models[0]:
        raise ConfigError(
            f"variant= has {len(names)} names, but beta_star has model dimensions {tuple(models)}; "
            f"expected {models[0]} names, one for each entry of the first."
        )
    return names


def variant_runs(variant: Sequence[Variant]) -> list[tuple[Variant, slice]]:
    """Runs of consecutive equal names, each with its slice."""
    runs = [(name, len(list(run))) for name, run in groupby(variant)]
    stops = accumulate(length for _, length in runs)
    return [(name, slice(stop - n, stop)) for (name, n), stop in zip(runs, stops, strict=True)]


def exponents(beta_star: Sequence[BetaStar]) -> tuple[BetaStar, ...]:
    """The exponents whose losses are averaged, all expanded to :func:`model_dimensions`."""
    models = model_dimensions(beta_star)
    if not models:
        return tuple(beta_star)
    like = next(x for x in beta_star if isinstance(x, Tensor) and x.ndim)
    return tuple(
        (x.to(like.device) if isinstance(x, Tensor) else like.new_full((), x)).expand(models)
        for x in beta_star
    )


def model_dimensions(beta_star: BetaStar | Sequence[BetaStar]) -> torch.Size:
    """The leading dimensions that energies must have at these exponents; none for one model.

    Raises:
        ShapeError: entries of different model dimensions.
    """
    if isinstance(beta_star, Tensor):
        return beta_star.shape
    if not isinstance(beta_star, Sequence):
        return ONE_MODEL
    found = {x.shape for x in beta_star if isinstance(x, Tensor) and x.ndim}
    if len(found) > 1:
        shapes = " and ".join(str(tuple(shape)) for shape in sorted(found))
        raise ShapeError(
            f"The exponents have model dimensions {shapes}; expected the same for all. An exponent "
            "that is one number holds for every model."
        )
    return found.pop() if found else ONE_MODEL


def has_models(x: Tensor, models: torch.Size) -> bool:
    """Whether each model has samples of its own in x, instead of all sharing the same."""
    return x.ndim > len(models) and (not models or x.shape[: len(models)] == models)


def per_sample(f: Tensor, beta_star: BetaStar, reduce: Reduce) -> Tensor:
    """Energies in float32 at least, heads reduced: ``(samples,)`` or ``(*models, samples)``."""
    f = f.to(torch.promote_types(f.dtype, torch.float32))
    if f.ndim == 1 or (isinstance(beta_star, Tensor) and beta_star.ndim):
        return f
    heads = f.flatten(1)
    if reduce == "mean":
        return heads.mean(1)
    # A sum over one head would only add a kernel.
    return heads.squeeze(1) if heads.shape[1] == 1 else heads.sum(1)
