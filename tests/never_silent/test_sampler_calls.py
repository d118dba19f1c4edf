"""Samplers that would run untempered: refused with the fix."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ebmguard import guard
from ebmguard.errors import ConfigError, SamplerError
from tests.parts import Bowl, Energy, gradient_at, unit_langevin

X = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
HALF: Any = {"beta_star": 0.5, "output_scale": 1.0}
OFF: Any = {"beta_star": 0.0, "output_scale": 1.0}
LATER: Any = {"beta_star": lambda step: 0.0, "output_scale": 1.0}


# -- what is sampled later, elsewhere, or from another network -----------------------------------


class Lazy:
    """Takes a step whenever it is asked for the next sample."""

    def __init__(self, f: Any, x: Tensor) -> None:
        self.f, self.x = f, x

    def __iter__(self) -> Lazy:
        return self

    def __next__(self) -> Tensor:
        self.x = unit_langevin(self.f, self.x)
        return self.x


class Deferred:
    """A sampler object whose call is a generator."""

    def __call__(self, f: Any, x: Tensor) -> Iterator[Tensor]:
        yield unit_langevin(f, x)


class Eventually:
    def __init__(self, f: Any, x: Tensor) -> None:
        self.f, self.x = f, x

    def __await__(self) -> Any:
        return iter([unit_langevin(self.f, self.x)])


async def _stream(f: Any, x: Tensor) -> Any:
    yield unit_langevin(f, x)


# What a sampler returns; none of it is there yet.
LAZY: dict[str, Callable[[Any, Tensor], Any]] = {
    "generator": lambda f, x: (unit_langevin(f, row) for row in x.split(1)),
    "iterator of a class": Lazy,
    "partial": lambda f, x: functools.partial(unit_langevin, f, x),
    "awaitable": Eventually,
    "async generator": _stream,
    "future": lambda f, x: Future[Tensor](),
    "in a tuple": lambda f, x: (map(functools.partial(unit_langevin, f), x), {"steps": 3}),
}


@pytest.mark.parametrize("name", LAZY)
def test_what_is_sampled_later_is_refused(name: str, caplog: pytest.LogCaptureFixture) -> None:
    def sampler(f: Any, x: Tensor) -> Any:
        """Takes its first steps at once, so that the network was called."""
        return LAZY[name](f, unit_langevin(f, x))

    f = Bowl()
    for wrapped in (sampler, lambda f, x: LAZY[name](f, x)):
        g = guard(None, wrapped, **HALF)
        with pytest.raises(SamplerError, match=r"run after the call has returned.*list\(\.\.\.\)"):
            g.sampler(f, X)
        assert g.state_dict()["sampler_calls"] == 0
    guard(None, sampler, **OFF).sampler(f, X)  # nothing to temper
    assert not caplog.records
    g = guard(None, sampler, **LATER)
    g.sampler(f, X)
    g.sampler(f, X)
    assert [r.getMessage()[:29] for r in caplog.records] == ["At β* = 0 nothing is tempered"]


def test_an_object_whose_call_is_a_generator_is_refused_at_once() -> None:
    for sampler in (Deferred(), functools.partial(Deferred())):
        with pytest.raises(SamplerError, match="generator or coroutine"):
            guard(None, sampler, **HALF)


def _done(f: Any, x: Tensor) -> Any:
    future = Future[Tensor]()
    future.set_result(unit_langevin(f, x))
    return future


# What is there when the call is over.
READY: dict[str, Callable[[Any, Tensor], Any]] = {
    "dict": lambda f, x: {"x": unit_langevin(f, x)},
    "future that is done": _done,
    "samples and a function": lambda f, x: (unit_langevin(f, x), lambda: None),
    "module": lambda f, x: (unit_langevin(f, x), nn.Identity())[1],
    "none": lambda f, x: (unit_langevin(f, x), None)[1],
}


@pytest.mark.parametrize("name", READY)
def test_what_is_there_goes_on(name: str) -> None:
    f = Bowl()
    g = guard(None, READY[name], **HALF)
    for _ in range(3):
        g.sampler(f, X)
    assert g.state_dict()["sampler_calls"] == 3
    assert torch.equal(gradient_at(f, X), -X)


F, AVERAGE = Energy(), Energy()
COPY = copy.deepcopy(F)

# A sampler's call: the sampler, its arguments, and what is said.
ELSEWHERE: dict[str, tuple[Any, tuple[Any, ...], str]] = {
    "a copy": (unit_langevin, (COPY, X), "network, an argument"),
    "the average, by its name": (lambda x: unit_langevin(AVERAGE, x), (X,), "`AVERAGE`"),
    "another method": (lambda f, x: unit_langevin(f.classify, x), (F, X), "method such as"),
    "no step": (lambda f, x: x, (F, X), "takes no step"),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_another_energy_is_refused_by_name_and_free_where_nothing_is_tempered(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    sampler, args, said = ELSEWHERE[name]
    told: Any = {} if F in args else {"model": F}
    g = guard(None, sampler, **HALF, **told)
    for cure in (said, r"`sampler\.original`", r"g\.paused\(\)", "model="):
        with pytest.raises(SamplerError, match=rf"(?s)never called Energy\.forward.*{cure}"):
            g.sampler(*args)
    g.sampler.original(*args)
    with g.paused():
        g.sampler(*args)
    assert g.state_dict()["sampler_calls"] == 0
    for off in (OFF, {"beta_star": torch.zeros(()), "output_scale": 1.0}, LATER):
        rng = torch.get_rng_state()
        right = sampler(*args)
        torch.set_rng_state(rng)
        assert torch.equal(guard(None, sampler, **off, **told).sampler(*args), right)
    assert len(caplog.records) == 2  # of the exponents that may still rise


# Calls that fall above 0, where the energy cannot be told or tempered.
UNTOLD: dict[str, tuple[Any, Callable[[], tuple[Any, ...]], dict[str, Any]]] = {
    "no network": (lambda x: gradient_at(AVERAGE, x), lambda: (X,), {}),
    "two networks": (lambda f, h, x: gradient_at(f, x), lambda: (Bowl(), Energy(), X), {}),
    "a network without that method": (gradient_at, lambda: (Bowl(), X), {"energy": "score"}),
    "energies in a tuple": (
        lambda f, x: gradient_at(lambda y: f(y)[0], x),
        lambda: (Pair(), X),
        {},
    ),
}


class Pair(Energy):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


@pytest.mark.parametrize("name", UNTOLD)
def test_what_cannot_be_tempered_goes_on_where_nothing_is(name: str) -> None:
    sampler, args, told = UNTOLD[name]
    with pytest.raises((SamplerError, ConfigError)):
        guard(None, sampler, **HALF, **told).sampler(*args())
    given = args()
    g = guard(None, sampler, **OFF, **told)
    assert torch.equal(g.sampler(*given), sampler(*given))


def test_two_guards_on_one_network_go_on_where_neither_tempers() -> None:
    f = Bowl()
    inner = guard(None, gradient_at, **OFF)
    outer = guard(None, lambda f, x: inner.sampler(f, x), **OFF)
    assert torch.equal(outer.sampler(f, X), -X)
    assert not vars(f).keys() & {"forward", "__getstate__"}
    for one, other in ((HALF, OFF), (OFF, HALF), (HALF, HALF)):
        inner = guard(None, gradient_at, **one)
        nested = guard(None, lambda f, x, g=inner: g.sampler(f, x), **other)
        with pytest.raises(SamplerError, match="Two guards"):
            nested.sampler(f, X)


# -- copies --------------------------------------------------------------------------------------


def _saved(f: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(f, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class OwnForward(Bowl):
    """Has a forward of its own on the instance, as accelerate's `prepare` leaves it."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = functools.partial(Bowl.forward, self)  # type: ignore[method-assign]


