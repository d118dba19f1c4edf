"""Finer steps inside an unchanged sampler are those of the sampler written with finer steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from ebmguard.sampling import Recording, SamplerUpdate, Substeps, Tempering
from tests.parts import gradient_at
from tests.runs import frozen, randomness
from tests.sampling.loops import (
    LOOPS,
    NOISE,
    STEP,
    STEPS,
    Sampler,
    all_at_once,
    network,
    plain,
    starts,
    stepping,
)

A, C = STEP, NOISE
LABELS, ENDS = torch.arange(64) % 4, (-0.5, 0.75)


class Net(nn.Module):
    """A smooth energy with a label, ``(B, 3)`` and ``(B,)`` to ``(B,)``; heads are logits."""

    def __init__(self, heads: int = 1, *further: nn.Module) -> None:
        super().__init__()
        self.of_label = nn.Embedding(4, 3, dtype=torch.float64)
        first = nn.Linear(3, 32, dtype=torch.float64)
        self.net = nn.Sequential(
            first, *further, nn.SiLU(), nn.Linear(32, heads, dtype=torch.float64)
        )

    def forward(self, x: Tensor, y: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        out: Tensor = self.net(x if y is None else x + self.of_label(y))
        return scale * (out.squeeze(1) if out.shape[1] == 1 else out)


def without_noise(x: Tensor, g: Tensor, t: int) -> Tensor:
    return x + A * g


def falling(x: Tensor, g: Tensor, t: int) -> Any:
    return x + A * 0.8**t * g + C * 0.8 ** (t / 2) * torch.randn_like(x)


def by_norm(g: Tensor) -> Tensor:
    cut: Tensor = g * (0.1 / g.norm(dim=1, keepdim=True)).clamp(max=1)
    return cut


def by_value(g: Tensor) -> Tensor:
    return g.clamp(-0.03, 0.03)


def mean_of_energies(f: Any, x: Tensor) -> Tensor:
    x, noise = x.clone().requires_grad_(), torch.empty_like(x)
    for _ in range(STEPS):
        (-f(x)).mean().backward()
        assert x.grad is not None
        noise.normal_(0, 2 * C)
        x.data.add_(x.grad, alpha=-A * len(x)).add_(noise, alpha=-0.5)
        x.grad = None
    return x.detach()


def noise_first(f: Any, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        noise = torch.randn_like(x)
        x = x + A * gradient_at(f, x) + C * noise
    return x


def gradient_after_noise(f: Any, x: Tensor) -> Tensor:
    x = x.clone()
    for _ in range(STEPS):
        x += C * torch.randn_like(x)
        x = (x + A * gradient_at(f, x)).clamp(*ENDS)
    return x


def own(z: Tensor) -> Tensor:
    return z


def of_energy(energy: Callable[[Any, Tensor], Tensor], **differs: Any) -> Any:
    return stepping(plain, energy), {"energy": energy, **differs}


# What differs from x + (A g + C n): of the gradient at z, of x, and of step t.
CASES: dict[str, tuple[Sampler, dict[str, Any]]] = {
    "functional": (stepping(plain), {}),
    "backward() of a mean, low energies, normal_ with a std": (mean_of_energies, {}),
    "noise before the gradient": (noise_first, {}),
    "gradient after noise": (
        gradient_after_noise,
        {"ends": ENDS, "is_after": True, "spread": 0.1},
    ),
    "noise of all steps at once": (all_at_once, {}),
    "clip and clamp": (
        stepping(lambda x, g, t: plain(x, by_value(g)).clamp(*ENDS)),
        {"cut": by_value, "ends": ENDS},
    ),
    "clip by norm": (stepping(lambda x, g, t: plain(x, by_norm(g))), {"cut": by_norm}),
    "sizes that fall along the chain": (stepping(falling), {"factor": lambda t: 0.8**t}),
    "decay": (stepping(lambda x, g, t: plain(0.95 * x, g)), {"decay": 0.05}),
    "no noise": (stepping(without_noise), {"noise": False}),
    "labels, a keyword": of_energy(lambda f, z: f(z, LABELS, scale=1.5)),
    "a normal prior outside": of_energy(lambda f, z: f(z) - 0.5 * z.square().sum(1)),
    "logsumexp of logits outside": of_energy(lambda f, z: f(z).logsumexp(1), heads=10),
}


class Tape(torch.overrides.TorchFunctionMode):
    """Keeps draws at their standard deviation, by step."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.__name__ in ("randn", "randn_like", "normal_"):
            # mean_of_energies has a standard deviation of its own, and takes it away again
            own = -out / (2 * C) if func.__name__ == "normal_" else out
            self.draws += [*own.clone()] if own.ndim > 2 else [own.clone()]
        return out


