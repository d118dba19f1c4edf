"""What a trainer has told the guard about the rest of itself."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, TypeAlias, TypedDict, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .errors import ConfigError, SamplerError

__all__ = [
    "Clamp",
    "Told",
    "Trainer",
    "check_takes",
    "find_energy",
    "finite_number",
    "is_function",
    "refuse_deferred",
]

Clamp: TypeAlias = "tuple[float, float]"


class Told(TypedDict, total=False):
    """What a guard may be told of the trainer: keywords of ``guard`` and of ``attach``."""

    model: nn.Module | None
    energy: str | None
    optimizer: Optimizer | None
    scheduler: Any
    scaler: torch.amp.GradScaler | None
    ema: Any
    buffer: Any
    generators: Sequence[torch.Generator] | None
    step_size: float | None
    noise_std: float | None
    clamp: Clamp | None
    sgld_steps: int | None
    steps_argument: str | None


# Keywords that there were, and what to write instead.
_REMOVED = {
    "beta_stars": "Average the losses of several exponents yourself: sum("
    "contrastive_loss(f_pos, f_neg, b) for b in exponents) / len(exponents), with "
    "ebmguard.objective.contrastive_loss",
    "reduce": "Heads (B, K) are summed, as by a sampler that differentiates f(x).sum(). For their "
    "mean pass f.mean(1) to the loss, and let the sampler differentiate that",
}


@dataclass(frozen=True)
class Trainer:
    """The parts and settings of :class:`Told`; None is what the guard was not told."""

    model: nn.Module | None = None
    energy: str = "forward"
    optimizer: Optimizer | None = None
    scheduler: Any = None
    scaler: torch.amp.GradScaler | None = None
    ema: Any = None
    buffer: Any = None
    generators: tuple[torch.Generator, ...] = ()
    step_size: float | None = None
    noise_std: float | None = None
    clamp: Clamp | None = None
    sgld_steps: int | None = None
    steps_argument: str | None = None

    def extended(self, **given: Any) -> Trainer:
        """This with the fields that are given now; None leaves one as it was.

        Raises:
            TypeError: a keyword that there is not.
            ConfigError: values that cannot be meant, alone or together.
        """
        for name in given:
            if name not in Told.__annotations__:
                if name in _REMOVED:
                    raise TypeError(f"{name}= is gone. {_REMOVED[name]}.")
                close = difflib.get_close_matches(name, Told.__annotations__, 1)
                hint = f"; did you mean {close[0]}=?" if close else ""
                raise TypeError(f"unexpected keyword argument {name!r}{hint}")
        new = {name: _checked(name, x) for name, x in given.items() if x is not None}
        result = replace(self, **new)
        if result.steps_argument is not None and result.sgld_steps is None:
            raise ConfigError("steps_argument= needs sgld_steps=, the sampler's number of steps.")
        if result.scaler is not None and result.optimizer is None:
            raise ConfigError("scaler= needs the optimizer that it scales: add optimizer=.")
        if result.model is not None:
            find_energy(result.model, result.energy)
        if result.optimizer is not None and result.model is not None:
            trained = {id(p) for group in result.optimizer.param_groups for p in group["params"]}
            if not trained & set(map(id, result.model.parameters())):
                raise ConfigError(
                    "The optimizer trains none of the model's parameters: is it the optimizer of "
                    "another network?"
                )
        return result

    @property
    def steps(self) -> dict[str, float] | None:
        """``step_size`` and ``noise_std`` of the sampler; None where one is unknown."""
        if self.step_size is None or self.noise_std is None:
            return None
        return {"step_size": self.step_size, "noise_std": self.noise_std}


def find_energy(model: nn.Module, energy: str) -> Callable[..., Any]:
    """What is called for energies: the model itself, or its method, else a ``ConfigError``."""
    if energy == "forward":
        return model  # whose hooks run
    found: Callable[..., Any] | None = getattr(model, energy, None)
    if not callable(found):
        raise ConfigError(
            f"energy={energy!r} names the method that returns the energies, but "
            f"{type(model).__name__} has none of that name."
        )
    return found


def is_function(sampler: object) -> bool:
    """Whether a sampler is a function, not an object with methods."""
    return inspect.isroutine(sampler) or isinstance(sampler, functools.partial)


def check_takes(sampler: object, name: str) -> None:
    """Refuse with a ConfigError a parameter that the sampler, guarded or not, does not have."""
    original = getattr(sampler, "original", sampler)
    if not is_function(original):
        raise ConfigError(
            f"steps_argument={name!r} names a parameter of a sampler function, but the sampler is "
            f"{'None' if original is None else 'an object'}. Let it take g.next_steps() instead."
        )
    parameters = inspect.signature(cast("Callable[..., Any]", original)).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    found = parameters.get(name)
    if not takes_any and (found is None or found.kind is found.POSITIONAL_ONLY):
        raise ConfigError(
            f"steps_argument={name!r}: the sampler has no parameter of that name; it has "
            f"{', '.join(parameters)}. Name that of its SGLD steps, or let it take g.next_steps()."
        )


def refuse_deferred(call: object) -> None:
    """Refuse, with a ``SamplerError``, what runs after the call, where nothing is tempered."""
    if isinstance(call, functools.partial):
        call = call.func
    functions = inspect.isgeneratorfunction, inspect.isasyncgenfunction, inspect.iscoroutinefunction
    results = inspect.isgenerator, inspect.isasyncgen, inspect.iscoroutine
    if any(is_one(call) for is_one in (*functions, *results)):
        raise SamplerError(
            "The sampler is a generator or coroutine: its steps would run after the call has "
            "returned, on the untempered energy. Return the samples, or use g.temper(f(x)) inside."
        )


def finite_number(name: str, value: object) -> float:
    """A finite number; of anything else a ``ConfigError`` that names the argument."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{name}={value!r} is a {type(value).__name__}; expected a number.")
    if not math.isfinite(value):
        raise ConfigError(f"{name}={value!r}; expected a finite number.")
    return float(value)


