"""What goes wrong in a sampler."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..alerts import Level
from ..check import Problem
from ..check.exponents import implied_scale
from .facts import Facts
from .sampling import Sampler
from .source import Source, name_of
from .values import number

__all__ = ["of_samplers", "of_scale"]

_TOLERANCE = 0.02


def of_samplers(facts: Facts) -> Iterator[Problem]:
    """Clipping, clamping, methods other than forward, and gradients that are switched off."""
    for sampler in facts.samplers:
        yield from _clipping(sampler)
        yield from _clamping(facts, sampler)
        yield from _method(facts, sampler)
        yield from _no_grad(sampler)
        yield from _graph(sampler)
    yield from _spent_generator(facts.source)


def of_scale(facts: Facts) -> Iterator[Problem]:
    """The output scale that step and noise imply, against what the guard was told."""
    source = facts.source
    is_told = any(usage.gives("output_scale", "step_size") for usage in facts.usages)
    for sampler in facts.samplers:
        where = sampler.source.where(sampler.loop)
        if sampler.energy is None or not sampler.moves_input:
            continue
        if not sampler.has_noise:
            if sampler.step is not None or sampler.clipped:
                yield Problem(
                    Level.INFO,
                    "no_noise",
                    where,
                    "The sampler adds no noise, so that no output scale exists.",
                    "beta_star alone: the weights act, and the sampler stays as it is.",
                )
            continue
        if sampler.step and sampler.noise:
            implied = implied_scale(sampler.step, sampler.noise)
            for usage in facts.usages:
                scale = number(source, usage.option("output_scale"))
                if scale is not None and abs(scale / implied - 1) > _TOLERANCE:
                    yield Problem(
                        Level.ERROR,
                        "output_scale",
                        source.where(usage.call),
                        f"output_scale={scale:g}, but step {sampler.step:g} and noise "
                        f"{sampler.noise:g} at {where} mean 2 * step / noise**2 = {implied:g}.",
                        f"output_scale={implied:g}.",
                    )
            if not is_told:
                yield Problem(
                    Level.INFO,
                    "output_scale",
                    where,
                    f"Step {sampler.step:g} and noise {sampler.noise:g} (defaults, where they are "
                    f"settings): output scale 2 * step / noise**2 = {implied:g}.",
                    f"guard(..., output_scale={implied:g}).",
                )
        elif not is_told:
            missing = [
                word
                for word, value in (("step", sampler.step), ("noise", sampler.noise))
                if not value
            ]
            yield Problem(
                Level.INFO,
                "output_scale",
                where,
                f"Could not tell the sampler's {' and '.join(missing)} from this file, and so not "
                "its output scale.",
                "guard(..., step_size=..., noise_std=...) with the numbers that the run uses.",
            )


def _clipping(sampler: Sampler) -> Iterator[Problem]:
    for node in sampler.clipped[:1]:
        yield Problem(
            Level.WARN,
            "clipped_gradient",
            sampler.source.where(node),
            f"The sampler clips its gradient (`{sampler.source.code(node)}`): where the clip "
            "saturates, a scaled energy moves the samples just as far, so that they are not drawn "
            "from the tempered energy, and the weights over-correct.",
            "no clip and a smaller step; or keep it, and compare `sampler/grad_norm`, which is the "
            "norm before it, with its limit.",
        )


def _clamping(facts: Facts, sampler: Sampler) -> Iterator[Problem]:
    for node, low, high in sampler.clamps[:1]:
        known = low is not None and high is not None
        to = f"({low:g}, {high:g})" if known else "(low, high)"
        yield Problem(
            Level.INFO,
            "clamped_samples",
            sampler.source.where(node),
            "The sampler clamps its samples: chains that end at the walls no longer show how far "
            "the energy drove them.",
            f"g.attach(clamp={to}), and watch `sampler/clamped`.",
        )
        if known and low == 0 and _data_is_centred(facts.source):
            yield Problem(
                Level.ERROR,
                "clamp",
                sampler.source.where(node),
                f"The sampler keeps samples in {to}, but Normalize((.5, ...), (.5, ...)) puts data "
                "in [-1, 1]: no negative can get where half of the data is.",
                "clamp to [-1, 1], or data in [0, 1].",
            )


def _data_is_centred(source: Source) -> bool:
    for call in source.calls("Normalize"):
        numbers = [
            n.value for arg in call.args for n in ast.walk(arg) if isinstance(n, ast.Constant)
        ]
        if numbers and all(value == 0.5 for value in numbers):
            return True
    return False


def _method(facts: Facts, sampler: Sampler) -> Iterator[Problem]:
    energy = sampler.energy
    if energy is None or not isinstance(energy.func, ast.Attribute):
        return
    method, owner = energy.func.attr, name_of(energy.func.value)
    methods = {
        node.name
        for source in (facts.source, *facts.beside)
        for each in ast.walk(source.tree)
        if isinstance(each, ast.ClassDef)
        for node in each.body
        if isinstance(node, ast.FunctionDef)
    }
    if (
        method != "forward"
        and (method in methods or owner != "self")
        and owner not in ("torch", "t")
    ):
        yield Problem(
            Level.ERROR if facts.usages else Level.WARN,
            "other_method",
            sampler.source.where(energy),
            f"The sampler differentiates `{owner}.{method}`, not the module's forward, which is "
            "what a guarded sampler tempers.",
            f"guard(None, None, ...) and g.temper({sampler.source.code(energy)}) in the loop.",
        )


def _no_grad(sampler: Sampler) -> Iterator[Problem]:
    source = sampler.source
    for node in source.above(sampler.loop):
        decorators = getattr(node, "decorator_list", [])
        items = [item.context_expr for item in node.items] if isinstance(node, ast.With) else []
        off = [each for each in (*decorators, *items) if _switches_off(each)]
        on = any(
            isinstance(each, ast.With) and "enable_grad" in ast.unparse(each.items[0].context_expr)
            for each in ast.walk(sampler.loop)
        )
        if off and not on:
            yield Problem(
                Level.ERROR,
                "no_grad",
                source.where(off[0]),
                "The sampler runs under no_grad, where the energy has no gradient to follow.",
                "`with torch.enable_grad():` around the energy and its gradient.",
            )


def _switches_off(node: ast.expr) -> bool:
    name = name_of(node.func if isinstance(node, ast.Call) else node)
    return name.split(".")[-1] in ("no_grad", "inference_mode")


def _graph(sampler: Sampler) -> Iterator[Problem]:
    source = sampler.source
    kept = [
        each
        for node in ast.walk(sampler.loop)
        if isinstance(node, ast.Call)
        for each in node.keywords
        if each.arg in ("retain_graph",) and getattr(each.value, "value", None) is True
    ]
    if kept:
        yield Problem(
            Level.INFO,
            "retain_graph",
            source.where(kept[0].value),
            "retain_graph=True keeps the graph of every sampling step until the next one.",
            "leave it out, unless something in the loop differentiates the same graph again.",
        )
    function = sampler.function
    if function is None or sampler.is_inline or sampler.energy is None:
        return
    returned = [
        n.value for n in ast.walk(function) if isinstance(n, ast.Return) and n.value is not None
    ]
    names = {name_of(arg) for arg in sampler.energy.args[:1]}
    bare = [node for node in returned if isinstance(node, ast.Name) and node.id in names]
    ends = ast.unparse(function)
    if bare and "detach" not in ends and ".data" not in ends:
        yield Problem(
            Level.WARN,
            "not_detached",
            source.where(bare[0]),
            "The samples are returned with the graph of the chain: the loss then differentiates "
            "through the sampler.",
            "return x.detach(), unless that is meant.",
        )


def _spent_generator(source: Source) -> Iterator[Problem]:
    """``parameters = model.parameters()`` is empty after its first use."""
    for name, values in source.assigned.items():
        for each in values:
            call = each.value
            if not (isinstance(call, ast.Call) and name_of(call.func).endswith(".parameters")):
                continue
            uses = [
                node
                for node in ast.walk(each.scope or source.tree)
                if isinstance(node, ast.Name)
                and node.id == name
                and isinstance(node.ctx, ast.Load)
                and node.lineno > each.line
            ]
            if len(uses) > 1 and len(values) == 1:
                yield Problem(
                    Level.WARN,
                    "spent_generator",
                    f"{source.path.name}:{each.line}",
                    f"`{name} = {source.code(call)}` is a generator: its first use, at line "
                    f"{uses[0].lineno}, empties it, and the one at line {uses[1].lineno} does "
                    "nothing.",
                    f"{name} = list({source.code(call)}).",
                )
