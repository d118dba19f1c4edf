"""From bad energies to the error, with the rules themselves."""

from __future__ import annotations

import pytest
import torch

from ebmguard import errors, guard
from tests.parts import Energy, energies, gradient_at, slopes

X = torch.ones(4, 2)


def test_nan_sample_stops_the_run():
    f = Energy()

    def sampler(f, x):
        moved = x + gradient_at(f, x)
        moved[1] = torch.nan
        return moved

    g = guard(None, sampler, beta_star=0.5, output_scale=10, action="raise")
    x = g.sampler(f, X)
    pos, neg = f(X), f(x)
    loss = g.loss_fn(pos, neg)
    assert loss.item() == 0
    assert g.last["nonfinite/samples"] == 0.25
    assert g.last["nonfinite/neg"] == 1
    with pytest.raises(errors.NonFiniteError, match="nonfinite/energies"):
        g.sampler(f, X)


def test_nan_sample_is_left_out_where_the_run_goes_on():
    g = guard(None, None, beta_star=1.0)
    pos, neg = energies(dtype=torch.float64)
    spoilt = torch.cat([neg.detach(), torch.tensor([torch.nan])]).requires_grad_()
    with_nan = g.loss_fn(pos, spoilt)
    alone = guard(None, None, beta_star=1.0).loss_fn(pos, neg)
    torch.testing.assert_close(with_nan, alone, rtol=1e-12, atol=0)
    (to_neg,) = slopes(with_nan, spoilt)
    assert to_neg[-1] == 0
    assert [alert.rule for alert in g.alerts] == ["nonfinite"]


def test_blow_up_of_the_gap_stops_the_run():
    g = guard(None, None, beta_star=0.0, action="raise")

    def run():
        for step in range(60):
            pos, neg = energies(32, 32)
            g.loss_fn(pos + (1000.0 if step >= 40 else 0.0), neg)

    with pytest.raises(errors.EnergyBlowupError):
        run()
    assert 40 <= g.alerts[-1].step <= 42
