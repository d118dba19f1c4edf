"""Where training comes to rest (App. I), by exact expectation over a small discrete space.

A state space of K points, F one number per point. The expected gradient sums over every draw of
one positive and M negatives, so nothing here is random.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from ebmguard.objective import coefficients, contrastive_loss

DATA = torch.tensor([0.5, 0.1, 0.25, 0.15], dtype=torch.float64)
PROPOSAL = torch.tensor([0.1, 0.3, 0.2, 0.4], dtype=torch.float64)
REST = 1e-12
BETAS = [0.1, 0.5, 1.0, 2.0, -0.5]


def _expected_gradient(
    log_density,
    proposal,
    beta,
    m,
    *,
    n=1,
    variant="default",
    output_scale=1.0,
    is_known=False,
):
    """E over n draws x⁺ ~ p_d and m draws x⁻ ~ proposal of the gradient in f = F / o.

    Where the proposal is known, it is divided out of the weights.
    """
    points = range(len(DATA))
    draws = torch.tensor(list(itertools.product(points, repeat=n + m)))
    chance = DATA[draws[:, :n]].prod(1) * proposal[draws[:, n:]].prod(1)
    f = (log_density / output_scale).detach().requires_grad_()
    exponent = torch.full((len(draws),), beta * output_scale, dtype=torch.float64)
    log_q = None
    if is_known:
        log_q = proposal.log()[draws[:, :n]], proposal.log()[draws[:, n:]]
    losses = contrastive_loss(
        f[draws[:, :n]], f[draws[:, n:]], exponent, variant=variant, log_q=log_q
    )
    (slope,) = torch.autograd.grad((chance * losses).sum(), f)
    return slope


def _tempered(log_density, beta):
    """What an exact sampler of p^(1 - β) draws from."""
    return torch.softmax((1 - beta) * log_density, 0)


@pytest.mark.parametrize("output_scale", [1.0, 50.0])
@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize("beta", BETAS)
def test_default_with_a_fixed_proposal_rests_at_the_corrected_log_ratio(beta, m, output_scale):
    rest = (DATA.log() - PROPOSAL.log()) / beta
    for constant in (0.0, -3.0):
        slope = _expected_gradient(rest + constant, PROPOSAL, beta, m, output_scale=output_scale)
        assert slope.abs().max() < REST


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("beta", BETAS)
def test_default_with_a_fixed_proposal_rests_nowhere_else(beta, m):
    rest = (DATA.log() - PROPOSAL.log()) / beta
    for elsewhere in (DATA.log(), (DATA.log() - PROPOSAL.log()) / (2 * beta), torch.zeros(4)):
        assert _expected_gradient(elsewhere.double(), PROPOSAL, beta, m).abs().max() > 1e-3
    for point in range(4):
        push = torch.zeros(4, dtype=torch.float64)
        push[point] = 0.1 / abs(beta)
        slope = _expected_gradient(rest + push, PROPOSAL, beta, m)
        # The minimum: descending leads back (the loss carries 1/β, so this holds for β < 0 as
        # minus the maximum of the same likelihood).
        assert slope[point] * (1 if beta > 0 else -1) > 1e-4


@pytest.mark.parametrize("m", [1, 2, 4])
@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9, 1.0, -0.5])
def test_default_with_an_exact_sampler_rests_at_the_data(beta, m):
    for constant in (0.0, 2.0):
        log_density = DATA.log() + constant
        slope = _expected_gradient(log_density, _tempered(log_density, beta), beta, m)
        assert slope.abs().max() < REST
    wrong = DATA.log() * 1.3
    assert _expected_gradient(wrong, _tempered(wrong, beta), beta, m).abs().max() > 1e-3


@pytest.mark.parametrize("variant", ["no_pos", "batch", "true"])
@pytest.mark.parametrize("beta", [0.5, -0.5])
def test_self_normalised_variants_rest_there_only_with_many_negatives(variant, beta):
    log_density = DATA.log()
    sampled = _tempered(log_density, beta)
    sizes = [
        _expected_gradient(log_density, sampled, beta, m, n=2, variant=variant).abs().max().item()
        for m in (2, 3, 4, 6)
    ]
    assert sizes[0] > 1e-2
    assert sizes == sorted(sizes, reverse=True)
    # The bias of self-normalised importance sampling falls with 1/M.
    assert sizes[3] < 0.6 * sizes[0]
    # The default has none, with the same draws.
    assert _expected_gradient(log_density, sampled, beta, 4, n=2).abs().max() < REST


def test_no_pos_with_one_negative_is_blind_to_the_exponent():
    for log_density in (DATA.log(), torch.randn(4, generator=torch.Generator().manual_seed(0))):
        slope = _expected_gradient(log_density.double(), PROPOSAL, 0.7, 1, variant="no_pos")
        torch.testing.assert_close(slope, PROPOSAL - DATA, rtol=1e-12, atol=1e-15)


def test_standard_loss_rests_where_the_sampler_draws_the_data():
    log_density = DATA.log()
    slope = _expected_gradient(log_density, torch.softmax(log_density, 0), 0.0, 2)
    assert slope.abs().max() < REST


@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize("beta", BETAS)
def test_default_with_a_known_proposal_rests_at_the_data_whatever_the_proposal(beta, m):
    for proposal in (PROPOSAL, torch.tensor([0.7, 0.1, 0.1, 0.1], dtype=torch.float64)):
        rest = DATA.log() / beta - 1.0
        slope = _expected_gradient(rest, proposal, beta, m, is_known=True)
        assert slope.abs().max() < REST
        for elsewhere in ((DATA.log() - proposal.log()) / beta, 1.3 * rest):
            slope = _expected_gradient(elsewhere, proposal, beta, m, is_known=True)
            assert slope.abs().max() > 1e-3


# -- temperatures apart (App. G.1): an exact sampler of exp(a f), weights exp(b f) ---------------

TEMPERATURES = [(0.3, 0.5), (1.0, 1.0), (2.0, 0.25), (0.0, 0.7), (1.5, -0.5)]


@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize(("a", "b"), TEMPERATURES)
def test_default_rests_where_the_sum_of_the_temperatures_times_f_is_the_data(a, b, m):
    for constant in (0.0, -2.0):
        f = DATA.log() / (a + b) + constant
        slope = _expected_gradient(f, torch.softmax(a * f, 0), b, m)
        assert slope.abs().max() < REST
    for factor in (0.8, 1.25):
        f = factor * DATA.log() / (a + b)
        assert _expected_gradient(f, torch.softmax(a * f, 0), b, m).abs().max() > 1e-3


@pytest.mark.parametrize("variant", ["no_pos", "batch"])
@pytest.mark.parametrize(("a", "b"), TEMPERATURES)
def test_self_normalised_variants_rest_there_with_ever_more_negatives(variant, a, b):
    def slope(f, count):
        """With as many negatives at each point as are expected of count draws."""
        at_pos = torch.arange(4).repeat_interleave((20 * DATA).round().long())
        at_neg = torch.arange(4).repeat_interleave((count * torch.softmax(a * f, 0)).long())
        sides = coefficients(f[at_pos], f[at_neg], b, variant=variant)
        total = torch.zeros(4, dtype=torch.float64)
        for at, side in zip((at_pos, at_neg), sides, strict=True):
            total.index_add_(0, at, side)
        return total.abs().max()

    rest = DATA.log() / (a + b)
    assert slope(rest, 1_000_000) < 1e-5
    assert slope(1.25 * rest, 1_000_000) > 1e-2


@pytest.mark.parametrize("variant", ["default", "no_pos", "batch", "true"])
@pytest.mark.parametrize(("a", "b"), TEMPERATURES)
def test_temperatures_apart_are_the_update_of_another_model(variant, a, b):
    # a = k (1 - β) and b = k β: the model is exp(k f), and the losses differ by their units.
    k = a + b
    beta = b / k
    f = DATA.log() * 0.7
    sampled = torch.softmax(a * f, 0)
    torch.testing.assert_close(sampled, _tempered(k * f, beta))
    apart = _expected_gradient(f, sampled, b, 2, n=2, variant=variant)
    # The gradient in f itself, of a loss that is in units of k f.
    together = _expected_gradient(k * f, sampled, beta, 2, n=2, variant=variant)
    torch.testing.assert_close(apart, together, rtol=1e-12, atol=1e-15)
