"""The losses, their weights and their gradient in closed form, with checks."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..energies import BetaStar, LogQ, Reduce, check_energies, check_log_q, of_tensors, per_sample
from ..errors import ConfigError
from . import trusted
from ._terms import Anchor, Terms
from .finite_samples import log_q_at, lowest, masked

__all__ = ["coefficients", "contrastive_loss", "grad_scale", "positive_weights", "weights"]

F = TypeVar("F", bound=Callable[..., Any])


def _checked(function: F) -> F:
    # As a function of this module, so that it can be pickled beside the unchecked one.
    @wraps(function, assigned=("__name__", "__qualname__", "__doc__", "__annotations__"))
    def checked(f_pos: Tensor, f_neg: Tensor, beta_star: Any, **options: Any) -> Any:
        group = options.get("process_group")
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise ConfigError(
                f"process_group= is a {type(group).__name__}; expected a ProcessGroup."
            )
        of_energies = {name: x for name, x in options.items() if name != "process_group"}
        check_energies(f_pos, f_neg, beta_star, **of_energies)
        return function(f_pos, f_neg, beta_star, **options)

    return cast("F", checked)


contrastive_loss = _checked(trusted.contrastive_loss)
coefficients = _checked(trusted.coefficients)


@of_tensors
def weights(
    f_neg: Tensor, beta_star: BetaStar, *, log_q: Tensor | None = None, reduce: Reduce = "sum"
) -> Tensor:
    """Self-normalised importance weights of the negatives: softmax of β* f⁻ - log q (Eq. 5 to 7).

    Args:
        f_neg: negative energies of the negatives, ``(M,)``, ``(M, *heads)`` or ``(*models, M)``.
        beta_star: exponent on raw outputs; 0 gives uniform weights.
        log_q: log-density of the proposal at the negatives, ``(M,)`` or ``(*models, M)``.
        reduce: how heads become one energy.

    Returns:
        ``(M,)`` or ``(*models, M)``, summing to one unless no negative is finite.

    Raises:
        EnergyTypeError, ShapeError, ConfigError: see :func:`ebmguard.energies.check_log_q`.
    """
    if log_q is not None:
        check_log_q(log_q, f_neg, beta_star)
    neg = per_sample(f_neg, beta_star, reduce)
    beta = beta_star.to(neg).unsqueeze(-1) if isinstance(beta_star, Tensor) else beta_star
    valid, neg, log_q = masked(neg, beta, None if log_q is None else log_q_at(log_q, beta))
    anchor = Anchor.of(neg, log_q, valid, beta)
    exponent = anchor.exponent(neg - anchor.f, log_q, beta)
    return torch.softmax(torch.where(valid, exponent, lowest(exponent)), -1) * valid


@of_tensors
@_checked
def positive_weights(
    f_pos: Tensor,
    f_neg: Tensor,
    beta_star: BetaStar,
    *,
    log_q: LogQ | None = None,
    reduce: Reduce = "sum",
) -> Tensor:
    """Weight each positive would get as one more negative: sigmoid(β* f⁺ - log q⁺ - S) (Eq. 8).

    Args and errors: as for :func:`contrastive_loss`.

    Returns:
        ``(N,)`` or ``(*models, N)``; NaN for positives whose energy or log q is not usable;
        1 / (M + 1) at β* = 0.
    """
    terms = Terms.of(f_pos, f_neg, beta_star, log_q=log_q, reduce=reduce, zero_at=0.0)
    return torch.where(terms.valid_pos, torch.sigmoid(-terms.margin), torch.nan)


@of_tensors
@_checked
def grad_scale(
    f_pos: Tensor,
    f_neg: Tensor,
    beta_star: BetaStar,
    *,
    log_q: LogQ | None = None,
    reduce: Reduce = "sum",
) -> Tensor:
    """GradScale, mean_i (1 - w⁺_i) (Eq. 30): the factor on the whole contrastive gradient.

    M / (M + 1) when positives and negatives look alike, towards 0 when no negative is competitive.

    Args and errors: as for :func:`contrastive_loss`.

    Returns:
        0-dim, or ``(*models,)``; 0 if a side has no usable sample, as the loss is then.
    """
    terms = Terms.of(f_pos, f_neg, beta_star, log_q=log_q, reduce=reduce, zero_at=0.0)
    return terms.scale_of(terms.valid_pos)