def look(f: nn.Module, sample: Sampler, x: Tensor, ends: int | None = None) -> SamplerUpdate | str:
    """What a recorded call shows, of which nothing changes."""
    looking = Substeps(None)
    recording = Recording(ends=ends, on_evaluation=looking.look)
    end = Tempering(f).run(sample, (f, x), {}, 1.0, recording, looking)
    return looking.why or SamplerUpdate.of(recording.evaluations, recording.draws.log, end)


def finer(
    f: nn.Module, sample: Sampler, x: Tensor, moves: SamplerUpdate, n: int
) -> tuple[Tensor, list[Tensor], Substeps]:
    """A call with finer steps: its samples, the noise of these, and what made them."""
    substeps, inner, plain = Substeps(moves, n, seed=3), list[Tensor](), torch.randn_like

    def kept(z: Tensor, **kwargs: Any) -> Tensor:
        out = plain(z, **kwargs)
        if substeps._is_isolated:
            inner.append(math.copysign(1, moves.sizes[0][1]) * out)
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn_like", kept)
        found = Tempering(f).run(sample, (f, x), {}, 1.0, None, substeps)
    return found, inner, substeps


def reference(
    f: Any,
    x: Tensor,
    n: int,
    inner: Iterator[Tensor],
    outer: Iterator[Tensor],
    *,
    cut: Callable[[Tensor], Tensor] = own,
    ends: tuple[float, float] = (-math.inf, math.inf),
    factor: Callable[[int], float] = lambda t: 1.0,
    energy: Callable[[Any, Tensor], Tensor] = lambda f, z: f(z),
    decay: float = 0.0,
    noise: bool = True,
    heads: int = 1,
    is_after: bool = False,
    spread: float = 0.8,
) -> Tensor:
    """The same sampler, written with n times finer steps, on the same noise."""
    for t in range(STEPS):
        a, c = factor(t) * A / n, (factor(t) / n) ** 0.5 * C if noise else 0.0
        for j in range(n):
            is_own = j == (0 if is_after else n - 1)
            xi = next(outer if is_own else inner) if noise else torch.zeros_like(x)
            before, after = (c * xi, 0.0) if is_after else (0.0, c * xi)
            x = x + before
            g = cut(gradient_at(lambda z: energy(f, z), x))
            x = (x * (1 - decay / n) + a * g + after).clamp(*ends)
    return x


@pytest.mark.parametrize(
    ("name", "n"),
    [*((name, 4) for name in CASES), *((name, 1) for name in [*CASES][:2])],
)
def test_finer_steps_are_those_of_the_sampler_written_with_finer_steps(name: str, n: int) -> None:
    sample, told = CASES[name]
    torch.manual_seed(0)
    f, x = Net(told.get("heads", 1)), torch.randn(64, 3, dtype=torch.float64)
    x *= told.get("spread", 0.8)
    moves = look(f, sample, x)
    assert isinstance(moves, SamplerUpdate), moves

    torch.manual_seed(1)
    with Tape() as tape:
        plain = sample(f, x)
    after = randomness()
    torch.manual_seed(1)
    found, inner, substeps = finer(f, sample, x, moves, n)
    assert randomness() == after
    if n == 1:
        assert frozen(found) == frozen(plain)
        return
    want = reference(f, x, n, iter(inner), iter(tape.draws), **told)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-11)
    assert (plain - want).abs().max() > 1e-3
    assert substeps.missed == 0


@pytest.mark.parametrize("name", LOOPS)
def test_looking_changes_nothing_and_what_moves_is_brought_where_finer_steps_lead(
    name: str,
) -> None:
    loop = LOOPS[name]
    assert loop.sample is not None
    ends = []
    for looks in (False, True):
        torch.manual_seed(0)
        np.random.seed(0)
        f, x = network(loop), starts(loop)
        moves = look(f, loop.sample, x) if looks else Tempering(f).run(loop.sample, (f, x), {}, 1.0)
        ends.append(randomness())
    assert ends[0] == ends[1]
    # The network gets something else; or a proposal may be refused.
    wrong = {
        "augmentation inside",
        "in the logit of x",
        "MALA, rows rejected",
        "MALA of the library",
        # Which of its noises is a step's is not sure, and they are larger than its drift.
        "noise first, in one buffer, clipped and clamped",
    }
    # They have no one output scale, but steps that are known.
    known = {"annealed, step kept", "no noise", "noise of size 0", "two steps a call"}
    known |= {"temperature that rises", "one step a call"}
    expects = name in known or (loop.step is not None and name not in wrong)
    assert isinstance(moves, SamplerUpdate) == expects, moves
    if isinstance(moves, SamplerUpdate):
        substeps = Substeps(moves, 4)
        Tempering(f).run(loop.sample, (f, starts(loop)), {}, 1.0, None, substeps)
        # Where one step leads is evaluated by the next one.
        assert (substeps.missed is None) == (name == "one step a call")
        assert substeps.missed is None or substeps.missed < 0.1


