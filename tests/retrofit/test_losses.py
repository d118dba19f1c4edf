"""The guarded loss and the reweighted energies against closed forms, in every layout.

Also with a sampler that knows its own density, and with temperatures apart.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from arviz_stats.base.array import array_stats
from torch import Tensor, nn

from ebmguard import guard
from ebmguard.errors import ConfigError, ShapeError
from tests.parts import Energy, Memory, climb, difference, rising_difference, slopes
from tests.parts import gradients as closed_form

N, M, K = 5, 7, 3
PAGE = (Path(__file__).parents[2] / "docs" / "samplers.md").read_text()
PAGE = PAGE.split("\n## Proposals that know their density\n")[1].split("\n## ")[0]


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def proposal() -> tuple[Tensor, Tensor]:
    """Log-densities of positives and negatives."""
    return torch.randn(N, dtype=torch.float64), torch.randn(M, dtype=torch.float64)


def close(actual: Tensor, expected: Tensor | float) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("heads", "convention", "has_proposal", "beta_star"),
    [
        ((), "log_density", False, -0.7),
        ((), "energy", False, 2.0),
        ((1,), "log_density", False, 0.3),
        ((K,), "log_density", False, 2.0),
        ((), "log_density", True, 2.0),
        ((), "energy", True, 0.3),  # of the proposal, high stays high
    ],
)
def test_layouts(gradients, heads, convention, has_proposal, beta_star):
    """High on data is the sum over heads; exp(β* f) is divided by the proposal's density."""
    sides, scale = leaves((N, *heads), (M, *heads)), 1 if convention == "log_density" else -1
    g = guard(None, None, beta_star=beta_star, convention=convention)
    f_pos, f_neg = (scale * x.detach().reshape(len(x), -1).sum(1) for x in sides)
    over_pos, over_neg, options = f_pos, f_neg, dict[str, Any]()
    if has_proposal:
        q_pos, q_neg = options["log_q"] = proposal()
        over_pos, over_neg = f_pos - q_pos / beta_star, f_neg - q_neg / beta_star
    found = gradients(g, *sides, **options)
    expected = closed_form(over_pos, over_neg, beta_star)
    for side, gradient, right in zip(sides, found, expected, strict=True):
        close(gradient, scale * right.reshape(-1, *(1 for _ in heads)).expand_as(side))
    assert g.last["f_pos/mean"] == pytest.approx(f_pos.mean().item())
    assert g.last["energy_gap"] == pytest.approx((f_pos.mean() - f_neg.mean()).item())


def test_reweighting_multiplies_whatever_gradient_arrives():
    pos, neg, a, b = leaves((N,), (M,), (N,), (M,))
    same_pos, same_neg = guard(None, None, beta_star=1.2).reweight(pos, neg)
    to_pos, to_neg = slopes((a * same_pos).sum() + (b * same_neg.exp()).sum(), pos, neg)
    coefficient_pos, coefficient_neg = closed_form(pos, neg, 1.2)
    close(to_pos, a * -N * coefficient_pos)  # 1 - w+_i
    close(to_neg, b * neg.exp() * M * coefficient_neg)  # M GradScale w_j


def test_energies_without_a_graph():
    g = guard(None, None, beta_star=1.0)
    assert not g.loss_fn(torch.ones(3), torch.ones(4)).requires_grad
    assert g.reweight(torch.ones(3), torch.ones(4))[0].tolist() == [1.0, 1.0, 1.0]


def test_training_goes_on_after_a_first_loss_in_inference_mode():
    # What is kept for later calls must not be an inference tensor, which no gradient goes through.
    g = guard(None, None, beta_star=0.3719)
    pos, neg = leaves((N,), (M,))
    with torch.inference_mode(), g.paused():
        g.loss_fn(pos, neg)
    found = slopes(g.loss_fn(pos, neg), pos, neg)
    for side, right in zip(found, closed_form(pos, neg, 0.3719), strict=True):
        close(side, right)


