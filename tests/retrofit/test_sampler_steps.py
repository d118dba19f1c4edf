"""`sampler/...` of gradients and steps: what real samplers did, read without a pass of its own."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ebmguard import Guard, guard
from ebmguard.diagnostics import ChainState, metropolis_acceptance
from ebmguard.samplers import ReplayBuffer
from ebmguard.sampling import Evaluation
from tests.parts import Bowl, Bowls, Energy, energies, gradient_at

STEP_SIZE, NOISE_STD, BETA = 0.3, 0.2, 0.25
SETTINGS: Any = {"step_size": STEP_SIZE, "noise_std": NOISE_STD}
TEMPERED: Any = {"beta_star": 0.5, "output_scale": 2.0}  # β = 1/4
X = torch.randn(6, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Steep(Energy):
    """Steep enough for steps that are too long now and then."""

    def __init__(self) -> None:
        super().__init__(dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return 20 * super().forward(x)


class Recorded:
    """Langevin steps whose every point is kept: of what the acceptance is expected to be."""

    def __init__(self, move: str = "new", objective: str = "sum", steps: int = 4) -> None:
        self.move, self.objective, self.steps = move, objective, steps
        self.points: list[Tensor] = []

    def __call__(self, f: Any, x: Tensor) -> Tensor:
        rng = torch.Generator().manual_seed(0)
        self.points = []
        x = x.clone().requires_grad_()
        for _ in range(self.steps):
            self.points.append(x.detach().clone())
            c, total = {
                "sum": (1.0, f(x).sum()),
                "energy": (-1.0, -f(x).sum()),
                "mean": (1 / len(x), f(x).mean()),
            }[self.objective]
            if self.move == "backward":
                total.backward()
                assert x.grad is not None
                grad, x.grad = x.grad.detach() / c, None
            else:
                grad = torch.autograd.grad(total, x)[0] / c
            noise = NOISE_STD * torch.randn(x.shape, generator=rng, dtype=x.dtype)
            if self.move == "in place":
                x.data += STEP_SIZE * grad + noise
            elif self.move == "gradient in place":
                x.data += grad.mul_(STEP_SIZE) + noise
            else:
                x = (x + STEP_SIZE * grad + noise).detach().requires_grad_()
        return x.detach()

    def acceptance(self, f: Any, c: float = 1.0) -> float:
        """Of the last step whose two ends were evaluated."""
        ends = []
        for point in self.points[-2:]:
            x = point.clone().requires_grad_()
            h = c * (1 - BETA) * f(x)
            (gradient,) = torch.autograd.grad(h.sum(), x)
            ends.append(ChainState(x.detach(), h.detach(), gradient))
        return metropolis_acceptance(*ends, **SETTINGS).mean().item()


def near(value: float) -> Any:
    return pytest.approx(value, rel=1e-6, nan_ok=True)


def attached(sampler: Any, **options: Any) -> Guard:
    return guard(None, sampler, **(TEMPERED | options)).attach(**SETTINGS)


def row(sampler: Any, f: Any, *args: Any, **options: Any) -> dict[str, float]:
    """What a guard's row says of one call."""
    return row_of(attached(sampler, **options), f, *(args or (X,)))


def row_of(g: Guard, *args: Any) -> dict[str, float]:
    g.sampler(*args)
    g.loss_fn(*energies(dtype=torch.float64))
    return g.last


# -- the norm of gradients -----------------------------------------------------------------------

POINTS = torch.tensor([[3.0, 4.0], [0.0, 2.0], [0.6, 0.8]], dtype=torch.float64)
MEAN = (5.0 + 2.0 + 1.0) / 3  # of the norms of the bowl's gradients -x


def test_norms_are_of_the_untempered_energy():
    for options in ({}, {"output_scale": None}, {"beta_star": 0.0}):
        found = row(gradient_at, Bowl(), POINTS, **options)
        assert found["sampler/grad_norm"] == near(MEAN)
        assert found["sampler/grad_norm_max"] == near(5.0)
    # Where the factor is zero they are unknown.
    assert math.isnan(row(gradient_at, Bowl(), POINTS, beta_star=2.0)["sampler/grad_norm"])


