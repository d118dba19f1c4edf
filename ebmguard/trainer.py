"""The parts and settings of a trainer that the guard knows."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, TypedDict, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .errors import ConfigError, SamplerError

__all__ = [
    *("TYPED_IN", "Combined", "Trainer", "TrainerParts", "check_takes", "find_energy"),
    *("finite_number", "implied_scale", "inner_optimizer", "is_function", "lazy_result_problem"),
    *("leaves", "optimizers_of", "refuse_deferred"),
]


class TrainerParts(TypedDict, total=False):
    """The parts of a trainer that are keywords of ``guard`` and of ``attach``."""

    model: nn.Module | None
    energy: str | None
    optimizer: Optimizer | Sequence[Optimizer] | None
    scheduler: Any
    scaler: torch.amp.GradScaler | None
    ema: Any
    buffer: Any
    generators: Sequence[torch.Generator] | None
    step_size: float | None
    noise_std: float | None
    clamp: tuple[float, float] | None
    sgld_steps: int | None
    steps_argument: str | None


# Keywords of earlier versions, and what to write instead.
_REMOVED = {
    "adapt": 'Leave it out: substeps="auto" takes finer steps where the chains need them',
    "beta_stars": "Average the losses of several exponents yourself, each that of "
    "ebmguard.objective.contrastive_loss",
    "steer": "Leave beta_star= out, or give it a number or a function of the step",
    "reduce": "Heads (B, K) are summed. For their mean pass f.mean(1) to the loss, and let the "
    "sampler differentiate that",
}


@dataclass(frozen=True)
class Trainer:
    """The parts and settings of :class:`TrainerParts`; None if the guard does not know one."""

    model: nn.Module | None = None
    energy: str = "forward"
    optimizer: Any = None  # several are Combined
    scheduler: Any = None
    scaler: torch.amp.GradScaler | None = None
    ema: Any = None
    buffer: Any = None
    generators: tuple[torch.Generator, ...] = ()
    step_size: float | None = None
    noise_std: float | None = None
    clamp: tuple[float, float] | None = None
    sgld_steps: int | None = None
    steps_argument: str | None = None

    def extended(self, **parts: Any) -> Trainer:
        """Return a copy with these parts; None leaves a part as it was.

        Raises:
            TypeError: an unknown keyword.
            ConfigError: values that are wrong, alone or together.
        """
        for name in [name for name in parts if name not in TrainerParts.__annotations__]:
            if name in _REMOVED:
                raise TypeError(f"{name}= is gone. {_REMOVED[name]}.")
            close = difflib.get_close_matches(name, TrainerParts.__annotations__, 1)
            hint = f"; did you mean {close[0]}=?" if close else ""
            raise TypeError(f"unexpected keyword argument {name!r}{hint}")
        new = {name: _checked(name, x) for name, x in parts.items() if x is not None}
        result = replace(self, **new)
        model, optimizer = result.model, result.optimizer
        if result.steps_argument is not None and result.sgld_steps is None:
            raise ConfigError("steps_argument= needs sgld_steps=, the sampler's number of steps.")
        if result.scaler is not None and optimizer is None:
            raise ConfigError("scaler= needs the optimizer that it scales: add optimizer=.")
        if model is not None:
            find_energy(model, result.energy)
        if optimizer is not None and model is not None:
            trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if trained.isdisjoint(map(id, model.parameters())):
                raise ConfigError(
                    "The optimizer trains none of the model's parameters: is it another network's?"
                )
        return result

    @property
    def untrained(self) -> list[str]:
        """The model's parameters that require a gradient and are no attached optimizer's."""
        groups = () if self.optimizer is None else self.optimizer.param_groups
        trained = {id(p) for group in groups for p in group["params"]}
        named = () if self.model is None else self.model.named_parameters()
        return [name for name, p in named if p.requires_grad and id(p) not in trained]

    @functools.cached_property
    def steps(self) -> dict[str, float] | None:
        """The sampler's ``step_size`` and ``noise_std``; None if one is unknown."""
        if self.step_size is None or self.noise_std is None:
            return None
        return {"step_size": self.step_size, "noise_std": self.noise_std}


TYPED_IN = 0.02
"""Rounding of a scale that was typed in, such as 2e4 for 2 / 0.01**2."""


