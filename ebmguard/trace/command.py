"""`ebmguard trace`."""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import sys
from collections.abc import Callable, Iterator

from ..errors import ConfigError
from .chains import Sampler
from .config import TraceConfig
from .graph import DATA
from .lines import Plan, by_hand, plans
from .reading import Difference
from .refusals import REFUSALS, Refused
from .script import Replay, replay, shown, source_of
from .tracer import Guarded, Trace, trace_script

__all__ = ["trace"]


def trace(config: TraceConfig) -> int:
    """Trace a script, print its lines and prove them. Return 0 where they are proven, else 1.

    A ConfigError where there is no such file, too few steps, or a guard in it already.
    """
    if not config.script.is_file():
        raise ConfigError(f"{config.script} does not exist; name the Python file of a trainer.")
    if config.steps < 2:
        raise ConfigError(f"--steps is {config.steps}; expected 2 or more: the first one finds.")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            seen = trace_script(config.script, config.arguments, config.steps)
    except Guarded as there:
        raise ConfigError(
            f"{config.script} is guarded already, at {there}. Trace it without that guard, or ask "
            "what is wrong with it: g.check() before the first step, ebmguard check LOG_DIR later."
        ) from None
    print("\n".join(_text(seen)))
    try:
        return _prove(config, seen, plans(seen))
    except (OSError, SyntaxError) as unreadable:
        refused = Refused("not evaluated", error=unreadable, guard=by_hand(seen.samplers[0]))
    except Refused as unclear:
        refused = unclear
    print(f"\ncould not tell how to guard it: {refused}\nway out: {refused.exit}")
    return 1


def _prove(config: TraceConfig, seen: Trace, candidates: list[Plan]) -> int:
    again = functools.partial(replay, config.script, config.arguments, seen.steps)
    refusals = list[Refused]()
    for plan in candidates:
        try:
            proof = _proof(again, seen, plan)
        except Refused as refused:
            refusals.append(refused)
            if refused.why in ("warned", "softmax"):  # Other lines would only hide it.
                refusals, candidates = [refused], [plan]
                break
            continue
        print("\nto guard it:\n" + "\n".join(_diff(plan)) + f"\n\nproven: {proof}")
        is_whole = any(word.startswith("optimizer=") for word in plan.parts)
        print(f"attached: {', '.join(plan.parts) or 'nothing'}{'' if is_whole else _LACKS}")
        return 0
    print("\nnot proven; the lines would be:\n" + "\n".join(_diff(candidates[0])))
    first, plain = refusals[0], again({})
    if plain.state != seen.state:
        stopped = f"stopped: {plain.error}" if plain.error else "differs as well"
        first = Refused("not repeatable", error=stopped)
    print(f"\nbut {first}\nway out: {first.exit}")
    return 1


_ACTS = 0.05  # a β* that is under nearly every output scale
_LACKS = (
    "; without optimizer= it watches no gradients, skips no step with NaN in them, and cannot roll "
    "back: call the guard's attach(model=..., optimizer=...)"
)


def _proof(again: Callable[..., Replay], seen: Trace, plan: Plan) -> str:
    """Run a plan. Return the proof in words; Refused where there is none."""
    texts = plan.texts()
    done = again(texts, beta_star=0.0, substeps=1)
    if done.error or not done.state:
        raise Refused("guarded run", error=done.error or "it ended before as long")
    if done.guards != 1 or not done.losses:
        raise Refused("guards", **done._asdict())
    if done.state != seen.state and plan.softmax is None:
        raise Refused("differs")
    acting = again(texts, beta_star=_ACTS)
    if acting.error:
        raise Refused("guarded run", error=acting.error)
    for warning in done.warnings + acting.warnings:
        raise Refused("warned", error=warning)
    if plan.softmax is not None:
        raise Refused("softmax", place=plan.softmax)
    why = " No output scale is known: a beta_star of yours acts through the weights alone."
    return (
        f"with these lines at beta_star=0 it ran again for {seen.steps} optimizer steps; "
        "parameters and random states are the same bit for bit, and the guard saw "
        f"{done.sampler_calls} sampler calls and {done.losses} losses. At beta_star={_ACTS:g} it "
        "ran as long, and the guard warned of nothing. What comes after these steps was not seen."
        f"{'' if plan.has_scale else why}"
    )