# -- the trainer's own loss ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss_fn", "shape", "options", "weight"),
    [
        (difference, (N,), {}, 1.0),
        (lambda p, n: 0.3 * (n.sum() - p.sum()), (N,), {}, 0.3 * N),
        (lambda p, n: (n - p).mean(), (N, 1), {}, 1.0),
        (difference, (N, K), {}, 1 / K),
        (rising_difference, (N,), {"convention": "energy"}, 1.0),
        (difference, (2, N), {"beta_star": torch.ones(2)}, 0.5),
    ],
)
def test_weight_of_a_given_loss(loss_fn, shape, options, weight):
    options = {"beta_star": 1.0} | options
    pos, neg = leaves(shape, shape)
    given, plain = (guard(loss, None, **options) for loss in (loss_fn, None))
    close(given.loss_fn(pos, neg), weight * plain.loss_fn(pos, neg))
    assert given.last["loss_weight"] == pytest.approx(weight)
    if isinstance(options["beta_star"], Tensor):
        return
    log_q = torch.randn(N).double(), torch.randn(N).double()
    of_proposal = (g.loss_fn(pos, neg, log_q=log_q) for g in (given, plain))
    close(next(of_proposal), weight * next(of_proposal))
    # At beta* = 0 the same loss is the trainer's, whatever its units.
    off = guard(loss_fn, None, **(options | {"beta_star": 0.0}))
    assert torch.equal(off.loss_fn(pos, neg), loss_fn(pos, neg))
    small = guard(loss_fn, None, **(options | {"beta_star": 1e-9, "variant": "no_pos"}))
    actual = slopes(small.loss_fn(pos, neg), pos, neg)
    for gradient, right in zip(actual, slopes(loss_fn(pos, neg), pos, neg), strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-7, atol=0)


@pytest.mark.parametrize("sign", [1, -1])
def test_without_a_loss_it_is_at_beta_star_zero_the_difference_of_summed_heads(sign):
    pos, neg = leaves((3, 2), (4, 2))
    g = guard(None, None, beta_star=0.0, convention="log_density" if sign > 0 else "energy")
    close(g.loss_fn(pos, neg), sign * (neg.sum(1).mean() - pos.sum(1).mean()))


def test_weight_does_not_train_what_it_is_made_of():
    weight = torch.tensor(2.0, requires_grad=True)
    pos, neg = leaves((N,), (M,))
    g = guard(lambda p, n: weight * (n.mean() - p.mean()), beta_star=1.0)
    g.loss_fn(pos, neg).backward()
    assert weight.grad is None
    assert pos.grad is not None


@pytest.mark.parametrize("shape", [(N, 1), (N,)])
def test_with_rows_each_positive_has_the_negatives_of_its_row(gradients, shape):
    pos, neg = leaves(shape, (N, 4))
    rows = torch.arange(N), torch.arange(N).repeat_interleave(4)
    found = gradients(guard(None, None, beta_star=0.5), pos, neg, groups="rows")
    expected = closed_form(pos.flatten(), neg.flatten(), 0.5, groups=rows)
    for side, right in zip(found, expected, strict=True):
        close(side.flatten(), right)


# -- proposals that know their density -------------------------------------------------------------


def test_pareto_shape_is_that_of_the_weights_in_force_through_a_checkpoint_too():
    """Of the last 16 batches, each relative to its mean, by arviz-stats."""
    memory, kept = Memory(), []
    g = guard(None, None, beta_star=1.25, sinks=[memory], reference_beta_star=0.75)
    for step in range(51):
        neg, q_neg = torch.randn(2, 10 + step, dtype=torch.float64)
        # Some steps do without.
        log_q = None if step % 3 == 0 else (torch.zeros(5), q_neg)
        kept.append((neg, q_neg if log_q else torch.zeros_like(q_neg)))
        g.loss_fn(torch.zeros(5, dtype=torch.float64), neg, log_q=log_q)
        if step == 49:
            state = g.state_dict()
            g.close()
            g = guard(None, None, beta_star=1.25, sinks=[memory], reference_beta_star=0.75)
            g.load_state_dict(state)
    g.close()
    rows = {step: row for step, row in memory.rows if "pareto_k" in row}
    assert [*rows] == [0, 50]
    assert math.isnan(rows[0]["pareto_k"])  # too few for a tail
    for tag, star, share in (("pareto_k", 1.25, 1.0), ("ref/pareto_k", 0.75, 0.0)):
        ws = [torch.softmax(star * f - share * q, -1) for f, q in kept[-16:]]
        ratios = torch.cat([(w * len(w)).log() for w in ws]).numpy()
        right = float(array_stats.psislw(-ratios)[1])
        assert rows[50][tag] == pytest.approx(right, rel=1e-6), tag


