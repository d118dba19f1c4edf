"""The drift that a chain gets: (1 - β) times that of the whole energy, or a refusal at once."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn

from ebmguard import guard
from ebmguard.errors import LossError, SamplerError
from tests.parts import gradient_at

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # in torch's forward mode
HALF: Any = {"beta_star": 0.5, "output_scale": 1.0, "substeps": 1}
Function: TypeAlias = Callable[[Tensor], Tensor]


def network(heads: int = 1, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 16), nn.SiLU(), nn.Linear(16, heads)).double()


OTHER = network(seed=1)


def by_backward(energy: Function, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    energy(x).sum().backward()
    assert x.grad is not None
    return x.grad.data


def of_the_mean(energy: Function, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return -len(x) * torch.autograd.grad(-energy(x).mean(), x, create_graph=True)[0].detach()


def one_by_one(energy: Function, x: Tensor) -> Tensor:
    found: Tensor = torch.vmap(torch.func.grad(lambda x: energy(x[None]).sum()))(x.detach())
    return found


def in_forward_mode(energy: Function, x: Tensor) -> Tensor:
    axes = [axis.expand_as(x).contiguous() for axis in torch.eye(2).double()]
    rises = [torch.func.jvp(lambda x: energy(x).reshape(-1), (x,), (axis,))[1] for axis in axes]
    return torch.stack(rises, 1).detach()


def weighted(energy: Function, x: Tensor) -> Tensor:
    x, weights = x.detach().requires_grad_(), torch.linspace(1, 2, len(x)).double()
    return torch.autograd.grad(energy(x).flatten(), x, weights)[0] / weights[:, None]


def twice(energy: Function, x: Tensor) -> Tensor:
    """Two experts, whose backward passes add up in the samples' gradient."""
    x = x.detach().requires_grad_()
    for each in (energy, OTHER):
        each(x).sum().backward()
    assert x.grad is not None
    return x.grad


