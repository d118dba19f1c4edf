"""The checks of the arguments ``loss_fn`` and ``sampler`` of ``guard()``.

Names tell nothing: a candidate is called on two small vectors, and its result decides.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..sampling import is_compiled, variables_of
from ..trainer import Trainer, refuse_deferred
from .ownership import ONCE
from .sampling import Guarded, GuardedLoss

__all__ = ["check_loss", "check_sampler"]

_FOREIGN = "builtins", "torch"  # no classes of a trainer
_VECTORS = (0.5, -0.25), (0.25, 1.0)


def _asked(call: Any) -> tuple[str, list[str], bool]:
    """The name of a callable, its parameters, and whether it takes two values."""
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


def _called(candidate: Callable[..., Any]) -> tuple[Any, list[Tensor]]:
    """The result of a call with two small vectors, and these. Random numbers stay as they are."""
    has_gpus = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpus = range(torch.cuda.device_count() if has_gpus else 0)
    with torch.random.fork_rng(gpus), torch.inference_mode(False), torch.enable_grad():
        vectors = [torch.tensor(x, device="cpu", requires_grad=True) for x in _VECTORS]
        return candidate(*vectors), vectors


def _why_no_loss(candidate: Any) -> str:
    """The way it fails on two vectors; empty where that may be because something is not ready yet.

    A lambda is often there because what it calls comes later. The first loss is looked at again.
    """
    if getattr(candidate, "__name__", "") == "<lambda>" or is_compiled(candidate):
        return ""
    try:
        _called(candidate)
    except Exception as error:  # noqa: BLE001  The trainer's code may raise anything.
        # It calls a vector, or takes it for a network, a buffer or a number of samples.
        is_of_vector = isinstance(getattr(error, "obj", None), Tensor)
        is_told = type(error) in (TypeError, ConfigError) or is_of_vector
        return str(error).partition("\n")[0][:60] if is_told else ""
    return ""


def _is_loss(candidate: Any) -> bool:
    """Tell if it makes one number of two vectors; only asked where a call changes nothing."""
    code = getattr(candidate, "__code__", None)
    is_alone = isinstance(candidate, FunctionType) and not candidate.__defaults__
    if code is None or not is_alone or (code.co_argcount, code.co_kwonlyargcount) != (2, 0):
        return False
    used = [getattr(x, "__name__", "").split(".")[0] for x in variables_of(candidate).values()]
    if {*used} - {"torch"} or any(isinstance(x, CodeType) for x in code.co_consts):
        return False
    try:
        made, vectors = _called(candidate)
    except Exception:  # noqa: BLE001  It is a sampler, which calls its network.
        return False
    if not isinstance(made, Tensor) or made.ndim or not made.requires_grad:
        return False
    return None not in torch.autograd.grad(made, vectors, allow_unused=True)


def check_loss(loss_fn: Any) -> None:
    """Raise a ConfigError on what is not a loss of two sides: a sampler, a network, a class."""
    if isinstance(loss_fn, GuardedLoss):
        raise ConfigError("loss_fn is guarded already; use one guard, or pass loss_fn=None.")
    name, takes, is_right = _asked(loss_fn)
    is_class, is_sampler, why = isinstance(loss_fn, type), isinstance(loss_fn, Guarded), ""
    if is_right and not (is_class or is_sampler) and (failure := _why_no_loss(loss_fn)):
        why = f" With two vectors it fails: {failure}."
    if why or is_class or is_sampler or not is_right:
        what = "the class " if is_class else ""
        raise ConfigError(
            f"loss_fn= is {what}{name}({', '.join(takes)}); expected a function of (f_pos, f_neg), "
            f"the contrastive difference, or None.{why} If it is the sampler, that comes second: "
            f"guard(None, {name}, ...)."
        )


def check_sampler(sampler: object, methods: Sequence[str], trainer: Trainer) -> None:
    """Raise a ConfigError on samplers that cannot run tempered, a SamplerError if deferred."""
    function = sampler.func if isinstance(sampler, functools.partial) else sampler
    function = getattr(function, "__func__", function)
    if isinstance(function, Guarded):
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
        energies = [getattr(model, energy), *([model] if energy == "forward" else [])]
        if any(sampler is x or (inspect.ismethod(sampler) and sampler == x) for x in energies):
            raise ConfigError(
                f"The sampler is the energy of {type(model).__name__} itself; expected the "
                "function that draws samples from it, such as langevin(f, x)."
            )
    if _is_loss(sampler):
        name, takes, _ = _asked(sampler)
        raise ConfigError(
            f"The sampler is {name}({', '.join(takes)}), a loss: it makes one number of two "
            "vectors. The loss comes first: guard(loss_fn, sampler, ...)."
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
    """A few methods of the trainer's classes. The class is asked, since a property may raise."""
    kinds = [x for x in type(sampler).__mro__ if x.__module__.split(".")[0] not in _FOREIGN]
    names = {x for kind in kinds for x in vars(kind) if not x.startswith("_")}
    routines = sorted(x for x in names if inspect.isroutine(getattr(type(sampler), x, None)))
    return ", ".join([*routines[:12], *(["..."] if routines[12:] else [])]) or "none"
