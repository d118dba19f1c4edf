"""The default loss is a softmax classification: which of 1 + M samples is the real one (App. C).

And it is a bound of the loss without that one (App. D).
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from ebmguard.objective import contrastive_loss, positive_weights
from tests.objective.oracles import energies, slopes

EVERY_SIZE = pytest.mark.parametrize("sizes", [(1, 1), (5, 1), (6, 4), (3, 16)], ids=str)


@EVERY_SIZE
def test_equals_cross_entropy_with_inverse_temperature(sizes):
    pos, neg = energies(*sizes)
    for beta in (0.5, 1.0, 6.0, -0.7):
        logits = beta * torch.cat([pos.unsqueeze(1), neg.expand(len(pos), -1)], dim=1)
        classified = F.cross_entropy(logits, torch.zeros(len(pos), dtype=torch.long))
        loss = contrastive_loss(pos, neg, beta)
        # The absolute tolerance is for cross_entropy: it forms 1 - softmax.
        torch.testing.assert_close(beta * loss, classified, rtol=1e-12, atol=1e-15)
        correct = torch.softmax(logits, 1)[:, 0].detach()
        for a, b in zip(slopes(beta * loss, pos, neg), slopes(classified, pos, neg), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)
        w_pos = positive_weights(pos, neg, beta).detach()
        torch.testing.assert_close(w_pos, correct, rtol=1e-12, atol=0)


def test_one_negative_is_logistic_regression_on_the_difference():
    pos, neg = energies(6, 1)
    logistic = F.binary_cross_entropy_with_logits(2.0 * (pos - neg), torch.ones(6).double()) / 2.0
    torch.testing.assert_close(contrastive_loss(pos, neg, 2.0), logistic, rtol=1e-12, atol=0)


@EVERY_SIZE
def test_the_default_is_a_bound_of_no_pos(sizes):
    """Eq. 28: log sigmoid is concave, so that Eq. 8 is never above it of Eq. 7's objective."""
    pos, neg = energies(*sizes)
    for beta in (0.1, 0.5, 1.0, 6.0):
        without = contrastive_loss(pos, neg, beta, variant="no_pos")
        bound = F.softplus(beta * without) / beta
        loss = contrastive_loss(pos, neg, beta)
        assert (loss > bound) if len(pos) > 1 else (loss >= bound - 1e-12)
        alike = pos.mean().expand_as(pos)
        found = contrastive_loss(alike, neg, beta)
        torch.testing.assert_close(found, bound, rtol=1e-12, atol=1e-15)
