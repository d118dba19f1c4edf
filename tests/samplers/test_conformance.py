"""What holds for every sampler and every step, whichever algorithm is inside."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ebmguard import guard
from ebmguard.errors import ConfigError, ShapeError
from ebmguard.samplers import (
    Mixture,
    Proposal,
    hmc,
    hmc_step,
    mala,
    mala_step,
    sgld,
    sgld_step,
    start_chains,
)
from tests.parts import Energy
from tests.samplers.parts import PRECISION, Gaussian, bowl, normals, scale_of, seeded

SIZES: Any = {"step_size": 0.4, "noise_std": 0.8}  # o = 1.25, and far too long for SGLD
START = torch.tensor([3.0, -2.0], dtype=torch.float64)


def stationary(factor: float, steps: int) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the density exp(o factor f), whatever the number of steps."""
    return torch.zeros(2).double(), torch.linalg.inv(factor * scale_of(**SIZES) * PRECISION)


def recursion(factor: float, steps: int) -> tuple[Tensor, Tensor]:
    """Mean and covariance after so many steps of x + step_size ∇(factor f) + noise_std z."""
    eye = torch.eye(2, dtype=torch.float64)
    contraction = eye - SIZES["step_size"] * factor * PRECISION
    mean, cov = START, torch.zeros_like(eye)
    for _ in range(steps):
        mean = contraction @ mean
        cov = contraction @ cov @ contraction.T + SIZES["noise_std"] ** 2 * eye
    return mean, cov


class Case(NamedTuple):
    """A sampler, its step, how often it calls f, the settings of ensembles, and its law."""

    run: Callable[..., Tensor]
    step: Callable[..., Any]
    evaluations: Callable[[int], int]
    ensemble: dict[str, int]
    law: Callable[[float, int], tuple[Tensor, Tensor]]
    mixing: int


CASES = {
    "sgld": Case(sgld, sgld_step, lambda n: n, {}, recursion, 6),
    "mala": Case(mala, mala_step, lambda n: 1 + n, {"dim": 1}, stationary, 60),
    "hmc": Case(
        partial(hmc, leapfrog_steps=3),
        partial(hmc_step, leapfrog_steps=3),
        lambda n: 1 + 3 * n,
        {"dim": 1},
        stationary,
        25,
    ),
}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def drawn(case: Case, x: Tensor, rng: torch.Generator) -> Any:
    """The random numbers of one step: its Gaussian, and what the test of a proposal needs."""
    z = torch.randn(x.shape, generator=rng, dtype=x.dtype)
    return z if case.run is sgld else (z, torch.rand(x.shape[:-1], generator=rng, dtype=x.dtype))


@pytest.mark.parametrize(
    ("dtype", "models"), [(torch.float32, ()), (torch.float64, (3,)), (torch.bfloat16, (3,))]
)
def test_a_run_is_its_steps_and_nothing_else_changes(case, models, dtype):
    net = Energy().to(dtype)
    x0 = normals(*models, 6, 2).to(dtype)
    before, parameters = x0.clone(), [p.clone() for p in net.parameters()]
    state, shown = torch.get_rng_state(), list[Proposal]()
    options: Any = {} if case.run is sgld else {"on_step": shown.append}
    options |= case.ensemble if models else {}
    with torch.no_grad():  # the sampler turns gradients on for itself
        x = case.run(net, x0, steps=8, **SIZES, **options, generator=seeded(3))
    assert len(shown) == (0 if case.run is sgld else 8)
    chains, rng = start_chains(net, x0, dim=len(models)), seeded(3)
    for step in range(8):
        held = [part.clone() for part in chains]
        moved, proposal = case.step(net, chains, **SIZES, generator=rng)
        assert isinstance(proposal, Proposal)
        assert {part.shape for part in proposal[1:]} == {(*models, 6)}
        assert all(map(torch.equal, held, chains))
        for seen in shown[step : step + 1]:
            assert all(map(torch.equal, seen.chains, proposal.chains))
            assert all(map(torch.equal, seen[1:], proposal[1:]))
        chains = moved
    assert torch.equal(x, chains.x)
    assert x.dtype == dtype
    # The kept state is that of a new evaluation.
    for kept, fresh in zip(chains, start_chains(net, chains.x, dim=len(models)), strict=True):
        torch.testing.assert_close(kept, fresh)
    # Nothing else has changed, and nothing is attached to a graph.
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x0, before)
    assert not any(t.requires_grad for t in (x0, x, *chains, *proposal.chains, *proposal[1:]))
    for p, old in zip(net.parameters(), parameters, strict=True):
        assert p.grad is None
        assert torch.equal(p, old)


def test_a_seed_gives_its_samples_from_either_generator(case):
    def draw(rng):
        return case.run(bowl, normals(5, 2), steps=4, **SIZES, generator=rng)

    first = draw(seeded(0))
    assert torch.equal(draw(seeded(0)), first)
    assert not torch.equal(draw(seeded(1)), first)
    torch.manual_seed(0)
    assert torch.equal(draw(None), first)


