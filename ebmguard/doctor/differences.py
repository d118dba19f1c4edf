"""Contrastive differences in a source file: energies of data and of samples, subtracted."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .sampling import Sampler
from .source import Source, name_of

__all__ = ["Difference", "Side", "energy_modules", "find_differences", "sampling_functions"]

_SAID = {"print", "format", "write", "append", "update", "info", "log", "set_description", "item"}
_DEPTH = 8
# Samplers by their usual names, where the file has none of its own.
_IMPORTED = ("sample_q", "sample_langevin", "sgld", "langevin", "gen_image", "sample_new_exmps")


@dataclass(frozen=True)
class Side:
    """One side of a difference.

    Attributes:
        per_sample: code of the energies before any mean.
        is_mean: whether the mean is taken before the subtraction.
        is_inline: whether that mean is taken of a call, so that no name holds the energies.
        is_negative: whether the input was drawn by a sampler; None where that cannot be told.
    """

    per_sample: str
    is_mean: bool
    is_inline: bool
    is_negative: bool | None


@dataclass(frozen=True)
class Difference:
    """``left - right`` of two energies.

    Attributes:
        node: the subtraction, with a minus in front of it where there is one.
        statement: which it is part of.
        left, right: its sides.
        is_negated: whether there is a minus in front.
    """

    node: ast.expr
    statement: ast.stmt
    left: Side
    right: Side
    is_negated: bool

    @property
    def positive(self) -> Side:
        """The side of the data, as far as it can be told; else the left one."""
        return self.right if self.left.is_negative and not self.right.is_negative else self.left

    @property
    def negative(self) -> Side:
        """The other side."""
        return self.left if self.positive is self.right else self.right

    @property
    def is_known(self) -> bool:
        """Whether one of its sides is known to be the samples'."""
        return bool(self.left.is_negative) != bool(self.right.is_negative)

    @property
    def is_data_minus_samples(self) -> bool:
        """The sign of what the statement adds up."""
        return (self.positive is self.left) != self.is_negated


def find_differences(source: Source, samplers: Sequence[Sampler]) -> list[Difference]:
    """Differences of energies that are trained on, in the file's order."""
    modules = energy_modules(source, samplers)
    negatives = _negative_names(source, samplers)
    found = []
    for node in ast.walk(source.tree):
        if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub)):
            continue
        statement = source.statement(node)
        if (
            statement is None
            or _is_said(source, node, statement)
            or _in_sampler(source, node, samplers)
        ):
            continue
        left = _side(source, node.left, modules, negatives)
        right = _side(source, node.right, modules, negatives)
        if left is None or right is None or left.per_sample == right.per_sample:
            continue
        parent = source.parents.get(node)
        negated = isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.USub)
        whole = parent if negated and isinstance(parent, ast.UnaryOp) else node
        found.append(Difference(whole, statement, left, right, negated))
    return sorted(found, key=lambda each: each.statement.lineno)


def energy_modules(source: Source, samplers: Sequence[Sampler]) -> set[str]:
    """What the file calls the energy: in its samplers, and where these are given it."""
    names = {sampler.module for sampler in samplers if sampler.module}
    for sampler in samplers:
        function = sampler.function
        if function is None:
            continue
        if sampler.takes_module:
            place = [a.arg for a in function.args.args].index(sampler.module)
            for call in source.calls(sampler.name):
                given = dict(enumerate(call.args)).get(place)
                named = [each.value for each in call.keywords if each.arg == sampler.module]
                names |= {name_of(each) for each in (given, *named) if each is not None}
        parent = source.parents.get(function)
        if isinstance(parent, ast.ClassDef):  # made from the module, by custom its first argument
            names |= {name_of(arg) for call in source.calls(parent.name) for arg in call.args[:1]}
    names.discard("")
    return names | {name.split(".")[-1] for name in names}


def _is_said(source: Source, node: ast.AST, statement: ast.stmt) -> bool:
    """Whether the difference is only printed or logged."""
    for each in source.above(node):
        if each is statement:
            break
        if isinstance(each, ast.Call):
            last = each.func.attr if isinstance(each.func, ast.Attribute) else name_of(each.func)
            if last in _SAID:
                return True
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Subscript):
        return isinstance(statement.targets[0].slice, ast.Constant)  # kvs["e_diff"] = ...
    return False


def _in_sampler(source: Source, node: ast.AST, samplers: Sequence[Sampler]) -> bool:
    loops = {sampler.loop for sampler in samplers}
    return any(each in loops for each in source.above(node))