def implied_scale(step_size: float, noise_std: float) -> float:
    """Return o of x += step_size * df/dx + noise_std * randn; infinite without noise."""
    return 2 * step_size / noise_std**2 if noise_std**2 else math.inf


@dataclass(frozen=True)
class Combined:
    """Optimizers of one model, or their schedulers, as one object with the groups of all."""

    parts: tuple[Any, ...]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers, in turn."""
        return [group for optimizer in self.parts for group in optimizer.param_groups]

    def state_dict(self) -> list[Any]:
        """Return the states of all parts."""
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: Sequence[Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


def optimizers_of(attached: Any) -> tuple[Any, ...]:
    """Return the optimizers that were attached as one or as several."""
    return attached.parts if isinstance(attached, Combined) else (attached,)


def inner_optimizer(wrapper: object) -> str:
    """Return the attribute that holds the optimizer inside a wrapper; empty without one."""
    inner = (name for name, x in getattr(wrapper, "__dict__", {}).items() if _has_hooks(x))
    return next(inner, "")


def find_energy(model: nn.Module, energy: str) -> Callable[..., Any]:
    """Return the function of the energies: the model, or its method, else a ``ConfigError``."""
    if energy == "forward":
        return model  # as a call, so that its hooks run
    method: Callable[..., Any] | None = getattr(model, energy, None)
    if callable(method):
        return method
    kind = type(model).__name__
    raise ConfigError(f"energy={energy!r} names the method, but {kind} has none of that name.")


def is_function(sampler: object) -> bool:
    """Return whether a sampler is a function, not an object with methods."""
    return inspect.isroutine(sampler) or isinstance(sampler, functools.partial)


def check_takes(sampler: object, name: str) -> None:
    """Refuse with a ConfigError a parameter that the sampler, guarded or not, does not have."""
    original: Any = getattr(sampler, "original", sampler)
    if not is_function(original):
        raise ConfigError(
            f"steps_argument={name!r} names a parameter of a sampler function, but the sampler is "
            "none. Let it take g.next_steps() instead."
        )
    signature = inspect.signature(original)
    try:
        signature.bind_partial(**{name: None})
    except TypeError:
        raise ConfigError(
            f"steps_argument={name!r}: the sampler has no parameter of that name; it has "
            f"{', '.join(signature.parameters)}. Name that of its SGLD steps, or let it take "
            "g.next_steps()."
        ) from None


def refuse_deferred(call: object) -> None:
    """Refuse, with a ``SamplerError``, a sampler that runs after its call, untempered."""
    if isinstance(call, functools.partial):
        call = call.func
    kinds = inspect.isgeneratorfunction, inspect.isasyncgenfunction, inspect.iscoroutinefunction
    if any(is_one(call) or is_one(getattr(call, "__call__", None)) for is_one in kinds):  # noqa: B004
        raise SamplerError(f"The sampler is a generator or coroutine: {_DEFERRED}")


def lazy_result_problem(result: object) -> str:
    """Return what is wrong with a sampler's result that is not computed yet; empty if it is."""
    parts = [*leaves(result)]
    lazy = [type(part).__name__ for part in parts if _is_lazy(part)]
    if not lazy or any(hasattr(part, "shape") for part in parts):
        return ""
    return f"The sampler returned a {lazy[0]}, like a generator or coroutine: {_DEFERRED}"


_DEFERRED = (
    "its steps would run after the call has returned, on the untempered energy. Return the samples "
    "(a list of them: list(...)), or use g.temper(f(x)) inside."
)
# Iterators over items that are computed already.
_CONTAINERS: list[Any] = [(), [], {}, {}.values(), {}.items(), reversed([])]
_EAGER = tuple(type(iter(x)) for x in _CONTAINERS)


def leaves(x: object) -> list[object]:
    """Return what a sampler has returned, alone or in tuples, lists and dicts."""
    inner = x.values() if isinstance(x, Mapping) else x if isinstance(x, list | tuple) else None
    return [x] if inner is None else [leaf for part in inner for leaf in leaves(part)]


def _is_lazy(x: object) -> bool:
    future: Any = x
    if callable(getattr(x, "add_done_callback", None)):
        return not future.done()
    if isinstance(x, Iterator):
        return not isinstance(x, _EAGER)
    return is_function(x) or isinstance(x, AsyncIterator) or inspect.isawaitable(x)


