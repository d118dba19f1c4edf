"""`ebmguard trace`."""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Iterator

from ..errors import ConfigError
from .chains import Sampler
from .config import TraceConfig
from .graph import DATA
from .lines import Plan, by_hand, plans
from .refusals import REFUSALS, Refused
from .script import replay, shown, source_of
from .tracer import Guarded, Trace, trace_script

__all__ = ["trace"]


def trace(config: TraceConfig) -> int:
    """Trace, print and prove; 0 where the lines that are printed were proven, else 1.

    A ConfigError where there is no such file, too few steps, or a guard in it already.
    """
    if not config.script.is_file():
        raise ConfigError(f"{config.script} does not exist; name the Python file of a trainer.")
    if config.steps < 2:
        raise ConfigError(f"--steps is {config.steps}; expected 2 or more: the first one finds.")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            found = trace_script(config.script, config.arguments, config.steps)
    except Guarded as there:
        raise ConfigError(
            f"{config.script} is guarded already, at {there}. Trace it without that guard, or ask "
            "what is wrong with it: g.check() before the first step, ebmguard check LOG_DIR later."
        ) from None
    print("\n".join(_text(found)))
    try:
        tried = plans(found)
        return _prove(config, found, tried)
    except (OSError, SyntaxError) as unreadable:
        refused = Refused("not evaluated", error=unreadable, guard=by_hand(found.samplers[0]))
    except Refused as unclear:
        refused = unclear
    print(f"\ncould not tell how to guard it: {refused}\nway out: {refused.exit}")
    return 1


def _prove(config: TraceConfig, found: Trace, tried: list[Plan]) -> int:
    refusals = list[Refused]()
    for plan in tried:
        told = _tried(config, found, plan)
        if isinstance(told, str):
            print("\nto guard it:\n" + "\n".join(_diff(plan)) + f"\n\nproven: {told}")
            print(f"attached: {', '.join(plan.told) or 'nothing'}{_lacks(plan)}")
            return 0
        refusals.append(told)
        if told.why in ("warned", "softmax"):  # Other lines would only hide it.
            refusals, tried = [told], [plan]
            break
    print("\nnot proven; the lines would be:\n" + "\n".join(_diff(tried[0])))
    first, plain = refusals[0], replay(config.script, config.arguments, found.steps, {})
    if plain.state != found.state:
        stopped = f"stopped: {plain.error}" if plain.error else "differs as well"
        first = Refused("not repeatable", error=stopped)
    print(f"\nbut {first}\nway out: {first.exit}")
    return 1


def _lacks(plan: Plan) -> str:
    """What the guard does not do, as it is told too little."""
    if any(each.startswith("optimizer=") for each in plan.told):
        return ""
    where = "g.attach(model=..., optimizer=...)"
    return (
        "; without optimizer= it watches no gradients, skips no step with NaN in them, and cannot "
        f"roll back: make it later with {where}, g = loss_fn.guard"
    )


_ACTS = 0.05  # a β* that is under nearly every output scale


def _tried(config: TraceConfig, found: Trace, plan: Plan) -> Refused | str:
    """Why a plan is not the one; or, in words, what was proven."""
    guarded = config.script, config.arguments, found.steps, plan.texts()
    done = replay(*guarded, beta_star=0.0, substeps=1)
    facts = {"guards": done.guards, "calls": done.sampler_calls, "losses": done.losses}
    if done.error or not done.state:
        return Refused("guarded run", error=done.error or "it ended before as long")
    if done.guards != 1 or not done.losses:
        return Refused("guards", **facts)
    if done.state != found.state and plan.softmax is None:
        return Refused("differs")
    acting = replay(*guarded, beta_star=_ACTS)
    if acting.error:
        return Refused("guarded run", error=acting.error)
    said = done.warnings + acting.warnings
    if any(each.is_linear for each in found.samplers):
        said = tuple(each for each in said if "where f is linear in x" not in each)
    if said:
        return Refused("warned", error=said[0])
    if plan.softmax is not None:
        return Refused("softmax", place=plan.softmax.place)
    why = " No output scale is known: a beta_star of yours acts through the weights alone."
    return (
        f"with these lines at beta_star=0 it ran again for {found.steps} optimizer steps; "
        "parameters and random states are the same bit for bit, and the guard saw "
        f"{done.sampler_calls} sampler calls and {done.losses} losses. At beta_star={_ACTS:g} it "
        "ran as long, and the guard warned of nothing. What comes after these steps was not seen."
        f"{'' if plan.has_scale else why}"
    )


