"""The one place that maps functions of one model over the members of an ensemble."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import groupby
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from ..diagnostics import energy_sums, weight_sums
from ..energies import Groups, LogQ, Variant, check_energies, check_variant
from ..errors import ConfigError, EnergyTypeError, ShapeError
from ..objective import Exponent, Terms
from ..ranks import Batch

__all__ = ["WEIGHT_SUMS", "Variants", "check_models", "check_variants", "over_models"]

Variants: TypeAlias = Variant | tuple[Variant, ...]

WEIGHT_SUMS = 10  # numbers of `weight_sums` at one exponent


def over_models(
    models: torch.Size,
    f_pos: Tensor,
    f_neg: Tensor,
    beta_star: float | Tensor,
    reference: float,
    groups: Groups | None,
    log_q: LogQ | None,
    *,
    variant: Variants | None,
) -> tuple[Tensor | None, Tensor]:
    """Map :func:`of_loss` over the models: the losses ``(*models,)``, and the sums ``(models, n)``.

    The models' dimensions come first in ``f_pos``, ``f_neg``, β* and ``log_q``; one model has none.
    The ``variant`` is one name, or one for every entry of the first of these dimensions.
    """
    one_loss = partial(of_loss, groups=groups, reference=reference)
    if not models:
        assert not isinstance(variant, tuple)
        return one_loss(f_pos, f_neg, beta_star, *(log_q or ()), variant=variant)
    assert isinstance(beta_star, Tensor)
    sides = f_pos, f_neg, beta_star.expand(models), *(log_q or ())
    flat = [x.reshape(-1, *x.shape[len(models) :]) for x in sides]
    names = [variant] * models[0] if isinstance(variant, str) else [*(variant or ())]
    stride, start, results = len(flat[0]) // models[0], 0, []
    for name, run in groupby(names):
        end = start + stride * len([*run])
        results.append(torch.vmap(partial(one_loss, variant=name))(*(x[start:end] for x in flat)))
        start = end
    losses, sums = (torch.cat(x) for x in zip(*results, strict=True))
    return losses.reshape(models), sums


def of_loss(
    f_pos: Tensor,
    f_neg: Tensor,
    beta_star: float | Tensor,
    *log_q: Tensor,
    groups: Groups | None,
    reference: float,
    variant: Variant | None,
) -> tuple[Tensor | None, Tensor]:
    """The loss of one model at β*, None without a variant, and the sums of its diagnostics.

    Loss and weights use the same terms, at β* and at the reference exponent. ``log_q`` is divided
    out at β* only. The sums are the loss (if there is one),
    :func:`~ebmguard.diagnostics.weight_sums` at both, and ``energy_sums``.
    """
    if isinstance(beta_star, Tensor):
        column = torch.stack((beta_star, beta_star.new_full((), reference))).unsqueeze(-1)
        exponent = Exponent.of(column, f_pos.dtype)
    else:
        exponent = _column(beta_star, reference, f_pos.dtype, f_pos.device)
    both: Any = None
    if log_q:
        both = tuple(torch.stack((q, torch.zeros_like(q))) for q in log_q)
    with torch.set_grad_enabled(torch.is_grad_enabled() and variant is not None):
        terms = Terms.of(f_pos, f_neg, exponent, groups, both)
        loss = None if variant is None else terms.loss(variant)[0]
    with torch.no_grad():
        sums = [] if loss is None else [loss.detach().reshape(1)]
        sums += [weight_sums(terms).flatten(), energy_sums(f_pos.detach(), f_neg.detach())]
        return loss, torch.cat(sums)


@lru_cache(maxsize=64)
def _column(first: float, second: float, dtype: torch.dtype, device: torch.device) -> Exponent:
    """A column of two exponents, the first 0 only where there is no loss."""
    # Filled in on the device, since a copy from the host would wait for it.
    with torch.inference_mode(False):  # a later call may need its gradient
        low, zero, *both = (
            torch.full((), x, dtype=dtype, device=device)
            for x in (torch.finfo(dtype).min / 16, 0.0, first, second)
        )
        exponent = Exponent.of(torch.stack(both).unsqueeze(-1), dtype)
        is_up = min(first, second) >= 0
        return exponent._replace(is_zero=False, is_nonnegative=is_up, low=low, zero=zero)


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


def check_variants(variant: object, models: torch.Size) -> None:
    """Refuse an unknown variant, or a number of them that does not fit the first dimension."""
    several = not isinstance(variant, str) and isinstance(variant, Sequence)
    names: Sequence[object] = variant if several else (variant,)  # type: ignore[assignment]
    for name in names:
        check_variant(name)
    if several and not models:
        raise ConfigError(
            f"variant={[*names]!r} names one variant for each model, but beta_star has no model "
            "dimensions. Pass one name, or a beta_star tensor with one entry for each model."
        )
    if several and len(names) != models[0]:
        raise ConfigError(
            f"variant= has {len(names)} names, but beta_star has model dimensions {tuple(models)}; "
            f"expected {models[0]} names, one for each entry of the first."
        )
