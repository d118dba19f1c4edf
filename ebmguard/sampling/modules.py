"""Which network a sampler calls, as far as its arguments and its code tell."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import suppress

from torch import nn

from ..errors import SamplerError

__all__ = ["find_module", "other_networks", "variables_of"]


def find_module(sampler: object, args: Sequence[object], kwargs: Mapping[str, object]) -> nn.Module:
    """The only module among a sampler's arguments, bound ones included.

    A bound method such as ``f.forward`` counts as its module, also where it is the sampler itself.
    SamplerError if there is none, or more than one.
    """
    found = _modules(sampler, args, kwargs)
    if len(found) == 1:
        return found[0]
    what = "No energy module among the sampler's arguments; it is probably a closure or a global."
    if isinstance(sampler, nn.Module):
        what = f"The sampler is a network itself, {type(sampler).__name__}, and gets no other one."
    if found:
        names = ", ".join(type(module).__name__ for module in found)
        what = f"{len(found)} modules among the arguments ({names}); which one is the energy?"
    raise SamplerError(f"{what} Name the one that the sampler calls: guard(..., model=f).")


def _modules(
    sampler: object, args: Sequence[object], kwargs: Mapping[str, object]
) -> list[nn.Module]:
    if isinstance(sampler, functools.partial):
        args, kwargs = (*sampler.args, *args), {**sampler.keywords, **kwargs}
        sampler = sampler.func
    found: dict[nn.Module, None] = {}
    for value in (*args, *kwargs.values(), getattr(sampler, "__self__", None)):
        module = value if isinstance(value, nn.Module) else getattr(value, "__self__", None)
        if isinstance(module, nn.Module):
            found[module] = None
    return [*found]


def variables_of(sampler: object) -> dict[str, object]:
    """Global and closed-over variables that a sampler's code names, as far as they have a value."""
    function = sampler.func if isinstance(sampler, functools.partial) else sampler
    function = getattr(function, "__func__", function)
    code, values = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    found = {name: values[name] for name in getattr(code, "co_names", ()) if name in values}
    cells = getattr(function, "__closure__", None) or ()
    for name, cell in zip(getattr(code, "co_freevars", ()), cells, strict=False):
        with suppress(ValueError):  # it is empty still
            found[name] = cell.cell_contents
    return found


def other_networks(
    energy: nn.Module, sampler: object, args: Sequence[object], kwargs: Mapping[str, object]
) -> list[str]:
    """How a sampler names the networks that it uses beside this one, as far as can be told."""
    found = dict.fromkeys(_modules(sampler, args, kwargs), "an argument")
    named = variables_of(sampler).items()
    found |= {x: f"`{name}`" for name, x in named if isinstance(x, nn.Module)}
    own = {*energy.modules()}
    return [name for x, name in found.items() if x not in own and energy not in {*x.modules()}]