class OwnCopy(Bowl):
    """Copies itself, without what is on the instance."""

    def __deepcopy__(self, memo: Any) -> OwnCopy:
        return OwnCopy()


class OwnState(Bowl):
    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__


COPIES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "deepcopy": (Bowl, copy.deepcopy),
    "pickle": (Bowl, lambda f: pickle.loads(pickle.dumps(f))),
    "torch.save": (Bowl, _saved),
    "the method alone": (Bowl, lambda f: f.forward),
    "a forward of its own": (OwnForward, copy.deepcopy),
    "a way of its own": (OwnCopy, copy.deepcopy),
    "a state of its own": (OwnState, copy.deepcopy),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_made_inside_the_sampler_is_a_plain_network(name: str) -> None:
    make, copied = COPIES[name]
    f, kept = make(), []
    before = dict(vars(f))

    def sampler(f: Any, x: Tensor) -> Tensor:
        kept.append(copied(f))
        if name != "the method alone":
            kept.append(gradient_at(kept[0], x))
        return gradient_at(f, x)

    assert torch.equal(guard(None, sampler, **HALF).sampler(f, X), -0.5 * X)
    assert all(torch.equal(x, -X) for x in kept[1:])
    assert torch.equal(gradient_at(kept[0], X), -X)
    if isinstance(kept[0], Bowl):
        assert vars(kept[0]).keys() == before.keys()
        with pytest.raises(AttributeError, match="gone"):
            _ = kept[0].gone
    assert vars(f) == before
    # It may be saved, copied and guarded like any other.
    if isinstance(kept[0], nn.Module) and name != "a forward of its own":
        pickle.dumps(kept[0])
    assert torch.equal(gradient_at(copy.deepcopy(kept[0]), X), -X)
    again = guard(None, gradient_at, model=kept[0] if isinstance(kept[0], Bowl) else f, **HALF)
    assert torch.equal(again.sampler(again.trainer.model, X), -0.5 * X)