def test_given_noise_is_that_of_the_generator_and_has_to_fit(case):
    start = start_chains(bowl, normals(4, 2))
    expected, _ = case.step(bowl, start, **SIZES, generator=seeded(5))
    noise, before = drawn(case, start.x, seeded(5)), torch.get_rng_state()
    found, _ = case.step(bowl, start, **SIZES, noise=noise)
    assert all(map(torch.equal, found, expected))
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ConfigError, match="both given"):
        case.step(bowl, start, **SIZES, noise=noise, generator=seeded(0))
    wrong = (
        [noise[:3]] if case.run is sgld else [(noise[0][:3], noise[1]), (noise[0], noise[1][:3])]
    )
    for each in wrong:
        with pytest.raises(ShapeError, match=r"\(3,.*does not broadcast to \(4,"):
            case.step(bowl, start, **SIZES, noise=each)


def test_members_of_an_ensemble_are_the_chains_they_are_alone(case):
    curvature = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64)
    x0 = normals(3, 50, 2)
    noise = drawn(case, x0[0], seeded(4))  # shared

    def bowls(curvature: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda x: -0.5 * curvature * x.square().sum(-1)

    together = bowls(curvature[:, None])
    moved, _ = case.step(together, start_chains(together, x0, dim=1), **SIZES, noise=noise)
    for member, own in enumerate(curvature):
        alone, _ = case.step(bowls(own), start_chains(bowls(own), x0[member]), **SIZES, noise=noise)
        for one, other in zip(moved, alone, strict=True):
            torch.testing.assert_close(one[member], other, rtol=0, atol=1e-13)


@pytest.mark.parametrize("steps", [0, 7])
def test_nothing_is_evaluated_twice(case, steps):
    calls = 0

    def counted(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return bowl(x)

    x0 = normals(4, 2)
    x = case.run(counted, x0, steps=steps, **SIZES)
    assert calls == case.evaluations(steps)
    assert torch.equal(x, x0) == (steps == 0)


def test_nothing_waits_for_the_device(case):
    """On the device `meta` any read by the host raises."""
    x0 = torch.empty(2, 5, 3, device="meta")
    x = case.run(lambda x: x.sum(-1), x0, steps=2, **SIZES, **case.ensemble)
    assert (x.shape, x.device) == (x0.shape, x0.device)


def test_the_law_under_a_guard_is_that_of_the_tempered_density(case):
    """Moments of 20,000 chains from a start far off, within 5 standard errors."""
    n, f, factor = 20_000, Gaussian(), 0.75
    _, sample_q = guard(None, case.run, beta=0.25, **SIZES)
    x = sample_q(f, START.expand(n, 2), steps=case.mixing, **SIZES, generator=seeded(11))

    def errors(mean: Tensor, cov: Tensor) -> float:
        """The largest error of a mean or a covariance about the true mean, in standard errors."""
        off = x - mean
        mean_error = off.mean(0).abs() / (cov.diagonal() / n).sqrt()
        variances = cov.diagonal().outer(cov.diagonal())
        cov_error = (off.T @ off / n - cov).abs() / ((variances + cov.square()) / n).sqrt()
        return float(torch.maximum(mean_error.max(), cov_error.max()))

    assert errors(*case.law(factor, case.mixing)) < 5
    # Another density, such as the plain one or that of a sampler without a test, is told apart.
    assert errors(*case.law(1.75 - factor, case.mixing)) > 20
    assert errors(*(recursion if case.law is stationary else stationary)(factor, case.mixing)) > 20


@pytest.mark.parametrize("name", CASES)
def test_a_mixture_under_a_guard_takes_it_as_it_is(name):
    """Both parts climb 3/4 of f, and draw from the one generator in their order."""
    f, x0 = Gaussian(), normals(5, 2)
    parts = {"first": CASES["sgld"].run, "own": CASES[name].run}
    settings: Any = {"steps": 3, **SIZES}
    _, sample_q = guard(None, Mixture(parts), beta=0.25, **SIZES)
    x = sample_q(f, x0, **settings, generator=seeded(0))
    assert sample_q.parts == {"first": slice(0, 5), "own": slice(5, 10)}
    rng = seeded(0)
    expected = [run(lambda x: 0.75 * f(x), x0, **settings, generator=rng) for run in parts.values()]
    torch.testing.assert_close(x, torch.cat(expected))
    plain = sample_q.original(f, x0, **settings, generator=seeded(0))
    assert not torch.allclose(x, plain)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": -1}, "steps is -1"),
        ({"steps": 1.5}, "steps= is 1.5; expected a whole number"),
        ({"noise_std": math.inf}, "noise_std is inf"),
        ({"step_size": -1.0}, "step_size is -1.0"),
    ],
)
def test_settings_are_refused_before_anything_is_drawn(case, wrong, message):
    settings, rng = {"steps": 1, **SIZES, **wrong}, seeded(0)
    before, x0 = rng.get_state(), normals(2, 2)
    with pytest.raises(ConfigError, match=message):
        case.run(bowl, x0, **settings, generator=rng)
    if settings.pop("steps") == 1:
        with pytest.raises(ConfigError, match=message):
            case.step(bowl, start_chains(bowl, x0), **settings, generator=rng)
    assert torch.equal(rng.get_state(), before)