def _text(seen: Trace) -> Iterator[str]:
    kinds = ", ".join(dict.fromkeys(type(x).__name__ for x in seen.optimizers)) or "none"
    yield f"traced {seen.steps} optimizer steps ({kinds}) in {seen.seconds:.1f} s"
    if seen.error:
        yield f"  the script stopped: {seen.error}"
    if not seen.samplers:
        yield f"no sampler: {REFUSALS['no sampler'][0]}"
    for sampler in seen.samplers:
        yield from _of_sampler(sampler)
    for difference in seen.differences:
        yield from _of_loss(seen, difference)
    if seen.samplers and not seen.differences:
        yield "no difference of energies of samples and of data in what backward() was called on"


def _of_sampler(sampler: Sampler) -> Iterator[str]:
    steps = " to ".join(map(str, sorted({min(sampler.lengths), max(sampler.lengths)})))
    calls = f"{len(sampler.lengths)} calls of {steps} gradients"
    yield f"\nsampler `{sampler.name}` ({sampler.loop}), {calls}"
    if sampler.entries == ():
        yield f"  its loop stands beside the loss: {sampler.loop}"
    for entry in sampler.entries or ():
        yield f"  called at {entry}: {entry.text}"
    kind = type(sampler.energy)
    names = [*dict.fromkeys(name for group in sampler.names.values() for name in group)]
    called = f", called {', '.join(names[:3])}" if names else ""
    yield f"  energy: {kind.__module__}.{kind.__qualname__}{called}"
    yield f"  at {sampler.site}: {sampler.site.text}"
    heads = ": a function of it is the energy" if sampler.is_function else ""
    yield f"  input {tuple(sampler.first.x.shape)}, output {sampler.first.output_shape}{heads}"
    yield f"  {sampler.measured}"
    if "discrete" in sampler.measured.verdict:
        yield "  where its moves are right for exp(f), as those of Gibbs, output_scale=1"


def _of_loss(seen: Trace, difference: Difference) -> Iterator[str]:
    place, given = difference.place, {sampler.name: sampler.arguments for sampler in seen.samplers}
    yield f"\nloss at {place} ({difference.times} times): {place.text}"
    for label in difference.labels:
        of = "data" if label == DATA else f"samples of `{label}`"
        if (side := difference.sides.get(label)) is None:
            yield f"  {of}: no expression found"
            continue
        pull, text = difference.pull(label), side.name or (side.node and ast.unparse(side.node))
        way = "raises" if pull < 0 else "lowers" if pull > 0 else "has no slope for"
        what = f"`{side.turned(text)}` {(*side.value.shape,)}" if text else "no expression found"
        yield f"  {of}: {what}; the loss {way} the output there ({pull:+.4g})"
        if (more := given.get(label, 0) - side.arguments) > 0:
            yield f"    the sampler gives it {more} more than the loss, such as a class:"
            yield "    it draws from another density"
        if side.bends:
            yield f"    not affine in these, and left as it is: {side.bends}"
    met = {known.place.line for known in seen.differences}
    if others := sorted(difference.elsewhere - met):
        yield f"  the same expression stands in line {', '.join(map(str, others))}, in branches"
        yield "  that did not run or in no loss: it is not guarded by the lines below"
    if difference.effect.bends:
        yield "  the loss is not affine in this difference: what is around it stays as it is"


def _diff(plan: Plan) -> Iterator[str]:
    for file, text in sorted(plan.texts().items()):
        before = source_of(file).text.splitlines()
        changes = difflib.unified_diff(before, text.splitlines(), n=0, lineterm="")
        yield f"  {shown(file)}"
        yield from (f"    {line}" for line in changes if not line.startswith(("---", "+++")))
