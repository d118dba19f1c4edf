"""The two callables that ``guard`` hands back: drop-in for the trainer's loss and sampler."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, TypeAlias

from torch import Tensor, nn

from ..energies import Groups, LogQ
from ..errors import ConfigError
from ..trainer import Trainer, is_function, refuse_deferred

__all__ = ["GuardedLoss", "check_loss", "check_sampler", "wrap_sampler"]

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


class GuardedFunction:
    """A sampler function that runs tempered; ``original`` is the one that does not."""

    def __init__(self, run: Run, sampler: Callable[..., Any]) -> None:
        functools.update_wrapper(self, sampler)
        self.original = sampler
        self._run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self.original, args, kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        # So that a method can be guarded in the body of its class.
        return self if instance is None else MethodType(self, instance)


class GuardedObject:
    """A sampler object whose calls and named methods run tempered; all else is ``original``'s."""

    original: Any
    _run: Run
    _methods: frozenset[str]

    def __init__(self, run: Run, sampler: object, methods: Sequence[str]) -> None:
        vars(self).update(original=sampler, _run=run, _methods=frozenset(methods))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self.original, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in GuardedObject.__annotations__:  # not set yet: a copy under construction
            raise AttributeError(name)
        value = getattr(self.original, name)
        return GuardedFunction(self._run, value) if name in self._methods else value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.original, name, value)


def wrap_sampler(run: Run, sampler: Any, methods: Sequence[str]) -> GuardedFunction | GuardedObject:
    """Wrap a sampler that :func:`check_sampler` has accepted."""
    if is_function(sampler):
        return GuardedFunction(run, sampler)
    return GuardedObject(run, sampler, methods)


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
    """Refuse, with a ConfigError, what is no loss of two sides: a sampler, a network, a class."""
    if isinstance(loss_fn, GuardedLoss):
        raise ConfigError("loss_fn is guarded already; use one guard, or pass loss_fn=None.")
    name, takes, is_right = _asked(loss_fn)
    network = _NETWORK.fullmatch(takes[0] if takes else "")
    hints = _DRAWS.match(name), network, any(map(_START.fullmatch, takes))
    draws = sum(map(bool, hints)) > 1 or isinstance(loss_fn, GuardedFunction | GuardedObject)
    if draws or not is_right or isinstance(loss_fn, type):
        what = "the class " if isinstance(loss_fn, type) else ""
        raise ConfigError(
            f"loss_fn= is {what}{name}({', '.join(takes)}); expected a function of (f_pos, f_neg), "
            "the contrastive difference, or None. If it is the sampler, that comes second: "
            f"guard(None, {name}, ...)."
        )


def check_sampler(sampler: object, methods: Sequence[str], trainer: Trainer) -> None:
    """Refuse samplers that cannot run tempered: a ConfigError, or a SamplerError if deferred."""
    function = sampler.func if isinstance(sampler, functools.partial) else sampler
    function = getattr(function, "__func__", function)
    if isinstance(function, GuardedFunction | GuardedObject):
        raise ConfigError(
            "The sampler is guarded already; a second guard would temper it twice. Pass "
            "`sampler.original`, or use one guard for both losses."
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


_FOREIGN = "builtins", "torch"
