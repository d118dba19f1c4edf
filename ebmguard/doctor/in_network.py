"""What goes wrong in the network, as far as its source shows."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..alerts import Level
from ..check import Problem
from .facts import Facts
from .source import Source, name_of
from .values import number

__all__ = ["of_network"]

_BATCH_NORMS = {"BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm", "batch_norm"}


def of_network(facts: Facts) -> Iterator[Problem]:
    """Batch normalisation, and a squeeze that drops the batch."""
    for source in (facts.source, *facts.beside):
        yield from _batch_norm(source)
        yield from _squeeze(source)
    yield from _weight_decay(facts.source)


def _batch_norm(source: Source) -> Iterator[Problem]:
    calls = [call for call in source.calls(*_BATCH_NORMS) if "convert" not in name_of(call.func)]
    if not calls:
        return
    always = [call for call in calls if not _is_an_option(source, call)]
    lines = ", ".join(str(call.lineno) for call in calls[:4]) + (", ..." if len(calls) > 4 else "")
    yield Problem(
        Level.WARN if always else Level.INFO,
        "batch_norm",
        source.where((always or calls)[0]),
        f"Batch normalisation (line{'s' if len(calls) > 1 else ''} {lines}"
        + ("" if always else ", one of several options")
        + "): in train mode f(x) depends on the other samples of its batch, and data and negatives "
        "are measured against different statistics.",
        "no normalisation, as JEM, GroupNorm or LayerNorm; or these layers in eval mode while "
        "energies are computed.",
    )


def _is_an_option(source: Source, call: ast.Call) -> bool:
    return any(isinstance(each, ast.If | ast.IfExp) for each in source.above(call))


def _squeeze(source: Source) -> Iterator[Problem]:
    for call in source.calls("squeeze"):
        statement = source.statement(call)
        function = source.function(call)
        inside = getattr(function, "name", "") in ("forward", "classify", "energy")
        bare = isinstance(call.func, ast.Attribute) and not call.args and not call.keywords
        if inside and bare and isinstance(statement, ast.Return):
            yield Problem(
                Level.INFO,
                "squeeze",
                source.where(call),
                f"`{source.line(statement)}` drops the batch too where it is one sample.",
                "squeeze(-1), or flatten(0); drop_last=True in the data loader hides it.",
            )


def _weight_decay(source: Source) -> Iterator[Problem]:
    found = []
    for call in source.calls("Adam", "SGD", "AdamW"):
        node = next((each.value for each in call.keywords if each.arg == "weight_decay"), None)
        if decay := number(source, node):
            found.append((call, decay))
    if found:
        call, decay = found[0]
        yield Problem(
            Level.INFO,
            "weight_decay",
            source.where(call),
            f"weight_decay is {decay:g}: where GradScale is small, the decay is what is left of "
            "the gradient, and Adam brings it to the size of a full step.",
            "weight_decay=0, as JEM, or AdamW.",
        )
