"""SGLD against the linear recursion that it is on a quadratic energy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ebmguard import guard
from ebmguard.errors import ConfigError
from ebmguard.samplers import annealed, sgld, sgld_step

STEP, NOISE = 0.1, 0.5


def quadratic(precision):
    return lambda x: -0.5 * torch.einsum("bi,ij,bj->b", x, precision, x)


class Quadratic(nn.Module):
    def __init__(self, precision: Tensor) -> None:
        super().__init__()
        self.precision = precision

    def forward(self, x: Tensor) -> Tensor:
        f: Tensor = quadratic(self.precision)(x)
        return f


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


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("beta", [0.0, 0.25])
def test_mean_and_covariance_after_k_steps(dtype, atol, beta):
    """On a quadratic the chain is a linear map of its start and its noise, so its law is exact.

    Without noise it is the mean; started at 0, with a unit impulse as noise, it is one column of
    the factor of its covariance. Under a guard the slope is that of (1 - β) f.
    """
    steps, dim = 6, 3
    precision = torch.tensor([[2.0, 0.5, 0.1], [0.5, 1.0, -0.3], [0.1, -0.3, 4.0]], dtype=dtype)
    start = torch.tensor([1.0, -2.0, 0.7], dtype=dtype)
    settings: Any = {"steps": steps, "step_size": STEP, "noise_std": NOISE}
    f = Quadratic(precision)
    _, sample_q = guard(None, sgld, beta=beta, step_size=STEP, noise_std=NOISE)
    still = torch.zeros(steps, 1, dim, dtype=dtype)
    mean = sample_q(f, start[None], **settings, noise=still)[0]
    # One chain for each step and each direction of its noise.
    impulses = torch.eye(steps * dim, dtype=dtype).view(steps * dim, steps, dim).transpose(0, 1)
    columns = sample_q(f, torch.zeros(steps * dim, dim, dtype=dtype), **settings, noise=impulses)
    contraction = torch.eye(dim, dtype=torch.float64) - STEP * (1 - beta) * precision.double()
    expected_mean, expected_cov = start.double(), torch.zeros(dim, dim, dtype=torch.float64)
    for _ in range(steps):
        expected_mean = contraction @ expected_mean
        expected_cov = contraction @ expected_cov @ contraction.T + NOISE**2 * torch.eye(dim)
    torch.testing.assert_close(mean.double(), expected_mean, rtol=0, atol=atol)
    cov = columns.double().T @ columns.double()
    torch.testing.assert_close(cov, expected_cov, rtol=0, atol=atol)


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
        ({"step_size": [0.1, -0.1]}, "step_size is -0.1"),
        ({"noise_std": [0.1]}, "noise_std has 1 entries for 2 steps"),
        ({"step_size": (0.1, 0.1, 0.1)}, "step_size has 3 entries for 2 steps"),
        ({"step_size": torch.full((2,), 0.1)}, r"of a tensor or an array, its tolist\(\)"),
        ({"clamp": (1.0, -1.0)}, "low < high"),
        ({"grad_clip": 0.0}, "grad_clip is 0.0"),
        ({"grad_clip": float("inf")}, "grad_clip is inf"),
    ],
)
def test_refuses(settings, message):
    settings = {"steps": 2, "step_size": 0.1, "noise_std": 0.1, **settings}
    with pytest.raises(ConfigError, match=message):
        sgld(lambda x: x.sum(1), torch.zeros(2, 2), **settings)


def test_refuses_a_gradient_of_another_shape():
    with pytest.raises(ValueError, match=r"grad has shape \(2,\)"):
        sgld_step(torch.zeros(2, 2), torch.zeros(2), step_size=0.1, noise_std=0.0)


# -- steps of several sizes, and a clipped gradient ------------------------------------------


def test_every_step_may_have_its_own_sizes():
    """Against the recursion with another matrix and another noise at every step."""
    precision = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    sizes, stds = annealed(0.3, 0.01, 5, shape="linear"), annealed(1.0, 0.1, 5)
    x0, noise = torch.randn(4, 2).double(), torch.randn(5, 4, 2).double()
    x = sgld(quadratic(precision), x0, steps=5, step_size=sizes, noise_std=stds, noise=noise)
    expected = x0
    for size, std, z in zip(sizes, stds, noise, strict=True):
        expected = expected - size * expected @ precision + std * z
    torch.testing.assert_close(x, expected, rtol=0, atol=1e-12)
    same = sgld(quadratic(precision), x0, steps=5, step_size=[0.1] * 5, noise_std=0.2, noise=noise)
    one = sgld(quadratic(precision), x0, steps=5, step_size=0.1, noise_std=0.2, noise=noise)
    assert torch.equal(same, one)


def test_gradient_is_clipped_entry_by_entry_before_the_step():
    slope = torch.tensor([3.0, -0.02, 0.0, -7.0, torch.nan])
    settings: Any = {"steps": 2, "step_size": 10.0, "noise_std": 0.0}
    x = sgld(lambda x: x @ slope, torch.zeros(1, 5), **settings, grad_clip=0.05)
    expected = torch.tensor([[1.0, -0.4, 0.0, -1.0, torch.nan]])
    torch.testing.assert_close(x, expected, equal_nan=True)
    wide = sgld(lambda x: x @ slope, torch.zeros(1, 5), **settings, grad_clip=10.0)
    assert torch.equal(wide[:, :4], sgld(lambda x: x @ slope, torch.zeros(1, 5), **settings)[:, :4])


def test_tempering_has_no_hold_where_the_clip_cuts():
    """As docs/samplers.md warns: the guard's factor changes the second entry alone."""
    slope = nn.Linear(2, 1, bias=False)
    nn.init.constant_(slope.weight, 7.0)
    slope.weight.data[0, 1] = 0.04
    settings: Any = {"steps": 1, "step_size": 1.0, "noise_std": 0.0, "grad_clip": 0.05}
    _, sample_q = guard(None, sgld, beta=0.25, output_scale=1.0)
    x = sample_q(slope, torch.zeros(1, 2), **settings)
    torch.testing.assert_close(x, torch.tensor([[0.05, 0.03]]))


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
