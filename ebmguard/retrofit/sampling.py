"""The sampler: checks, wrappers, and calls on the tempered energy."""

from __future__ import annotations

import functools
import inspect
import logging
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from types import MethodType
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo as uncompiled

from ..energies import Groups, LogQ
from ..errors import ConfigError, SamplerError
from ..sampling import Drift, Recording, Substeps, Tempering, find_module, other_networks
from ..trainer import Trainer, find_energy, found_lazy, is_function, refuse_deferred
from .claims import ONCE
from .strength import Strength, StrengthAt

__all__ = [
    "OTHER_THREAD",
    "GuardedLoss",
    "OneLoss",
    "Sampling",
    "Turn",
    "check_loss",
    "check_sampler",
    "wrap_sampler",
]

T = TypeVar("T")

_log = logging.getLogger("ebmguard")
OTHER_THREAD = (
    "The guarded sampler was called while another thread is inside it, or inside `with "
    "g.paused():`, and would run untempered. Let one thread sample at a time (a lock around the "
    "calls), call `sampler.original` for pictures and inside a sampler, or give each thread a "
    "model and a guard of its own."
)


class Turn:
    """A lock for one call at a time that, unlike a real lock, can be copied.

    An interrupt may come before any line, also while a call or a `with` in it ends. So what ends
    the call stands twice, and gradients are enabled again as they were.
    """

    def __init__(self) -> None:
        self._holder: dict[str, list[int]] = {}  # a list, which is no other call's

    @property
    def thread(self) -> int | None:
        """Which has it."""
        return self._holder.get("now", [None])[0]

    def run(self, call: Callable[[bool], T]) -> T:
        """``call(is_free)``: whether this call holds the turn; False while another one does."""
        mine, is_enabled, is_over = [get_ident()], torch.is_grad_enabled(), False
        try:
            try:
                result = call(self._holder.setdefault("now", mine) is mine)
                is_over = True
            finally:
                self._leave(mine)
        finally:
            self._leave(mine)
            if not is_over:
                torch.set_grad_enabled(is_enabled)
        return result

    def _leave(self, mine: list[int]) -> None:
        if self._holder.get("now") is mine:
            del self._holder["now"]


class Sampling:
    """Finds the energy module of a sampler call, and runs the call on its tempered output."""

    def __init__(self, dims: int) -> None:
        self.calls = 0
        self._dims = dims  # model dimensions of the energies
        self.turn = Turn()
        self._has_warned = False
        # Kept while their modules live: what a CUDA graph has captured is theirs.
        self.temperings = weakref.WeakKeyDictionary[nn.Module, Tempering]()

    def run(
        self,
        call: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        trainer: Trainer,
        strength: Strength,
        now: StrengthAt,
        recording: Recording | None,
        substeps: Substeps | None,
    ) -> tuple[Any, Tempering | None]:
        """Run the sampler on the tempered energy; returns its result, and what tempered it.

        Raises:
            SamplerError: no energy module is known or among the arguments, the sampler never called
                it, its drift is not the tempered one, or its steps are deferred.
            ConfigError: the module has no such method.
        """
        module, tempering, factor = trainer.model, None, now.factor_of_samples
        must_temper = now.must_temper
        # What β* = 0 allows and a later step of the schedule does not is said once.
        later = now.is_off and strength.is_scheduled and strength.tempers
        if module is None:
            try:
                module = find_module(call, args, kwargs)
            except SamplerError:
                if must_temper and not _is_one(factor):
                    raise
        if module is not None and (must_temper or hasattr(module, trainer.energy)):
            find_energy(module, trainer.energy)
            tempering = self.temperings.get(module)
            if tempering is None or tempering.energy != trainer.energy:
                tempering = Tempering(module, trainer.energy, batch_dim=self._dims)
            self.temperings[module] = tempering
        drift = recording if isinstance(recording, Drift) else None
        if drift is not None and module is not None:
            drift.draws.own = [*module.parameters()]
        if tempering is None:
            result = call(*args, **kwargs)
        else:
            finer = drift.looking if substeps is None and drift is not None else substeps
            result = tempering.run(call, args, kwargs, factor, recording, finer)
        if drift is not None and tempering is not None:
            drift.is_hidden |= tempering.is_hidden
        wrong = lazy = "" if isinstance(result, Tensor) else found_lazy(result)
        if (must_temper or later) and not lazy and tempering:
            if not tempering.reached:
                wrong = _never_called(tempering, call, args, kwargs)
            elif drift and not tempering.is_hidden and (wrong := drift.wrong(result)):
                energy = f"{type(tempering.module).__name__}.{tempering.energy}"
                wrong = f"{wrong}. {_EXITS}".format(energy)
        if wrong and (must_temper or (lazy and not now.is_off)) and not _is_one(factor):
            raise SamplerError(wrong)
        if wrong and (must_temper or later) and not self._has_warned:
            self._has_warned = True
            _log.warning("At β* = 0 nothing is tempered; above 0 this will end: %s", wrong)
        self.calls += 1
        return result, tempering