def test_no_hook_stays_on_the_samples():
    x, f = POINTS.clone().requires_grad_(), Bowl()
    g = attached(lambda f: torch.autograd.grad(f(x).sum(), x)[0])
    for _ in range(3):
        g.sampler(f)
        assert not x._backward_hooks
    (9 * f(x)).sum().backward()
    assert row_of(g, f)["sampler/grad_norm"] == near(MEAN)


# -- acceptance --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("move", "objective", "c"),
    [
        *((move, "sum", 1.0) for move in ("new", "in place", "gradient in place", "backward")),
        ("new", "energy", 1.0),
        # A mean over the batch makes all steps shorter: that is the chain that is judged.
        ("new", "mean", 1 / 6),
    ],
)
def test_acceptance_is_that_of_the_last_step_with_both_ends(move, objective, c):
    f, sampler = Steep(), Recorded(move, objective)
    found = row(sampler, f)
    expected = sampler.acceptance(f, c)
    assert 0.2 < expected < 1
    assert found["sampler/acceptance"] == near(expected)
    assert found["sampler/evaluations"] == 4


def test_members_of_an_ensemble_have_their_own():
    star = torch.full((3,), 0.5, dtype=torch.float64)
    g = attached(Recorded(), beta_star=star)
    g.sampler(Bowls(torch.tensor([1.0, 2.0, 3.0])), X.expand(3, 6, 2))
    g.loss_fn(torch.randn(3, 4), torch.randn(3, 5))
    for i, own in enumerate(g.members):
        sampler = Recorded()
        # All draw the noise of the ensemble.
        sampler.points = [x[i] for x in g.sampler.original.points]
        assert own["sampler/acceptance"] == near(sampler.acceptance(Bowls(torch.tensor(i + 1.0))))
        assert own["sampler/evaluations"] == 4


def of_vmap(f: Any, x: Tensor) -> Any:
    return torch.func.vmap(torch.func.grad(lambda one: f(one[None]).sum()))(x)


def of_func(f: Any, x: Tensor) -> Any:
    return [torch.func.grad(lambda x: f(x).sum())(x) for _ in range(3)][-1]


class Mean(Steep):
    """No energy of each sample."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean()


@pytest.mark.parametrize(
    ("sampler", "network"),
    [
        (Recorded(steps=1), Steep),  # the second end was never evaluated
        (of_vmap, Steep),
        (of_func, Steep),
        (lambda f, x: [_grad(lambda x: f(x).logsumexp(0), x) for _ in range(3)][-1], Steep),
        (lambda f, x: [_grad(lambda x: f(x).sum() + f(x).sum(), x) for _ in range(3)][-1], Steep),
        (lambda f, x: [_grad(lambda x: f(x).sum(), x[:k]) for k in (3, 4)][-1], Steep),
        (Recorded(), Mean),
    ],
    ids=["one step", "vmap", "func.grad", "one for all", "two calls", "sizes", "one energy"],
)
def test_unknown_where_there_is_no_such_step(sampler, network):
    found = row(sampler, network())
    assert math.isnan(found["sampler/acceptance"])
    assert math.isnan(found["sampler/grad_norm"]) == (sampler in (of_vmap, of_func))


def _grad(f, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(f(x), x)[0]


def test_a_call_in_which_a_step_ends_measures_what_it_began_to_measure():
    """As where samples are drawn ahead, beside the optimizer's step."""
    f, recorded, ends = Steep(), Recorded(), list[Any]()

    def ahead(f, x):
        samples = recorded(f, x)
        for end in ends:
            end()
        return samples

    optimizer = torch.optim.SGD(f.parameters(), lr=1e-3)
    g, slow = attached(ahead, model=f, optimizer=optimizer), list[int]()
    while g.step < 101:
        ends[:] = [optimizer.step] if g.step in (49, 100) else []  # the second is of the slow tier
        step = g.step
        found = row_of(g, f, X)
        slow += [step] if "sampler/acceptance" in found else []
        optimizer.step()
    assert slow == [0, 100]


