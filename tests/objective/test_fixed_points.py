"""Where training comes to rest (App. I), by exact expectation over a small discrete space.

A state space of K points, F one number per point. The expected gradient sums over every draw of
the positives and the negatives, so nothing here is random.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from benchmarks.finite_negatives import efficiency
from ebmguard.objective import contrastive_loss, weights
from tests.objective.oracles import VARIANTS

DATA = torch.tensor([0.5, 0.1, 0.25, 0.15], dtype=torch.float64)
PROPOSAL = torch.tensor([0.1, 0.3, 0.2, 0.4], dtype=torch.float64)
REST = 1e-12
EVERY_BETA = pytest.mark.parametrize("beta", [0.1, 0.5, 1.0, 2.0, -0.5])


def _expected_gradient(f, proposal, beta, m, *, n=1, variant="default", is_known=False):
    """E over n draws x⁺ ~ p_d and m draws x⁻ ~ proposal of the gradient in f.

    Where the proposal is known, it is divided out of the weights.
    """
    points = range(len(DATA))
    draws = torch.tensor(list(itertools.product(points, repeat=n + m)))
    at_pos, at_neg = draws[:, :n], draws[:, n:]
    chance = DATA[at_pos].prod(1) * proposal[at_neg].prod(1)
    f = f.detach().requires_grad_()

    def loss(i, j):
        log_q = (proposal.log()[i], proposal.log()[j]) if is_known else None
        return contrastive_loss(f[i], f[j], beta, variant=variant, log_q=log_q)

    (slope,) = torch.autograd.grad((chance * torch.vmap(loss)(at_pos, at_neg)).sum(), f)
    return slope


def _tempered(log_density, beta):
    """What an exact sampler of p^(1 - β) draws from."""
    return torch.softmax((1 - beta) * log_density, 0)


@EVERY_BETA
def test_default_with_a_fixed_proposal_rests_at_the_corrected_log_ratio_alone(beta):
    rest = (DATA.log() - PROPOSAL.log()) / beta
    for m in (1, 2, 3):
        assert _expected_gradient(rest - m, PROPOSAL, beta, m).abs().max() < REST
    for elsewhere in (DATA.log(), rest / 2, torch.zeros(4).double()):
        assert _expected_gradient(elsewhere, PROPOSAL, beta, 2).abs().max() > 1e-3
    for point in range(4):
        push = torch.zeros(4, dtype=torch.float64)
        push[point] = 0.1 / abs(beta)
        slope = _expected_gradient(rest + push, PROPOSAL, beta, 2)
        # The minimum: descending leads back (the loss carries 1/β, so this holds for β < 0 as
        # minus the maximum of the same likelihood).
        assert slope[point] * (1 if beta > 0 else -1) > 1e-4


@EVERY_BETA
def test_default_with_a_known_proposal_rests_at_the_data_whatever_the_proposal(beta):
    for m in (1, 3):
        for proposal in (PROPOSAL, torch.tensor([0.7, 0.1, 0.1, 0.1], dtype=torch.float64)):
            rest = DATA.log() / beta - 1.0
            slope = _expected_gradient(rest, proposal, beta, m, is_known=True)
            assert slope.abs().max() < REST
            for elsewhere in ((DATA.log() - proposal.log()) / beta, 1.3 * rest):
                slope = _expected_gradient(elsewhere, proposal, beta, m, is_known=True)
                assert slope.abs().max() > 1e-3


def test_what_a_biased_sampler_leaves_falls_with_beta():
    """Appendix I: the gap is (1/β - 1) (log p_d - log s), if s^(1 - β) is drawn for p^(1 - β)."""
    gaps = []
    for beta in (0.1, 0.3, 0.5, 0.7, 0.9, 1.0):
        rest = DATA.log() + (1 / beta - 1) * (DATA.log() - PROPOSAL.log())
        slope = _expected_gradient(rest, _tempered(PROPOSAL.log(), beta), beta, 2)
        assert slope.abs().max() < REST
        gaps.append((DATA @ (DATA.log() - rest.log_softmax(0))).item())
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] > 1
    assert abs(gaps[-1]) < REST


@pytest.mark.parametrize(
    ("a", "b"),
    [
        *((0.9, 0.1), (0.5, 0.5), (0.0, 1.0), (1.5, -0.5)),  # a tempered model: a + b = 1
        (1.0, 0.0),  # the standard loss
        *((0.3, 0.5), (2.0, 0.25), (0.0, 0.7)),  # temperatures apart (App. G.1)
    ],
)
def test_default_with_an_exact_sampler_of_exp_a_f_rests_where_a_plus_b_times_f_is_the_data(a, b):
    for m in (1, 2, 4):
        f = DATA.log() / (a + b) - m
        assert _expected_gradient(f, torch.softmax(a * f, 0), b, m).abs().max() < REST
        for factor in (0.8, 1.3):
            wrong = factor * f
            slope = _expected_gradient(wrong, torch.softmax(a * wrong, 0), b, m)
            assert slope.abs().max() > 1e-3


@pytest.mark.parametrize(("beta", "m"), [(0.5, 8), (0.9, 8), (-0.5, 8), (0.5, 64), (2.0, 64)])
def test_so_it_does_with_many_negatives(beta, m):
    """Draws that differ in their order alone are summed at once, with the multinomial's chance."""
    p = DATA[:3] / DATA[:3].sum()
    counts = torch.tensor([(i, j, m - i - j) for i in range(m + 1) for j in range(m + 1 - i)])
    of_negatives = (
        counts * _tempered(p.log(), beta).log() - torch.lgamma(counts.double() + 1)
    ).sum(1)
    chance = (of_negatives + math.lgamma(m + 1)).exp()[:, None] * p
    negatives = torch.stack([torch.arange(3).repeat_interleave(count) for count in counts])
    f = p.log().requires_grad_()
    of_positives = torch.vmap(lambda i, j: contrastive_loss(f[i], f[j], beta), in_dims=(0, None))
    losses = torch.vmap(of_positives, in_dims=(None, 0))(torch.arange(3)[:, None], negatives)
    assert chance.sum() == pytest.approx(1)
    (slope,) = torch.autograd.grad((chance * losses).sum(), f)
    assert slope.abs().max() < REST


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9, 1.0, -0.5])
def test_default_learns_at_the_rate_of_a_ranking_likelihood(beta):
    """At rest the gradient's covariance is minus the slope of its mean: both are E Cov_p⁺(∇f)."""
    at_rest = DATA.log()
    for m in (1, 3):
        draws = torch.tensor(list(itertools.product(range(4), repeat=1 + m)))

        def chance(f, draws=draws):
            return DATA[draws[:, 0]] * _tempered(f, beta)[draws[:, 1:]].prod(1)

        def losses(f, draws=draws):
            return torch.vmap(lambda x: contrastive_loss(f[x[:1]], f[x[1:]], beta))(draws)

        def mean(f):  # the sampler moves with f, and nothing is differentiated through it
            return torch.func.grad(lambda g: (chance(f) * losses(g)).sum())(f)

        shares = torch.softmax(beta * at_rest[draws], 1)
        at = torch.nn.functional.one_hot(draws, 4).double()
        p = torch.einsum("si,six->sx", shares, at)
        within = torch.diag_embed(p) - p[:, :, None] * p[:, None]
        information = torch.einsum("s,sxy->xy", chance(at_rest), within)
        own = torch.func.jacrev(losses)(at_rest)
        covariance = torch.einsum("s,sx,sy->xy", chance(at_rest), own, own)
        torch.testing.assert_close(covariance, information, rtol=1e-11, atol=1e-14)
        slope = torch.func.jacrev(mean)(at_rest)
        torch.testing.assert_close(slope, information, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5])
