"""The place of a guard's line: it runs once, and the sampler has a name there."""

from __future__ import annotations

import ast
import re
from typing import Any, NamedTuple

from .chains import Names, Sampler
from .script import Place, Source

__all__ = ["Where", "binds", "where"]


class Where(NamedTuple):
    """A line below or above a statement, and the names of the trainer's parts there."""

    source: Source
    statement: ast.stmt
    is_below: bool
    sampler: str
    models: list[str]
    optimizers: list[str]
    is_global: bool = False  # the loss is in another function
    is_moved: bool = False  # the sampler gets this name there, as an attribute of self


def where(sampler: Sampler, entry: Place, loss: Place, trainer: Names) -> Where | None:
    """Return the place for a guard of the function called at ``entry``.

    None where no place runs once.
    """
    base, call, source = entry.base, entry.node, entry.source
    if base is None or not isinstance(call, ast.Call):
        return None
    code, around = entry.code, source.around(loss.statement)
    owner = next((x for x in source.around(call) if isinstance(x, ast.ClassDef)), None)
    has_energy = any(x.startswith("self.") for x in sampler.names.get(code, []))
    is_local = base.id in (*code.co_varnames, *code.co_freevars, *code.co_cellvars)
    is_moved = base is call.func and not is_local and has_energy
    if base.id == "self" or (is_moved and owner in around):
        return _in_init(sampler, entry, trainer, owner) if owner in around else None
    return _outside(sampler, entry, loss, trainer)


def _in_init(sampler: Sampler, entry: Place, trainer: Names, owner: Any) -> Where | None:
    """Return the end of ``__init__``, or the line before the call's loops."""
    source = entry.source
    init = next((node for node in owner.body if "__init__" in binds(node)), None)
    files = {place.source for place in sampler.calls}
    is_made = (s.loops(x) for s in files for x in s.nodes if _calls(x, owner))
    if init is None or any(is_made):
        return None
    text, statement, loops = source.segment(init), init.body[-1], entry.loops
    models = [x for x in sampler.names.get(entry.code, []) if x.startswith("self.")]
    is_below = not loops or not models or f"{models[0]} =" in text
    if not is_below:
        if any(place.loops for place in sampler.calls[sampler.calls.index(entry) + 1 :]):
            return None
        statement = loops[-1]
    mine = [x for x in trainer if f"{owner.name}." in getattr(x, "co_qualname", "")]
    optimizers = [x for code in mine for x in trainer[code] if f"{x} =" in text]
    name = source.segment(entry.node.func)  # type: ignore[union-attr]
    parts = name, models, optimizers
    return Where(source, statement, is_below, *parts, is_moved=not name.startswith("self."))


def _outside(sampler: Sampler, entry: Place, loss: Place, trainer: Names) -> Where | None:
    """Return the line before the loops of the function that made the sampler."""
    calls, known = sampler.calls[sampler.calls.index(entry) :], sampler.callees.get(entry, {})
    base = entry.base.id  # type: ignore[union-attr]
    suffix = entry.source.segment(entry.node.func)[len(base) :]  # type: ignore[union-attr]
    for place, caller in zip(calls, (*calls[1:], None), strict=True):
        code, source = place.code, place.source
        if base not in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            break
        # It is an argument, and the caller has another name for it.
        names = [*known.get(caller.code, ()), *known.get(caller.source.file, ())] if caller else []
        call: Any = caller and caller.node
        given = [*getattr(call, "args", ()), *(x.value for x in getattr(call, "keywords", ()))]
        base = next((x for x in names if x in map(ast.unparse, given)), "")
        if not base:
            return None
    root, outer = _root(base), calls[calls.index(place) :]
    is_own = root != base or root in (*code.co_varnames, *code.co_cellvars)
    is_free = not is_own and root in code.co_freevars
    makers = [x for x in outer if (root in x.code.co_cellvars if is_free else x.is_file)]
    frame = place if is_own else next((x for x in makers if x.source is source), None)
    if loss.source is not source or (is_free and frame is None):
        return None
    if frame is None:
        body = source.tree.body
        made = [at for at, node in enumerate(body, 1) if {root, "*"} & _bound(node)]
        if not made:
            return None
        anchor, later = body[made[-1] - 1], body[made[-1] :]
    else:
        loops = [x for x in frame.loops if isinstance(x, ast.stmt)]
        anchor = loops[-1] if loops else frame.statement
        again = [x for x in calls[calls.index(frame) + 1 :] if x.loops or _is_again(x)]
        if again or root in _bound(anchor):
            return None
        later = [anchor]
    unknown = set[str]().union(*map(_bound, later))
    key: Any = source.file if frame is None or frame.is_file else frame.code
    named = sampler.names.get(key, []), trainer.get(key, [])
    models, optimizers = ([x for x in of if not {x, _root(x)} & unknown] for of in named)
    name, is_global = base + suffix, source.scope(anchor) not in source.around(loss.statement)
    return Where(source, anchor, frame is None, name, models, optimizers, is_global)


def _root(text: str) -> str:
    """Return the name that an expression begins with."""
    return re.split(r"\W", text)[0]


def _calls(node: ast.AST, owner: Any) -> bool:
    """Tell whether a node makes an object of a class."""
    return isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == owner.name


def _is_again(place: Place) -> bool:
    """Tell whether its file calls the same function at another place, too."""
    name = ast.unparse(place.node.func) if isinstance(place.node, ast.Call) else ""
    calls = (x for x in place.source.nodes if isinstance(x, ast.Call))
    return sum(ast.unparse(call.func) == name for call in calls) > 1


def _bound(node: ast.AST) -> set[str]:
    """Return the names that a statement binds, but for those of functions and classes in it."""
    is_scope = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    inner = () if is_scope else ast.iter_child_nodes(node)
    return {*binds(node)}.union(*map(_bound, inner))


def binds(node: ast.AST) -> list[str]:
    """Return the names and attributes that a node binds."""
    if isinstance(node, ast.Name | ast.Attribute):
        return [ast.unparse(node)] if isinstance(node.ctx, ast.Store) else []
    if isinstance(node, ast.alias):
        return [(node.asname or node.name).partition(".")[0]]
    return [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
