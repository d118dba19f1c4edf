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
    drift_to_noise,
    energy_unit,
    metropolis_acceptance,
    oriented,
    sample_diagnostics,
    sample_marks,
)

Clamp = tuple[float, float]


def shown(x: Tensor, before: Tensor | None = None, clamp: Clamp | None = None) -> dict[str, float]:
    """The numbers of samples, after those of the call before."""
    marks = None if before is None else sample_marks(before)
    if marks is not None and marks.shape[-1] != x.shape[0]:
        marks = None
    found = sample_diagnostics(sample_marks(x, clamp), marks, entries=x.shape[-1])
    return {tag.split("/")[1]: value.item() for tag, value in found.items()}


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


def test_ratio_is_unknown_without_noise_and_0_of_a_still_energy():
    norm = torch.tensor([0.0, 1.0])
    assert drift_to_noise(norm, entries=4, step_size=1.0, noise_std=0).isnan().all()
    assert drift_to_noise(norm, entries=4, step_size=1.0, noise_std=0.1)[0] == 0


@pytest.mark.parametrize("noise_std", [0.2, 0.0])
def test_the_unit_of_energies_goes_with_the_energies(noise_std):
    """f times c with steps over c is the same chain; JEM's unit is 1."""
    scale = 2.0**10
    unit = energy_unit(step_size=0.25, noise_std=noise_std)
    assert energy_unit(step_size=0.25 / scale, noise_std=noise_std) == scale * unit > 0
    assert energy_unit(step_size=1.0, noise_std=0.01) == 1


# -- the samples themselves --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_share_of_entries_at_the_ends_or_beyond(dtype):
    # 0.1 and 0.7 are no numbers of any of these types.
    x = torch.tensor([[-5.0, 0.3, 9.0], [0.4, 0.5, 0.6]], dtype=dtype).clamp(0.1, 0.7)
    assert shown(x, None, (0.1, 0.7))["clamped"] == pytest.approx(2 / 6)
    x = torch.tensor([[-2.0, 0.0, torch.nan, torch.inf]], dtype=dtype)
    assert shown(x, None, (-1.0, 1.0))["clamped"] == 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_share_of_samples_that_are_not_finite(dtype):
    x = torch.zeros(5, 3, dtype=dtype)
    assert shown(x)["samples"] == 0
    x[0, 1], x[1, 2], x[2, 0], x[3, 0] = torch.nan, torch.inf, -torch.inf, torch.finfo(dtype).max
    assert shown(x)["samples"] == pytest.approx(3 / 5)


@given(st.integers(1, 6), st.integers(1, 20), st.integers(0, 2**31))
def test_repeated_is_the_share_of_equal_samples(n, d, seed):
    generator = torch.Generator().manual_seed(seed)
    before = torch.randn(n, d, generator=generator)
    keep = torch.rand(n, 1, generator=generator) < 0.5
    now = torch.where(keep, before, torch.randn(n, d, generator=generator))
    expected = (now == before).all(-1).float().mean().item()
    assert shown(now, before)["repeated"] == pytest.approx(expected)


def test_repeats_that_cannot_be_told():
    assert math.isnan(shown(torch.ones(2, 3), torch.ones(3, 3))["repeated"])
    assert math.isnan(shown(torch.ones(2, 3))["repeated"])
    lost = torch.tensor([[1.0, torch.nan], [1.0, 2.0]])
    assert shown(lost, lost)["repeated"] == 0.5


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
    x, output = torch.empty(4, 2, device="meta"), torch.empty(4, 1, device="meta")
    assert oriented(x, output, output, x, sign=1).h.shape == (4,)
    marks = sample_marks(x, (0.0, 1.0))
    assert marks.shape == (4, 4)
    found = sample_diagnostics(marks, marks, entries=2)
    assert [value.shape for value in found.values()] == [()] * 3


# -- what the sampler differentiated ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("objective", "sign", "per_sample"),
    [
        (lambda f: f.mean(), 1, 1 / 6),
        (lambda f: -f.sum(), 1, 1.0),  # a sampler that descends the energy -f
        (lambda f: 3 * f.sum(), 1, 3.0),
        (lambda f: -f.mean(), -1, -1 / 6),  # a network that returns energies
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
