"""What is special to one codebase. What holds for all is in test_conformance.py."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from typing import Any

import pytest
import torch
from torch import nn

from ebmguard import guard
from ebmguard.sinks import read_jsonl
from tests.adapters import ebm_trainers, jem_family, structures
from tests.parts import (
    CHAINS,
    doubles,
    draw,
    get_sample_q,
    gradient_at,
    rising_difference,
    uniform,
)
from tests.runs import Run, Trial, begin, train

JEM: Any = {"beta_star": 0.5, "output_scale": 20_000}


def guarded() -> Run:
    """JEM's loop with one guard for all of its losses."""
    run = begin()
    run.loss_fn, run.sampler = run.guard(None, run.sampler, **JEM)
    return run


def test_jem_rows_of_the_terms_are_written_apart(tmp_path):
    jem_family.train_jem(Trial(0.5, n=5), p_x_y_weight=1.0)
    for term in ("p_x", "p_x_y"):
        rows = read_jsonl(tmp_path / "run" / "ebmguard" / term / "metrics.jsonl")
        assert [row["step"] for row in rows] == list(range(5))
        assert all(row["sampler/grad_norm"] > 0 for row in rows)


def test_jem_plots_with_the_training_sampler_do_not_disturb_the_steps():
    def run_with(plot_every, pause):
        run = guarded()
        plots = []

        def plot(step):
            if (step + 1) % plot_every == 0:
                state = torch.get_rng_state()  # so that the plots leave the same run behind
                with run.guards[0].paused() if pause else contextlib.nullcontext():
                    plots.append(run.sampler(run.model, []))
                torch.set_rng_state(state)

        train(run, after=plot)
        assert len(plots) == 20 // plot_every
        return run

    without = run_with(100, pause=False)
    for pause in (False, True):
        run = run_with(5, pause)
        assert run.equals(without)
        found, expected = run.memories[0], without.memories[0]
        assert found.steps == list(range(20))
        assert found.column("loss") == expected.column("loss")
        # Paused plots leave no trace at all; the others are pooled with the next step's samples.
        assert (repr(found.rows) == repr(expected.rows)) == pause  # NaN is not equal to itself


def test_jem_two_terms_with_a_guard_each_train_as_with_one_and_are_watched_apart():
    together = train(guarded(), joint_weight=0.5)
    apart = guarded()
    second = apart.guard(None, get_sample_q(), **JEM)
    train(apart, joint_weight=0.5, joint=second)
    assert apart.equals(together)
    assert [memory.steps for memory in apart.memories] == [list(range(20))] * 2
    gaps = [(call.f_pos.mean() - call.f_neg.mean()).item() for call in apart.calls[::2]]
    assert apart.memories[0].column("energy_gap") == pytest.approx(gaps, abs=1e-6)


@doubles()
@pytest.mark.parametrize(
    ("outer", "in_steps"), [(0.0, 4), (0.5, 4), (1.0, 0)], ids=["PYLD", "both", "SGLD"]
)
def test_jempp_a_whole_step_climbs_by_the_sum_of_its_steps(outer, in_steps):
    args = Namespace(**jem_family.JEMPP | {"sgld_lr": outer, "in_steps": in_steps, "sgld_std": 0.5})
    step_size = outer + in_steps * 0.2
    o = 2 * step_size / 0.5**2
    _, sampler = g = guard(None, jem_family.sample_pyld, beta_star=o / 4)
    f, chains = jem_family.Sliced(), 0.1 * uniform(CHAINS)
    f.head.weight.data *= 0.1  # slopes so small that neither clip nor bounds are reached
    before = chains.clone()
    sampler(f, chains.clone(), in_steps=in_steps, args=args)  # which is measured
    assert g.measured is not None
    assert g.measured.output_scale == pytest.approx(o, rel=1e-6)
    torch.manual_seed(3)
    x_q = sampler(f, chains, n_steps=1, in_steps=in_steps, args=args)
    torch.manual_seed(3)
    x, _ = draw(before)
    inside = x.abs().amax((1, 2, 3)) < 0.5
    assert inside.sum() >= 3
    x = x + 0.75 * step_size * gradient_at(f, x) + 0.5 * torch.randn_like(x)
    torch.testing.assert_close(x_q[inside], x[inside], rtol=0, atol=1e-12)


