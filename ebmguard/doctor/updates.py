"""How a loop moves a variable: its updates as sums of gradients and noise with their factors."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .source import Source, name_of
from .values import number

__all__ = [
    "CLIPS",
    "gradient_names",
    "is_noise",
    "is_sum",
    "last_name",
    "mentions_gradient",
    "noise_names",
    "noise_of",
    "root_of",
    "terms",
    "updates",
]

CLIPS = {"clamp", "clamp_", "clip", "clip_", "hardtanh", "clip_by_value", "clip_vector_norm"}
_NOISE = {"randn", "randn_like", "normal", "normal_", "Normal"}
_DEPTH = 6


def updates(loop: ast.AST) -> Iterator[tuple[str, ast.expr, int]]:
    """Changes of a variable by an expression: target, expression, and its sign."""
    for node in ast.walk(loop):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add | ast.Sub):
            yield root_of(node.target), node.value, 1 if isinstance(node.op, ast.Add) else -1
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = root_of(node.targets[0])
            of_itself = any(root_of(each) == target for each in ast.walk(node.value))
            if target and (of_itself or is_sum(node.value)):
                yield target, node.value, 1
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("add_", "sub_")
            and node.args
        ):
            alpha = next((each.value for each in node.keywords if each.arg == "alpha"), None)
            value = node.args[0]
            if alpha is None and len(node.args) == 2:  # add_(alpha, x), as it once was
                alpha, value = node.args
            expression = value if alpha is None else ast.BinOp(alpha, ast.Mult(), value)
            yield root_of(node.func.value), expression, 1 if node.func.attr == "add_" else -1


def terms(
    source: Source, node: ast.expr, loop: ast.AST, depth: int = _DEPTH
) -> Iterator[tuple[int, list[ast.expr]]]:
    """A sum as signed products of factors; names of the loop that stand for sums are opened."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        yield from terms(source, node.left, loop, depth)
        other = 1 if isinstance(node.op, ast.Add) else -1
        for sign, factors in terms(source, node.right, loop, depth):
            yield other * sign, factors
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        for sign, factors in terms(source, node.operand, loop, depth):
            yield -sign, factors
    elif isinstance(node, ast.Name) and depth and (value := _once(node.id, loop)) is not None:
        yield from terms(source, value, loop, depth - 1)
    else:
        yield 1, list(_factors(node))


def _factors(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        yield from _factors(node.left)
        yield from _factors(node.right)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield ast.Constant(-1.0)
        yield from _factors(node.operand)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        yield from _factors(node.left)
        yield ast.BinOp(ast.Constant(1.0), ast.Div(), node.right)
    else:
        yield node


def _once(name: str, loop: ast.AST) -> ast.expr | None:
    """An arithmetic expression that a name is assigned once in the loop."""
    values = [
        node.value
        for node in ast.walk(loop)
        if isinstance(node, ast.Assign) and [root_of(each) for each in node.targets] == [name]
    ]
    if len(values) == 1 and isinstance(values[0], ast.BinOp | ast.UnaryOp):
        mentioned = {each.id for each in ast.walk(values[0]) if isinstance(each, ast.Name)}
        return None if name in mentioned else values[0]
    return None


def gradient_names(loop: ast.AST) -> set[str]:
    """Names in the loop that hold a gradient, or something made of it."""
    names: set[str] = set()
    while True:
        size = len(names)
        for node in ast.walk(loop):
            if not isinstance(node, ast.Assign):
                continue
            own = {root_of(target) for target in node.targets} - {""}
            itself = any(root_of(each) in own for each in ast.walk(node.value))
            if mentions_gradient(node.value, names) and not _moves(node) and not itself:
                for target in node.targets:
                    names |= {each.id for each in ast.walk(target) if isinstance(each, ast.Name)}
        if len(names) == size:
            return names


def _moves(node: ast.Assign) -> bool:
    """Whether the statement is a sample's move rather than a gradient's definition."""
    if not isinstance(node.value, ast.BinOp | ast.Call):
        return False
    signs = [each for each in ast.walk(node.value) if isinstance(each, ast.Add | ast.Sub)]
    return bool(signs)


def mentions_gradient(node: ast.AST, names: set[str]) -> bool:
    """Whether an expression is made of a gradient, by the names that hold some."""
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and each.id in names:
            return True
        if isinstance(each, ast.Attribute) and each.attr == "grad":
            return True
        if isinstance(each, ast.Call) and last_name(each) == "grad":
            return True
    return False


def noise_names(source: Source, loop: ast.AST) -> dict[str, float | None]:
    """Names that hold noise, with its standard deviation where it is known."""
    scope = source.function(loop) or source.tree
    found: dict[str, float | None] = {}
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call | ast.Attribute):
            inner = [each for each in ast.walk(node.value) if isinstance(each, ast.Call)]
            if any(last_name(each) in _NOISE for each in inner):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        found[target.id] = 1.0
    for node in ast.walk(loop):
        if (
            isinstance(node, ast.Call)
            and last_name(node) == "normal_"
            and isinstance(node.func, ast.Attribute)
        ):
            std = (
                node.args[1]
                if len(node.args) > 1
                else next(
                    (each.value for each in node.keywords if each.arg == "std"), ast.Constant(1.0)
                )
            )
            found[root_of(node.func.value)] = number(source, std)
    return found


def is_noise(node: ast.AST, names: dict[str, float | None]) -> bool:
    """Whether a factor is noise, by the names that hold some."""
    return any(
        (isinstance(each, ast.Name) and each.id in names)
        or (isinstance(each, ast.Call) and last_name(each) in _NOISE)
        for each in ast.walk(node)
    )


def noise_of(node: ast.expr, names: dict[str, float | None], source: Source) -> float | None:
    """Standard deviation of a factor that is noise, where it is known."""
    root = root_of(node)
    if root in names:
        return names[root]
    if isinstance(node, ast.Call) and last_name(node) == "normal" and len(node.args) > 1:
        return number(source, node.args[1])
    return 1.0


def is_sum(node: ast.AST) -> bool:
    """Whether an expression adds or subtracts at its top."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub)


def root_of(node: ast.AST) -> str:
    """The variable behind ``x``, ``x.data``, ``x.grad.data`` or ``x[i]``; empty for others."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        if isinstance(node, ast.Attribute) and name_of(node).startswith("self."):
            return ".".join(name_of(node).split(".")[:2])
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def last_name(node: ast.Call) -> str:
    """The function's or method's own name."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else name_of(node.func)