class Prior(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return -x.square().sum(1, keepdim=True) / 2


def with_a_prior(energy: Function, x: Tensor) -> Tensor:
    """The gradient of the prior is written by hand."""
    return gradient_at(energy, x) - x.detach()


def langevin(energy: Function, x: Tensor, moves: Any = gradient_at) -> Tensor:
    for _ in range(4):
        x = (x + 0.02 * moves(energy, x) + 0.2 * torch.randn_like(x)).detach()
    return x


class Wrapper(nn.Module):
    def __init__(self, f: nn.Module, bend: Function = lambda out: out) -> None:
        super().__init__()
        self.module, self.bend = f, bend

    def forward(self, x: Tensor) -> Tensor:
        return self.bend(self.module(x))


def half_past(f: Any) -> Any:
    kept = f.forward
    return lambda x: f(x) + kept(x)


def in_turn(f: Any, past: Any = lambda f: nn.Sequential(*f)) -> Any:
    """By calls of f and, every other time, by its layers or by a copy."""
    ways = itertools.cycle([f, past(f)])
    return lambda x: next(ways)(x)


def traced(f: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of torch warn of the format
        return torch.jit.trace(f, torch.zeros(16, 2).double())


@dataclass
class Case:
    """A sampler that moves by ``moves`` of ``energy(uses(f), x)``, and calls f(x) for its log."""

    energy: Callable[[Any, Tensor], Tensor] = lambda f, x: f(x)
    heads: int = 1
    moves: Callable[[Function, Tensor], Tensor] = gradient_at
    hook: Function | None = None
    uses: Callable[[Any], Any] = lambda f: f
    beside: nn.Module | None = None  # another energy that ``moves`` follows, too
    chains: int = 16

    def whole(self, f: Any, x: Tensor) -> Tensor:
        """The energy that the sampler follows, one number a sample."""
        total = self.energy(f, x).reshape(len(x), -1).sum(1)
        return total if self.beside is None else total + self.beside(x).squeeze(1)

    def factors(self, **options: Any) -> Tensor:
        """The drifts of three steps of training, over the true ones."""
        f, seen = network(self.heads), list[Tensor]()
        layers, bend = [*f], self.hook or (lambda out: out)
        if self.hook is not None:
            f.register_forward_hook(lambda module, args, output: bend(output))
        used = self.uses(f)

        def plain(x: Tensor) -> Tensor:
            for layer in layers:
                x = layer(x)
            return bend(x)

        def true(x: Tensor) -> Tensor:
            wraps = used.bend if isinstance(used, Wrapper) else lambda out: out
            own = gradient_at(lambda x: self.energy(lambda x: wraps(plain(x)), x), x)
            return own if self.beside is None else own + gradient_at(self.beside, x)

        def sampler(x: Tensor) -> Tensor:
            for _ in range(4):
                drift = self.moves(lambda x: self.energy(used, x), x)
                f(x).mean().item()
                seen.append((drift / true(x)).flatten())
                x = (x + 0.02 * drift + 0.2 * torch.randn_like(x)).detach()
            return x

        optimizer = torch.optim.SGD(f.parameters(), lr=0.1)
        before = [p.detach().clone() for p in f.parameters()]
        own = HALF | {"model": f, "optimizer": optimizer} | options
        loss, sample = guard(None, sampler, **own)
        try:
            for _ in range(3):
                sides = torch.randn(16, 2).double(), sample(torch.randn(self.chains, 2).double())
                loss(*(self.whole(used, x) for x in sides)).backward()
                optimizer.step()
        except (LossError, SamplerError):
            assert all(map(torch.equal, f.parameters(), before))
            raise
        return torch.cat(seen)


def logsumexp(f: Any, x: Tensor) -> Tensor:
    out: Tensor = f(x).logsumexp(1)
    return out


EXACT = {
    "the output": Case(),
    "by backward, in place": Case(moves=by_backward),
    "the mean of an energy, with a graph": Case(moves=of_the_mean),
    "one sample at a time": Case(moves=one_by_one),
    "in forward mode": Case(moves=in_forward_mode),
    "logsumexp, in forward mode": Case(logsumexp, heads=5, moves=in_forward_mode),
    "with a weight for each chain": Case(moves=weighted),
    "of a pair": Case(lambda f, x: f(x) + f(-x)),
    "of another shape": Case(lambda f, x: f(x.reshape(2, -1).reshape(-1, 2))),
    "of scaled samples": Case(lambda f, x: f(2 * x - 1)),
    "forward by its name": Case(lambda f, x: getattr(f, "forward", f)(x)),
    "behind a square": Case(hook=lambda out: -(out**2)),
    "behind a logsumexp": Case(hook=lambda out: out.logsumexp(1), heads=5),
    "through a wrapper": Case(uses=Wrapper),
    "logsumexp": Case(logsumexp, heads=5),
    "logsumexp in a wrapper": Case(uses=lambda f: Wrapper(f, lambda x: x.logsumexp(1)), heads=5),
    "logsumexp of two calls": Case(lambda f, x: torch.cat([f(x), f(-x)], 1).logsumexp(1), heads=5),
    "one logit": Case(lambda f, x: f(x)[:, 3], heads=5),
    "a label's log-probability": Case(lambda f, x: f(x).log_softmax(1)[:, 0], heads=5),
    "a sum of heads": Case(lambda f, x: f(x).sum(1), heads=5),
}
# What is said, of which samplers.
REFUSED: dict[str, dict[str, Case]] = {
    "not linear": {
        "a square": Case(lambda f, x: -(f(x) ** 2)),
        "a square, flat": Case(lambda f, x: -(f(x) ** 2), hook=lambda out: out.squeeze(1)),
        "logsumexp over chains": Case(lambda f, x: f(x).logsumexp(0)),
        "a wrapper that bends": Case(uses=lambda f: Wrapper(f, lambda out: -(out**2))),
    },
    "other terms": {
        "two experts": (experts := Case(lambda f, x: f(x) + OTHER(x))),
        "two experts, in two passes": (passes := Case(moves=twice, beside=OTHER)),
        "a prior": (prior := Case(lambda f, x: f(x).sum(1) - x.square().sum(1) / 2)),
        "half past the guard": Case(uses=half_past),
    },
    "did not come through": {
        "layers every other time": Case(uses=in_turn),
        "a copy every other time": Case(uses=partial(in_turn, past=copy.deepcopy)),
        "a kept forward": Case(uses=lambda f: f.forward),
        "a copy": Case(uses=copy.deepcopy, moves=by_backward),
        "a compiled twin": Case(uses=traced),
    },
    "a decay of x": {"a prior by hand": (by_a_prior := Case(moves=with_a_prior, beside=Prior()))},
}


@pytest.mark.parametrize("name", EXACT)
def test_the_drift_is_half(name: str) -> None:
    torch.testing.assert_close(
        found := EXACT[name].factors(), torch.full_like(found, 0.5), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize(
    ("why", "name"), [(why, name) for why, cases in REFUSED.items() for name in cases]
)
def test_or_it_is_refused_before_the_first_update(why: str, name: str) -> None:
    with pytest.raises((LossError, SamplerError), match=why):
        REFUSED[why][name].factors()


@pytest.mark.parametrize(
    ("case", "by"),
    [(experts, 1.0), (prior, 1.0), (passes, 1.0), (by_a_prior, 1.0), (by_a_prior, -2.0)],
)
def test_a_base_measure_goes_on_and_is_told(
    case: Case, by: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the loss gets the network's own output; a decay is no news to who has written it."""
    f = network()
    energy = partial(case.energy, f)
    loss, sample = guard(None, lambda x: langevin(energy, x, case.moves), model=f, **HALF)
    for _ in range(3):
        sides = torch.randn(16, 2).double(), sample(torch.randn(16, 2).double())
        loss(*(by * f(x) for x in sides)).backward()
    told = sum("no part of the loss's energies" in each for each in caplog.messages)
    assert told == (case is not by_a_prior)


# -- values: of a Metropolis test ------------------------------------------------------------------


def metropolis(energy: Function, x: Tensor, seen: list[Tensor]) -> Tensor:
    """Two steps of MALA on what f(x) is, noting the values that its test takes."""
    for _ in range(2):
        y = x + 0.02 * gradient_at(energy, x) + 0.2 * torch.randn_like(x)
        rise = (energy(y) - energy(x)).flatten().detach()
        seen.append(rise)
        x = torch.where((torch.rand(len(x)).log() < rise)[:, None], y, x).detach()
    return x


VALUES: dict[str, tuple[Callable[[Any, Tensor], Tensor], int, float]] = {
    "one number": (lambda f, x: f(x), 1, 0.5),
    "logsumexp": (logsumexp, 5, 1.0),
    "a sum of heads": (lambda f, x: f(x).sum(1), 5, 1.0),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_of_one_number_are_tempered_and_of_several_it_is_said(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    energy, heads, factor = VALUES[name]
    f, tempered, plain = network(heads), list[Tensor](), list[Tensor]()
    _, sample = guard(
        None, lambda x: metropolis(lambda x: energy(f, x), x, tempered), model=f, **HALF
    )
    x = torch.randn(16, 2).double()
    torch.manual_seed(1)
    sample(x)
    torch.manual_seed(1)
    y = x + 0.5 * 0.02 * gradient_at(lambda x: energy(f, x), x) + 0.2 * torch.randn_like(x)
    plain.append((energy(f, y) - energy(f, x)).flatten().detach())
    torch.testing.assert_close(tempered[0], factor * plain[0])
    said = [r for r in caplog.records if "Metropolis" in r.message and "g.temper" in r.message]
    assert len(said) == (heads > 1)


def walk(energy: Function, x: Tensor, seen: list[Tensor]) -> Tensor:
    """A random-walk Metropolis step, which takes values alone."""
    y = x + 0.2 * torch.randn_like(x)
    rise = (energy(y) - energy(x)).flatten().detach()
    seen.append(rise)
    return torch.where((torch.rand(len(x)).log() < rise)[:, None], y, x)


def gibbs(energy: Function, x: Tensor, seen: list[Tensor]) -> Tensor:
    """A draw of one of the outputs of each sample."""
    seen.append(energy(x).detach())
    drawn: Tensor = x + torch.multinomial(seen[-1].softmax(1), 1)
    return drawn


def by_hand(energy: Function, x: Tensor, seen: list[Tensor]) -> Tensor:
    """Steps by a score that is written by hand, and a call for the log."""
    for _ in range(2):
        x = x - 0.02 * x + 0.2 * torch.randn_like(x)
    seen.append(energy(x).detach())
    return x


def by_differences(energy: Function, x: Tensor, seen: list[Tensor]) -> Tensor:
    """A step by finite differences along each axis."""
    by = 1e-5 * torch.eye(2).double()
    rises = [(energy(x + by[i]) - energy(x - by[i])).reshape(-1).detach() / 2e-5 for i in (0, 1)]
    seen.append(torch.stack(rises, 1))
    return x + 0.02 * seen[-1] + 0.2 * torch.randn_like(x)


# What takes values alone: the sampler, the energy, its outputs, and how it ends with gradients
# enabled and without.
ALONE: dict[str, tuple[Any, Callable[[Any, Tensor], Tensor], int, tuple[str, str]]] = {
    "one number": (walk, lambda f, x: f(x), 1, ("", "")),
    "logsumexp": (walk, logsumexp, 5, ("no gradient", "the values of each")),
    "a sum of heads": (walk, lambda f, x: f(x).sum(1), 5, ("no gradient", "")),
    "one output": (walk, lambda f, x: f(x)[:, 2], 5, ("no gradient", "")),
    "by hand": (by_hand, lambda f, x: f(x), 1, ("by hand", "by hand")),
    "finite differences": (by_differences, lambda f, x: f(x), 1, ("", "")),
    "a draw among outputs": (gibbs, lambda f, x: f(x), 5, ("no gradient", "")),
}


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("name", ALONE)
def test_values_alone_are_tempered_or_refused(name: str, enabled: bool) -> None:
    sampler, energy, heads, ways = ALONE[name]
    f, seen, said = network(heads), list[Tensor](), ways[not enabled]

    def draw(x: Tensor) -> Tensor:
        with torch.set_grad_enabled(enabled):
            drawn: Tensor = sampler(lambda x: energy(f, x), x, seen)
        return drawn

    loss, sample = guard(None, draw, model=f, **HALF)
    x, y = torch.randn(2, 16, 2).double()
    with pytest.raises((LossError, SamplerError), match=said) if said else nullcontext():
        torch.manual_seed(1)
        q = sample(x)
        chosen = energy if sampler is not gibbs else lambda f, x: f(x)[:, 0]
        loss(chosen(f, y), chosen(f, q))
    if not said:
        plain = list[Tensor]()
        torch.manual_seed(1)
        sampler(lambda x: energy(f, x), x, plain)
        torch.testing.assert_close(seen[0], 0.5 * plain[0])
    torch.manual_seed(1)
    free = sampler(lambda x: energy(f, x), x, [])
    torch.manual_seed(1)
    off = guard(None, draw, model=f, **(HALF | {"beta_star": 0.0})).sampler
    assert torch.equal(off(x), free)
