"""Samplers in a source file: loops that differentiate an energy and move its input along."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from .source import Function, Source, name_of
from .updates import (
    CLIPS,
    gradient_names,
    is_noise,
    is_sum,
    last_name,
    mentions_gradient,
    noise_names,
    noise_of,
    root_of,
    terms,
    updates,
)
from .values import number

__all__ = ["Sampler", "find_samplers"]

_GRAD_CALLS = {"grad"}


@dataclass
class Sampler:
    """A sampling loop.

    Attributes:
        source: the file.
        loop: the innermost loop that differentiates.
        function: the function around it, None for a loop at module level.
        energy: the call whose result is differentiated, None where it was not found.
        sign: 1 where the samples climb what was differentiated, -1 where they descend, 0 unknown.
        step, noise: factors of gradient and noise; None where there is none or it is not known.
        has_noise: whether noise is added at all.
        moves_input: whether it is the energy's input that the gradient moves, and not a momentum.
        clipped: where the gradient is clipped.
        clamps: where the samples are clamped, and to what.
    """

    source: Source
    loop: ast.AST
    function: Function | None
    energy: ast.Call | None = None
    sign: int = 0
    step: float | None = None
    noise: float | None = None
    has_noise: bool = False
    moves_input: bool = False
    clipped: list[ast.AST] = field(default_factory=list)
    clamps: list[tuple[ast.Call, float | None, float | None]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Of the function; empty for a loop without one."""
        return getattr(self.function, "name", "")

    @property
    def module(self) -> str:
        """The expression that is called for the energy: ``f`` of ``f(x)`` and ``f.forward(x)``."""
        return name_of(self.energy.func).removesuffix(".forward") if self.energy else ""

    @property
    def is_inline(self) -> bool:
        """Whether it is part of a training loop, rather than a function that returns samples."""
        if self.function is None:
            return True
        steps = [
            node
            for node in ast.walk(self.function)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("step", "zero_grad")
        ]
        return bool(steps)

    @property
    def takes_module(self) -> bool:
        """Whether the module is a parameter of the function, where the guard finds it."""
        if self.function is None or not self.module:
            return False
        arguments = self.function.args
        names = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        return self.module in names


def find_samplers(source: Source) -> list[Sampler]:
    """Every sampling loop of a file, in its order."""
    loops: dict[ast.AST, Sampler] = {}
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call):
            continue
        last = name_of(node.func).split(".")[-1] or getattr(node.func, "attr", "")
        if last in _GRAD_CALLS and node.args:
            differentiated: ast.expr = node.args[0]
        elif last == "backward" and isinstance(node.func, ast.Attribute):
            differentiated = node.func.value
        else:
            continue
        loop = next(
            (
                each
                for each in source.above(node)
                if isinstance(each, ast.For | ast.While | Function)
            ),
            None,
        )
        if not isinstance(loop, ast.For | ast.While) or loop in loops:
            continue
        sampler = _read(source, loop, differentiated, by_backward=last == "backward")
        if sampler is not None:
            loops[loop] = sampler
    found = sorted(loops.values(), key=lambda each: getattr(each.loop, "lineno", 0))
    # The best understood loop of a function stands for it.
    best: dict[object, Sampler] = {}
    for each in found:
        key = each.function or each.loop
        if key not in best or (best[key].energy is None and each.energy is not None):
            best[key] = each
    return list(best.values())


def _read(
    source: Source, loop: ast.For | ast.While, differentiated: ast.expr, *, by_backward: bool
) -> Sampler | None:
    sampler = Sampler(source, loop, source.function(loop))
    gradients = gradient_names(loop)
    noises = noise_names(source, loop)
    moved = set()
    for target, expression, sign in updates(loop):
        if target in gradients or target in noises:
            continue
        for factor_sign, factors in terms(source, expression, loop):
            total = sign * factor_sign
            if any(mentions_gradient(each, gradients) for each in factors):
                moved.add(target)
                _read_drift(sampler, source, factors, gradients, total)
            elif any(is_noise(each, noises) for each in factors):
                _read_noise(sampler, source, factors, noises)
    if not moved:
        return None
    energy, negated = _energy(differentiated, loop)
    if by_backward and (energy is None or not _called_with(energy, moved)):
        return None  # the backward pass of a training loop
    sampler.energy = energy
    sampler.moves_input = energy is not None and _called_with(energy, moved | _same_as(loop, moved))
    if negated:
        sampler.sign = -sampler.sign
    _read_clips(sampler, source, loop, gradients, moved)
    return sampler


