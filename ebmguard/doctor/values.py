"""Numbers in a source file: literals, constants, and the defaults of its command line."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable

from .source import FUNCTIONS, Source, name_of

__all__ = ["number", "settings"]

_OPERATIONS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.Pow: lambda a, b: a**b,
}
_DEPTH = 8


def settings(source: Source) -> dict[str, ast.expr]:
    """Defaults by the attribute they are read as: argparse, absl flags, and dataclass fields."""
    found: dict[str, ast.expr] = {}
    for call in source.calls("add_argument"):
        names = [arg.value for arg in call.args if isinstance(arg, ast.Constant)]
        default = next((each.value for each in call.keywords if each.arg == "default"), None)
        dest = next((each.value for each in call.keywords if each.arg == "dest"), None)
        long = [name for name in names if isinstance(name, str)]
        name = dest.value if isinstance(dest, ast.Constant) else max(long, key=len, default="")
        if default is not None and isinstance(name, str):
            found[name.lstrip("-").replace("-", "_")] = default
    for call in source.calls("DEFINE_float", "DEFINE_integer", "DEFINE_bool", "DEFINE_string"):
        if len(call.args) > 1 and isinstance(call.args[0], ast.Constant):
            found[str(call.args[0].value)] = call.args[1]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and field.value is not None:
                    found.setdefault(name_of(field.target), field.value)
    return found


def number(source: Source, node: ast.expr | None, depth: int = _DEPTH) -> float | None:
    """The number that an expression stands for, as far as the file tells; else None."""
    if node is None or not depth:
        return None
    if isinstance(node, ast.Constant):
        value = node.value
        return float(value) if isinstance(value, int | float) else None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        inner = number(source, node.operand, depth - 1)
        return None if inner is None else inner * (-1 if isinstance(node.op, ast.USub) else 1)
    if isinstance(node, ast.BinOp):
        operation = _OPERATIONS.get(type(node.op))
        left = number(source, node.left, depth - 1)
        right = number(source, node.right, depth - 1)
        if operation is None or left is None or right is None:
            return None
        try:
            result = operation(left, right)
        except (ZeroDivisionError, OverflowError):
            return None
        return result if isinstance(result, float) and math.isfinite(result) else None
    if isinstance(node, ast.Name):
        return number(source, _constant(source, node), depth - 1)
    if isinstance(node, ast.Attribute):
        # args.sgld_lr, FLAGS.step_lr, config.sgld.lr: the last part is the setting's name.
        return number(source, settings(source).get(node.attr), depth - 1)
    return None


def _constant(source: Source, node: ast.Name) -> ast.expr | None:
    """The value of a name that has only one: assigned once, or a parameter's default."""
    assigned = source.assigned.get(node.id, [])
    values = {ast.unparse(each.value) for each in assigned}
    if len(values) == 1:
        return assigned[0].value
    for scope in source.above(node):
        if isinstance(scope, FUNCTIONS) and not assigned:
            arguments = [*scope.args.posonlyargs, *scope.args.args]
            defaults = scope.args.defaults
            known = dict(
                zip(
                    [a.arg for a in arguments[len(arguments) - len(defaults) :]],
                    defaults,
                    strict=True,
                )
            )
            known |= {
                a.arg: default
                for a, default in zip(scope.args.kwonlyargs, scope.args.kw_defaults, strict=True)
                if default is not None
            }
            if node.id in known:
                return known[node.id]
    return None
