"""What goes wrong around the loss: divergence checks, means, checkpoints."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..alerts import Level
from ..check import Problem
from .facts import Facts
from .source import Source, name_of
from .values import number

__all__ = ["of_checkpoints", "of_checks", "of_means"]

# A loss or energy beyond this is no ordinary threshold.
_LARGE = 5.0
_FINITE = {"isnan", "isfinite", "isinf", "nan_to_num", "detect_anomaly"}


def of_checks(facts: Facts) -> Iterator[Problem]:
    """Divergence checks that NaN passes, and trainers without any."""
    source = facts.source
    found = False
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.If) or not (compared := _large_comparison(source, node.test)):
            continue
        ends = _end_of_run(node.body)
        if ends is None:
            continue
        found = True
        if _sees_nan(source, node):
            continue
        yield Problem(
            Level.ERROR,
            "nan_passes",
            source.where(node),
            f"`{compared}` is False for NaN, so that a lost run goes on and writes checkpoints; "
            f"where it is true, {ends}.",
            'a guard with action="raise" or "rollback", whose rule `nonfinite` sees NaN; or '
            "`not x <= limit` instead of `x > limit`, which is True for NaN.",
        )
    if not found and facts.differences and not facts.usages and not _names(source) & _FINITE:
        yield Problem(
            Level.WARN,
            "no_divergence_check",
            source.where(facts.differences[0].statement),
            "Nothing here notices that the run is lost.",
            "the guard's alerts (see the lines below), on_alert= for your own.",
        )


def of_means(facts: Facts) -> Iterator[Problem]:
    """Means that are taken before the loss could weigh the samples."""
    source = facts.source
    for each in facts.differences:
        inline = [side for side in (each.left, each.right) if side.is_mean and side.is_inline]
        if inline:
            codes = " and ".join(f"`{side.per_sample}.mean()`" for side in inline)
            yield Problem(
                Level.WARN,
                "means_too_early",
                source.where(each.statement),
                f"{codes}: the mean is all that is left of the energies, and a weight for each "
                "sample has nothing to act on.",
                "hand the energies themselves to the guarded loss: "
                f"cd_loss({each.positive.per_sample}, {each.negative.per_sample}).",
            )


def of_checkpoints(facts: Facts) -> Iterator[Problem]:
    """Checkpoints that cannot resume a run."""
    source = facts.source
    saved = list(source.calls("save"))
    states = [name_of(call.func).split(".")[-2:][0] for call in source.calls("state_dict")]
    if not saved or not states:
        return
    optimizers = [name for name in states if "opt" in name.lower()]
    if not optimizers and any(True for _ in source.calls("Adam", "SGD", "AdamW", "RMSprop")):
        yield Problem(
            Level.WARN,
            "checkpoint",
            source.where(next(source.calls("state_dict"))),
            "Checkpoints hold the network but not the optimizer: a run that is restarted from one "
            "has lost Adam's moments, and takes its first steps blindly.",
            "save optimizer.state_dict() too, the scheduler's, the replay buffer and the random "
            'generators; or action="rollback", which keeps all of it.',
        )


def _large_comparison(source: Source, test: ast.expr) -> str:
    """The code of a comparison of something's size with a large number; else empty."""
    for node in ast.walk(test):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            limit = number(source, node.comparators[0])
            is_above = isinstance(node.ops[0], ast.Gt | ast.GtE)
            code = source.code(node)
            sized = any(word in code for word in ("abs", "loss", "energy", "L", ".item()"))
            if is_above and limit is not None and limit >= _LARGE and sized and "%" not in code:
                return code
    return ""


def _end_of_run(body: list[ast.stmt]) -> str | None:
    for node in body:
        for each in ast.walk(node):
            if (
                isinstance(each, ast.BinOp)
                and isinstance(each.op, ast.Div)
                and isinstance(each.right, ast.Constant)
                and each.right.value == 0
            ):
                return "1/0 ends the run with a ZeroDivisionError that says nothing"
            if isinstance(each, ast.Raise):
                return "the run ends"
            if isinstance(each, ast.Assert) and isinstance(each.test, ast.Constant):
                return "`assert False` ends the run, unless Python runs with -O"
            if isinstance(each, ast.Call) and name_of(each.func) in ("exit", "quit", "sys.exit"):
                return "the run ends"
    last = body[-1]
    if isinstance(last, ast.Return | ast.Break):
        return "the run ends without a word of why"
    return None


def _sees_nan(source: Source, node: ast.If) -> bool:
    """Whether NaN is looked for in the same test, or in another one that ends the run."""
    if {
        name_of(n.func).split(".")[-1] for n in ast.walk(node.test) if isinstance(n, ast.Call)
    } & _FINITE:
        return True
    return any(
        isinstance(each, ast.If)
        and _end_of_run(each.body) is not None
        and {name_of(n.func).split(".")[-1] for n in ast.walk(each.test) if isinstance(n, ast.Call)}
        & _FINITE
        for each in ast.walk(source.tree)
    )


def _names(source: Source) -> set[str]:
    return {name_of(node.func).split(".")[-1] for node in source.all_calls}