class CopiesAll(Bowl):
    """Copies all that is on the instance by hand."""

    def __deepcopy__(self, memo: Any) -> CopiesAll:
        new = CopiesAll.__new__(CopiesAll)
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new


def test_a_copy_that_would_keep_the_factor_is_refused() -> None:
    f, kept = CopiesAll(), []

    def sampler(f: Any, x: Tensor) -> Tensor:
        kept.append(copy.deepcopy(f))
        return gradient_at(f, x)

    with pytest.raises(SamplerError, match=r"would keep the tempered energy\. Copy it before"):
        guard(None, sampler, **HALF).sampler(f, X)
    assert torch.equal(gradient_at(f, X), -X)
    assert torch.equal(guard(None, sampler, **OFF).sampler(f, X), -X)
    assert torch.equal(gradient_at(kept[0], X), -X)


# -- threads -------------------------------------------------------------------------------------


def in_thread(call: Callable[[], Any]) -> Any:
    """What a call returns, or raises, in a thread of its own that ends now."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(call)
        return future.exception() or future.result()


def test_a_second_thread_is_refused_or_free_where_nothing_is_tempered() -> None:
    for options in (HALF, OFF):
        f = Bowl()
        found: list[Any] = []

        def sampler(f: Any, x: Tensor, again: Any, found: list[Any] = found) -> Tensor:
            if again:
                found.append(in_thread(lambda: again(f, x, None)))
            return gradient_at(f, x)

        g = guard(None, sampler, model=f, **options)
        factor = 1 - options["beta_star"]
        for _ in range(2):
            assert torch.equal(g.sampler(f, X, g.sampler), -factor * X)
        if factor == 1:
            assert all(torch.equal(x, -X) for x in found)
        else:
            assert [type(x) for x in found] == [SamplerError] * 2
            assert "another thread" in str(found[0])
            assert "`sampler.original`" in str(found[0])
        assert g.state_dict()["sampler_calls"] == 2


def test_threads_one_after_the_other_nested_calls_and_paused_ones_go_on() -> None:
    f = Bowl()
    inner = guard(None, gradient_at, model=Bowl(), **HALF)  # of another network

    def sampler(f: Any, x: Tensor, depth: int = 1) -> Tensor:
        assert torch.equal(inner.sampler(inner.trainer.model, x), -0.5 * X)
        return g.sampler(f, x, depth - 1) if depth else gradient_at(f, x)

    g = guard(None, sampler, **HALF)
    for _ in range(2):
        assert torch.equal(in_thread(lambda: g.sampler(f, X)), -0.5 * X)
        assert torch.equal(g.sampler(f, X), -0.5 * X)
    with pytest.raises(TypeError):
        g.sampler(f, X, "two")
    assert torch.equal(g.sampler(f, X), -0.5 * X)  # the turn is given back
    with g.paused():
        assert torch.equal(g.sampler(f, X, 0), -X)


def test_what_another_thread_has_paused_is_refused() -> None:
    """A thread that drew pictures had the training run untempered meanwhile."""
    f, g = Bowl(), guard(None, gradient_at, **HALF)
    with g.paused():
        found = in_thread(lambda: g.sampler(f, X))
        assert torch.equal(g.sampler(f, X), -X)
    assert isinstance(found, SamplerError)
    assert "paused" in str(found)
    assert torch.equal(in_thread(lambda: g.sampler(f, X)), -0.5 * X)
    off = guard(None, gradient_at, **OFF)
    with off.paused():
        assert torch.equal(in_thread(lambda: off.sampler(f, X)), -X)
