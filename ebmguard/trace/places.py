"""The place of a guard's line: it runs once, and the sampler has a name there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from itertools import chain
from typing import Any, NamedTuple

from .chains import Names, Sampler
from .script import SCOPES, Place, Source

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
    calls = sampler.calls[sampler.calls.index(entry) :]
    base = entry.base.id  # type: ignore[union-attr]
    suffix = entry.source.segment(entry.node.func)[len(base) :]  # type: ignore[union-attr]
    scopes = [x.source.scope(x.node or x.statement) for x in calls]
    for at, (place, inner) in enumerate(zip(calls, scopes, strict=True)):
        source, root = place.source, _root(base)
        around = [inner, *(x for x in source.around(inner) if isinstance(x, SCOPES))]
        scope = next((x for x in around if root in _bound(source, x)), source.tree)
        bound = _bound(source, scope)
        made = bound.get(root) or bound.get("*")
        if "." in base or made is not scope:
            scope = inner if "." in base else scope
            break
        caller = calls[at + 1] if at + 1 < len(calls) else place
        known, call = sampler.callees.get(entry, {}), caller.node
        given = [*getattr(call, "args", ()), *(x.value for x in getattr(call, "keywords", ()))]
        names = (*known.get(caller.code, ()), *known.get(caller.source.file, ()))
        base = next((x for x in names if x in map(ast.unparse, given)), "")
        if not base or caller is place:
            return None
    is_file = scope is source.tree
    frame = next((x for x, of in [*zip(calls, scopes, strict=True)][at:] if of is scope), None)
    if made is None or loss.source is not source or (frame is None and not is_file):
        return None
    anchor = made
    if frame is not None:
        loops = [x for x in frame.loops if isinstance(x, ast.stmt)]
        anchor = loops[-1] if loops else frame.statement
        outer = calls[calls.index(frame) + 1 :]
        again = () if is_file else (x.loops or _is_again(x) for x in outer)
        is_inside = root in chain(*map(binds, ast.walk(anchor)))
        if any(again) or made.lineno >= anchor.lineno or is_inside:
            return None
    line = anchor.lineno + (frame is None)
    is_near = scope in source.around(loss.statement)
    key: Any = source.file if is_file or frame is None else frame.code
    text = "" if is_file else source.segment(scope)

    def known_there(names: Iterable[str]) -> list[str]:
        pairs = [(x, bound.get(_root(x))) for x in names]
        there = [x for x, by in pairs if (by.lineno < line if by is not None else not is_file)]
        return [x for x in there if not (x.startswith("self.") and f"{x} =" in text)]

    models, optimizers = (known_there(names.get(key, [])) for names in (sampler.names, trainer))
    parts = base + suffix, models, optimizers
    return Where(source, anchor, frame is None, *parts, is_global=not is_near)


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


def _bound(source: Source, scope: ast.AST) -> dict[str, Any]:
    """Return the names that a scope binds, with their last statement, or the scope."""
    bindings: dict[str, Any] = {}
    for node in ast.walk(scope):
        around = [node, *source.around(node)]
        owners = (parent for parent in around[1:] if isinstance(parent, (ast.ClassDef, *SCOPES)))
        by: Any = next(x for x in around if x is scope or isinstance(x, ast.stmt))
        is_header = hasattr(by, "body") and by not in (node, scope)  # such as that of a loop
        is_own = node is not scope and not is_header and next(owners) is scope
        for name in binds(node) if is_own else ():
            bindings[name] = max(by, bindings.get(name, by), key=lambda statement: statement.lineno)
    return bindings


def binds(node: ast.AST) -> list[str]:
    """Return the names that a node binds."""
    if isinstance(node, ast.Name):
        return [node.id] if isinstance(node.ctx, ast.Store) else []
    if isinstance(node, ast.alias):
        return [(node.asname or node.name).partition(".")[0]]
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    return [node.arg] if isinstance(node, ast.arg) else []
