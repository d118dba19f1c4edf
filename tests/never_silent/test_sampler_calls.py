"""Samplers that would run untempered, and arguments in the wrong place: refused with the fix."""

from __future__ import annotations

import asyncio
import copy
import functools
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ebmguard import guard
from ebmguard.errors import ConfigError, EnergyTypeError, LossError, SamplerError
from tests.parts import Bowl, Energy, gradient_at

X = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
HALF: Any = {"beta_star": 0.5, "output_scale": 1.0}
OFF: Any = {"beta_star": 0.0, "output_scale": 1.0}
LATER: Any = {"beta_star": lambda step: 0.0, "output_scale": 1.0}


def langevin(f: Any, x: Tensor, steps: int = 3, step: float = 0.02, noise: float = 0.2) -> Tensor:
    for _ in range(steps):
        x = x + step * gradient_at(f, x) + noise * torch.randn_like(x)
    return x.detach()


def difference(f_pos: Tensor, f_neg: Tensor) -> Tensor:
    return f_neg.mean() - f_pos.mean()


# -- what is sampled later, elsewhere, or from another network -----------------------------------


class Lazy:
    """Takes a step whenever it is asked for the next sample."""

    def __init__(self, f: Any, x: Tensor) -> None:
        self.f, self.x = f, x

    def __iter__(self) -> Lazy:
        return self

    def __next__(self) -> Tensor:
        self.x = langevin(self.f, self.x)
        return self.x


class Deferred:
    """A sampler object whose call is a generator."""

    def __call__(self, f: Any, x: Tensor) -> Iterator[Tensor]:
        yield langevin(f, x)


class Eventually:
    def __init__(self, f: Any, x: Tensor) -> None:
        self.f, self.x = f, x

    def __await__(self) -> Any:
        return iter([langevin(self.f, self.x)])


async def _stream(f: Any, x: Tensor) -> Any:
    yield langevin(f, x)


def _loop_future(f: Any, x: Tensor) -> Any:
    loop = asyncio.new_event_loop()
    try:
        return loop.create_future()
    finally:
        loop.close()


def _warmed(later: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], Any]:
    """Takes its first steps at once, so that the network was called."""

    def sampler(f: Any, x: Tensor) -> Any:
        return later(f, langevin(f, x))

    return sampler


# What a sampler returns; none of it is there yet.
LAZY: dict[str, Callable[[Any, Tensor], Any]] = {
    "map": lambda f, x: map(functools.partial(langevin, f), x.split(1)),
    "filter": lambda f, x: filter(lambda row: bool((f(row) < 0).all()), x.split(1)),
    "zip": lambda f, x: zip(map(functools.partial(langevin, f), x), x, strict=True),
    "generator": lambda f, x: (langevin(f, row) for row in x.split(1)),
    "iterator of a class": Lazy,
    "lambda": lambda f, x: lambda: langevin(f, x),
    "partial": lambda f, x: functools.partial(langevin, f, x),
    "bound method": lambda f, x: Lazy(f, x).__next__,
    "awaitable": Eventually,
    "async generator": _stream,
    "future": lambda f, x: Future[Tensor](),
    "future of a loop": _loop_future,
    "in a tuple": lambda f, x: (map(functools.partial(langevin, f), x), {"steps": 3}),
    "in a dict of lists": lambda f, x: {"x": [functools.partial(langevin, f, x)]},
}


@pytest.mark.parametrize("name", LAZY)
def test_what_is_sampled_later_is_refused(name: str, caplog: pytest.LogCaptureFixture) -> None:
    f, sampler = Bowl(), _warmed(LAZY[name])
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
    future.set_result(langevin(f, x))
    return future


# What is there when the call is over.
READY: dict[str, Callable[[Any, Tensor], Any]] = {
    "list": lambda f, x: [langevin(f, x)],
    "dict": lambda f, x: {"x": langevin(f, x)},
    "iterator of a list": lambda f, x: iter([langevin(f, x)]),
    "future that is done": _done,
    "samples and a function": lambda f, x: (langevin(f, x), lambda: None),
    "samples and an iterator": lambda f, x: (langevin(f, x), map(abs, [1])),
    "array and a function": lambda f, x: (langevin(f, x).numpy(), abs),
    "module": lambda f, x: (langevin(f, x), nn.Identity())[1],
    "none": lambda f, x: (langevin(f, x), None)[1],
    "nothing": lambda f, x: langevin(f, x[:0]),
}


@pytest.mark.parametrize("name", READY)
def test_what_is_there_goes_on(name: str) -> None:
    f = Bowl()
    g = guard(None, READY[name], **HALF)
    for _ in range(3):
        g.sampler(f, X)
    assert g.state_dict()["sampler_calls"] == 3
    assert torch.equal(gradient_at(f, X), -X)


AVERAGE, PART = Energy(), Energy()


