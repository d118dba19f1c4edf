"""How a source file uses the guard, where it does."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from .source import Source, name_of

__all__ = ["Usage", "find_usages"]


@dataclass(frozen=True)
class Usage:
    """One call of ``guard``.

    Attributes:
        call: the call.
        statement: the statement that it is part of.
        guard, loss, sampler: names that its result is bound to; empty for those that are not.
        original: the name of the sampler that it was given; empty where it was none.
    """

    call: ast.Call
    statement: ast.stmt | None
    guard: str
    loss: str
    sampler: str
    original: str

    def option(self, name: str) -> ast.expr | None:
        """A keyword argument."""
        return next((each.value for each in self.call.keywords if each.arg == name), None)

    def gives(self, *names: str) -> bool:
        """Whether one of these keywords is given, or may be among ``**settings``."""
        return any(each.arg is None or each.arg in names for each in self.call.keywords)

    @property
    def is_inline(self) -> bool:
        """Whether it was given no sampler."""
        given = self.call.args[1] if len(self.call.args) > 1 else self.option("sampler")
        return given is None or (isinstance(given, ast.Constant) and given.value is None)


def find_usages(source: Source) -> list[Usage]:
    """Every call of :func:`ebmguard.guard` in a file, in its order."""
    names = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                package = alias.name.partition(".")[0]
                # `import ebmguard.adapters.jem` binds the package too.
                if package == "ebmguard" and (alias.asname is None or alias.name == package):
                    names.add(f"{alias.asname or package}.guard")
        elif isinstance(node, ast.ImportFrom) and node.module == "ebmguard":
            names |= {a.asname or a.name for a in node.names if a.name == "guard"}
    return [_usage(source, call) for call in source.all_calls if name_of(call.func) in names]


def _usage(source: Source, call: ast.Call) -> Usage:
    statement = source.statement(call)
    guard = loss = sampler = ""
    if isinstance(statement, ast.Assign) and statement.value is call:
        target = statement.targets[0]
        if isinstance(target, ast.Tuple) and len(target.elts) == 2:
            loss, sampler = (name_of(each) for each in target.elts)
        else:
            guard = name_of(target)
            for name, values in source.assigned.items():  # cd_loss, sample_q = g
                for each in values:
                    if name_of(each.value) == guard and each.value is not call:
                        loss, sampler = (name, sampler) if not loss else (loss, name)
    given = call.args[1] if len(call.args) > 1 else None
    if given is None:
        given = next((each.value for each in call.keywords if each.arg == "sampler"), None)
    original = name_of(given) if given is not None else ""
    return Usage(call, statement, guard, loss, sampler, original)