def test_nothing_of_the_samples_is_kept_after_the_call():
    def kept():
        gc.collect()
        return {id(each) for each in gc.get_objects() if type(each) is Evaluation}

    before = kept()  # what another test's guard still has
    attached(Recorded()).sampler(Steep(), X)
    assert kept() <= before


# -- the rest ------------------------------------------------------------------------------------


class Linear(nn.Module):
    """Of slope 5, whatever the sample."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.tensor([3.0, 4.0], dtype=torch.float64)


@pytest.mark.parametrize("beta_star", [0.0, 0.5, torch.tensor(0.5), torch.tensor([0.5, 0.5])])
def test_drift_is_that_of_the_tempered_energy(beta_star):
    members = (2,) if isinstance(beta_star, Tensor) and beta_star.ndim else ()
    g = attached(Recorded(), beta_star=beta_star)
    g.sampler(Linear(), X.expand(*members, 6, 2))
    g.loss_fn(torch.randn(*members, 4), torch.randn(*members, 5))
    factor = 1.0 if isinstance(beta_star, float) and not beta_star else 1 - BETA
    drift = STEP_SIZE * factor * 5 / (NOISE_STD * math.sqrt(2))
    assert g.last["sampler/drift_to_noise"] == near(drift)
    assert g.last["sampler/grad_norm"] == near(5.0)


def test_a_sampler_without_noise_has_no_ratio():
    g = guard(None, Recorded(), beta_star=0.5).attach(step_size=1.0, noise_std=0.0)
    found = row_of(g, Energy(dtype=torch.float64), X)
    assert math.isnan(found["sampler/drift_to_noise"])
    assert math.isnan(found["sampler/acceptance"])


def test_share_at_the_clamp():
    x = torch.tensor([[-1.0, 0.5], [0.3, 1.0], [0.0, 0.0], [1.0, 1.0]])
    g = guard(None, lambda: (torch.arange(4), x), beta_star=0.5, clamp=(-1.0, 1.0))
    assert row_of(g)["sampler/clamped"] == 0.5


def test_samplers_of_one_step_are_averaged():
    f, g = Bowl(), attached(lambda f, steps, x: Recorded(steps=steps)(f, x) * 0 + gradient_at(f, x))
    g.sampler(f, 2, POINTS)
    found = row_of(g, f, 6, 3 * POINTS)
    assert found["sampler/evaluations"] == (3 + 7) / 2
    assert found["sampler/grad_norm"] == near(2 * MEAN)


def test_gradients_that_are_differentiated_again_count_once():
    def sampler(f, x):
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        grad.square().sum().backward()
        return x.detach()

    assert row(sampler, Energy(dtype=torch.float64))["sampler/evaluations"] == 1


# -- the buffer ------------------------------------------------------------------------------------


def make_buffer() -> ReplayBuffer:
    rng = torch.Generator().manual_seed(0)
    return ReplayBuffer(8, (2,), reinit_rate=0.5, generator=rng, dtype=torch.float64)


def from_buffer(f: nn.Module, buffer: ReplayBuffer) -> Tensor:
    x, rows = buffer.sample(6)
    buffer.write(rows, x)
    return x


def test_of_several_draws_the_buffer_is_asked_for_each_ones_own():
    f, buffer, said = Energy(dtype=torch.float64), make_buffer(), []
    g = guard(None, from_buffer, beta_star=0.5, buffer=buffer)
    for _ in range(2):
        g.sampler(f, buffer)
        said.append({f"buffer/{name}": x.item() for name, x in buffer.diagnostics().items()})
    with g.paused():
        g.sampler(f, buffer)  # a plot's draw is not the step's
    g.loss_fn(*energies())
    found = {tag: value for tag, value in g.last.items() if tag.startswith("buffer/")}
    expected = {tag: (value + said[1][tag]) / 2 for tag, value in said[0].items()}
    assert len(expected) == 3
    assert found == pytest.approx(expected)


def test_inline_samplers_have_a_buffer_too():
    buffer = make_buffer()
    g = guard(None, None, beta_star=0.5, buffer=buffer)
    from_buffer(Energy(), buffer)
    g.loss_fn(*energies())
    assert g.last["buffer/reinit"] == buffer.diagnostics()["reinit"]
