"""Trainers that run without the guard run with it, to the same bits at β* = 0, and tempered above.

Samples of several lengths or sparse ones, scripted and compiled networks and steps, batched
gradients, default devices, devices without float64, optimizers that share a network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Muon, SparseAdam
from torch.utils._pytree import tree_map

from ebmguard import Guard, guard
from ebmguard.energies import unwrapped
from ebmguard.objective import mean_difference
from tests.never_silent.parts import batched, by, mapped
from tests.parts import Energy, unit_langevin

STEPS = 4  # the last of which has a row of several
N = 8


class Around(nn.Module):
    """An energy of what is made of the samples first."""

    def __init__(self, first: Callable[[Tensor], Tensor], rest: Any = None) -> None:
        super().__init__()
        self.first, self.rest = first, rest or Energy()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.rest(self.first(x))
        return found


class Sets(nn.Module):
    """The energy of a set is the sum over its members."""

    def __init__(self) -> None:
        super().__init__()
        self.of_one = Energy()

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.of_one(each).sum() for each in x.unbind()])


class Embedded(nn.Module):
    """Sparse gradients beside dense ones."""

    def __init__(self) -> None:
        super().__init__()
        self.shifts = nn.Embedding(3, 2, sparse=True)
        self.rest = Energy()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.rest(x + self.shifts((x[:, 0] > 0).long()))
        return found


class Mps(Tensor):
    """A tensor of a device without float64, as MPS is."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.cpu:
            return args[0].as_subclass(Tensor)
        if func is Tensor.double:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapper(Tensor):
    """A tensor around another one, as DTensor is."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Wrapper:
        made: Wrapper = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        told = tree_map(lambda x: x.held if isinstance(x, cls) else x, (args, kwargs or {}))
        found = func(*told[0], **told[1])
        return tree_map(lambda x: cls(x) if isinstance(x, Tensor) else x, found)


def of_dense() -> nn.Module:
    return Around(lambda x: x.to_dense())


def waves() -> Tensor:
    return torch.randn(N, 2, dtype=torch.cfloat, device="cpu")


def points() -> Tensor:
    return torch.randn(N, 2, device="cpu")


def sets(layout: torch.layout) -> Callable[[], Tensor]:
    def made() -> Tensor:
        parts = [torch.randn(2 + i % 3, 2) for i in range(N)]
        return torch.nested.nested_tensor(parts, layout=layout)

    return made


def masked() -> Tensor:
    return points() * (torch.rand(N, 2, device="cpu") > 0.5)


def of_entries(f: Any, x: Tensor) -> Tensor:
    """Moves the entries that are there."""
    for _ in range(3):
        layout = x.layout
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(f(x).sum(), x)
        dense = x.detach().to_dense()
        dense = dense + (dense != 0) * (0.02 * slope.to_dense() + 0.2 * torch.randn(N, 2))
        x = dense.to_sparse(layout=layout)
    return x.detach()


def jacobian(f: Any, x: Tensor, **how: Any) -> Tensor:
    rows: Tensor = torch.autograd.functional.jacobian(f, x, vectorize=True, **how)
    return rows.diagonal(dim1=0, dim2=1).T


def forwards(f: Any, x: Tensor) -> Tensor:
    return jacobian(f, x, strategy="forward-mode")


def compiled(function: Any) -> Any:
    return torch.compile(function, backend="eager")


@contextmanager
def on_meta() -> Iterator[None]:
    """Whoever makes a tensor without a device gets one that cannot be read."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def adam(f: nn.Module) -> list[Any]:
    return [Adam(f.parameters(), lr=1e-3)]


def split(one: Callable[..., Any], other: Callable[..., Any]) -> Callable[[nn.Module], list[Any]]:
    """Matrices to one, the rest to the other."""

    def made(f: nn.Module) -> list[Any]:
        flat = [p for p in f.parameters() if p.ndim < 2]
        return [one([p for p in f.parameters() if p.ndim > 1], lr=1e-3), other(flat, lr=1e-3)]

    return made


def sparse_and_dense(f: Any) -> list[Any]:
    return [SparseAdam(f.shifts.parameters(), lr=1e-2), Adam(f.rest.parameters(), lr=1e-3)]