_EXITS = (
    "Let {0} return all that the sampler follows, name a method that does with energy=, or use "
    "g.temper(energy) in the sampler and guard(loss_fn, None, ...). Pictures: `sampler.original`."
)


def _is_one(factor: float | Tensor) -> bool:
    """Read on the host, where a call would be refused otherwise."""
    return isinstance(factor, Tensor) and bool((factor == 1).all())


def _never_called(
    tempering: Tempering, call: object, args: Sequence[object], kwargs: Mapping[str, object]
) -> str:
    energy = f"{type(tempering.module).__name__}.{tempering.energy}"
    others = " and ".join(other_networks(tempering.module, call, args, kwargs))
    why = f"it uses another network, {others}; a copy is another one, too"
    if not others:
        why = (
            "it calls another method such as `energy`, a copy, or a CUDA graph that no guarded "
            "call has captured, or takes no step"
        )
    return (
        f"The sampler never called {energy}, so it ran on the untempered energy ({why}). For a "
        "picture use `sampler.original`, or `with g.paused():`. To train, name the network with "
        "model=. Name the method with energy=, or temper inside the sampler with g.temper(energy) "
        "and guard(loss_fn, None, ...)."
    )


# Runs a sampler, given with its arguments, on the tempered energy.
Run: TypeAlias = Callable[[Callable[..., Any], Sequence[Any], dict[str, Any]], Any]


class GuardedLoss:
    """The guarded contrastive loss of ``guard``, instead of ``-(fp - fq)``."""

    def __init__(self, guard: Any) -> None:
        self.guard = guard

    def __call__(
        self, f_pos: Tensor, f_neg: Tensor, groups: Groups | None = None, log_q: LogQ | None = None
    ) -> Tensor:
        """See :meth:`ebmguard.Guard.loss`."""
        loss: Tensor = self.guard.loss(f_pos, f_neg, groups, log_q)
        return loss


class OneLoss:
    """Makes one loss per guard. The loss holds the guard; the guard does not hold the loss."""

    def __init__(self) -> None:
        self._made = weakref.WeakValueDictionary[int, GuardedLoss]()

    def __get__(self, guard: Any, owner: type | None = None) -> Any:
        if guard is None:
            return self
        return self._made.get(id(guard)) or self._made.setdefault(id(guard), GuardedLoss(guard))


class _Guarded:
    original: Any
    _run: Run

    @uncompiled  # a function that is compiled around it runs this one as it is
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self.original, args, kwargs)


class GuardedFunction(_Guarded):
    """A sampler function that runs tempered; ``original`` is the untempered function."""

    def __init__(self, run: Run, sampler: Callable[..., Any]) -> None:
        self._run, self.original = run, sampler
        functools.update_wrapper(self, sampler)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        # So that a method can be guarded in the body of its class.
        return self if instance is None else MethodType(self, instance)


class GuardedObject(_Guarded):
    """A sampler object with tempered calls and named methods; the rest is ``original``'s."""

    def __init__(self, run: Run, sampler: object, methods: Sequence[str]) -> None:
        vars(self).update(_run=run, original=sampler, _methods=frozenset(methods))

    def __getattr__(self, name: str) -> Any:
        if name in ("original", "_run", "_methods"):  # not set yet: a copy under construction
            raise AttributeError(name)
        value = getattr(self.original, name)
        return GuardedFunction(self._run, value) if name in self._methods else value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.original, name, value)


def wrap_sampler(run: Run, sampler: Any, methods: Sequence[str]) -> _Guarded:
    """Wrap a sampler that :func:`check_sampler` has accepted."""
    if is_function(sampler):
        return GuardedFunction(run, sampler)
    return GuardedObject(run, sampler, methods)


_FOREIGN = "builtins", "torch"  # no classes of a trainer's own
# How samplers call themselves, the network and what else they take; and losses their two sides.
_DRAWS = re.compile(r"(?i)(?!.*(loss|objective|contrast)).*(sampl|langevin|sgld|mcmc|hmc)")
_NETWORK = re.compile(r"(f|e|energy|model|net|network|ebm|critic|score)(_(fn|func|model|net))?")
_START = re.compile(r"[xz](_?0|_?init)?|(n_|num_)?steps|step_?size|noise(_\w+)?|\w*buffer")
_POS = re.compile(r"(f|e|energy|energies)_?(p|pos|positive|real|data)")
_NEG = re.compile(r"(f|e|energy|energies)_?(q|n|neg|negative|fake)")


