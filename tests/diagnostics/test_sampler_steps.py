"""Numbers of the sampler's steps, against densities written out and against each other."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Normal

from ebmguard.diagnostics import (
    ChainState,
    clamped,
    drift_to_noise,
    fingerprint,
    metropolis_acceptance,
    oriented,
    repeated,
)

# -- drift to noise ----------------------------------------------------------------------------


def test_ratio_is_that_of_the_lengths_of_drift_and_noise():
    """Measured on a real step: the noise of d entries has the length σ √d, up to 1/√(2d)."""
    d, step_size, noise_std = 200_000, 0.3, 0.02
    gradient = torch.randn(3, d, dtype=torch.float64)
    noise = noise_std * torch.randn(3, d, dtype=torch.float64)
    expected = (step_size * gradient).norm(dim=1) / noise.norm(dim=1)
    found = drift_to_noise(
        gradient.norm(dim=1), entries=d, step_size=step_size, noise_std=noise_std
    )
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0)


@pytest.mark.parametrize("noise_std", [0, 0.0])
def test_ratio_is_unknown_without_noise(noise_std):
    norm = torch.tensor([0.0, 1.0])
    assert drift_to_noise(norm, entries=4, step_size=1.0, noise_std=noise_std).isnan().all()


def test_ratio_of_a_still_energy_is_zero():
    assert drift_to_noise(torch.zeros(()), entries=4, step_size=1.0, noise_std=0.1) == 0


# -- the clamp ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_share_of_entries_at_the_ends(dtype):
    # 0.1 and 0.7 are no numbers of any of these types.
    x = torch.tensor([[-5.0, 0.3, 9.0], [0.4, 0.5, 0.6]], dtype=dtype).clamp(0.1, 0.7)
    share = clamped(x, (0.1, 0.7))
    assert share.dtype == torch.float32
    assert share.item() == pytest.approx(2 / 6)


def test_beyond_the_ends_counts_and_nan_does_not():
    x = torch.tensor([[-2.0, 0.0, torch.nan, torch.inf]])
    assert clamped(x, (-1.0, 1.0)).item() == 0.5


# -- Metropolis acceptance -----------------------------------------------------------------------


def bowl(x: Tensor) -> ChainState:
    return ChainState(x, -0.5 * x.square().sum(-1), -x)


def wells(x: Tensor) -> ChainState:
    """Two wells at ±1, with a slope between them."""
    return ChainState(
        x,
        (-(x.square() - 1).square() + 0.3 * x).sum(-1),
        -4 * x * (x.square() - 1) + 0.3,
    )


def by_densities(start: ChainState, end: ChainState, step_size: float, noise_std: float) -> Tensor:
    """The textbook formula, term by term, in float64."""
    scale = 2 * step_size / noise_std**2

    def proposal(from_: ChainState, to: ChainState) -> Tensor:
        mean = from_.x + step_size * from_.gradient
        log_q: Tensor = Normal(mean, noise_std).log_prob(to.x).sum(-1)
        return log_q

    ratio: Tensor = scale * (end.h - start.h) + proposal(end, start) - proposal(start, end)
    probability: Tensor = ratio.clamp(max=0).exp()
    return probability


@given(
    step_size=st.floats(1e-4, 2.0),
    noise_std=st.floats(0.05, 2.0),
    seed=st.integers(0, 2**32),
    energy=st.sampled_from([bowl, wells]),
)
def test_agrees_with_the_densities(step_size, noise_std, seed, energy):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(7, 3, generator=rng, dtype=torch.float64)
    start = energy(x)
    noise = noise_std * torch.randn(7, 3, generator=rng, dtype=torch.float64)
    end = energy(x + step_size * start.gradient + noise)
    found = metropolis_acceptance(start, end, step_size=step_size, noise_std=noise_std)
    expected = by_densities(start, end, step_size, noise_std)
    # The sum of terms up to 1e7 that cancel leaves so many digits.
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert ((found >= 0) & (found <= 1)).all()


def test_gaussian_in_closed_form():
    """For h = -|x|²/2 the logarithm of the ratio is o s (|x|² - |x'|²) / 4."""
    x, x_end = torch.randn(2, 50, 4, dtype=torch.float64)
    step_size, noise_std = 0.7, 0.9
    scale = 2 * step_size / noise_std**2
    squares = x.square().sum(-1) - x_end.square().sum(-1)
    expected = (scale * step_size / 4 * squares).clamp(max=0).exp()
    found = metropolis_acceptance(bowl(x), bowl(x_end), step_size=step_size, noise_std=noise_std)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert 0.1 < found.mean() < 0.9


def test_detailed_balance_by_quadrature():
    """p(x) q(x' | x) a(x, x') is symmetric, so that p is the chain's own density."""
    step_size, noise_std = 0.2, 0.8
    grid = torch.linspace(-3, 3, 301, dtype=torch.float64).unsqueeze(-1)
    at = wells(grid)
    p = (2 * step_size / noise_std**2 * at.h).softmax(0)
    q = Normal(grid + step_size * at.gradient, noise_std).log_prob(grid.T).exp()

    def every(which: int) -> ChainState:
        n = len(grid)
        shapes = [(n, n, 1), (n, n), (n, n, 1)]
        return ChainState(
            *(part.unsqueeze(which).expand(shape) for part, shape in zip(at, shapes, strict=True))
        )

    accepted = metropolis_acceptance(every(1), every(0), step_size=step_size, noise_std=noise_std)
    flow = p.unsqueeze(1) * q * accepted
    torch.testing.assert_close(flow, flow.T, rtol=1e-9, atol=1e-15)
    unadjusted = p.unsqueeze(1) * q
    assert (unadjusted - unadjusted.T).abs().max() > 1e-6


def test_chain_that_uses_it_has_the_right_variance():
    """Unadjusted, the variance of the chains is off by 1 / (1 - s/2)."""
    rng = torch.Generator().manual_seed(0)
    step_size, noise_std = 0.8, 1.0
    scale = 2 * step_size / noise_std**2
    n = 40_000
    x = torch.randn(n, 1, generator=rng, dtype=torch.float64)
    plain = x.clone()
    for _ in range(60):
        noise = noise_std * torch.randn(n, 1, generator=rng, dtype=torch.float64)
        plain = plain + step_size * bowl(plain).gradient + noise
        start = bowl(x)
        end = bowl(x + step_size * start.gradient + noise)
        accepted = metropolis_acceptance(start, end, step_size=step_size, noise_std=noise_std)
        moves = torch.rand(n, generator=rng, dtype=torch.float64) < accepted
        x = torch.where(moves.unsqueeze(-1), end.x, x)
    error = math.sqrt(2 / n)  # of a variance, relative
    assert x.var() * scale == pytest.approx(1.0, abs=5 * error)
    assert plain.var() * scale == pytest.approx(1 / (1 - step_size / 2), rel=5 * error)


def test_short_steps_are_accepted_and_long_ones_are_not():
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(500, 5, generator=rng, dtype=torch.float64)
    shares = []
    for step_size in (1e-6, 0.1, 1.0, 8.0):
        noise_std = math.sqrt(2 * step_size)  # o = 1: the density stays the same
        noise = noise_std * torch.randn(500, 5, generator=rng, dtype=torch.float64)
        start = wells(x)
        end = wells(x + step_size * start.gradient + noise)
        found = metropolis_acceptance(start, end, step_size=step_size, noise_std=noise_std)
        shares.append(found.mean().item())
    assert shares[0] == pytest.approx(1.0, abs=1e-3)
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 1e-3


def test_a_jem_step_in_float32_keeps_its_digits():
    """At o = 20,000 the terms of the textbook's sum are a thousand times their result."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(64, 100, generator=rng, dtype=torch.float64) * 0.011
    step_size, noise_std = 1.0, 0.01

    def slope(x: Tensor) -> ChainState:
        return ChainState(x, -0.2 * x.square().sum(-1), -0.4 * x)

    noise = noise_std * torch.randn(64, 100, generator=rng, dtype=torch.float64)
    start = slope(x)
    end = slope(x + step_size * start.gradient + noise)
    exact = by_densities(start, end, step_size, noise_std)
    found = metropolis_acceptance(
        ChainState(*(part.float() for part in start)),
        ChainState(*(part.float() for part in end)),
        step_size=step_size,
        noise_std=noise_std,
    )
    assert 0.1 < exact.mean() < 0.95
    torch.testing.assert_close(found, exact, rtol=0, atol=5e-3)


def test_unknown_without_noise_and_where_an_input_is_nan():
    start, end = bowl(torch.zeros(3, 2)), bowl(torch.ones(3, 2))
    assert metropolis_acceptance(start, end, step_size=0.1, noise_std=0.0).isnan().all()
    broken = start._replace(h=torch.tensor([0.0, torch.nan, 0.0]))
    found = metropolis_acceptance(broken, end, step_size=0.1, noise_std=0.1)
    assert found.isnan().tolist() == [False, True, False]
    assert metropolis_acceptance(end, broken, step_size=0.1, noise_std=0.1)[1].isnan()


def test_nothing_is_read_by_the_host():
    def state() -> ChainState:
        return ChainState(*(torch.empty(shape, device="meta") for shape in ((4, 2), (4,), (4, 2))))

    assert metropolis_acceptance(state(), state(), step_size=1.0, noise_std=0.1).shape == (4,)
    assert clamped(torch.empty(4, 2, device="meta"), (0.0, 1.0)).shape == ()
    x, output = torch.empty(4, 2, device="meta"), torch.empty(4, 1, device="meta")
    assert oriented(x, output, output, x, sign=1).h.shape == (4,)


# -- what the sampler differentiated ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("objective", "sign", "per_sample"),
    [
        (lambda f: f.sum(), 1, 1.0),
        (lambda f: f.mean(), 1, 1 / 6),
        (lambda f: -f.sum(), 1, 1.0),  # a sampler that descends the energy -f
        (lambda f: 3 * f.sum(), 1, 3.0),
        (lambda f: f.sum(), -1, -1.0),  # a network that returns energies
        (lambda f: -f.mean(), -1, -1 / 6),
    ],
)
def test_energy_is_high_on_data_whatever_was_differentiated(objective, sign, per_sample):
    x = torch.randn(3, 2, dtype=torch.float64).requires_grad_()
    f = torch.stack((x.square().sum(1), x.sin().sum(1)), 1)  # two heads
    cotangent, gradient = torch.autograd.grad(objective(f), (f, x))
    state = oriented(x.detach(), f.detach(), cotangent, gradient, sign=sign)
    own = (per_sample * f.sum(1)).sum()
    (expected,) = torch.autograd.grad(
        (per_sample * torch.stack((x.square().sum(1), x.sin().sum(1)), 1)).sum(), x
    )
    torch.testing.assert_close(state.h.sum(), own.detach())
    torch.testing.assert_close(state.gradient, expected)


def test_energy_is_unknown_where_samples_were_weighted():
    x = torch.randn(3, 2).requires_grad_()
    f = x.square().sum(1, keepdim=True)
    for objective in (f.squeeze(1).dot(torch.tensor([1.0, 2.0, 1.0])), f.logsumexp(0).sum()):
        cotangent, gradient = torch.autograd.grad(objective, (f, x), retain_graph=True)
        state = oriented(x.detach(), f.detach(), cotangent, gradient, sign=1)
        assert state.h.isnan().all()
        assert state.gradient.isnan().all()


# -- repeats ------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(1, 20), st.integers(0, 2**31))
def test_repeated_is_the_share_of_equal_samples(n, d, seed):
    generator = torch.Generator().manual_seed(seed)
    before = torch.randn(n, d, generator=generator)
    keep = torch.rand(n, 1, generator=generator) < 0.5
    now = torch.where(keep, before, torch.randn(n, d, generator=generator))
    found = repeated(fingerprint(now), fingerprint(before))
    assert torch.equal(found, (now == before).all(-1).float().mean())


def test_the_smallest_move_counts_as_one():
    x = torch.ones(1, 3)
    moved = x.clone()
    moved[0, 1] = torch.nextafter(x[0, 1], torch.tensor(2.0))
    assert repeated(fingerprint(moved), fingerprint(x)).item() == 0
    assert repeated(fingerprint(x.clone()), fingerprint(x)).item() == 1


def test_repeats_that_cannot_be_told():
    assert repeated(fingerprint(torch.ones(2, 3)), fingerprint(torch.ones(3, 3))).isnan()
    lost = torch.tensor([[1.0, torch.nan], [1.0, 2.0]])
    assert repeated(fingerprint(lost), fingerprint(lost)).item() == 0.5


def test_the_search_for_repeats_waits_for_nothing():
    x = torch.ones(4, 2, device="meta")
    assert repeated(fingerprint(x), fingerprint(x)).device.type == "meta"