def _negative_names(source: Source, samplers: Sequence[Sampler]) -> set[str]:
    """Names that hold samples: what a sampler returned, and what an inline one moves."""
    drawing = sampling_functions(source, samplers)
    names: set[str] = set()
    for sampler in samplers:
        if sampler.is_inline and sampler.energy is not None:
            names |= {name_of(arg) for arg in sampler.energy.args[:1]}
    for name, values in source.assigned.items():
        for each in values:
            calls = [node for node in ast.walk(each.value) if isinstance(node, ast.Call)]
            if any(name_of(call.func).split(".")[-1] in drawing for call in calls):
                names.add(name)
    return names - {""}


def sampling_functions(source: Source, samplers: Sequence[Sampler]) -> set[str]:
    """Names of functions that return samples: those with a sampling loop, and who calls them."""
    drawing = {sampler.name for sampler in samplers if sampler.name and not sampler.is_inline}
    if not drawing:
        return set(_IMPORTED)
    functions = [node for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef)]
    while True:
        size = len(drawing)
        for function in functions:
            inside = list(ast.walk(function))
            calls = {name_of(n.func).split(".")[-1] for n in inside if isinstance(n, ast.Call)}
            returns = any(isinstance(n, ast.Return) and n.value is not None for n in inside)
            trains = calls & {"backward", "step", "zero_grad"}
            if calls & drawing and returns and not trains:
                drawing.add(function.name)
        if len(drawing) == size:
            return drawing


def _side(source: Source, node: ast.expr, modules: set[str], negatives: set[str]) -> Side | None:
    is_mean = False
    current = node
    for _ in range(_DEPTH):
        if isinstance(current, ast.Call) and isinstance(current.func, ast.Attribute):
            if current.func.attr == "mean":
                is_torch = name_of(current.func.value) in ("torch", "t")
                inner = current.args[0] if is_torch and current.args else current.func.value
                inline = isinstance(inner, ast.Call)
                side = _energies(source, inner, modules, negatives)
                return None if side is None else Side(source.code(inner), True, inline, side)
            if current.func.attr in ("squeeze", "view", "flatten", "clone", "float"):
                current = current.func.value
                continue
        if isinstance(current, ast.Name):
            value = source.value_at(current.id, node)
            energies = _energies(source, current, modules, negatives)
            if value is not None and _is_mean(value):
                current, is_mean = value, True
                continue
            if energies is None:
                return None
            return Side(source.code(current), is_mean, False, energies)
        break
    energies = _energies(source, current, modules, negatives)
    if energies is None:
        return None
    return Side(source.code(current), is_mean, isinstance(current, ast.Call), energies)


def _is_mean(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "mean"
    )


def _energies(
    source: Source, node: ast.expr, modules: set[str], negatives: set[str], depth: int = _DEPTH
) -> bool | None:
    """Whether an expression is the energy of samples; None where it is no energy at all."""
    if not depth:
        return None
    if isinstance(node, ast.Call):
        name = name_of(node.func).removesuffix(".forward")
        if name in modules or (name.startswith("self.") and name.split(".")[-1] in modules):
            return any(_reaches(source, arg, negatives) for arg in node.args)
        if isinstance(node.func, ast.Attribute):
            return _energies(source, node.func.value, modules, negatives, depth - 1)
        return None
    if isinstance(node, ast.Subscript):
        return _energies(source, node.value, modules, negatives, depth - 1)
    if isinstance(node, ast.Name):
        value = source.value_at(node.id, node)
        found = None if value is None else _energies(source, value, modules, negatives, depth - 1)
        if found is not None and isinstance(value, ast.Call) and _is_chunk(value):
            # One call for both: real first, by custom; the name tells where it can.
            return any(part in node.id.lower() for part in ("fake", "neg", "sample", "gen"))
        return found
    return None


def _is_chunk(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and node.func.attr in ("chunk", "split")


def _reaches(source: Source, node: ast.expr, negatives: set[str], depth: int = 4) -> bool:
    """Whether an expression is made of samples."""
    for each in _names(node):
        if each.id in negatives:
            return True
        value = source.value_at(each.id, each) if depth else None
        if value is not None and _reaches(source, value, negatives, depth - 1):
            return True
    return False


def _names(node: ast.expr) -> Iterator[ast.Name]:
    yield from (each for each in ast.walk(node) if isinstance(each, ast.Name))
