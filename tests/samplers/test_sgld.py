"""SGLD against the linear recursion that it is on a quadratic energy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ebmguard.samplers import sgld, sgld_step

STEP, NOISE = 0.1, 0.5


def quadratic(precision):
    return lambda x: -0.5 * torch.einsum("bi,ij,bj->b", x, precision, x)


def test_step_is_drift_then_noise():
    x = torch.randn(5, 3, dtype=torch.float64)
    grad = torch.randn(5, 3, dtype=torch.float64)
    rng = torch.Generator().manual_seed(1)
    moved = sgld_step(x, grad, step_size=STEP, noise_std=NOISE, generator=rng)
    noise = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(moved, x + STEP * grad + NOISE * noise, rtol=0, atol=1e-15)


def test_step_without_noise_draws_nothing():
    rng = torch.Generator().manual_seed(1)
    before = rng.get_state()
    x = torch.ones(2, 2)
    assert torch.equal(sgld_step(x, x, step_size=2.0, noise_std=0.0, generator=rng), 3 * x)
    assert torch.equal(rng.get_state(), before)


def test_chain_without_noise_is_the_power_of_a_matrix():
    precision = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    x0 = torch.tensor([[1.0, -2.0], [0.3, 4.0]], dtype=torch.float64)
    x = sgld(quadratic(precision), x0, steps=7, step_size=STEP, noise_std=0.0)
    contraction = torch.eye(2, dtype=torch.float64) - STEP * precision
    expected = x0 @ torch.linalg.matrix_power(contraction, 7)
    torch.testing.assert_close(x, expected, rtol=0, atol=1e-12)


def test_moments_follow_the_closed_form():
    """On a quadratic energy the chain is a linear map of its start and its noise."""
    precision = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    contraction = torch.eye(2, dtype=torch.float64) - STEP * precision
    x0 = torch.tensor([[1.0, -2.0]], dtype=torch.float64)
    steps, count = 4, 200_000
    rng = torch.Generator().manual_seed(3)
    x = sgld(
        quadratic(precision),
        x0.expand(count, 2),
        steps=steps,
        step_size=STEP,
        noise_std=NOISE,
        generator=rng,
    )
    # Replay the very noise through the recursion x_k+1 = A x_k + s z_k, written out by hand.
    rng = torch.Generator().manual_seed(3)
    by_hand = x0.expand(count, 2)
    for _ in range(steps):
        noise = torch.randn(count, 2, dtype=torch.float64, generator=rng)
        by_hand = by_hand @ contraction.T + NOISE * noise
    torch.testing.assert_close(x.mean(0), by_hand.mean(0), rtol=0, atol=1e-6)
    torch.testing.assert_close(x.T.cov(), by_hand.T.cov(), rtol=0, atol=1e-6)
    # And the law itself: mean A^k x0, covariance s^2 sum_j A^j A^jT, within sampling error.
    mean = x0[0] @ torch.linalg.matrix_power(contraction, steps)
    powers = [torch.linalg.matrix_power(contraction, j) for j in range(steps)]
    cov = NOISE**2 * torch.stack([p @ p.T for p in powers]).sum(0)
    error = 5 * cov.diagonal().max().sqrt() / count**0.5
    assert (x.mean(0) - mean).abs().max() < error
    assert (x.T.cov() - cov).abs().max() < 5 * cov.max() * (2 / count) ** 0.5


def test_touches_neither_parameters_nor_start():
    net = torch.nn.Linear(3, 1)
    x0 = torch.randn(4, 3)
    before = x0.clone()
    x = sgld(lambda x: net(x)[:, 0], x0, steps=3, step_size=0.1, noise_std=0.1)
    assert net.weight.grad is None
    assert torch.equal(x0, before)
    assert not x0.requires_grad
    assert not x.requires_grad
    with torch.no_grad():  # the sampler turns gradients on for itself
        sgld(lambda x: net(x)[:, 0], x0, steps=1, step_size=0.1, noise_std=0.1)


def test_same_seed_same_samples_and_clamp():
    f = quadratic(torch.eye(2))
    x0 = torch.zeros(50, 2)

    def draw(seed):
        rng = torch.Generator().manual_seed(seed)
        return sgld(f, x0, steps=5, step_size=0.1, noise_std=1.0, generator=rng, clamp=(-0.5, 1.0))

    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))
    assert draw(0).min() == -0.5
    assert draw(0).max() == 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": -1}, "steps is -1"),
        ({"step_size": float("nan")}, "step_size is nan"),
        ({"noise_std": -0.1}, "noise_std is -0.1"),
        ({"clamp": (1.0, -1.0)}, "low < high"),
    ],
)
def test_refuses(settings, message):
    settings = {"steps": 1, "step_size": 0.1, "noise_std": 0.1, **settings}
    with pytest.raises(ValueError, match=message):
        sgld(lambda x: x.sum(1), torch.zeros(2, 2), **settings)


def test_refuses_a_gradient_of_another_shape():
    with pytest.raises(ValueError, match=r"grad has shape \(2,\)"):
        sgld_step(torch.zeros(2, 2), torch.zeros(2), step_size=0.1, noise_std=0.0)


# -- given noise -----------------------------------------------------------------------------


def test_given_noise_is_that_of_the_generator():
    precision = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    x0 = torch.randn(6, 2, dtype=torch.float64)
    settings: Any = {"steps": 4, "step_size": STEP, "noise_std": NOISE}
    drawn = sgld(quadratic(precision), x0, **settings, generator=torch.Generator().manual_seed(5))
    rng = torch.Generator().manual_seed(5)
    noise = torch.stack([torch.randn(6, 2, dtype=torch.float64, generator=rng) for _ in range(4)])
    assert torch.equal(sgld(quadratic(precision), x0, **settings, noise=noise), drawn)


def test_given_noise_draws_nothing():
    x = torch.ones(2, 2)
    before = torch.get_rng_state()
    moved = sgld_step(x, x, step_size=1.0, noise_std=0.5, noise=torch.full((2, 2), 4.0))
    assert torch.equal(moved, torch.full((2, 2), 4.0))
    sgld(lambda x: x.sum(-1), x, steps=3, step_size=1.0, noise_std=0.5, noise=torch.ones(3, 2, 2))
    assert torch.equal(torch.get_rng_state(), before)


def test_members_of_an_ensemble_share_their_noise():
    """(G, n, dim) with f -> (G, n): each member is the chain that it would be alone."""
    curvature = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)
    x0, noise = (
        torch.randn(5, 2, dtype=torch.float64),
        torch.randn(4, 1, 5, 2, dtype=torch.float64),
    )
    settings: Any = {"steps": 4, "step_size": STEP, "noise_std": NOISE}

    def bowl(curvature):
        return lambda x: -0.5 * curvature * x.square().sum(-1)

    together = sgld(bowl(curvature[:, None]), x0.expand(3, 5, 2), **settings, noise=noise)
    assert together.shape == (3, 5, 2)
    for member, own in enumerate(curvature):
        alone = sgld(bowl(own), x0, **settings, noise=noise[:, 0])
        torch.testing.assert_close(together[member], alone, rtol=0, atol=1e-15)
    grad = torch.zeros(3, 5, 2, dtype=torch.float64)
    step = sgld_step(together, grad, step_size=STEP, noise_std=NOISE, noise=noise[0])
    torch.testing.assert_close(step, together + NOISE * noise[0], rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((3, 4, 3), r"\(3, 4, 3\).*\(3, 4, 2\)"),
        ((2, 4, 2), r"\(2, 4, 2\).*\(3, 4, 2\)"),
        ((1, 3, 4, 2), r"\(1, 3, 4, 2\).*\(3, 4, 2\)"),
        # These would give every step the same noise.
        ((4, 2), r"\(4, 2\).*\(3, 4, 2\)"),
        ((1, 4, 2), r"each of the 3 steps: \(3, 4, 2\)"),
        ((), r"each of the 3 steps: \(3, 4, 2\)"),
    ],
)
def test_refuses_noise_of_another_shape(shape, message):
    settings: Any = {"steps": 3, "step_size": 0.1, "noise_std": 0.1}
    with pytest.raises(ValueError, match=message):
        sgld(lambda x: x.sum(1), torch.zeros(4, 2), **settings, noise=torch.zeros(shape))


def test_refuses_one_draw_for_all_samples():
    """As many samples as steps: (steps, dim) would broadcast, and not be what it looks like."""
    settings: Any = {"steps": 4, "step_size": 0.1, "noise_std": 0.1}
    with pytest.raises(ValueError, match=r"draws of their own .* 4 steps: \(4, 4, 2\)"):
        sgld(lambda x: x.sum(1), torch.zeros(4, 2), **settings, noise=torch.zeros(4, 2))


def test_refuses_wrong_or_two_sources_of_noise():
    x, rng = torch.zeros(4, 2), torch.Generator()
    settings: Any = {"step_size": 0.1, "noise_std": 0.1}
    with pytest.raises(ValueError, match=r"\(3, 2\).*\(4, 2\)"):
        sgld_step(x, x, **settings, noise=torch.zeros(3, 2))
    with pytest.raises(ValueError, match="both given"):
        sgld_step(x, x, **settings, noise=x, generator=rng)
    with pytest.raises(ValueError, match="both given"):
        sgld(lambda x: x.sum(1), x, steps=1, **settings, noise=x[None], generator=rng)