@pytest.mark.parametrize("attach", [False, True], ids=["guard", "guard and attach"])
def test_sadajem_two_losses_are_one_row_and_one_step_of_a_schedule(attach, tmp_path):
    run = jem_family.train_sadajem(Trial(lambda step: 0.5 + step, 12, attach=attach), l2_coeff=0.1)
    rows = read_jsonl(tmp_path / "run" / "ebmguard" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(12))
    assert [row["beta_star"] for row in rows] == [0.5 + step for step in range(12)]
    # The row's loss is the mean of the two, without the L2 term that was added in place.
    means = [(a + b) / 2 for a, b in zip(run.others[::2], run.others[1::2], strict=True)]
    assert [row["loss"] for row in rows] == pytest.approx(means, rel=1e-5)


def test_sadajem_the_outer_optimizer_never_steps_and_the_run_says_so(caplog):
    g = jem_family.train_sadajem(Trial(0.5, attach=True), outer=True).guards[0]
    assert g.step > 0
    assert [x for x in caplog.messages if "optimizer=" in x]


def test_ebm_anatomy_reweighted_energies_keep_the_trainers_record_of_the_difference():
    run, by_loss = (
        ebm_trainers.train_ebm_anatomy(Trial(2.0, n=1), by_weights=by) for by in (True, False)
    )
    call, other = run.calls[0], by_loss.calls[0]
    torch.testing.assert_close(call.to_pos, other.to_pos, rtol=1e-6, atol=0)
    torch.testing.assert_close(call.to_neg, other.to_neg, rtol=1e-6, atol=0)
    d_s_t = 20_000 * (call.f_pos.mean() - call.f_neg.mean()).item()
    assert run.others[0] == pytest.approx(d_s_t, rel=1e-5)
    assert by_loss.others[0] != pytest.approx(d_s_t, rel=1e-1)
    # Rows hold the loss before the factor, which the trainer multiplies in place.
    assert by_loss.others[0] == pytest.approx(by_loss.guards[0].last["loss"] * 20_000, rel=1e-6)


def test_improved_cd_the_kl_terms_gradient_has_the_factor_of_the_tempering():
    """E = θ/2 |x|², whose last step and its derivative are known: the factor 1 - β, at its samples.

    With x' = x - s (1 - β) θ x, the term is mean θ'/2 |x'|² with θ' held, and its derivative
    d/dθ = θ x' · (-s (1 - β) x).
    """

    class Quadratic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.theta = nn.Parameter(torch.tensor(0.3))

        def forward(self, x, label):
            return self.theta / 2 * x.flatten(1).pow(2).sum(1, keepdim=True)

    model, x = Quadratic(), torch.rand(5, 1, 2, 2)
    beta = 0.25
    flags = Namespace(step_lr=0.5)
    loss_fn, draw_with_kl = rising_difference, ebm_trainers.gen_image
    # o = 2 · 0.5 / 0.5², and β* = β o
    settings: Any = {"convention": "energy", "step_size": 0.5, "noise_std": 0.5}
    _, sampler = guard(loss_fn, draw_with_kl, beta_star=beta * 4, **settings)
    _, im_neg_kl, _ = sampler(None, flags, model, x, 1, noise_std=0.0)
    model.requires_grad_(False)
    loss_kl = model.forward(im_neg_kl, None).mean()
    model.requires_grad_(True)
    loss_kl.backward()
    moved = x * (1 - 0.5 * (1 - beta) * 0.3)
    by_hand = (0.3 * moved * (-0.5 * (1 - beta) * x)).flatten(1).sum(1).mean()
    torch.testing.assert_close(im_neg_kl.detach(), moved)
    torch.testing.assert_close(model.theta.grad, by_hand)


@doubles()
def test_recovery_the_rows_weigh_each_pair_at_its_own_level():
    """Of one pair 1 - w⁺ is sigmoid(β / b0 (f⁻ - f⁺)), where β is a hundredth."""
    run = structures.train_recovery(Trial(4.0, n=1))
    (call,) = run.calls
    assert call.groups is not None
    scale = 400 * call.groups[-1]
    left = torch.sigmoid(0.01 * scale * (call.f_neg - call.f_pos))
    (row,) = [numbers for _, numbers in run.memories[0].rows]
    assert row["grad_scale"] == pytest.approx(left.mean().item(), rel=1e-6)
    assert scale.unique().numel() > 1


def test_latent_the_second_guard_watches_the_posteriors_chain():
    run = structures.train_latent(Trial(0.5, n=5))
    prior, posterior = run.memories
    for tag in ("energy_gap", "f_pos/mean"):
        assert posterior.column(tag) == prior.column(tag)
    assert all(x > 0 for x in posterior.column("sampler/grad_norm"))
    assert posterior.column("sampler/grad_norm") != prior.column("sampler/grad_norm")
    assert posterior.column("sampler/evaluations") == [5.0] * 5
    assert posterior.column("beta_star") == [0.0] * 5
