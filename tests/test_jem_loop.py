"""The retrofit of a JEM script, as a whole: a loop with the structure of the published one.

Closure as a sampler, replay buffer on the CPU written in place, an energy of shape (B,) or, with
labels, (B, 1), start points moved through ``.data``, losses written inline, two data streams, plots
drawn with the training sampler now and then. ``docs/codebases.md`` has the script itself.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from ebmguard.sinks import read_jsonl
from tests.parts import BATCH, CLASSES, get_sample_q, gradient_at, gradients, uniform
from tests.runs import Run, begin, train

OUTPUT_SCALE = 20_000


def guarded(**options: Any) -> Run:
    """A run with a guard."""
    run = begin()
    settings: dict[str, Any] = {"beta_star": 0.5, "output_scale": OUTPUT_SCALE}
    run.loss_fn, run.sampler = run.guard(None, run.sampler, **settings | options)
    return run


@pytest.mark.parametrize("options", [{}, {"by_class": True}, {"joint_weight": 0.5}], ids=str)
def test_off_it_is_the_same_run(options, tmp_path):
    run = train(guarded(beta_star=0, log_dir=tmp_path), **options)
    assert run.equals(train(begin(), **options))


def test_on_it_is_another_run_and_all_of_it_is_written(tmp_path):
    run = train(guarded(log_dir=tmp_path))
    assert not run.equals(train(begin()))
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(20))
    for row, call in zip(rows, run.calls, strict=True):
        gap = call.f_pos.mean().item() - call.f_neg.mean().item()
        assert row["energy_gap"] == pytest.approx(gap, abs=1e-6)
        assert row["sampler/grad_norm"] > 0
    assert list(tmp_path.glob("events.out.tfevents.*"))


@pytest.mark.parametrize("with_labels", [False, True], ids=["f(x)", "f(x, y)"])
def test_gradient_of_every_parameter_is_the_closed_form(with_labels):
    run = guarded()
    x, x_q = uniform(BATCH).double(), run.sampler(run.model, []).double()
    f = run.model.double()
    y = torch.arange(BATCH) % CLASSES if with_labels else None
    f_pos, f_neg = f(x, y), f(x_q, y)
    assert f_pos.shape == ((BATCH, 1) if with_labels else (BATCH,))
    inputs = list(f.parameters())
    found = torch.autograd.grad(run.loss_fn(f_pos, f_neg), inputs, retain_graph=True)
    # Eq. 8: every positive competes with all negatives.
    outer = gradients(f_pos.flatten(), f_neg.flatten(), 0.5)
    by_hand = [side.view_as(f) for side, f in zip(outer, (f_pos, f_neg), strict=True)]
    expected = torch.autograd.grad([f_pos, f_neg], inputs, by_hand)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_the_chain_climbs_the_tempered_energy():
    run = guarded(output_scale=2)
    torch.manual_seed(3)
    x_q = run.sampler(run.model, [])
    torch.manual_seed(3)
    x = uniform(BATCH)
    for _ in range(3):
        x = x + 0.75 * gradient_at(run.model, x) + 0.01 * torch.randn_like(x)
    torch.testing.assert_close(x_q, x)
    assert run.model.training
    assert "forward" not in vars(run.model)


def test_plots_do_not_disturb_the_steps():
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


def test_two_losses_of_one_iteration_are_one_step_once_the_optimizer_is_attached():
    for attach, steps in ((False, 40), (True, 20)):
        run = guarded()
        if attach:
            run.guards[0].attach(optimizer=run.optimizer)
        train(run, joint_weight=0.5)
        assert run.memories[0].steps == list(range(steps))


def test_two_terms_with_a_guard_each_train_as_with_one_and_are_watched_apart():
    together = train(guarded(), joint_weight=0.5)
    apart = guarded()
    second = apart.guard(None, get_sample_q(), beta_star=0.5, output_scale=OUTPUT_SCALE)
    train(apart, joint_weight=0.5, joint=second)
    assert apart.equals(together)
    assert [memory.steps for memory in apart.memories] == [list(range(20))] * 2
    gaps = [(call.f_pos.mean() - call.f_neg.mean()).item() for call in apart.calls[::2]]
    assert apart.memories[0].column("energy_gap") == pytest.approx(gaps, abs=1e-6)