def _read_drift(
    sampler: Sampler, source: Source, factors: list[ast.expr], gradients: set[str], sign: int
) -> None:
    size: float | None = 1.0
    for factor in factors:
        if not mentions_gradient(factor, gradients):
            own = number(source, factor)
            size = None if own is None or size is None else size * own
        elif isinstance(factor, ast.Call) and last_name(factor) in CLIPS:
            sampler.clipped.append(factor)
        elif isinstance(factor, ast.Call) and not isinstance(factor.func, ast.Attribute):
            return  # a function of the gradient, which may do anything with it
        elif isinstance(factor, ast.Call) and not mentions_gradient(factor.func, gradients):
            return
    if size is not None and size < 0:
        sign, size = -sign, -size
    elif size is None and any(
        isinstance(each, ast.Constant) and each.value == -1 for each in factors
    ):
        sign = -sign
    sampler.sign = sampler.sign or sign
    if sampler.step is None:
        sampler.step = size


def _read_noise(
    sampler: Sampler, source: Source, factors: list[ast.expr], noises: dict[str, float | None]
) -> None:
    size: float | None = 1.0
    for factor in factors:
        own = (
            noise_of(factor, noises, source) if is_noise(factor, noises) else number(source, factor)
        )
        size = None if own is None or size is None else size * own
    if size == 0:
        return
    sampler.has_noise = True
    sampler.noise = size


def _read_clips(
    sampler: Sampler, source: Source, loop: ast.AST, gradients: set[str], moved: set[str]
) -> None:
    for node in ast.walk(loop):
        if not (isinstance(node, ast.Call) and last_name(node) in CLIPS):
            continue
        as_method = isinstance(node.func, ast.Attribute) and root_of(node.func.value) not in (
            "torch",
            "t",
            "np",
            "F",
            "nn",
        )
        subject = node.func.value if as_method and isinstance(node.func, ast.Attribute) else None
        arguments = list(node.args)
        if subject is None and arguments:
            subject = arguments.pop(0)
        if subject is None:
            continue
        if mentions_gradient(subject, gradients) and not is_sum(subject):
            if node not in sampler.clipped:
                sampler.clipped.append(node)
        elif root_of(subject) in moved or is_sum(subject):
            ends = arguments + [each.value for each in node.keywords]
            low, high = (number(source, each) for each in (*ends, *[None] * 2)[:2])
            sampler.clamps.append((node, low, high))


def _energy(node: ast.expr, loop: ast.AST) -> tuple[ast.Call | None, bool]:
    """The call behind a differentiated expression, and whether it was negated on the way."""
    negated = False
    for _ in range(12):
        if isinstance(node, ast.List | ast.Tuple) and node.elts:
            node = node.elts[0]
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            node, negated = node.operand, not negated
        elif isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.BinOp):
            node = node.left if not isinstance(node.left, ast.Constant) else node.right
        elif isinstance(node, ast.Call):
            func = node.func
            if isinstance(func, ast.Attribute) and func.attr in (
                "sum",
                "mean",
                "squeeze",
                "view",
                "flatten",
                "reshape",
                "backward",
            ):
                node = node.args[0] if name_of(func.value) in ("torch", "t") else func.value
            else:
                return (node if name_of(func) else None), negated
        elif isinstance(node, ast.Name):
            values = [
                each.value
                for each in ast.walk(loop)
                if isinstance(each, ast.Assign) and _targets(each, node.id)
            ]
            if not values:
                return None, negated
            node = values[0]
        else:
            return None, negated
    return None, negated


def _same_as(loop: ast.AST, names: set[str]) -> set[str]:
    """Variables that are set to one of these, as in ``x.data = moved.data``."""
    return {
        root_of(target)
        for node in ast.walk(loop)
        if isinstance(node, ast.Assign) and root_of(node.value) in names
        for target in node.targets
    }


def _targets(node: ast.Assign, name: str) -> bool:
    return any(
        isinstance(each, ast.Name) and each.id == name
        for target in node.targets
        for each in ast.walk(target)
    )


def _called_with(call: ast.Call, names: set[str]) -> bool:
    return any(
        root_of(arg) in names for arg in (*call.args, *(each.value for each in call.keywords))
    )
