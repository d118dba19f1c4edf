"""The lines that would put the guard into a trainer, with the names of its own file."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from ..check.exponents import implied_scale
from .differences import Difference, sampling_functions
from .sampling import Sampler
from .source import Source, name_of

__all__ = ["Change", "retrofit"]

# Old lines and new lines, with the line of the file where they belong.
Change = tuple[int, tuple[str, ...], tuple[str, ...]]


def retrofit(
    source: Source, samplers: Sequence[Sampler], differences: Sequence[Difference]
) -> list[Change]:
    """What to change, in the file's order; empty where no sampler or no difference was found."""
    sampler = next((each for each in reversed(samplers) if each.energy is not None), None)
    own = [each for each in differences if each.is_known] or list(differences)
    if sampler is None or not own:
        return []
    first = own[0]
    loss, wrapping = _sampler_lines(source, sampler, samplers)
    changes = [_import(source), *wrapping]
    changes.append(_loss_line(source, first, sampler, loss))
    return sorted(changes, key=lambda change: change[0])


def _import(source: Source) -> Change:
    imports = [n for n in source.tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    line = imports[-1].end_lineno or imports[-1].lineno if imports else 1
    return line, (), ("import ebmguard",)


def _sampler_lines(
    source: Source, sampler: Sampler, samplers: Sequence[Sampler]
) -> tuple[str, list[Change]]:
    """The name of the guarded loss, and the changes where samples are drawn."""
    options = _options(sampler)
    if sampler.is_inline:
        assert sampler.energy is not None
        statement = source.statement(sampler.energy)
        assert statement is not None
        old = source.line(statement)
        code = source.code(sampler.energy)
        make = f"g = ebmguard.guard(None, None, {options})"
        before = _first_line_of_loop(source, sampler)
        return "g.loss", [
            (before, (), (f"{make}     # before the training loop",)),
            (statement.lineno, (old,), (old.replace(code, f"g.temper({code})", 1),)),
        ]
    model = "" if sampler.takes_module or not sampler.module else f"model={sampler.module}, "
    factory = _made_by(source, sampler)
    if factory is not None:
        target, value = factory
        code = source.code(value.value)
        new = f"cd_loss, {target} = ebmguard.guard(None, {code}, {model}{options})"
        return "cd_loss", [(value.lineno, (source.line(value),), (new,))]
    holder = _holder(source, sampler, samplers)
    if holder is not None:
        statement, target, method = holder
        code = source.code(statement.value)
        own = f"{target.rpartition('.')[0]}." if "." in target else ""
        module = f"model={_module_of(statement.value)}, " if _module_of(statement.value) else model
        new = (
            f"{own}cd_loss, {target} = ebmguard.guard(None, {code}, "
            f'methods=("{method}",), {module}{options})'
        )
        return f"{own}cd_loss", [(statement.lineno, (source.line(statement),), (new,))]
    new = f"cd_loss, {sampler.name} = ebmguard.guard(None, {sampler.name}, {model}{options})"
    if sampler.source is not source:
        return "cd_loss", [(_import(source)[0], (), (f"{new}     # after the imports",))]
    function = sampler.function
    assert function is not None
    end = getattr(function, "end_lineno", None) or function.lineno
    return "cd_loss", [(end, (), (f"{new}     # after `def {sampler.name}`",))]


def _options(sampler: Sampler) -> str:
    parts = []
    if sampler.sign < 0:
        parts.append('convention="energy"')
    parts.append("beta_star=0.5")
    if sampler.has_noise:
        if sampler.step and sampler.noise:
            parts.append(f"output_scale={_short(implied_scale(sampler.step, sampler.noise))}")
        else:
            parts.append("step_size=..., noise_std=...")
    parts.append('log_dir="runs/1"')
    return ", ".join(parts)


def _short(scale: float) -> str:
    return (
        f"{round(scale):_}"
        if scale >= 10 and abs(scale - round(scale)) < 1e-6 * scale
        else f"{scale:g}"
    )


def _made_by(source: Source, sampler: Sampler) -> tuple[str, ast.Assign] | None:
    """The assignment of what a factory around the sampler returns: name and statement."""
    assert sampler.function is not None
    outer = source.function(sampler.function)
    factory = getattr(outer, "name", "")
    if not factory:
        return None
    for call in source.calls(factory):
        parent = source.parents.get(call)
        if isinstance(parent, ast.Assign) and len(parent.targets) == 1:
            return name_of(parent.targets[0]), parent
    return None


def _holder(
    source: Source, sampler: Sampler, samplers: Sequence[Sampler]
) -> tuple[ast.Assign, str, str] | None:
    """Of a sampler that is a method: where its object is made, its name, and the method called."""
    assert sampler.function is not None
    parent = source.parents.get(sampler.function)
    if not isinstance(parent, ast.ClassDef):
        return None
    drawing = sampling_functions(source, samplers)
    methods = [n.name for n in parent.body if isinstance(n, ast.FunctionDef) and n.name in drawing]
    for call in source.calls(parent.name):
        made = source.parents.get(call)
        if isinstance(made, ast.Assign) and len(made.targets) == 1:
            target = name_of(made.targets[0])
            last = target.split(".")[-1]
            called = [
                name_of(each.func).split(".")[-1]
                for each in source.calls(*methods)
                if name_of(each.func).split(".")[-2:-1] == [last]
            ]
            return made, target, called[0] if called else methods[-1]
    return None


def _module_of(call: ast.expr) -> str:
    """The first argument of a constructor, which is the module by custom."""
    return name_of(call.args[0]) if isinstance(call, ast.Call) and call.args else ""


def _first_line_of_loop(source: Source, sampler: Sampler) -> int:
    chain = (sampler.loop, *source.above(sampler.loop))
    return min(each.lineno for each in chain if isinstance(each, ast.For | ast.While)) - 1


def _loss_line(source: Source, found: Difference, sampler: Sampler, loss: str) -> Change:
    call = f"{loss}({found.positive.per_sample}, {found.negative.per_sample})"
    # f that is high on data wants samples minus data minimised, an energy data minus samples.
    is_minimised = found.is_data_minus_samples == (sampler.sign < 0)
    old = source.line(found.statement)
    code = source.code(found.node)
    code = f"({code})" if f"({code})" in old else code
    new = old.replace(code, call if is_minimised else f"-{call}", 1)
    return found.statement.lineno, (old,), (new,)
