"""At beta* = 0 the guarded run is the unguarded one, bit for bit; with beta* it is another."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest
import torch

from ebmguard import Guard, guard
from tests.guard.jem_loop import Outcome, Sampler, plain_loss, train
from tests.guard.parts import Memory


@pytest.fixture(scope="module")
def unguarded() -> Outcome:
    return train()


def attached(g: Guard):
    return lambda model, optimizer: g.attach(model=model, optimizer=optimizer)


def test_off_with_log_folder_and_attached_optimizer(unguarded, tmp_path):
    g = guard(None, Sampler(), beta_star=0, output_scale=20_000, log_dir=tmp_path)
    loss_fn, sample_q = g
    assert train(loss_fn, sample_q, on_start=attached(g)).equals(unguarded)
    assert g.step == 50
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 50


def test_off_without_anything_attached(unguarded):
    assert train(*guard(None, Sampler(), beta_star=0)).equals(unguarded)


def test_off_with_the_trainers_own_loss(unguarded):
    g = guard(plain_loss, Sampler(), beta=0, step_size=1.0, noise_std=0.01)
    assert train(*g, on_start=attached(g)).equals(unguarded)


def test_off_in_the_energy_convention(unguarded):
    def of_energies(e_pos, e_neg):
        return e_pos.mean() - e_neg.mean()

    assert train(of_energies, negate=True).equals(unguarded)
    for loss_fn in (None, of_energies):
        g = guard(loss_fn, Sampler(), beta_star=0, convention="energy")
        assert train(*g, negate=True).equals(unguarded)


def test_off_with_reweighted_energies(unguarded):
    g = guard(None, Sampler(), beta_star=0, output_scale=20_000)
    sample_q = g.sampler
    assert train(sample_q=sample_q, reweight=g.reweight).equals(unguarded)
    assert g.step == 49  # the last step is still open


def test_off_with_an_inline_sampler(unguarded):
    g = guard(None, None, beta_star=0, output_scale=20_000)
    assert train(g.loss_fn, Sampler(g.temper)).equals(unguarded)


def test_off_by_a_schedule(unguarded):
    g = guard(None, Sampler(), beta_star=lambda step: 0.0, output_scale=20_000)
    assert train(*g).equals(unguarded)


def test_off_later_than_the_start_is_another_run(unguarded):
    g = guard(None, Sampler(), beta_star=lambda step: 1.0 if step < 3 else 0.0)
    assert not train(*g).equals(unguarded)


def test_reweighting_is_the_guarded_loss():
    # The same gradients in another order of operations: equal up to rounding.
    by_loss = train(*guard(None, Sampler(), beta_star=2.0, output_scale=100), n_steps=5)
    g = guard(None, Sampler(), beta_star=2.0, output_scale=100)
    by_gradient = train(sample_q=g.sampler, reweight=g.reweight, n_steps=5)
    pairs = zip(by_loss.model.parameters(), by_gradient.model.parameters(), strict=True)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-5) for a, b in pairs)


def test_inline_and_wrapped_samplers_are_the_same_run():
    wrapped = train(*guard(None, Sampler(), beta_star=2.0, output_scale=100))
    g = guard(None, None, beta_star=2.0, output_scale=100)
    assert train(g.loss_fn, Sampler(g.temper)).equals(wrapped)


def test_alerts_with_warn_change_nothing(unguarded, caplog):
    g = guard(None, Sampler(), beta_star=0, sinks=[Memory()])
    g._judge.observe = _always_error  # type: ignore[assignment, method-assign]
    with caplog.at_level(logging.CRITICAL, "ebmguard"):
        assert train(*g, on_start=attached(g)).equals(unguarded)
    assert len(g.alerts) == 50


def _always_error(step, row, members=()):
    from ebmguard import Alert, Level

    return [Alert("nonfinite", Level.ERROR, step, "energy_gap", 1.0, 0.0, 0, ("a", "b"))]


def test_no_global_random_number_is_drawn(tmp_path):
    def states():
        return torch.get_rng_state(), random.getstate(), repr(np.random.get_state(legacy=False))

    pos, neg = torch.randn(8), torch.randn(8)
    model = torch.nn.Linear(2, 1)

    def sampler(f):
        x = torch.zeros(4, 2, requires_grad=True)
        return torch.autograd.grad(f(x).sum(), x)[0]

    before = states()
    g = guard(plain_loss, sampler, beta_star=1.0, output_scale=5, log_dir=tmp_path)
    g.attach(model=model, optimizer=torch.optim.Adam(model.parameters()))
    for _ in range(3):
        g.sampler(model)
        g.loss_fn(pos, neg)
        g.reweight(pos, neg)
    g.load_state_dict(g.state_dict())
    g.close()
    torch_state, python_state, numpy_state = states()
    assert torch.equal(torch_state, before[0])
    assert python_state == before[1]
    assert numpy_state == before[2]