def finite_number(name: str, value: object) -> float:
    """Return the value as a finite number, or raise a ``ConfigError`` that names the argument."""
    if not _is_number(value):
        raise ConfigError(f"{name}={value!r} is {_kind(value)}; expected a number.")
    try:
        number = float(value)
    except OverflowError:
        raise ConfigError(f"{name}= is beyond any float; expected a finite number.") from None
    if not math.isfinite(number):
        raise ConfigError(f"{name}={value!r}; expected a finite number.")
    return number


def _checked(name: str, value: Any) -> Any:
    """Return the value of a field as it is kept."""
    is_list = name in ("optimizer", "scheduler") and isinstance(value, list | tuple)
    if is_list and value and not _is_stateful(value):
        parts = tuple(_checked(name, part) for part in value)
        return Combined(parts) if parts[1:] else parts[0]
    problem = f"{name}= is {_kind(value)}"
    if name in ("step_size", "noise_std"):
        value = finite_number(name, value)
        problem = f"{name}={value:g}"
    elif name in ("sgld_steps", "clamp"):
        problem = f"{name}={value!r}"
    is_right, wanted = _EXPECTED[name]
    if not is_right(value):
        if name == "optimizer" and (inner := inner_optimizer(value)):
            wanted += f". Pass the one that it wraps, its `{inner}`: optimizer=wrapper.{inner}"
        raise ConfigError(f"{problem}; expected {wanted}.")
    if name == "generators":
        for generator in value:
            if not isinstance(generator, torch.Generator):
                raise ConfigError(f"{name}= holds {_kind(generator)}; expected torch.Generators.")
    if name == "clamp":
        return float(value[0]), float(value[1])
    return {"sgld_steps": int, "generators": tuple}.get(name, lambda x: x)(value)


def _kind(x: object) -> str:
    return f"the class {x.__name__}" if isinstance(x, type) else f"a {type(x).__name__}"


def _is_number(x: object) -> TypeGuard[float]:
    return isinstance(x, Real) and not isinstance(x, bool)


def _is_interval(x: Any) -> bool:
    if isinstance(x, tuple | list) and len(x) == 2 and all(map(_is_number, x)):
        with suppress(OverflowError):
            return float(x[0]) < float(x[1])
    return False


def _is_stateful(part: object) -> bool:
    methods = [getattr(part, name, None) for name in ("state_dict", "load_state_dict")]
    return all(map(callable, methods)) and not isinstance(part, type)


def _has_hooks(part: object) -> bool:
    hooks = (hasattr(part, f"_optimizer_step_{when}_hooks") for when in ("pre", "post"))
    return isinstance(part, Optimizer) and all(hooks)


def _is_buffer(part: object) -> bool:
    rows = part if isinstance(part, list) else [part]
    return all(isinstance(x, Tensor) and x.ndim for x in rows) or _is_stateful(part)


_STATEFUL = "an object with state_dict() and load_state_dict()"
_UPDATE = "of the sampler's x += step_size * df/dx + noise_std * randn (f the negative energy)"
_COUNT = "the number of SGLD steps of a call, 1 or more"
_EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (lambda x: isinstance(x, nn.Module), "the torch.nn.Module that the sampler calls"),
    "energy": (lambda x: isinstance(x, str), "the name of the model's method"),
    "optimizer": (
        _has_hooks,
        "a torch Optimizer, with the hooks of Optimizer.__init__, or a list",
    ),
    "scheduler": (_is_stateful, _STATEFUL),
    "scaler": (lambda x: isinstance(x, torch.amp.GradScaler), "a torch.amp.GradScaler"),
    "ema": (_is_stateful, _STATEFUL),
    "buffer": (_is_buffer, f"a tensor of rows, a list of tensors, or {_STATEFUL}"),
    "generators": (lambda x: isinstance(x, Sequence), "a list of torch.Generators"),
    "step_size": (lambda x: x > 0, f"a number above 0, {_UPDATE}"),
    "noise_std": (lambda x: x >= 0, f"a number of 0 or more, {_UPDATE}"),
    "clamp": (_is_interval, "the lowest and the highest value of a sample, such as (-1, 1)"),
    "sgld_steps": (
        lambda x: isinstance(x, Integral) and x is not True and 0 < int(x) < 2**63,
        _COUNT,
    ),
    "steps_argument": (lambda x: isinstance(x, str), "the name of the sampler's parameter"),
}