def _checked(name: str, value: Any) -> Any:
    """The value of a field as it is kept."""
    if name in ("step_size", "noise_std"):
        number = finite_number(name, value)
        if number < 0 or (number == 0 and name == "step_size"):
            least = "above 0" if name == "step_size" else "of 0 or more"
            raise ConfigError(
                f"{name}={number:g}; expected a number {least}, of the sampler's update "
                "x += step_size * df/dx + noise_std * randn (df/dx of the negative energy)."
            )
        return number
    if name == "sgld_steps":
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise ConfigError(
                f"sgld_steps={value!r}; expected the number of SGLD steps of a call, 1 or more."
            )
        return int(value)
    if name == "clamp":
        ends = value if isinstance(value, tuple | list) and len(value) == 2 else (0, 0)
        are_numbers = all(isinstance(x, Real) and not isinstance(x, bool) for x in ends)
        if not (are_numbers and ends[0] < ends[1]):
            raise ConfigError(
                f"clamp={value!r}; expected the lowest and the highest value of a sample's "
                "entries, such as (-1, 1)."
            )
        return float(ends[0]), float(ends[1])
    is_right, wanted = _PARTS[name]
    if not is_right(value):
        is_class = isinstance(value, type)
        found = f"the class {value.__name__}" if is_class else f"a {type(value).__name__}"
        raise ConfigError(f"{name}= is {found}; expected {wanted}.")
    if name != "generators":
        return value
    for each in value:
        if not isinstance(each, torch.Generator):
            found = type(each).__name__
            raise ConfigError(f"generators= holds a {found}; expected torch.Generators.")
    return tuple(value)


def _is_stateful(part: object) -> bool:
    methods = [getattr(part, name, None) for name in ("state_dict", "load_state_dict")]
    return all(map(callable, methods)) and not isinstance(part, type)


def _is_buffer(part: object) -> bool:
    rows = part if isinstance(part, list) else [part]
    return all(isinstance(x, Tensor) and x.ndim for x in rows) or _is_stateful(part)


_STATEFUL = "an object with state_dict() and load_state_dict()"
_PARTS: dict[str, tuple[Callable[[object], bool], str]] = {
    "model": (lambda x: isinstance(x, nn.Module), "the torch.nn.Module that the sampler calls"),
    "energy": (lambda x: isinstance(x, str), "the name of the model's method"),
    "optimizer": (lambda x: isinstance(x, Optimizer), "a torch Optimizer"),
    "scheduler": (_is_stateful, _STATEFUL),
    "scaler": (lambda x: isinstance(x, torch.amp.GradScaler), "a torch.amp.GradScaler"),
    "ema": (_is_stateful, _STATEFUL),
    "buffer": (_is_buffer, f"a tensor of rows, a list of tensors, or {_STATEFUL}"),
    "generators": (lambda x: isinstance(x, Sequence), "a list of torch.Generators"),
    "steps_argument": (lambda x: isinstance(x, str), "the name of the sampler's parameter"),
}