def _asked(call: Any) -> tuple[str, list[str], bool]:
    """Name of a callable, its parameters, and whether it takes two values."""
    function = call.func if isinstance(call, functools.partial) else call
    name = getattr(function, "__name__", type(function).__name__)
    try:
        signature = inspect.signature(call.forward if isinstance(call, nn.Module) else call)
    except (ValueError, TypeError):  # not written in Python
        return name, [], True
    try:
        signature.bind(None, None)
    except TypeError:
        return name, [*signature.parameters], False
    return name, [*signature.parameters], True


def check_loss(loss_fn: Any) -> None:
    """Raise a ConfigError on what is not a loss of two sides: a sampler, a network, a class."""
    if isinstance(loss_fn, GuardedLoss):
        raise ConfigError("loss_fn is guarded already; use one guard, or pass loss_fn=None.")
    name, takes, is_right = _asked(loss_fn)
    network = _NETWORK.fullmatch(takes[0] if takes else "")
    hints = _DRAWS.match(name), network, any(map(_START.fullmatch, takes))
    draws = sum(map(bool, hints)) > 1 or isinstance(loss_fn, _Guarded)
    if draws or not is_right or isinstance(loss_fn, type):
        what = "the class " if isinstance(loss_fn, type) else ""
        raise ConfigError(
            f"loss_fn= is {what}{name}({', '.join(takes)}); expected a function of (f_pos, f_neg), "
            "the contrastive difference, or None. If it is the sampler, that comes second: "
            f"guard(None, {name}, ...)."
        )


def check_sampler(sampler: object, methods: Sequence[str], trainer: Trainer) -> None:
    """Raise a ConfigError on samplers that cannot run tempered, a SamplerError if deferred."""
    function = sampler.func if isinstance(sampler, functools.partial) else sampler
    function = getattr(function, "__func__", function)
    if isinstance(function, _Guarded):
        raise ConfigError(
            f"The sampler is guarded already; a second guard would temper it twice. {ONCE}. For "
            "another run pass `sampler.original`; for two losses use one guard."
        )
    if isinstance(sampler, type):
        raise ConfigError(
            f"The sampler is the class {sampler.__name__}; expected an object made from it. Pass "
            f"{sampler.__name__}(...)."
        )
    kind, model, energy = type(sampler).__name__, trainer.model, trainer.energy
    if isinstance(sampler, Tensor | list | tuple | dict | set):
        raise ConfigError(
            f"The sampler is a {kind}; expected one function that draws samples, such as "
            "langevin(f, x), or an object. Several are one ebmguard.samplers.Mixture; where "
            "samples are only read, pass None."
        )
    if model is not None and not methods:
        own = [getattr(model, energy), *([model] if energy == "forward" else [])]
        if any(sampler is x or (inspect.ismethod(sampler) and sampler == x) for x in own):
            raise ConfigError(
                f"The sampler is the energy of {type(model).__name__} itself; expected the "
                "function that draws samples from it, such as langevin(f, x)."
            )
    name, takes, _ = _asked(sampler)
    if len(takes) == 2 and _POS.fullmatch(takes[0]) and _NEG.fullmatch(takes[1]):
        raise ConfigError(
            f"The sampler is {name}({', '.join(takes)}), a loss by its arguments. The loss comes "
            "first: guard(loss_fn, sampler, ...)."
        )
    missing = [name for name in methods if not callable(getattr(sampler, name, None))]
    if missing:
        raise ConfigError(
            f"The sampler {kind} has no method {', '.join(missing)}; it has "
            f"{_public_methods(sampler)}."
        )
    if not callable(sampler) and not methods:
        raise ConfigError(
            f"The sampler is a {kind}, which cannot be called. Name the methods that draw samples: "
            f"guard(..., methods=(...)). It has {_public_methods(sampler)}."
        )
    if methods and inspect.isroutine(sampler):
        raise ConfigError("methods= names methods of a sampler object; this is a function.")
    for call in [sampler, *(getattr(sampler, name) for name in methods)]:
        refuse_deferred(call)


def _public_methods(sampler: object) -> str:
    """A few, of the classes that are the trainer's own. Of the class: a property may raise."""
    kinds = [x for x in type(sampler).__mro__ if x.__module__.split(".")[0] not in _FOREIGN]
    names = {x for each in kinds for x in vars(each) if not x.startswith("_")}
    found = sorted(x for x in names if inspect.isroutine(getattr(type(sampler), x, None)))
    return ", ".join([*found[:12], *(["..."] if found[12:] else [])]) or "none"