# A sampler's call: the sampler, its arguments, what else the guard is told, and what is said.
ELSEWHERE: dict[str, Callable[[Energy], tuple[Any, tuple[Any, ...], dict[str, Any], str]]] = {
    "a copy": lambda f: (langevin, (copy.deepcopy(f), X), {"model": f}, "network, an argument"),
    "a bound method of a copy": lambda f: (
        langevin,
        (copy.deepcopy(f).forward, X),
        {"model": f},
        "network, an argument",
    ),
    "the average, by its name": lambda f: (
        lambda x: langevin(AVERAGE, x),
        (X,),
        {"model": f},
        "network, `AVERAGE`",
    ),
    "the average beside the network": lambda f: (
        lambda f, x: langevin(AVERAGE, x),
        (f, X),
        {},
        "network, `AVERAGE`",
    ),
    "another method": lambda f: (
        lambda f, x: langevin(f.classify, x),
        (f, X),
        {},
        "another method such as",
    ),
    "no step": lambda f: (lambda f, x: x, (f, X), {}, "takes no step"),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_another_energy_is_refused_by_name_and_free_where_nothing_is_tempered(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    f = Energy()
    sampler, args, told, said = ELSEWHERE[name](f)
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
    "copy": (Bowl, copy.copy),
    "pickle": (Bowl, lambda f: pickle.loads(pickle.dumps(f))),
    "torch.save": (Bowl, _saved),
    "of a whole that holds it": (Bowl, lambda f: copy.deepcopy(nn.Sequential(f))),
    "of a list": (Bowl, lambda f: copy.deepcopy([f, f])[1]),
    "average": (Bowl, lambda f: torch.optim.swa_utils.AveragedModel(f)),
    "copy of a copy": (Bowl, lambda f: copy.deepcopy(copy.deepcopy(f))),
    "the method alone": (Bowl, lambda f: f.forward),
    "a forward of its own": (OwnForward, copy.deepcopy),
    "a way of its own": (OwnCopy, copy.deepcopy),
    "a state of its own": (OwnState, copy.deepcopy),
    "a state of its own, in a file": (OwnState, _saved),
}


@pytest.mark.parametrize("options", [HALF, OFF], ids=["half", "off"])
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_made_inside_the_sampler_is_a_plain_network(
    name: str, options: dict[str, Any]
) -> None:
    make, copied = COPIES[name]
    f, kept = make(), []
    before = dict(vars(f))

    def sampler(f: Any, x: Tensor) -> Tensor:
        kept.append(copied(f))
        if name != "the method alone":
            kept.append(gradient_at(kept[0], x))
        return gradient_at(f, x)

    g = guard(None, sampler, **options)
    factor = 1 - options["beta_star"]
    assert torch.equal(g.sampler(f, X), -factor * X)
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
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except SamplerError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


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


# -- arguments of guard() ------------------------------------------------------------------------


class Sampler:
    def __init__(self, f: Any = None) -> None:
        self.f = f

    def __call__(self, f: Any, x: Tensor) -> Tensor:
        return langevin(f, x)

    def draw(self) -> Tensor:
        return X


def sample_negatives(model: nn.Module, n: int) -> Tensor:
    return torch.randn(n, 2)


def draw_one(net: nn.Module) -> Tensor:
    return langevin(net, X)


wrong: Any = guard
NET = Bowl()
DOORS: dict[str, tuple[Callable[[], Any], str]] = {
    "sampler first": (lambda: wrong(langevin, **HALF), r"guard\(None, langevin, \.\.\.\)"),
    "both in the wrong order": (lambda: wrong(langevin, difference, **HALF), "comes second"),
    "partial of a sampler first": (
        lambda: wrong(functools.partial(langevin, steps=9), **HALF),
        r"guard\(None, langevin",
    ),
    "by its name and its network": (
        lambda: wrong(sample_negatives, **HALF),
        r"is sample_negatives\(model, n\).*comes second",
    ),
    "by the number of arguments": (lambda: wrong(draw_one, **HALF), r"draw_one\(net\)"),
    "sampler object first": (lambda: wrong(Sampler(), **HALF), r"Sampler\(f, x\).*comes second"),
    "guarded sampler first": (
        lambda: wrong(guard(None, langevin, **HALF).sampler, **HALF),
        "comes second",
    ),
    "network first": (lambda: wrong(NET, langevin, **HALF), r"Bowl\(x\); expected a function of"),
    "class first": (lambda: wrong(Sampler, **HALF), "class Sampler.*comes second"),
    "loss second": (
        lambda: wrong(None, difference, **HALF),
        r"difference\(f_pos, f_neg\), a loss.*comes first",
    ),
    "tensor": (lambda: wrong(None, X, **HALF), r"is a Tensor; expected one function"),
    "list": (lambda: wrong(None, [langevin, langevin], **HALF), "is a list.*Mixture"),
    "dict": (lambda: wrong(None, {"a": langevin}, **HALF), "is a dict.*Mixture"),
    "network as sampler": (lambda: wrong(None, NET, model=NET, **HALF), "energy of Bowl itself"),
    "its forward": (lambda: wrong(None, NET.forward, model=NET, **HALF), "energy of Bowl itself"),
    "its method": (
        lambda: wrong(None, PART.classify, model=PART, energy="classify", **HALF),
        "energy of Energy itself",
    ),
    "network with a wrong method": (
        lambda: wrong(None, NET, methods=("draw",), **HALF),
        "no method draw; it has forward",
    ),
    "object of another library": (
        lambda: wrong(None, torch.Generator(), **HALF),
        "cannot be called.*It has none",
    ),
}


@pytest.mark.parametrize("name", DOORS)
def test_an_argument_in_the_wrong_place_is_refused(name: str) -> None:
    call, said = DOORS[name]
    with pytest.raises(ConfigError, match=f"(?s){said}") as found:
        call()
    assert len(str(found.value)) < 300


def test_a_network_whose_name_is_not_told_is_refused_at_its_first_call() -> None:
    with pytest.raises(SamplerError, match="a network itself, Bowl"):
        guard(None, NET, **HALF).sampler(X)


class Contrast(nn.Module):
    def forward(self, e: Tensor, x: Tensor) -> Tensor:
        return difference(e, x)


def sampled_loss(f: Tensor, neg: Tensor) -> Tensor:
    return difference(f, neg)


@pytest.mark.parametrize(
    "loss",
    [
        difference,
        sampled_loss,
        lambda f, g: difference(f, g),
        lambda x, y: difference(x, y),
        lambda *energies: difference(*energies),
        lambda p, n, weight=2.0: weight * difference(p, n),
        functools.partial(lambda weight, p, n: weight * difference(p, n), 2.0),
        nn.L1Loss(),
    ],
)
def test_a_loss_by_any_name_is_taken(loss: Any) -> None:
    guard(loss, langevin, **HALF)


def test_samplers_of_many_kinds_are_taken() -> None:
    class Model(Bowl):
        def sample(self, x: Tensor) -> Tensor:
            return gradient_at(self, x)

        def energy(self, x: Tensor) -> Tensor:
            return Bowl.forward(self, x)

    class Draws(Model):
        def forward(self, x: Tensor) -> Tensor:
            return gradient_at(self.energy, x)

    model, draws = Model(), Draws()
    for g in (
        guard(None, model, methods=("sample",), model=model, **HALF),
        guard(None, model.sample, model=model, **HALF),
        guard(None, draws, model=draws, energy="energy", **HALF),
        guard(None, lambda pos, neg: gradient_at(model, pos), model=model, **HALF),
        guard(None, Sampler(), **HALF),
    ):
        assert g.sampler is not None
    assert torch.equal(guard(None, draws, model=draws, energy="energy", **HALF).sampler(X), -X / 2)


PLAIN = torch.ones(4)
ENERGIES: dict[str, tuple[Tensor, str]] = {
    "meta": (torch.ones(4, device="meta"), "device meta, which has no numbers"),
    "float8": (torch.ones(4).to(torch.float8_e4m3fn), r"float8_e4m3fn.*\.float\(\)"),
    "the other float8": (torch.ones(4).to(torch.float8_e5m2), r"float8_e5m2.*\.float\(\)"),
    "sparse": (torch.ones(4).to_sparse(), r"sparse_coo.*\.to_dense\(\)"),
    "integers": (torch.ones(4, dtype=torch.int8), "int8; energies must be floating point"),
    "booleans": (torch.ones(4) > 0, "bool; energies must be"),
    "complex": (torch.ones(4, dtype=torch.complex64), "complex64; energies must be"),
}


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("name", ENERGIES)
def test_energies_that_cannot_be_used_change_nothing(name: str, side: int) -> None:
    energies, said = ENERGIES[name]
    sides = (energies, PLAIN) if side == 0 else (PLAIN, energies)
    for beta_star in (0.5, 0.0):
        g = guard(beta_star=beta_star)
        for call in (g.loss, g.reweight):
            with pytest.raises(EnergyTypeError, match=f"f_{'neg' if side else 'pos'} .*{said}"):
                call(*sides)
        assert (g.step, g.last) == (0, {})
        g.loss(PLAIN, PLAIN.clone())
        assert g.step == 0
    if name != "sparse":  # which has no views
        members = guard(beta_star=torch.ones(1))
        with pytest.raises(EnergyTypeError, match=said):
            members.loss(sides[0][None], sides[1][None])


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda a, b: langevin(a, b), "failed: .*not callable.*comes second"),
        (lambda a, b: a + b, r"got shape \(4,\).*comes second"),
    ],
)
def test_a_sampler_that_was_taken_for_the_loss_is_told_at_the_first_loss(
    loss: Any, said: str
) -> None:
    g = guard(loss, **HALF)
    with pytest.raises(LossError, match=f"(?s){said}"):
        g.loss(PLAIN, PLAIN.clone())
    assert g.step == 0
