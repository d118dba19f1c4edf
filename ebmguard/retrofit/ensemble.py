"""The loss and the numbers of one model, or of all members of an ensemble at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from ..diagnostics import energy_diagnostics, nonfinite_diagnostics, weight_diagnostics
from ..energies import Groups, LogQ, Variant, check_energies
from ..errors import ConfigError, EnergyTypeError, ShapeError
from ..objective import Terms
from ..ranks import Batch
from ..tags import REFERENCE

__all__ = ["Variants", "check_models", "check_variants", "energies_by_tag", "loss_and_numbers"]

Variants: TypeAlias = Variant | tuple[Variant, ...]


def losses_of(
    models: torch.Size,
    f_pos: Tensor,
    f_neg: Tensor,
    beta_star: float | Tensor,
    groups: Groups | None,
    log_q: LogQ | None,
    *,
    variant: Variants,
) -> Tensor:
    """Return the loss of every model, ``(*models,)``; 0-dim for one model.

    The models' dimensions come first in ``f_pos``, ``f_neg``, β* and ``log_q``. The ``variant`` is
    one name, or one for every entry of the first of these dimensions.
    """
    if models:
        assert isinstance(beta_star, Tensor)
        beta_star = beta_star.expand(models).unsqueeze(-1)
    if isinstance(variant, str):
        return Terms.of(f_pos, f_neg, beta_star, groups, log_q).loss(variant)
    losses, start = list[Tensor](), 0
    for name, run in groupby(variant):
        part = slice(start, start := start + len([*run]))
        q = None if log_q is None else (log_q[0][part], log_q[1][part])
        star: Any = beta_star
        terms = Terms.of(f_pos[part], f_neg[part], star[part], groups, q)
        losses.append(terms.loss(name))
    return torch.cat(losses)


def loss_and_numbers(
    models: torch.Size,
    f_pos: Tensor,
    f_neg: Tensor,
    beta_star: float | Tensor,
    groups: Groups | None,
    log_q: LogQ | None,
    *,
    variant: Variants | None,
    options: Mapping[str, Any] | None,
) -> tuple[Tensor | None, tuple[str, ...], Tensor | None]:
    """Return :func:`losses_of` of a variant; and, with such options, the names of
    :func:`energies_by_tag` with its numbers, ``(..., names)``, in one tensor."""
    more: tuple[Any, ...] = beta_star, groups, log_q
    loss = None if variant is None else losses_of(models, f_pos, f_neg, *more, variant=variant)
    if options is None:
        return loss, (), None
    numbers = energies_by_tag(f_pos.detach(), f_neg.detach(), *more, **options)
    return loss, tuple(numbers), torch.stack([*numbers.values()], -1)


@torch.no_grad()
def energies_by_tag(
    f_pos: Tensor,
    f_neg: Tensor,
    beta_star: float | Tensor,
    groups: Groups | None = None,
    log_q: LogQ | None = None,
    *,
    reference: float,
    output_scale: float | None,
) -> dict[str, Tensor]:
    """Return all numbers of energies ``(..., N)`` and ``(..., M)``, detached: ``(...,)`` by tag.

    The weights are at β*, a number or ``(...,)``, and at the reference exponent; ``log_q`` is
    divided out at β* only.
    """
    if isinstance(beta_star, Tensor):
        beta_star = beta_star.expand(f_pos.shape[:-1])
        column = torch.stack((beta_star, torch.full_like(beta_star, reference))).unsqueeze(-1)
        beta_star = beta_star.unsqueeze(-1)
    else:
        exponents = f_pos.new_full((), beta_star), f_pos.new_full((), reference)
        column = torch.stack(exponents).reshape(2, *[1] * f_pos.ndim)
    both: Any = log_q and tuple(torch.stack((q, torch.zeros_like(q))) for q in log_q)
    weights = weight_diagnostics(f_pos, f_neg, column, groups, both)
    row = {name: x[0] for name, x in weights.items()}
    row |= {f"{REFERENCE}{name}": x[1] for name, x in weights.items()}
    row |= energy_diagnostics(f_pos, f_neg)
    row |= nonfinite_diagnostics(f_pos, f_neg, beta_star, log_q)
    if output_scale is not None:
        row["energy_gap_scaled"] = row["energy_gap"] * output_scale
    return row


def check_models(
    models: torch.Size, variant: Variants, batch: Batch, beta_star: float | Tensor
) -> None:
    """Refuse energies that do not fit these models: see :func:`ebmguard.energies.check_energies`.

    Raises an EnergyTypeError if they are not numbers, a ShapeError if the models' dimensions are
    not first.
    """
    f_pos, f_neg, groups, log_q = batch[:4]
    for name, f in (("f_pos", f_pos), ("f_neg", f_neg)):
        if isinstance(f, Tensor) and f.is_meta and not f.is_cuda:
            raise EnergyTypeError(
                f"{name} is on the device meta, which has no numbers. Put the model on a real one, "
                'model.to_empty(device="cpu"), load its weights, and call it there.'
            )
        is_tensor = isinstance(f, Tensor) and f.is_floating_point()  # else the check below says it
        has_models = is_tensor and f.ndim == len(models) + 1 and f.shape[:-1] == models
        if models and is_tensor and not has_models:
            raise ShapeError(
                f"beta_star has model dimensions {tuple(models)}, so {name} must have shape "
                f"({', '.join(map(str, models))}, samples); got {tuple(f.shape)}."
            )
    if models:
        names = "log_q_pos", "log_q_neg"
        for name, q, f in zip(names, log_q or (), (f_pos, f_neg), strict=False):
            if isinstance(q, Tensor) and q.shape != f.shape:
                raise ShapeError(
                    f"{name} has shape {tuple(q.shape)}; expected {tuple(f.shape)}, one "
                    "log-density per sample: log q(x), summed over the dimensions of x."
                )
        first, beta_star = (0,) * len(models), 1.0
        tensors = (f_pos, f_neg, *(log_q or ()))
        f_pos, f_neg, *rest = (x[first] if isinstance(x, Tensor) else x for x in tensors)
        log_q = cast("LogQ | None", tuple(rest) or None)
    for name in {variant} if isinstance(variant, str) else {*variant}:
        check_energies(f_pos, f_neg, beta_star, variant=name, groups=groups, log_q=log_q)


def check_variants(variant: Variant | Sequence[Variant], models: torch.Size) -> None:
    """Refuse a number of variants that does not fit the first dimension."""
    if isinstance(variant, str):
        return
    if not models:
        raise ConfigError(
            f"variant={[*variant]!r} names one variant for each model, but beta_star has no model "
            "dimensions. Pass one name, or a beta_star tensor with one entry for each model."
        )
    if len(variant) != models[0]:
        raise ConfigError(
            f"variant= has {len(variant)} names, but beta_star has model dimensions "
            f"{tuple(models)}; expected {models[0]} names, one for each entry of the first."
        )
