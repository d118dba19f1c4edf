"""The two callables that ``guard`` hands back: drop-in for the trainer's loss and sampler."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, TypeAlias

from torch import Tensor

from ..energies import Groups, LogQ
from ..errors import ConfigError
from ..trainer import is_function, refuse_deferred

__all__ = ["GuardedLoss", "check_sampler", "wrap_sampler"]

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


def check_sampler(sampler: object, methods: Sequence[str]) -> None:
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
    missing = [name for name in methods if not callable(getattr(sampler, name, None))]
    if missing:
        raise ConfigError(
            f"The sampler {type(sampler).__name__} has no method {', '.join(missing)}; it has "
            f"{_public_methods(sampler)}."
        )
    if not callable(sampler) and not methods:
        raise ConfigError(
            f"The sampler is a {type(sampler).__name__}, which cannot be called. Name the methods "
            f"that draw samples: guard(..., methods=(...)). It has {_public_methods(sampler)}."
        )
    if methods and inspect.isroutine(sampler):
        raise ConfigError("methods= names methods of a sampler object; this is a function.")
    for call in [sampler, *(getattr(sampler, name) for name in methods)]:
        refuse_deferred(call)


def _public_methods(sampler: object) -> str:
    names = (name for name in dir(sampler) if not name.startswith("_"))
    # Of the class: a property may raise.
    found = [name for name in names if inspect.isroutine(getattr(type(sampler), name, None))]
    return ", ".join(found) or "none"