def test_what_few_negatives_keep_of_the_information(beta):
    """With one negative, by a sum over a grid of both: the table of results/finite_negatives.md."""
    x = torch.linspace(-9, 9, 1501, dtype=torch.float64)
    f, slope = -x.square() / 2, -x.square() / 2
    p, q = torch.softmax(f, 0), torch.softmax((1 - beta) * f, 0)
    share = torch.sigmoid(beta * (f[:, None] - f))
    variance = share * (1 - share) * (slope[:, None] - slope).square()
    found = (p[:, None] * q * variance).sum() / (p @ slope.square() - (p @ slope).square())
    ess, kept = efficiency(beta, [1, 64], 1)
    assert kept[0] == pytest.approx(float(found), rel=1e-6)
    assert ess == pytest.approx((1 - beta**2) ** 0.5, rel=1e-6)
    assert beta or kept[1] == pytest.approx(64 / 65, rel=1e-6)


@pytest.mark.parametrize("variant", VARIANTS[1:])
@pytest.mark.parametrize("beta", [0.5, -0.5])
def test_self_normalised_variants_rest_there_only_with_many_negatives(variant, beta):
    log_density = DATA.log()
    sampled = _tempered(log_density, beta)
    sizes = [
        _expected_gradient(log_density, sampled, beta, m, n=2, variant=variant).abs().max().item()
        for m in (2, 3, 4, 5)
    ]
    assert sizes[0] > 1e-2
    assert sizes == sorted(sizes, reverse=True)
    # The bias of self-normalised importance sampling falls with 1/M.
    assert sizes[3] < 0.7 * sizes[0]
    # The default has none, with the same draws.
    assert _expected_gradient(log_density, sampled, beta, 4, n=2).abs().max() < REST


