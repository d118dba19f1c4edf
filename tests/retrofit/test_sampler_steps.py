"""`sampler/...` of the steps' size: what real samplers did, read without a pass of its own."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ebmguard import Guard, guard
from ebmguard.diagnostics import ChainState, metropolis_acceptance
from ebmguard.samplers import ReplayBuffer, sgld
from ebmguard.sampling import Evaluation
from tests.parts import Bowls, Energy, energies

STEP_SIZE, NOISE_STD, BETA = 0.3, 0.2, 0.25
SETTINGS: Any = {"step_size": STEP_SIZE, "noise_std": NOISE_STD}
TEMPERED: Any = {"beta_star": 0.5, "output_scale": 2.0}  # β = 1/4
X = torch.randn(6, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Steep(Energy):
    """Steep enough for steps that are too long now and then."""

    def __init__(self):
        super().__init__(dtype=torch.float64)

    def forward(self, x):
        return 20 * super().forward(x)


class Recorded:
    """Langevin steps whose every point is kept: of what the acceptance is expected to be."""

    def __init__(self, move="new", objective="sum", steps=4):
        self.move, self.objective, self.steps = move, objective, steps
        self.points: list[Tensor] = []

    def __call__(self, f, x):
        rng = torch.Generator().manual_seed(0)
        self.points = []
        x = x.clone().requires_grad_()
        for _ in range(self.steps):
            self.points.append(x.detach().clone())
            c, total = {
                "sum": (1.0, f(x).sum()),
                "energy": (-1.0, -f(x).sum()),
                "descent": (-1.0, f(x).sum()),
                "mean": (1 / len(x), f(x).mean()),
            }[self.objective]
            if self.move == "backward":
                total.backward()
                grad = x.grad.detach() / c
                x.grad = None
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

    def state(self, f, which: int, c: float = 1.0) -> ChainState:
        x = self.points[which].clone().requires_grad_()
        h = c * (1 - BETA) * f(x)
        (gradient,) = torch.autograd.grad(h.sum(), x)
        return ChainState(x.detach(), h.detach(), gradient)

    def acceptance(self, f, c: float = 1.0) -> float:
        ends = self.state(f, -2, c), self.state(f, -1, c)
        return metropolis_acceptance(*ends, **SETTINGS).mean().item()


def near(value: float) -> Any:
    return pytest.approx(value, rel=1e-6)


def attached(sampler: Any, **options: Any) -> Guard:
    return guard(None, sampler, **(TEMPERED | options)).attach(**SETTINGS)


def row(sampler: Any, f: nn.Module, *args: Any, **options: Any) -> dict[str, float]:
    g = attached(sampler, **options)
    g.sampler(f, *(args or (X,)))
    g.loss_fn(*energies(dtype=torch.float64))
    return g.last


# -- acceptance --------------------------------------------------------------------------------


@pytest.mark.parametrize("move", ["new", "in place", "gradient in place", "backward"])
def test_acceptance_is_that_of_the_last_step_with_both_ends(move):
    f, sampler = Steep(), Recorded(move)
    found = row(sampler, f)
    expected = sampler.acceptance(f)
    assert 0.2 < expected < 0.999
    assert found["sampler/acceptance"] == near(expected)
    assert found["sampler/evaluations"] == 4


@pytest.mark.parametrize(
    ("objective", "c"), [("energy", 1.0), ("mean", 1 / 6)], ids=["energy", "mean"]
)
def test_whatever_the_sampler_differentiates(objective, c):
    """A mean over the batch makes all steps shorter: that is the chain that is judged."""
    f, sampler = Steep(), Recorded(objective=objective)
    found = row(sampler, f)
    assert found["sampler/acceptance"] == near(sampler.acceptance(f, c))


def test_networks_that_return_energies():
    class Negative(nn.Module):
        def __init__(self, f):
            super().__init__()
            self.f = f

        def forward(self, x):
            return -self.f(x)

    f, sampler = Steep(), Recorded(objective="descent")
    found = row(sampler, Negative(f), convention="energy")
    expected = row(Recorded(), f)
    for tag in ("acceptance", "drift_to_noise", "evaluations"):
        assert found[f"sampler/{tag}"] == near(expected[f"sampler/{tag}"])


def test_our_own_sampler():
    f = Steep()
    noise = torch.randn(3, *X.shape, dtype=torch.float64)
    found = row(lambda f, x: sgld(f, x, steps=3, noise=noise, **SETTINGS), f)
    sampler = Recorded()
    sampler.points = [
        sgld(lambda x: (1 - BETA) * f(x), X, steps=k, noise=noise[:k], **SETTINGS) for k in (1, 2)
    ]
    assert found["sampler/acceptance"] == near(sampler.acceptance(f))
    assert found["sampler/evaluations"] == 3


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


@pytest.mark.parametrize(
    "sampler",
    [
        Recorded(steps=1),  # the second end was never evaluated
        lambda f, x: torch.func.vmap(torch.func.grad(lambda one: f(one[None]).sum()))(x),
        lambda f, x: [torch.func.grad(lambda x: f(x).sum())(x) for _ in range(3)][-1],
        lambda f, x: [_grad(lambda x: f(x).logsumexp(0), x) for _ in range(3)][-1],
        lambda f, x: [_grad(lambda x: f(x).sum() + f(x).sum(), x) for _ in range(3)][-1],
        lambda f, x: [_grad(lambda x: f(x).sum(), x[:k]) for k in (3, 4)][-1],
    ],
    ids=["one step", "vmap", "func.grad", "one for all", "two calls", "sizes"],
)
def test_unknown_where_there_is_no_such_step(sampler):
    found = row(sampler, Steep())
    assert math.isnan(found["sampler/acceptance"])


def test_unknown_where_the_network_returns_no_energy_of_each_sample():
    class Mean(Steep):
        def forward(self, x):
            return super().forward(x).mean()

    assert math.isnan(row(Recorded(), Mean())["sampler/acceptance"])


def _grad(f, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(f(x), x)[0]


def test_unknown_inside_compiled_code():
    torch.compiler.reset()
    f, x = Energy(), X.float()
    score = torch.compile(lambda x: f(x), backend="eager")
    g = attached(lambda: Recorded()(score, x), model=f)
    g.sampler()
    g.loss_fn(*energies())
    assert math.isnan(g.last["sampler/acceptance"])
    assert math.isnan(g.last["sampler/evaluations"])
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("in_place", [True, False])
def test_compiled_energies(in_place):
    torch.compiler.reset()
    f, sampler = Steep(), Recorded()
    again = Steep()
    again.load_state_dict(f.state_dict())
    compiled: Any = f
    if in_place:
        f.compile(backend="eager")
    else:
        compiled = torch.compile(f, backend="eager")
    assert row(sampler, compiled)["sampler/acceptance"] == near(sampler.acceptance(again))
    torch.compiler.reset()


def test_only_on_slow_steps_and_only_where_settings_are_known():
    f = Steep()
    g, bare = attached(Recorded()), guard(None, Recorded(), **TEMPERED)
    steps = []
    for step in range(102):
        for own in (g, bare):
            own.sampler(f, X)
            own.loss_fn(*energies(dtype=torch.float64))
        if "sampler/acceptance" in g.last:
            steps.append(step)
        assert g.last["sampler/evaluations"] == bare.last["sampler/evaluations"] == 4
        assert not {"sampler/acceptance", "sampler/drift_to_noise"} & set(bare.last)
    assert steps == [0, 50, 100]


class Counted(TorchDispatchMode):
    """Counts the operations of a block by name."""

    def __enter__(self):
        self.counts: dict[str, int] = {}
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def test_nothing_but_the_gradients_is_copied_on_other_steps():
    """They may be changed in place before the next one, with which they tell the sharpness."""
    f, g = Steep(), attached(Recorded())
    clones = []
    for _ in range(2):
        with Counted() as counted:
            g.sampler(f, X)
        clones.append(counted.counts["clone"])
        g.loss_fn(*energies(dtype=torch.float64))
    with Counted() as plain:
        Recorded()(Steep(), X)
    assert clones[1] == plain.counts["clone"] + Recorded().steps < clones[0]


def test_nothing_of_the_samples_is_kept_after_the_call():
    def kept():
        gc.collect()
        return {id(each) for each in gc.get_objects() if type(each) is Evaluation}

    before = kept()  # what another test's guard still has
    f, g = Steep(), attached(Recorded())
    g.sampler(f, X)
    assert kept() <= before


# -- the rest ------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta_star", [0.0, 0.5, torch.tensor(0.5), torch.tensor([0.5, 0.5])])
def test_drift_is_that_of_the_tempered_energy(beta_star):
    class Linear(nn.Module):
        """Of slope 5, whatever the sample."""

        def forward(self, x):
            return x @ torch.tensor([3.0, 4.0], dtype=torch.float64)

    members = (2,) if isinstance(beta_star, Tensor) and beta_star.ndim else ()
    g = attached(Recorded(), beta_star=beta_star)
    g.sampler(Linear(), X.expand(*members, 6, 2))
    g.loss_fn(torch.randn(*members, 4), torch.randn(*members, 5))
    factor = 1.0 if isinstance(beta_star, float) and not beta_star else 1 - BETA
    assert g.last["sampler/drift_to_noise"] == near(
        STEP_SIZE * factor * 5 / (NOISE_STD * math.sqrt(2))
    )
    assert g.last["sampler/grad_norm"] == near(5.0)


def test_a_sampler_without_noise_has_no_ratio():
    g = guard(None, Recorded(), beta_star=0.5).attach(step_size=1.0, noise_std=0.0)
    g.sampler(Energy(dtype=torch.float64), X)
    g.loss_fn(*energies())
    assert math.isnan(g.last["sampler/drift_to_noise"])
    assert math.isnan(g.last["sampler/acceptance"])


def test_share_at_the_clamp():
    x = torch.tensor([[-1.0, 0.5], [0.3, 1.0], [0.0, 0.0], [1.0, 1.0]])
    g = guard(None, lambda: (torch.arange(4), x), beta_star=0.5).attach(clamp=(-1.0, 1.0))
    g.sampler()
    g.loss_fn(*energies())
    assert g.last["sampler/clamped"] == 0.5


def test_samplers_of_one_step_are_averaged():
    f = Energy(dtype=torch.float64)
    g = attached(lambda f, steps: Recorded(steps=steps)(f, X))
    for steps in (2, 6):
        g.sampler(f, steps)
    g.loss_fn(*energies(dtype=torch.float64))
    assert g.last["sampler/evaluations"] == 4


def test_gradients_that_are_differentiated_again_count_once():
    def sampler(f, x):
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        grad.square().sum().backward()
        return x.detach()

    assert row(sampler, Energy(dtype=torch.float64))["sampler/evaluations"] == 1


# -- the buffer ------------------------------------------------------------------------------------


def make_buffer(rate: float = 0.5) -> ReplayBuffer:
    rng = torch.Generator().manual_seed(0)
    return ReplayBuffer(8, (2,), reinit_rate=rate, generator=rng, dtype=torch.float64)


def from_buffer(f: nn.Module, buffer: ReplayBuffer) -> Tensor:
    x, rows = buffer.sample(6)
    buffer.write(rows, x)
    return x


def test_what_the_buffer_says_of_the_draw():
    f, buffer = Energy(dtype=torch.float64), make_buffer()
    g = guard(None, from_buffer, beta_star=0.5).attach(buffer=buffer)
    for _ in range(3):
        g.sampler(f, buffer)
        g.loss_fn(*energies())
        expected = {f"buffer/{name}": x.item() for name, x in buffer.diagnostics().items()}
        assert len(expected) == 3
        found = {tag: value for tag, value in g.last.items() if tag.startswith("buffer/")}
        assert found == expected


def test_of_several_draws_each_is_asked_for_its_own():
    f, buffer = Energy(dtype=torch.float64), make_buffer()
    g = guard(None, from_buffer, beta_star=0.5).attach(buffer=buffer)
    ages = []
    for _ in range(2):
        g.sampler(f, buffer)
        ages.append(buffer.diagnostics()["age"].item())
    with g.paused():
        g.sampler(f, buffer)  # a plot's draw is not the step's
    g.loss_fn(*energies())
    assert g.last["buffer/age"] == pytest.approx(sum(ages) / 2)


def test_inline_samplers_have_a_buffer_too():
    buffer = make_buffer()
    g = guard(None, None, beta_star=0.5).attach(buffer=buffer)
    from_buffer(Energy(), buffer)
    g.loss_fn(*energies())
    assert g.last["buffer/reinit"] == buffer.diagnostics()["reinit"]


def test_a_plain_tensor_says_nothing():
    g = guard(None, lambda: X, beta_star=0.5).attach(buffer=torch.zeros(5, 2))
    g.sampler()
    g.loss_fn(*energies())
    assert not {tag for tag in g.last if tag.startswith("buffer/")}
