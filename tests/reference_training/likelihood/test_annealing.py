"""Annealing from both sides against constants that are known otherwise, and against ebmkit."""

from __future__ import annotations

import math
import pathlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import ebm
import pytest
import torch
from ebm.samplers.base import Sampler
from torch import Tensor

from ebmguard.errors import ConfigError, ShapeError
from ebmguard.reference_training.likelihood import (
    Gaussian,
    Path,
    Schedule,
    forward,
    pilot,
    quadrature_log_z,
    reverse,
)
from tests.reference_training.parts import rng

WIDE = torch.float64


# Seeds from 100 on: the walks of the tests must not get the noise of their starts once more.


def normal(count: int, *shape: int, seed: int) -> Tensor:
    return torch.randn((count, *shape), generator=rng(seed), dtype=WIDE)


def isotropic(dim: int, std: float) -> Gaussian:
    return Gaussian(torch.zeros(dim, dtype=WIDE), torch.full((dim,), std, dtype=WIDE), WIDE)


@dataclass(frozen=True)
class Known:
    """A path, log Z of its model by another way, exact samples, and how many temperatures do."""

    path: Path
    log_z: float
    samples: Callable[[int], Tensor]
    temperatures: int


def gaussian(leapfrog_steps: int = 1) -> Known:
    """f = 1000 - ½ (x - m)ᵀ P (x - m) in three dimensions: the closed form."""
    mean = torch.tensor([0.5, -1.0, 0.3], dtype=WIDE)
    factor = torch.tensor([[0.6, 0.0, 0.0], [0.3, 0.5, 0.0], [-0.2, 0.1, 0.8]], dtype=WIDE)
    inverse = torch.linalg.inv(factor)

    def f(x: Tensor) -> Tensor:
        white: Tensor = (x - mean) @ inverse.T
        return 1000 - white.square().sum(1) / 2

    log_z = 1000 + 1.5 * math.log(2 * math.pi) + float(factor.diagonal().log().sum())
    path = Path(f, isotropic(3, 1.5), leapfrog_steps=leapfrog_steps)
    return Known(
        path, log_z, lambda n: mean + normal(n, 3, seed=101) @ factor.T, 40 * leapfrog_steps
    )


def modes() -> Known:
    """Two Gaussians of unlike weight and width in two dimensions: quadrature."""
    centres = torch.tensor([[-1.5, 0.0], [1.5, 1.0]], dtype=WIDE)
    stds = torch.tensor([0.6, 0.3], dtype=WIDE)
    shares = torch.tensor([0.5, 0.5], dtype=WIDE)

    def f(x: Tensor) -> Tensor:
        squares = ((x[:, None] - centres) / stds[:, None]).square().sum(-1)
        return (shares.log() - 2 * stds.log() - squares / 2).logsumexp(1)

    def samples(n: int) -> Tensor:
        mode = torch.multinomial(shares, n, replacement=True, generator=rng(102))
        return centres[mode] + stds[mode, None] * normal(n, 2, seed=103)

    log_z = float(quadrature_log_z(f, (-6.0, -6.0), (6.0, 6.0)))
    return Known(Path(f, isotropic(2, 2.0)), log_z, samples, 150)


RUNS, CHAINS = 20, 100
KNOWN: dict[str, Callable[[], Known]] = {
    "gaussian-mala": gaussian,
    "gaussian-hmc": partial(gaussian, leapfrog_steps=3),
    "modes": modes,
}


@pytest.mark.parametrize("name", ["gaussian-mala", "modes"])
def test_log_z_lies_between_the_two_sides(name):
    known, count = KNOWN[name](), RUNS * CHAINS
    schedule = pilot(known.path, chains=100, temperatures=known.temperatures, generator=rng(1))
    ahead = forward(known.path, schedule, chains=count, generator=rng(2))
    back = reverse(known.path, schedule, known.samples(count), generator=rng(3))
    for found, side in ((ahead, 1), (back, -1)):
        each = side * found.log_weights
        # The chains are independent: of so many, each hundred is a run of its own.
        runs = side * (found.log_weights.reshape(RUNS, CHAINS).logsumexp(1) - math.log(CHAINS))
        assert float(runs.mean()) == pytest.approx(known.log_z, abs=0.05)
        # The bias of a single chain is plain, on the side where it belongs.
        assert side * (known.log_z - each.mean()) > 4 * each.std() / count**0.5


# Not of the modes: few chains find the narrow one in so few steps, and none of the others tells.
@pytest.mark.parametrize("name", sorted(KNOWN.keys() - {"modes"}))
def test_weights_are_unbiased_however_coarse_the_schedule(name):
    known = KNOWN[name]()
    betas, count = (0.0, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0), 20_000
    schedule = Schedule(betas, (1.5, 1.5, 1.0, 0.8, 0.6, 0.3))
    ahead = forward(known.path, schedule, chains=count, generator=rng(11))
    back = reverse(known.path, schedule, known.samples(count), generator=rng(12))
    for log_weights in (ahead.log_weights - known.log_z, back.log_weights + known.log_z):
        ratio = log_weights.exp()
        error = float(ratio.std()) / count**0.5
        assert error < 0.05
        assert float(ratio.mean()) == pytest.approx(1, abs=4 * error)