def test_standard_loss_pushes_for_ever_where_the_sampler_does_not_follow():
    """The forces of Section 2.3: with other negatives than p_d, no f is one of rest."""
    for f in (DATA.log(), PROPOSAL.log(), 1e3 * (DATA - PROPOSAL)):
        slope = _expected_gradient(f, PROPOSAL, 0.0, 2)
        torch.testing.assert_close(slope, PROPOSAL - DATA, rtol=1e-12, atol=1e-15)


def test_an_output_scale_makes_jem_a_model_of_eq_41():
    """Four points x and three classes: p(x) by o LSE h(x), p(y | x) by the softmax of h(x)."""
    h = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    f = h.logsumexp(1)
    for o in (1.0, 7.0):
        log_p = torch.log_softmax(o * f, 0)[:, None] + torch.log_softmax(h, 1)
        torch.testing.assert_close(log_p.exp().sum(), torch.ones(()).double())
        joint = (o - 1) * f[:, None] + h
        torch.testing.assert_close(log_p, joint - joint.flatten().logsumexp(0))
        # JEM's loss leaves o out: it is that of log p(x) / o.
        (slope,) = torch.autograd.grad(torch.log_softmax(o * f, 0) @ DATA / o, h, retain_graph=True)
        sampled = torch.softmax(o * f, 0).detach()
        (own,) = torch.autograd.grad(f @ (sampled - DATA), h, retain_graph=True)
        torch.testing.assert_close(slope, -own)
    # At β = 1/o the weights are those of Σ exp h(x)[y].
    torch.testing.assert_close(weights(f, 1.0), h.exp().sum(1) / h.exp().sum())


@pytest.mark.parametrize(("a", "b"), [(0.3, 0.5), (2.0, 0.25), (0.0, 0.7), (1.5, -0.5)])
def test_temperatures_apart_are_the_update_of_another_model(a, b):
    # a = k (1 - β) and b = k β: the model is exp(k f), and the losses differ by their units.
    k = a + b
    beta = b / k
    f = DATA.log() * 0.7
    sampled = torch.softmax(a * f, 0)
    torch.testing.assert_close(sampled, _tempered(k * f, beta))
    for variant in VARIANTS:
        apart = _expected_gradient(f, sampled, b, 2, n=2, variant=variant)
        # The gradient in f itself, of a loss that is in units of k f.
        together = _expected_gradient(k * f, sampled, beta, 2, n=2, variant=variant)
        torch.testing.assert_close(apart, together, rtol=1e-12, atol=1e-15)
