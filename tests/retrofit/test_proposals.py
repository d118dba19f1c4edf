"""The guard with a sampler that knows its own density, and with temperatures apart."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ebmguard import contrastive_loss, guard
from ebmguard.diagnostics import pareto_k, weight_diagnostics
from ebmguard.errors import ConfigError, ShapeError
from tests.parts import Energy, Memory, climb, energies, slopes

N, M = 5, 7
PAGE = (Path(__file__).parents[2] / "docs" / "samplers.md").read_text()
PAGE = PAGE.split("\n## Proposals that know their density\n")[1].split("\n## ")[0]


def sides(*models: int) -> tuple[Tensor, ...]:
    """Energies of both sides, and log-densities of both."""
    pos, neg, q_pos, q_neg = (torch.randn(*models, n, dtype=torch.float64) for n in (N, M, N, M))
    return pos.requires_grad_(), neg.requires_grad_(), q_pos, q_neg


def closed_form(pos: Tensor, neg: Tensor, beta_star: float, q_pos: Tensor, q_neg: Tensor) -> Any:
    """-(1 - w⁺_i)/N and GradScale w_j, written out with exp(β* f) / q instead of exp(β* f)."""
    at_neg = (beta_star * neg).exp() / q_neg.exp()
    at_pos = (beta_star * pos).exp() / q_pos.exp()
    missing = at_neg.sum() / (at_pos + at_neg.sum())
    return -missing / len(pos), missing.mean() * at_neg / at_neg.sum()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("beta_star", [0.5, 2.0, -0.7])
def test_gradients_are_those_of_weights_divided_by_the_proposal(gradients, beta_star, sign):
    """In either convention: of the proposal, high stays high."""
    pos, neg, q_pos, q_neg = sides()
    convention: Any = "log_density" if sign > 0 else "energy"
    g = guard(None, None, beta_star=beta_star, convention=convention)
    found = gradients(g, pos, neg, log_q=(q_pos, q_neg))
    expected = closed_form(sign * pos, sign * neg, beta_star, q_pos, q_neg)
    for side, right in zip(found, expected, strict=True):
        torch.testing.assert_close(side, sign * right, rtol=1e-12, atol=1e-15)


def test_the_trainers_own_weight_stays():
    pos, neg, q_pos, q_neg = sides()
    g = guard(lambda p, n: 0.3 * (n.mean() - p.mean()), None, beta_star=0.5)
    expected = 0.3 * contrastive_loss(pos, neg, 0.5, log_q=(q_pos, q_neg))
    torch.testing.assert_close(g.loss_fn(pos, neg, log_q=(q_pos, q_neg)), expected)


@pytest.mark.parametrize("variant", ["default", "no_pos", "batch", "true"])
def test_variants_and_classes_are_those_of_the_objective(variant):
    pos, neg, q_pos, q_neg = sides()
    options: dict[str, Any] = {"log_q": (q_pos, q_neg)}
    if variant in ("default", "no_pos"):
        options["groups"] = torch.tensor([0, 1, 1, 0, 2]), torch.tensor([0, 1, 1, 0, 1, 3, 3])
    found = guard(None, None, beta_star=0.8, variant=variant).loss_fn(pos, neg, **options)
    assert torch.equal(found, contrastive_loss(pos, neg, 0.8, variant=variant, **options))


# -- rows ----------------------------------------------------------------------------------------


def test_weights_of_the_row_have_the_proposal_and_those_of_the_reference_do_not():
    pos, neg, q_pos, q_neg = sides()
    g = guard(None, None, beta_star=2.0)
    g.loss_fn(pos, neg, log_q=(q_pos, q_neg))
    for tag, expected in weight_diagnostics(pos, neg, 2.0, log_q=(q_pos, q_neg)).items():
        assert g.last[tag] == pytest.approx(expected.item()), tag
    for tag, expected in weight_diagnostics(pos, neg, 0.5).items():
        assert g.last[f"ref/{tag}"] == pytest.approx(expected.item()), tag
    assert g.last["energy_gap"] == pytest.approx((pos.mean() - neg.mean()).item())


def test_pareto_shape_is_that_of_the_weights_in_force_through_a_checkpoint_too():
    memory = Memory()
    g = guard(None, None, beta_star=1.25, sinks=[memory])
    kept = []
    for step in range(51):
        neg, q_neg = torch.randn(2, 30 + step, dtype=torch.float64)
        # Some steps do without.
        log_q = None if step % 3 == 0 else (torch.zeros(5), q_neg)
        kept.append((neg, q_neg if log_q else torch.zeros_like(q_neg)))
        g.loss_fn(torch.zeros(5, dtype=torch.float64), neg, log_q=log_q)
        if step == 49:
            state = g.state_dict()
            g.close()
            g = guard(None, None, beta_star=1.25, sinks=[memory])
            g.load_state_dict(state)
    g.close()
    (row,) = [row for step, row in memory.rows if step == 50 and "pareto_k" in row]
    for tag, star, share in (("pareto_k", 1.25, 1.0), ("ref/pareto_k", 0.5, 0.0)):
        weights = [torch.softmax(star * f - share * q, -1) for f, q in kept[-16:]]
        expected = pareto_k(torch.cat([(w * len(w)).log() for w in weights]))
        assert row[tag] == pytest.approx(expected.item(), rel=1e-6), tag


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_lost_log_density_is_counted_and_alerts(bad):
    pos, neg, q_pos, q_neg = sides()
    q_neg[2] = bad
    g = guard(None, None, beta_star=1.0)
    found = slopes(g.loss_fn(pos, neg, log_q=(q_pos, q_neg)), pos, neg)
    assert all(side.isfinite().all() for side in found)
    assert found[1][2] == 0
    assert g.last["nonfinite/neg"] == 1
    assert g.last["nonfinite/pos"] == 0
    assert math.isnan(g.last["ess"])
    assert not math.isnan(g.last["ref/ess"])
    assert [alert.rule for alert in g.alerts] == ["nonfinite"]


# -- misuse --------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["loss", "reweight"])
def test_refused_before_anything_is_counted(call):
    pos, neg, q_pos, q_neg = sides()
    off = guard(None, None, beta_star=0.0)
    with pytest.raises(ConfigError, match=r"with beta_star = 0 there are none. Pass beta_star="):
        getattr(off, call)(pos, neg, log_q=(q_pos, q_neg))
    on = guard(None, None, beta_star=1.0)
    with pytest.raises(ShapeError, match=r"log_q_pos has shape \(7,\); expected \(5,\)"):
        getattr(on, call)(pos, neg, log_q=(q_neg, q_pos))
    for g in (off, on):
        assert g.step == 0
        assert not g.last


def test_a_schedule_that_reaches_zero_refuses_the_proposal_there():
    pos, neg = energies()
    log_q = torch.zeros(6), torch.zeros(5)
    g = guard(None, None, beta_star=lambda step: 1.0 - step)
    g.loss_fn(pos, neg, log_q=log_q)
    with pytest.raises(ConfigError, match="with beta_star = 0"):
        g.loss_fn(pos, neg, log_q=log_q)
    assert g.loss_fn(pos, neg).isfinite()


# -- training ------------------------------------------------------------------------------------


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


class Multiple(nn.Module):
    """k f of a network f."""

    def __init__(self, net: nn.Module, k: float) -> None:
        super().__init__()
        self.net = net
        self.k = k

    def forward(self, x: Tensor) -> Tensor:
        f: Tensor = self.net(x)
        return self.k * f


@pytest.mark.parametrize("variant", ["default", "no_pos", "batch", "true"])
@pytest.mark.parametrize(("a", "b"), [(0.3, 0.5), (2.0, 0.25), (0.0, 0.7)])
def test_sampler_scale_and_beta_star_are_the_update_of_another_model(a, b, variant):
    """a = k (1 - β) and b = k β on f, as 1 - β and β on k f, but for the units of the loss."""
    torch.manual_seed(0)
    net = Energy(dtype=torch.float64)
    k = a + b
    apart: Any = guard(
        None, climb, model=net, sampler_scale=a, beta_star=b, variant=variant, output_scale=None
    )
    whole = Multiple(net, k)
    together: Any = guard(None, climb, model=whole, beta=b / k, output_scale=1.0, variant=variant)
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
