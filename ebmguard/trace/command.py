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
from .lines import BETA_STAR, NO_SAMPLER, Plan, Unclear, plans
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
    except (Unclear, OSError, SyntaxError) as unclear:
        print(f"\ncould not tell how to guard it: {unclear}")
        return 1
    return _prove(config, found, tried)


def _prove(config: TraceConfig, found: Trace, tried: list[Plan]) -> int:
    outcomes = []
    for plan in tried:
        at_zero = {k: text.replace(BETA_STAR, "beta_star=0.0") for k, text in plan.texts().items()}
        done = replay(config.script, config.arguments, found.steps, at_zero)
        seen = f"saw {done.sampler_calls} sampler calls and {done.losses} losses"
        sees_all = done.guards == 1 and done.losses and (done.sampler_calls or plan.is_inline)
        if done.error or not done.state:
            outcomes.append(f"the guarded run stopped: {done.error or 'it ended before as long'}")
        elif not sees_all:
            outcomes.append(f"{done.guards} guards were made, which {seen}")
        elif done.state != found.state:
            outcomes.append("parameters or random states differ from those of the run without them")
        else:
            if "output_scale" not in plan.options:
                print("\nno output scale could be told: beta_star acts through the weights alone")
            print("\nto guard it:\n" + "\n".join(_diff(plan)))
            print(
                f"\nproven: with these lines at beta_star=0 it ran again for {found.steps} "
                "optimizer steps; parameters and random states are the same bit for bit, and the "
                f"guard {seen}."
            )
            return 0
    print("\nnot proven; the lines would be:\n" + "\n".join(_diff(tried[0])))
    print(f"\nbut {outcomes[0]}")
    has_run = not outcomes[0].startswith("the guarded run stopped")
    if has_run and replay(config.script, config.arguments, found.steps, {}).state != found.state:
        print("Two runs without these lines differ as well: the script cannot be repeated.")
    return 1


def _text(found: Trace) -> Iterator[str]:
    trained = ", ".join(found.optimizers) or "none"
    yield f"traced {found.steps} optimizer steps ({trained}) in {found.seconds:.1f} s"
    if found.error:
        yield f"  the script stopped: {found.error}"
    for sampler in found.samplers:
        yield from _sampler(sampler)
    if not found.samplers:
        yield f"no sampler: {NO_SAMPLER}"
    for each in found.differences:
        yield f"\nloss at {each.place} ({each.times} times): {each.place.text}"
        for label, side in each.sides.items():
            of = "data" if label == DATA else f"samples of `{label}`"
            way = "raises" if side.cotangent < 0 else "lowers"
            what = f"`{side.expression}` {side.shape}" if side.expression else "no expression found"
            yield f"  {of}: {what}; the loss {way} the output there ({side.cotangent:+.4g})"
    if found.samplers and not found.differences:
        yield "no difference of energies of samples and of data in what backward() was called on"


def _sampler(each: Sampler) -> Iterator[str]:
    steps = " to ".join(map(str, sorted({min(each.lengths), max(each.lengths)})))
    yield f"\nsampler `{each.name}` ({each.loop}), {len(each.lengths)} calls of {steps} gradients"
    if each.entries == ():
        yield f"  its loop stands beside the loss: {each.loop}"
    for entry in each.entries or ():
        yield f"  called at {entry}: {entry.text}"
    kind = type(each.first.energy)
    names = [*dict.fromkeys(name for group in each.names.values() for name in group)]
    called = f", called {', '.join(names[:3])}" if names else ""
    yield f"  energy: {kind.__module__}.{kind.__qualname__}{called}"
    yield f"  at {each.site}: {each.site.text}"
    heads = "" if each.is_scalar else ": not one number per sample is differentiated"
    if each.is_scalar and not each.is_linear:
        heads = ": a function of them such as logsumexp is the energy, which no factor tempers"
    yield f"  input {tuple(each.first.x.shape)}, output {each.first.output_shape}{heads}"
    if each.buffer:
        yield f"  samples are written into {each.buffer}"
    yield f"  {each.measured}"
    if "discrete" in each.measured.verdict:
        yield "  where its moves are right for exp(f), as those of Gibbs, output_scale=1"


def _diff(plan: Plan) -> Iterator[str]:
    for file, text in sorted(plan.texts().items()):
        before = source_of(file).text.splitlines()
        changes = difflib.unified_diff(before, text.splitlines(), n=0, lineterm="")
        yield f"  {shown(file)}"
        yield from (f"    {line}" for line in changes if not line.startswith(("---", "+++")))