def test_a_lost_log_density_is_counted_and_alerts():
    (pos, neg), (q_pos, q_neg) = leaves((N,), (M,)), proposal()
    q_neg[2] = math.nan
    g = guard(None, None, beta_star=1.0)
    found = slopes(g.loss_fn(pos, neg, log_q=(q_pos, q_neg)), pos, neg)
    assert all(side.isfinite().all() for side in found)
    assert found[1][2] == 0
    assert (g.last["nonfinite/pos"], g.last["nonfinite/neg"]) == (0, 1)
    assert math.isnan(g.last["ess"])
    assert not math.isnan(g.last["ref/ess"])
    assert [alert.rule for alert in g.alerts] == ["nonfinite"]


def test_a_proposal_is_refused_before_anything_is_counted():
    (pos, neg), (q_pos, q_neg) = leaves((N,), (M,)), proposal()
    # A schedule that reaches zero is refused there.
    on, off = (guard(None, None, beta_star=x) for x in (lambda step: 1.0 - step, 0.0))
    with pytest.raises(ShapeError, match=r"log_q_pos has shape \(7,\); expected \(5,\)"):
        on.loss_fn(pos, neg, log_q=(q_neg, q_pos))
    assert on.step == 0
    assert not on.last
    on.loss_fn(pos, neg, log_q=(q_pos, q_neg))
    for call in (off.loss_fn, off.reweight, on.loss_fn):
        with pytest.raises(ConfigError, match=r"with beta_star = 0 .* Pass beta_star="):
            call(pos, neg, log_q=(q_pos, q_neg))
    assert on.loss_fn(pos, neg).isfinite()


def test_the_program_on_the_page(capsys):
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(program, names)
    assert float(capsys.readouterr().out) == pytest.approx(0.37, abs=0.03)
    # f is the log-density of the data, up to a constant.
    x = torch.linspace(-0.4, 2.4, 57).unsqueeze(1)
    log_density, log_q = (
        q.log_prob(x).squeeze(1) for q in (torch.distributions.Normal(1.0, 0.7), names["q"])
    )
    with torch.no_grad():
        f = names["f"](x).squeeze(1)
    assert (f - log_density).std() < 0.15
    assert (f - (log_density - log_q)).std() > 0.4


# -- temperatures apart (Appendix G.1) -----------------------------------------------------------


class Multiple(nn.Sequential):
    """k f of a network f."""

    k = 1.0

    def forward(self, x: Tensor) -> Tensor:
        f: Tensor = super().forward(x)
        return self.k * f


@pytest.mark.parametrize(
    ("a", "b", "variant"),
    [(0.3, 0.5, "default"), (2.0, 0.25, "no_pos"), (0.0, 0.7, "batch"), (0.3, 0.5, "true")],
)
def test_sampler_scale_and_beta_star_are_the_update_of_another_model(a, b, variant):
    """a = k (1 - β) and b = k β on f, as 1 - β and β on k f, but for the units of the loss."""
    net, k = Energy(dtype=torch.float64), a + b
    whole = Multiple(net)
    whole.k = k
    apart = guard(None, climb, model=net, sampler_scale=a, beta_star=b, variant=variant)
    together = guard(None, climb, model=whole, beta=b / k, output_scale=1.0, variant=variant)
    x_pos, start = torch.randn(6, 2).double(), torch.randn(4, 2).double()
    x_apart, x_together = apart.sampler(net, start), together.sampler(whole, start)
    torch.testing.assert_close(x_apart, x_together, rtol=1e-12, atol=1e-12)
    assert (x_apart == start).all() == (a == 0)
    loss = apart.loss_fn(net(x_pos), net(x_apart))
    other = together.loss_fn(whole(x_pos), whole(x_together))
    torch.testing.assert_close(k * loss, other)
    parameters = list(net.parameters())
    for found, right in zip(slopes(k * loss, *parameters), slopes(other, *parameters), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-13)
