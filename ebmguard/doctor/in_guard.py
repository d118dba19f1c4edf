"""A guard that is in a trainer's file, but not wholly in place."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..alerts import Level
from ..check import Problem
from .differences import sampling_functions
from .facts import Facts
from .source import Function, Source, name_of
from .usage import Usage

__all__ = ["of_guard"]


def of_guard(facts: Facts) -> Iterator[Problem]:
    """A guard that is in the file, but not wholly in place."""
    source = facts.source
    for usage in facts.usages:
        yield from _local_name(facts, usage.statement, usage.sampler, usage.original)
        if not usage.is_inline:
            yield from _sampler(source, usage)
        yield from _loss(facts, usage)
    if facts.usages:
        for each in facts.differences:
            if each.is_known:
                yield Problem(
                    Level.WARN,
                    "unguarded_difference",
                    source.where(each.statement),
                    f"`{source.line(each.statement)}` is a contrastive term beside the guard's.",
                    "a guard of its own for another population of energies, or the guarded loss; "
                    "nothing, if it is only logged.",
                )
        yield from _plots(facts)


def _sampler(source: Source, usage: Usage) -> Iterator[Problem]:
    guarded = usage.sampler or f"{usage.guard}.sampler"
    plain = [
        node
        for node in source.all_calls
        if usage.original
        and usage.original != guarded
        and name_of(node.func) == usage.original
        and not _is_paused(source, node)
    ]
    for node in plain:
        yield Problem(
            Level.ERROR,
            "untempered_sampler",
            source.where(node),
            f"`{usage.original}` is the sampler as it was: its samples are not drawn from the "
            "tempered energy that the guarded loss expects.",
            f"call {guarded}(...), the guarded one.",
        )
    if not plain and guarded not in _read(source) and not _is_handed_on(source, usage.guard):
        yield Problem(
            Level.ERROR,
            "sampler_unused",
            source.where(usage.call),
            f"The guarded sampler `{guarded}` is never used in this file.",
            f"call {guarded}(...) where samples are drawn.",
        )


def _loss(facts: Facts, usage: Usage) -> Iterator[Problem]:
    source = facts.source
    names = {usage.loss} if usage.loss else set()
    if usage.guard:
        names |= {f"{usage.guard}.{name}" for name in ("loss_fn", "loss", "reweight")}
    read = _read(source)
    if names and not names & read and not _is_handed_on(source, usage.guard):
        known = [each for each in facts.differences if each.is_known]
        call = usage.loss or f"{usage.guard}.loss"
        energies = "f_pos, f_neg"
        if known:
            energies = f"{known[0].positive.per_sample}, {known[0].negative.per_sample}"
        yield Problem(
            Level.ERROR,
            "loss_unused",
            source.where(usage.call),
            "The guarded loss is never used in this file: samples are tempered, but not weighted.",
            f"{call}({energies}) instead of the contrastive difference.",
        )
    elif not any(name.endswith(".check") for name in read):
        yield Problem(
            Level.INFO,
            "check",
            source.where(usage.call),
            "The guard can look at the network itself, which this file does not show.",
            "g.attach(model=..., optimizer=...), then ebmguard.check.show(g.check(example_batch)).",
        )


def _is_handed_on(source: Source, guard: str) -> bool:
    """Whether the guard itself is returned, passed or unpacked: then its use is not seen here."""
    return any(
        isinstance(node, ast.Name)
        and node.id == guard
        and isinstance(node.ctx, ast.Load)
        and not isinstance(source.parents.get(node), ast.Attribute)
        for node in ast.walk(source.tree)
    )


def _read(source: Source) -> set[str]:
    """Every name that is read, and what it is read from: ``g`` and ``g.loss`` of ``g.loss(f)``."""
    return {
        name_of(node)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


def _plots(facts: Facts) -> Iterator[Problem]:
    """Calls of the guarded sampler now and then, which are no training steps."""
    source = facts.source
    names = {usage.sampler for usage in facts.usages if usage.sampler}
    for node in source.all_calls:
        now_and_then = any(
            isinstance(each, ast.If)
            and any(isinstance(part, ast.Mod) for part in ast.walk(each.test))
            for each in source.above(node)
        )
        if name_of(node.func) in names and now_and_then and not _is_paused(source, node):
            yield Problem(
                Level.INFO,
                "plot",
                source.where(node),
                "The guarded sampler is called now and then, for a picture: tempered, and its "
                "gradient norm joins the next step's.",
                "`with g.paused():` around it.",
            )


def _local_name(
    facts: Facts, statement: ast.stmt | None, target: str, original: str
) -> Iterator[Problem]:
    if statement is None or not target or target != original or "." in target:
        return
    source = facts.source
    scope = source.function(statement)
    functions = sampling_functions(source, facts.samplers)
    bound = [each for each in source.assigned.get(target, []) if each.scope is scope]
    earlier = [each for each in bound if each.line < statement.lineno]
    if (
        scope is not None
        and target in functions
        and not earlier
        and not _declared_global(scope, target)
        and target not in {argument.arg for argument in scope.args.args}
    ):
        yield Problem(
            Level.ERROR,
            "local_name",
            source.where(statement),
            f"The assignment makes `{target}` local to the function, so that it has no value yet "
            "on the right side: UnboundLocalError.",
            f"guard it at module level, after `def {target}`.",
        )


def _declared_global(scope: Function, name: str) -> bool:
    return any(isinstance(node, ast.Global) and name in node.names for node in ast.walk(scope))


def _is_paused(source: Source, node: ast.AST) -> bool:
    return any(
        isinstance(each, ast.With) and "paused" in ast.unparse(each.items[0].context_expr)
        for each in source.above(node)
    )
