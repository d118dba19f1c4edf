from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ebmguard import Guard
from tests.parts import slopes


@pytest.fixture(params=["loss", "reweight"])
def gradients(request):
    """The gradients by the loss, or by a plain difference of means of reweighted energies."""

    def of(g: Guard, pos: Tensor, neg: Tensor, **options: Any) -> tuple[Tensor, ...]:
        if request.param == "loss":
            return slopes(g.loss_fn(pos, neg, **options), pos, neg)
        same_pos, same_neg = g.reweight(pos, neg, **options)
        assert torch.equal(same_pos, pos)
        assert torch.equal(same_neg, neg)
        sign = 1 if g._loop.settings.sign > 0 else -1
        members = pos[..., 0].numel() if g._loop.settings.models else 1
        heads = pos.shape[1] if pos.ndim > 1 and members == 1 else 1
        difference = members * heads * (same_neg.mean() - same_pos.mean())
        return slopes(sign * difference, pos, neg)

    return of