def test_the_pilot_spends_equally_and_meets_the_acceptance():
    known = gaussian()
    schedule = pilot(known.path, chains=500, temperatures=60, generator=rng(1))
    evenly = Schedule((*(k / 60 for k in range(60)), 1.0), schedule.sizes)
    found = forward(known.path, schedule, chains=2000, generator=rng(2))
    plain = forward(known.path, evenly, chains=2000, generator=rng(2))
    assert found.conditional_ess.min() > plain.conditional_ess.min()
    lost = 1 - found.conditional_ess
    assert lost.max() < 3 * lost.median()
    assert (1 - plain.conditional_ess).max() > 20 * (1 - plain.conditional_ess).median()
    # Near β = 0 the size is held at the base's width, and more is accepted.
    assert found.acceptance[30:].mean() == pytest.approx(0.574, abs=0.08)


def test_a_state_that_the_model_cannot_have_weighs_nothing():
    def f(x):
        return torch.where(x[:, 0] > 0, 0.0, -torch.inf) + 0 * x.sum(1)

    path = Path(f, isotropic(1, 1.0), transition=lambda x, beta, rng: x)
    found = forward(path, Schedule((0.0, 1.0)), chains=400, generator=rng())
    positive = found.samples[:, 0] > 0
    assert (found.weights[~positive] == 0).all()
    assert found.ess < positive.sum()


def _path(**more):
    return Path(lambda x: -x.square().sum(1), isotropic(2, 1.0), **more)


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        (lambda: _path(moves=0), ConfigError, "moves is 0"),
        (lambda: Schedule(()), ConfigError, "from 0 to 1"),
        (lambda: Schedule((0.0, 0.5, 0.5, 1.0)), ConfigError, "increase"),
        (lambda: Schedule((0.0, 1.0), (0.1, 0.1)), ConfigError, "2 sizes"),
        (lambda: pilot(_path(), chains=1, temperatures=5), ConfigError, "chains is 1"),
        (lambda: forward(_path(), Schedule((0.0, 1.0)), chains=5), ConfigError, "no step sizes"),
        (
            lambda: pilot(Path(lambda x: x, isotropic(2, 1.0)), chains=5, temperatures=5),
            ShapeError,
            r"f returned shape \(5, 2\)",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(wrong, error, said):
    with pytest.raises(error, match=said):
        wrong()


BETAS = (0.0, 0.1, 0.35, 0.5, 0.9, 1.0)


class Turn(Sampler):
    """Moves that no random number decides: with them both libraries walk the same chains."""

    def step(self, energy, x):
        return turned(x)


def turned(x):
    return x.flip(1) * torch.tensor([0.9, -1.1], dtype=x.dtype)


def test_the_same_walks_have_the_same_weights():
    known = modes()
    base = torch.distributions.Independent(
        torch.distributions.Normal(torch.zeros(2).double(), 2), 1
    )
    betas = torch.tensor(BETAS, dtype=WIDE)
    options: dict[str, Any] = {"base": base, "schedule": betas, "sampler": Turn(steps=1)}

    class Seeded:
        log_prob = base.log_prob

        def sample(self, count, generator=None):
            torch.manual_seed(0)
            return base.sample((count,))

    # Theirs does not move at β = 1 on the way back.
    path = Path(known.path.f, Seeded(), transition=lambda x, beta, rng: turned(x))
    still = Path(known.path.f, Seeded(), lambda x, beta, rng: x if beta == 1 else turned(x))
    torch.manual_seed(0)
    theirs = ebm.ais_log_z(lambda x: -known.path.f(x), (2,), n_chains=50, **options)
    ours = forward(path, Schedule(BETAS), chains=50)
    torch.testing.assert_close(ours.log_weights, theirs.log_weights, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.samples, theirs.samples, rtol=1e-12, atol=1e-12)
    assert (ours.log_z, ours.ess) == pytest.approx((theirs.log_z, theirs.ess), rel=1e-9)
    x = known.samples(50)
    theirs = ebm.reverse_ais_log_z(lambda x: -known.path.f(x), x, **options)
    ours = reverse(still, Schedule(BETAS), x)
    torch.testing.assert_close(ours.log_weights, theirs.log_weights, rtol=1e-12, atol=1e-12)
    assert (ours.log_z, ours.ess) == pytest.approx((theirs.log_z, theirs.ess), rel=1e-9)


PAGE = (pathlib.Path(__file__).parents[3] / "docs" / "samplers.md").read_text()
PAGE = PAGE.split("\n## Likelihoods\n")[1]


def test_the_page_runs_from_top_to_bottom(capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, Any] = {}
    exec("\n".join(blocks), names)
    # What the page says of it, but for the last digits: another machine may sum in another order.
    printed = capsys.readouterr().out.splitlines()
    told = re.findall(r"^# (.*)$", blocks[0], flags=re.MULTILINE)
    words = [re.sub(r"[-\d.]+", "", line) for line in printed]
    assert words == [re.sub(r"[-\d.]+", "", line) for line in told]
    found, left = names["found"], names["left"]
    assert found.lower < 2.531 < found.upper
    assert left.problems
    torch.testing.assert_close(
        (names["f_neg"] - names["negatives"].log_q).softmax(0),
        names["negatives"].weights,
        check_dtype=False,
        rtol=1e-4,
        atol=1e-6,
    )
    assert torch.isfinite(names["loss"])
