"""Find the energy module of a sampler, and the other networks and variables that it uses."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import suppress

from torch import nn

from ..errors import SamplerError

__all__ = ["find_module", "is_compiled", "other_networks", "variables_of"]


def find_module(sampler: object, args: Sequence[object], kwargs: Mapping[str, object]) -> nn.Module:
    """Return the only module among a sampler's arguments, bound ones included.

    ``f.forward`` counts as f; else it is the one among a sampler object's attributes, or an error.
    """
    modules = _modules(sampler, args, kwargs)
    if not modules:
        attributes = getattr(getattr(sampler, "__self__", sampler), "__dict__", {}).values()
        modules = [*dict.fromkeys(x for x in attributes if isinstance(x, nn.Module))]
    if len(modules) == 1:
        return modules[0]
    what = "No energy module among the sampler's arguments; it is probably a closure or a global."
    if isinstance(sampler, nn.Module):
        what = f"The sampler is a network itself, {type(sampler).__name__}, and gets no other one."
    if modules:
        names = ", ".join(type(module).__name__ for module in modules)
        what = f"{len(modules)} modules among the arguments ({names}); which one is the energy?"
    raise SamplerError(f"{what} Name the one that the sampler calls: guard(..., model=f).")


def _modules(
    sampler: object, args: Sequence[object], kwargs: Mapping[str, object]
) -> list[nn.Module]:
    if isinstance(sampler, functools.partial):
        args, kwargs = (*sampler.args, *args), {**sampler.keywords, **kwargs}
        sampler = sampler.func
    modules: dict[nn.Module, None] = {}
    for value in (*args, *kwargs.values(), getattr(sampler, "__self__", None)):
        x = value if isinstance(value, nn.Module) else getattr(value, "__self__", None)
        if isinstance(x, nn.Module):
            modules[x] = None
    return [*modules]


def variables_of(sampler: object) -> dict[str, object]:
    """The global and closed-over variables that a sampler's code names, where they have a value."""
    function = sampler.func if isinstance(sampler, functools.partial) else sampler
    function = getattr(function, "__func__", function)
    code, values = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    variables = {name: values[name] for name in getattr(code, "co_names", ()) if name in values}
    cells = getattr(function, "__closure__", None) or ()
    for name, cell in zip(getattr(code, "co_freevars", ()), cells, strict=False):
        with suppress(ValueError):  # it is empty still
            variables[name] = cell.cell_contents
    return variables


def other_networks(
    energy: nn.Module, sampler: object, args: Sequence[object], kwargs: Mapping[str, object]
) -> list[str]:
    """The sampler's names of the networks that it uses beside this one, as far as is known."""
    names = dict.fromkeys(_modules(sampler, args, kwargs), "an argument")
    variables = variables_of(sampler).items()
    names |= {x: f"`{name}`" for name, x in variables if isinstance(x, nn.Module)}
    inner = {*energy.modules()}
    return [name for x, name in names.items() if x not in inner and energy not in {*x.modules()}]


def is_compiled(part: object) -> bool:
    """Return whether it has the mark that ``torch.compile`` leaves on functions and modules."""
    is_function = hasattr(part, "_torchdynamo_orig_callable")
    return is_function or getattr(part, "_compiled_call_impl", None) is not None
