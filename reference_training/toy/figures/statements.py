"""What a figure's numbers say, in sentences that follow from the numbers alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from ...plots.numbers import number
from .mixture import compare_samplers, weight_on_the_good
from .oracle import optimum_reached, tabular_optimum
from .runs import Member, ToyRun
from .specs import FigureSpec
from .spread import Spread, spread
from .words import OFF, VARIANT, listed


def statements(spec: FigureSpec, runs: Mapping[str, ToyRun]) -> list[str]:
    """The sentences of a figure: the trade-off, the variants, the optimum, and what diverged.

    Where samplers are compared: how each run trains beside the first one, instead of the
    trade-off.
    """
    said = []
    first = next(iter(runs.values()))
    for run in runs.values():
        if OFF in spec.betas and not spec.samplers:
            said.append(trade_off(spec, run))
        if spec.samplers and run is not first:
            said.append(compare_samplers(spec, first, run))
        if len(run.samplers) > 1:
            said.append(weight_on_the_good(spec, run))
        if len(spec.variants) > 1:
            said += compare_variants(spec, run)
        if spec.optimum:
            said.append(optimum_reached(spec, run))
        said.append(divergence(run))
    if spec.optimum:
        said += [tabular_optimum(data) for data in dict.fromkeys(r.data for r in runs.values())]
    return said


def trade_off(spec: FigureSpec, run: ToyRun) -> str:
    """How much closer p_θ comes to the data than at β = 0, and what SGLD(p_θ) pays for it."""
    if spread(run, OFF, "default", "kl").undefined:
        return f"{run.scenario}: at β = 0 KL(p_d‖p_θ) is undefined, and so is every ratio to it."
    betas = [beta for beta in spec.betas if beta != OFF]
    gains = [f"{_gain(run, beta)} at {beta}" for beta in betas]
    costs = [f"{_cost(run, beta)} at {beta}" for beta in betas]
    at_zero = run.of(OFF, "default")
    lost = sum(member.diverged_at is not None for member in at_zero)
    which = f" ({lost} of {len(at_zero)} seeds diverged there)" if lost else ""
    price = f"KL of SGLD(p_θ) at β over the one at β = 0: {listed(costs)}."
    if not math.isfinite(spread(run, OFF, "default", "kl_sgld").median):
        price = "KL of SGLD(p_θ) is not finite at β = 0."
    return (
        f"{run.scenario}: KL(p_d‖p_θ) at β = 0{which} over the one at β: {listed(gains)}. {price} "
        "Medians over seeds of a seed's two values."
    )


def compare_variants(spec: FigureSpec, run: ToyRun) -> list[str]:
    """Whether the default variant's median KL(p_d‖p_θ) is at least as good as every other's.

    One sentence for each β, then one for the paper's claim (Appendix K.2) that it always is.
    """
    betas = [beta for beta in spec.betas if beta != OFF]
    said: list[str] = []
    best: list[str] = []
    clear: list[str] = []
    within: list[str] = []
    beyond: list[str] = []
    for beta in betas:
        own = spread(run, beta, "default", "kl")
        others = {v: spread(run, beta, v, "kl") for v in spec.variants if v != "default"}
        better = [variant for variant, other in others.items() if other.better_than(own)]
        if not better and not own.undefined:
            best.append(beta)
            if not any(own.overlaps(other) for other in others.values()):
                clear.append(beta)
        for variant in better:
            place = f"{VARIANT[variant]} at β = {beta}"
            (within if own.overlaps(others[variant]) else beyond).append(place)
        compared = listed([_compared(own, v, other) for v, other in others.items()])
        lower = listed([VARIANT[variant] for variant in better]) if better else "no other variant"
        said.append(
            f"{run.scenario}, β = {beta}: median KL {number(own.median, 2)} for default, "
            f"{compared}. A lower median than the default's: {lower}."
        )
    return [*said, _claim(run, betas, best, clear, within, beyond)]


def divergence(run: ToyRun) -> str:
    """Which members diverged, and what the guard said of them."""
    groups: dict[tuple[str, str], list[tuple[int, Member]]] = {}
    for member in run.members:
        if member.diverged_at is not None:
            group = groups.setdefault((member.variant, member.beta), [])
            group.append((member.diverged_at, member))
    if not groups:
        return f"{run.scenario}: none of {len(run.members)} members diverged."
    parts = []
    for (variant, beta), lost in groups.items():
        alerts = [alert for _, m in lost if (alert := run.first_alert(m)) is not None]
        name = f"β = {beta}" + ("" if variant == "default" else f", {VARIANT[variant]}")
        heard = f"the guard alerted on {len(alerts)} of them"
        if alerts:
            first = min(alerts, key=lambda alert: int(alert["step"]))
            heard += f", first at update {first['step']:,} ({first['rule']})"
        parts.append(
            f"at {name} {len(lost)} of {len(run.of(beta, variant))} seeds diverged, the first at "
            f"update {min(step for step, _ in lost):,}; {heard}"
        )
    return f"{run.scenario}: {'; '.join(parts)}. No other member diverged."


def _claim(
    run: ToyRun,
    betas: list[str],
    best: list[str],
    clear: list[str],
    within: list[str],
    beyond: list[str],
) -> str:
    claim = "The claim that the default is at least as good as every other variant"
    text = f"{run.scenario}: the default's median KL is the lowest at {_count(best, betas)}"
    if run.seeds == 1:
        better = f"{listed(within + beyond)} is better. " if within + beyond else ""
        return f"{text}. {better}{claim} needs more seeds than one."
    text += f"; its seeds are apart from all others' at {_count(clear, betas)}. {claim} "
    if beyond:
        text += f"does not hold: beyond the spread of seeds {listed(beyond)} is better"
        return text + (f", within it {listed(within)}." if within else ".")
    if within:
        return text + f"is not refuted: {listed(within)} is better, but within the spread of seeds."
    if not best:
        return text + "cannot be judged: no median is defined."
    which = "these medians" if best == betas else "the medians that are defined"
    return text + f"holds for {which}."


def _count(found: list[str], betas: list[str]) -> str:
    return f"{len(found)} of {len(betas)} β" + (f" ({', '.join(found)})" if found else "")


def _compared(own: Spread, variant: str, other: Spread) -> str:
    factor = other.median / own.median if own.median else math.nan
    how = "overlap" if own.overlaps(other) else "apart"
    times = f"{number(factor, 2)} times"
    return f"{number(other.median, 2)} for {VARIANT[variant]} ({times}, spreads {how})"


def _gain(run: ToyRun, beta: str) -> str:
    # A seed that is lost at β has gained nothing, whatever it was at β = 0.
    ratios = (zero / own if math.isfinite(own) else 0.0 for zero, own in _pairs(run, beta, "kl"))
    return number(Spread.of(ratios).median, 2)


def _cost(run: ToyRun, beta: str) -> str:
    return number(Spread.of(own / zero for zero, own in _pairs(run, beta, "kl_sgld")).median, 2)


def _pairs(run: ToyRun, beta: str, metric: str) -> Iterator[tuple[float, float]]:
    """Each seed's value at β = 0, and its value at β."""
    for zero, own in zip(run.of(OFF, "default"), run.of(beta, "default"), strict=True):
        yield zero.metrics[metric], own.metrics[metric]