class Noisy(Net):
    """With batch norm, dropout and a counter, as networks in training mode have them."""

    calls: Tensor

    def __init__(self) -> None:
        parts = nn.BatchNorm1d(32, dtype=torch.float64), nn.Dropout(0.5)
        super().__init__(1, *parts)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, y: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        self.calls += 1
        return super().forward(x, y, scale=scale)


def test_the_network_and_the_random_numbers_do_not_notice() -> None:
    moves = look(Net(), stepping(plain), torch.randn(64, 3, dtype=torch.float64))
    assert isinstance(moves, SamplerUpdate)
    seen, found = [], []
    for n, seed in ((1, 0), (4, 0), (4, 1)):
        torch.manual_seed(0)
        f, x = Noisy(), torch.randn(64, 3, dtype=torch.float64)
        substeps = Substeps(moves, n, seed=seed)
        found.append(Tempering(f).run(stepping(plain), (f, x), {}, 1.0, None, substeps))
        masks = f.net[2](torch.ones(8, dtype=torch.float64))
        buffers = {k: v for k, v in f.named_buffers() if "running" not in k}
        parameters = [p.grad for p in f.parameters()]
        seen.append((frozen(buffers), randomness(), frozen(masks), parameters))
    assert seen[0] == seen[1] == seen[2]
    # It has the statistics of the batches that the sampler asked for, and of no others.
    assert f.net.get_buffer("1.num_batches_tracked") == STEPS
    assert all(x.isfinite().all() for x in found)
    assert not torch.equal(found[1], found[2])  # the finer steps have noise of their own


def with_graph(f: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(f(x).sum(), x, create_graph=True)[0]


def batched(f: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    each = torch.eye(len(x), dtype=x.dtype)
    return torch.autograd.grad(f(x), x, each, is_grads_batched=True)[0].sum(0)


def metropolis(f: Any, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        new = plain(x, gradient_at(f, x))
        goes = torch.rand(len(x)) < (f(new) - f(x)).detach().exp()
        x = torch.where(goes[:, None], new, x)
    return x


class OfTwo(Net):
    def forward(self, x: Tensor, y: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        return super().forward(x if y is None else x + 0.5 * y.square())


LEFT: dict[str, Sampler] = {
    "it differentiates its gradient": stepping(
        lambda x, g, t: plain(x, g).detach(), gradient=with_graph
    ),
    "it batches its gradient": stepping(plain, gradient=batched),
    "Metropolis test": metropolis,
    "other terms join": stepping(plain, lambda f, z: f(z) + z.sin().sum(1)),
    "a function of the network's output": stepping(plain, lambda f, z: softplus(f(z))),
}


@pytest.mark.parametrize("why", LEFT)
def test_what_cannot_be_divided_is_left_as_it_is(why: str) -> None:
    torch.manual_seed(0)
    sample, f, x = LEFT[why], OfTwo(), torch.randn(64, 3, dtype=torch.float64)
    torch.manual_seed(1)
    plain = sample(f, x)
    found = look(f, sample, x)
    assert isinstance(found, str)
    moves = SamplerUpdate([[A, C]], [[0, -1]])
    if why == "it differentiates its gradient":
        assert "nothing" not in found
    for times in (1, 4):
        substeps = Substeps(moves, times)
        torch.manual_seed(1)
        got = Tempering(f).run(sample, (f, x), {}, 1.0, None, substeps)
        if substeps.why:
            assert why in substeps.why
            assert frozen(got) == frozen(plain)
        else:
            assert why in found


def test_rounding_of_large_samples_is_no_miss() -> None:
    f = nn.Linear(3, 1)
    torch.nn.init.constant_(f.weight, 1e-3)
    moves = look(f, stepping(plain), torch.randn(64, 3))
    assert isinstance(moves, SamplerUpdate), moves
    _, _, substeps = finer(f, stepping(plain), 1e5 + torch.randn(64, 3), moves, 4)
    assert substeps.missed == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_the_inner_passes_are_under_autocast(dtype: torch.dtype) -> None:
    f = Net().float()
    seen = set[torch.dtype]()
    f.net[0].register_forward_hook(lambda *told: seen.add(told[2].dtype))

    def sample(f: Any, x: Tensor) -> Tensor:
        for _ in range(STEPS):
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
                g = gradient_at(f, x)
            x = plain(x, g.float())
        return x

    x = torch.randn(256, 3)
    moves = look(f, sample, x)
    assert isinstance(moves, SamplerUpdate), moves
    found, _, substeps = finer(f, sample, x, moves, 4)
    assert seen == {dtype}
    assert found.dtype is torch.float32
    assert substeps.missed == 0
