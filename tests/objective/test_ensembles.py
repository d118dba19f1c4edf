"""An ensemble is `torch.vmap` of the functions of one model: each member as if alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from ebmguard.objective import (
    contrastive_loss,
    grad_scale,
    positive_weights,
    weights,
)
from tests.objective.oracles import OF_CLASSES, VARIANTS, energies, proposal, slopes

# With a 0 among them, a sampler that over-shoots, and one that is too small for its reciprocal.
BETAS = torch.tensor([0.5, 0.0, -2.0, 1e-36, 3.0], dtype=torch.float64)
K, N, M = len(BETAS), 6, 7
LABELS = torch.tensor([0, 1, 2, 0, 1, 3]), torch.tensor([1, 0, 0, 2, 1, 1, 4])
SCALES = torch.tensor([0.25, 3.0, 1.5, 0.25, 3.0, 2.0], dtype=torch.float64)


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-15, equal_nan=True)


@pytest.mark.parametrize(
    ("options", "variant"),
    [
        *((name, variant) for name in ("plain", "log q", "unusable") for variant in VARIANTS),
        *((name, variant) for name in ("classes", "scales") for variant in OF_CLASSES),
    ],
)
def test_each_member_is_as_if_alone(options, variant):
    rng = torch.Generator().manual_seed(3)
    pos, neg = (torch.randn(K, n, generator=rng, dtype=torch.float64) for n in (N, M))
    if options == "unusable":  # all negatives of one member, some of another
        neg[0], neg[4, 2], pos[4, 1] = torch.nan, torch.inf, -torch.inf
    pos, neg = pos.requires_grad_(), neg.requires_grad_()
    known: dict[str, Any] = {"classes": LABELS, "scales": (*LABELS, SCALES)}
    groups = known.get(options)
    q = None
    if options == "log q":
        q = tuple(torch.stack([x, 2 * x, x.sin(), -x, x]) for x in proposal())
    mapped = torch.vmap(
        lambda p, n, b, *q: contrastive_loss(
            p, n, b, variant=variant, groups=groups, log_q=q or None
        )
    )
    loss = mapped(pos, neg, BETAS, *(q or ()))
    found = slopes(loss, pos, neg)
    for k in range(K):
        own = None if q is None else (q[0][k], q[1][k])
        alone = contrastive_loss(
            pos[k], neg[k], BETAS[k], variant=variant, groups=groups, log_q=own
        )
        close(loss[k], alone)
        expected = slopes(alone, pos, neg)
        for side in (0, 1):
            close(found[side][k], expected[side][k])


def test_weights_of_each_member_are_as_if_alone():
    rng = torch.Generator().manual_seed(3)
    pos, neg = (torch.randn(K, n, generator=rng, dtype=torch.float64) for n in (N, M))
    neg[0], pos[4, 1] = torch.nan, torch.inf
    functions: dict[Any, tuple[Any, ...]] = {
        weights: (neg, BETAS),
        positive_weights: (pos, neg, BETAS),
        grad_scale: (pos, neg, BETAS),
    }
    for function, given in functions.items():
        found = torch.vmap(function)(*given)
        close(found, torch.stack([function(*(x[k] for x in given)) for k in range(K)]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_model_dimensions_nest_and_samples_may_be_shared(variant):
    pos, neg = (torch.stack([f, f + 1, -f]).detach() for f in energies(N, M))
    one = partial(contrastive_loss, variant=variant)
    # Three models at each of five exponents, all trained on the same positives.
    found = torch.vmap(torch.vmap(one, (None, 0, None)), (None, None, 0))(pos[0], neg, BETAS)
    assert found.shape == (K, 3)
    close(found, torch.stack([torch.stack([one(pos[0], f, b) for f in neg]) for b in BETAS]))
    # A number for all of them is no tensor to map.
    found = torch.vmap(partial(one, beta_star=0.7))(pos, neg)
    close(found, torch.stack([one(p, n, 0.7) for p, n in zip(pos, neg, strict=True)]))
