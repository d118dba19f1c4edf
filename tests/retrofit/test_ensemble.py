"""All members of an ensemble at once: each model's loss and numbers are as if alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ebmguard.diagnostics import energy_diagnostics
from ebmguard.diagnostics import weight_diagnostics as weights
from ebmguard.objective import contrastive_loss
from ebmguard.retrofit.ensemble import loss_and_numbers
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
    sides = pos, neg, star, groups, q or None
    options = {"reference": REFERENCE, "output_scale": None}
    losses, tags, table = loss_and_numbers(
        torch.Size(models), *sides, variant=variant, options=options
    )
    assert losses is not None
    assert table is not None
    row = dict(zip(tags, table.unbind(-1), strict=True))

    count = star.numel()
    flat = [x.reshape(count, *x.shape[len(models) :]) for x in (pos, neg, star, *(q or ()))]
    names = [variant] * count
    if isinstance(variant, tuple):
        names = [name for name in variant for _ in range(count // models[0])]
    alone = []
    for i, name in enumerate(names):
        p, n, b, *own = (x[i] for x in flat)
        numbers = {tag: x.reshape(count)[i] for tag, x in row.items()}
        alone.append(
            contrastive_loss(p, n, b, variant=name, groups=groups, log_q=tuple(own) or None)
        )
        close(losses.reshape(count)[i], alone[-1])
        # log q belongs to the exponent in force alone.
        expected = energy_diagnostics(p.detach(), n.detach())
        for prefix, at, of in (("", b, tuple(own) or None), ("ref/", REFERENCE, None)):
            alike = weights(p.detach(), n.detach(), at, groups, of)
            expected |= {prefix + tag: x for tag, x in alike.items()}
        close({tag: numbers[tag] for tag in expected}, expected)
    assert losses.shape == models
    close(losses, torch.stack(alone).reshape(models))
    close(slopes(losses.sum(), pos, neg), slopes(torch.stack(alone).sum(), pos, neg))