def _text(found: Trace) -> Iterator[str]:
    trained = ", ".join(dict.fromkeys(type(each).__name__ for each in found.optimizers)) or "none"
    yield f"traced {found.steps} optimizer steps ({trained}) in {found.seconds:.1f} s"
    if found.error:
        yield f"  the script stopped: {found.error}"
    for sampler in found.samplers:
        yield from _sampler(sampler)
    if not found.samplers:
        yield f"no sampler: {REFUSALS['no sampler'][0]}"
    given = {each.name: each.arguments for each in found.samplers}
    for each in found.differences:
        yield f"\nloss at {each.place} ({each.times} times): {each.place.text}"
        for label, side in each.sides.items():
            of = "data" if label == DATA else f"samples of `{label}`"
            pull, text = each.pull(label), side.name
            way = "raises" if pull < 0 else "lowers" if pull > 0 else "has no slope for"
            if not text and side.node is not None:
                text = each.place.source.segment(side.node)
            what = f"`{side.turned(text)}` {side.shape}" if text else "no expression found"
            yield f"  {of}: {what}; the loss {way} the output there ({pull:+.4g})"
            more = given.get(label, side.arguments) - side.arguments
            if more > 0:
                yield f"    the sampler gives it {more} more than the loss, such as a class:"
                yield "    it draws from another density"
            if side.bends:
                yield f"    not affine in these, and left as it is: {side.bends}"
        met = {other.place.line for other in found.differences}
        if others := sorted(each.elsewhere - met):
            yield f"  the same expression stands in line {', '.join(map(str, others))}, in branches"
            yield "  that did not run or in no loss: it is not guarded by the lines below"
        if each.effect.bends:
            yield "  the loss is not affine in this difference: what is around it stays as it is"
    if found.samplers and not found.differences:
        yield "no difference of energies of samples and of data in what backward() was called on"


def _sampler(each: Sampler) -> Iterator[str]:
    steps = " to ".join(map(str, sorted({min(each.lengths), max(each.lengths)})))
    yield f"\nsampler `{each.name}` ({each.loop}), {len(each.lengths)} calls of {steps} gradients"
    if each.entries == ():
        yield f"  its loop stands beside the loss: {each.loop}"
    for entry in each.entries or ():
        yield f"  called at {entry}: {entry.text}"
    kind = type(each.energy)
    names = [*dict.fromkeys(name for group in each.names.values() for name in group)]
    called = f", called {', '.join(names[:3])}" if names else ""
    yield f"  energy: {kind.__module__}.{kind.__qualname__}{called}"
    yield f"  at {each.site}: {each.site.text}"
    heads = ": a function of it is the energy" if each.is_function else ""
    yield f"  input {tuple(each.first.x.shape)}, output {each.first.output_shape}{heads}"
    yield f"  {each.measured}"
    if "discrete" in each.measured.verdict:
        yield "  where its moves are right for exp(f), as those of Gibbs, output_scale=1"


def _diff(plan: Plan) -> Iterator[str]:
    for file, text in sorted(plan.texts().items()):
        before = source_of(file).text.splitlines()
        changes = difflib.unified_diff(before, text.splitlines(), n=0, lineterm="")
        yield f"  {shown(file)}"
        yield from (f"    {line}" for line in changes if not line.startswith(("---", "+++")))
