"""The one place that maps over an ensemble: each model's loss and sums are as if alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ebmguard.diagnostics import energy_diagnostics, named_energies, named_weights
from ebmguard.diagnostics import weight_diagnostics as weights
from ebmguard.objective import contrastive_loss
from ebmguard.retrofit.ensemble import WEIGHT_SUMS, over_models
from tests.parts import slopes

N, M, REFERENCE = 6, 8, 0.7
STARS = torch.tensor([[0.5, 0.0, -2.0], [3.0, 1e-36, 0.5]], dtype=torch.float64)
LABELS = torch.tensor([0, 1, 2, 0, 1, 3]), torch.tensor([1, 0, 0, 2, 1, 1, 4, 0])
SCALES = torch.tensor([0.25, 3.0, 1.5, 0.25, 3.0, 2.0], dtype=torch.float64)


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13, equal_nan=True)


@pytest.mark.parametrize("models", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"groups": LABELS, "variant": "no_pos"},
        {"groups": (*LABELS, SCALES), "q": True},
        {"variant": "batch", "q": True},
        {"variant": "several", "unusable": True},
        {"groups": LABELS},
    ],
    ids=str,
)
def test_equals_a_loop_over_the_models(models, options):
    stars = STARS[: (*models, 0, 0)[0]] if len(models) == 2 else STARS.flatten()[: (*models, 1)[0]]
    star = stars.reshape(models)
    pos, neg = (torch.randn(*models, n).double().requires_grad_() for n in (N, M))
    if options.get("unusable"):
        with torch.no_grad():
            neg.flatten()[1], pos.view(-1)[-1] = torch.inf, torch.nan
    q = options.get("q") and (torch.randn(*models, N).double(), torch.randn(*models, M).double())
    groups, variant = options.get("groups"), options.get("variant", "default")
    if variant == "several":
        variant = ("default", "true", "no_pos")[: models[0]] if models else "true"
    more = REFERENCE, groups, q or None
    losses, sums = over_models(torch.Size(models), pos, neg, star, *more, variant=variant)

    count = star.numel()
    flat = [x.reshape(count, *x.shape[len(models) :]) for x in (pos, neg, star, *(q or ()))]
    names = [variant] * count
    if isinstance(variant, tuple):
        names = [name for name in variant for _ in range(count // models[0])]
    alone = []
    for i, name in enumerate(names):
        p, n, b, *own = (x[i] for x in flat)
        loss, *numbers = sums.reshape(count, -1)[i].unbind()
        alone.append(
            contrastive_loss(p, n, b, variant=name, groups=groups, log_q=tuple(own) or None)
        )
        close(loss, alone[-1])
        # log q belongs to the exponent in force alone.
        for k, (at, of) in enumerate(((b, tuple(own) or None), (REFERENCE, None))):
            found = named_weights(
                numbers[k * WEIGHT_SUMS : (k + 1) * WEIGHT_SUMS], N, M, is_grouped=bool(groups)
            )
            close(found, weights(p.detach(), n.detach(), at, groups, of))
        found = named_energies(numbers[2 * WEIGHT_SUMS : 2 * WEIGHT_SUMS + 26], N, M)
        close(found, energy_diagnostics(p.detach(), n.detach()))
    assert losses is not None
    assert losses.shape == models
    close(losses, torch.stack(alone).reshape(models))
    close(slopes(losses.sum(), pos, neg), slopes(torch.stack(alone).sum(), pos, neg))