class Trainer(NamedTuple):
    network: Callable[[], nn.Module] = Energy
    sampler: Callable[[Any, Tensor], Tensor] = unit_langevin
    data: Callable[[], Tensor] = points
    optimizers: Callable[[nn.Module], Sequence[Any]] = adam
    compiles: str = ""  # what torch.compile gets
    inside: Callable[[], Any] = nullcontext
    has_norms: bool = True  # whether gradients of single samples can be seen


TRAINERS = {
    "scripted": Trainer(lambda: torch.jit.script(Energy())),
    "traced": Trainer(lambda: torch.jit.trace(Energy(), torch.ones(N, 2))),
    "batched gradients": Trainer(sampler=by(batched), has_norms=False),
    "a jacobian in forward mode": Trainer(sampler=by(forwards), has_norms=False),
    "vmap of grad": Trainer(sampler=by(mapped), has_norms=False),
    "jagged": Trainer(Sets, unit_langevin, sets(torch.jagged), has_norms=False),
    "sparse COO": Trainer(of_dense, of_entries, lambda: masked().to_sparse(), has_norms=False),
    "a compiled step": Trainer(compiles="step"),
    "compiled around the sampler": Trainer(compiles="sampler"),
    "compiled around the loss": Trainer(compiles="loss"),
    "another default device": Trainer(inside=on_meta),
    "no float64": Trainer(data=lambda: points().as_subclass(Mps)),
    "complex": Trainer(lambda: Around(Tensor.abs), data=waves),
    "a wrapper": Trainer(data=lambda: Wrapper(points()), has_norms=False),
    "Muon and AdamW": Trainer(optimizers=split(Muon, AdamW)),
    "sparse and dense": Trainer(Embedded, optimizers=sparse_and_dense),
}


def train(case: Trainer, **options: Any) -> tuple[list[Tensor], Guard | None]:
    """Losses, parameters and the next random number; with options under a guard."""
    torch.manual_seed(0)
    f = case.network()
    optimizers, g = case.optimizers(f), None
    loss: Any = mean_difference
    sampler: Any = case.sampler
    with case.inside():
        if options:
            g = guard(None, sampler, model=f, optimizer=optimizers, output_scale=1, **options)
            loss, sampler = g

        def draw(x: Tensor) -> Any:
            return sampler(f, x)

        def loss_of(x: Tensor, q: Tensor) -> Any:
            return loss(f(x), f(q))

        def step(x: Tensor, start: Tensor) -> Tensor:
            value: Tensor = loss_of(x, draw(start))
            for each in optimizers:
                each.zero_grad()
            value.backward()
            for each in optimizers:
                each.step()
            return value.detach()

        torch._dynamo.reset()
        if case.compiles == "sampler":
            draw = compiled(draw)
        elif case.compiles == "loss":
            loss_of = compiled(loss_of)
        elif case.compiles == "step":
            step = compiled(step)
        values = [step(case.data(), case.data()) for _ in range(STEPS)]
        end = [*(p.detach() for p in f.parameters()), torch.rand(1, device="cpu")]
        return [*values, *end], g


@pytest.mark.filterwarnings("ignore")  # of prototypes and of TorchScript, by torch
@pytest.mark.parametrize("name", TRAINERS)
def test_it_runs_to_the_same_bits(name: str) -> None:
    case = TRAINERS[name]
    if not case.compiles:
        train(case)  # TorchScript optimises in a process's first run, whose bits differ
    (alone, _), (guarded, g) = train(case), train(case, beta_star=0)
    assert g is not None
    assert g.step == STEPS
    for own, other in zip(alone, guarded, strict=True):
        own, other = unwrapped(own), unwrapped(other)
        assert torch.equal(own.as_subclass(Tensor), other.as_subclass(Tensor))
    norm = g.last["sampler/grad_norm"]
    assert (norm == norm) is case.has_norms
    tempered, g = train(case, beta_star=0.5)
    assert g is not None
    assert g.step == STEPS
    assert not torch.equal(unwrapped(tempered[0]), unwrapped(alone[0]))
