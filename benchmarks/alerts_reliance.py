"""Whether leaning on attractor-repeller dynamics shows before a run dies (Section 5, Appendix J).

At β* = 0 every negative repels alike; the weights of a small β* would let those that the model
thinks unlikely off. The cosine between the two, from the same weights and samples, says how far a
run leans on what is not EBM training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median, quantiles

from .alerts_fates import Fate, Row

WINDOWS = ((200, 100), (100, 50), (50, 10))
"""Steps before the first ERROR: (from, to)."""
BLOCK = 40
SETTLED = 100
"""Steps at the start of a run that are left out: everything moves there."""
FAR = 300
"""Blocks of a dying run that end so many steps before its first ERROR count as quiet."""
FALSE_ALARMS = 0.05
SIGNALS: dict[str, tuple[str, Callable[[Row], float]]] = {
    "angle, low": ("1 − `ref/reweighting_angle`", lambda row: 1 - row["ref/reweighting_angle"]),
    "angle, high": ("`ref/reweighting_angle`", lambda row: row["ref/reweighting_angle"]),
    "gap": ("`energy_gap`", lambda row: row["energy_gap"]),
    "gradient": ("log `sampler/grad_norm`", lambda row: math.log(row["sampler/grad_norm"])),
}


def reliance(fates: Sequence[Fate]) -> list[str]:
    """The section on it, from the runs at β* = 0."""
    at_zero = [fate for fate in fates if fate.beta_star == 0]
    dying = [fate for fate in at_zero if fate.error is not None and fate.kind == "diverged"]
    living = [fate for fate in at_zero if fate.kind == "healthy"]
    if not dying or not living:
        return []
    return [
        "## Does reliance on attractor-repeller dynamics announce a divergence?",
        "",
        f"The runs at β* = 0: {len(dying)} that diverged, {len(living)} healthy. "
        "`ref/reweighting_angle` is the cosine between the coefficients that the samples of a step "
        "get at β* = 0.5 and those they get at 0, from the same weights. (The energies, and so the "
        "gap, are the same for both.) Medians over windows of steps before the first ERROR, then "
        "median over runs with quartiles; for healthy runs the same windows before steps 500, "
        "1,000, 1,500 and 2,000.",
        "",
        *medians(dying, living),
        "",
        "How well one median over a window tells the approach of a death from quiet: the area "
        f"under the ROC curve (0.5 is a coin). Quiet are blocks of {BLOCK} steps of healthy runs, "
        f"which have other settings, or of the dying runs themselves, more than {FAR} steps before "
        "their first ERROR.",
        "",
        *areas(at_zero),
        "",
        "With the threshold that flags 5% of the quiet blocks of the tune half, of both kinds: "
        "what it flags in the report half, of quiet blocks and of dying runs before their first "
        "ERROR.",
        "",
        *flagged(at_zero),
        "",
    ]


def medians(dying: Sequence[Fate], living: Sequence[Fate]) -> list[str]:
    lines = ["| steps before | angle, dying | angle, healthy | gap, dying | gap, healthy |"]
    lines.append("|---|---:|---:|---:|---:|")
    for start, stop in WINDOWS:
        cells = []
        for name in ("angle, high", "gap"):
            for group in (dying, living):
                found = [
                    value
                    for fate in group
                    for end in ends(fate)
                    if (value := window(fate, name, end - start, end - stop)) is not None
                ]
                cells.append(quartiles(found))
        lines.append(f"| {start} to {stop} | {' | '.join(cells)} |")
    return lines


def areas(fates: Sequence[Fate]) -> list[str]:
    head = " | ".join(f"{start} to {stop}" for start, stop in WINDOWS)
    lines = [f"| signal | half | quiet are | {head} |", "|---|---|---|" + "---:|" * len(WINDOWS)]
    for name, (words, _) in SIGNALS.items():
        if name == "angle, high":
            continue
        for half, is_tune in HALVES.items():
            own = [fate for fate in fates if fate.is_tune is is_tune]
            for kind, whose in (("healthy", "healthy runs"), ("diverged", "their own past")):
                calm = quiet([fate for fate in own if fate.kind == kind], name)
                cells = [f"{area(before(own, name, at), calm):.2f}" for at in WINDOWS]
                lines.append(f"| {words} | {half} | {whose} | {' | '.join(cells)} |")
    return lines


def flagged(fates: Sequence[Fate]) -> list[str]:
    head = " | ".join(f"{start} to {stop} before" for start, stop in WINDOWS)
    lines = [
        f"| signal above | threshold | quiet blocks | {head} |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    tune = [fate for fate in fates if fate.is_tune]
    report = [fate for fate in fates if not fate.is_tune]
    for name, (words, _) in SIGNALS.items():
        calm = sorted(quiet(tune, name))
        threshold = calm[math.ceil((1 - FALSE_ALARMS) * len(calm)) - 1]
        cells = [hits(quiet(report, name), threshold)]
        cells += [hits(before(report, name, at), threshold) for at in WINDOWS]
        lines.append(f"| {words} | {threshold:.3f} | {' | '.join(cells)} |")
    return lines


HALVES = {"tune": True, "report": False}


def ends(fate: Fate) -> list[int]:
    """The steps that windows lie before."""
    if fate.error is not None and fate.kind == "diverged":
        return [fate.error.step]
    return [500, 1000, 1500, 2000]


def window(fate: Fate, name: str, start: int, stop: int) -> float | None:
    """Median of a signal over steps [start, stop); None where the run was not settled yet."""
    signal = SIGNALS[name][1]
    return median(map(signal, fate.rows[start:stop])) if start >= SETTLED else None


def before(fates: Sequence[Fate], name: str, at: tuple[int, int]) -> list[float]:
    """Of each dying run, its window before the first ERROR."""
    found = [
        window(fate, name, fate.error.step - at[0], fate.error.step - at[1])
        for fate in fates
        if fate.error is not None and fate.kind == "diverged"
    ]
    return [value for value in found if value is not None]


def quiet(fates: Sequence[Fate], name: str) -> list[float]:
    """Of blocks with no death in sight."""
    found = []
    for fate in fates:
        if fate.kind == "healthy":
            stop = len(fate.rows)
        elif fate.kind == "diverged" and fate.error is not None:
            stop = fate.error.step - FAR
        else:
            continue
        found += [
            window(fate, name, start, start + BLOCK)
            for start in range(SETTLED, stop - BLOCK + 1, BLOCK)
        ]
    return [value for value in found if value is not None]


def area(above: Sequence[float], below: Sequence[float]) -> float:
    """Share of pairs in which the first is the larger one; ties count half."""
    if not above or not below:
        return math.nan
    wins = sum((x > y) + 0.5 * (x == y) for x in above for y in below)
    return wins / (len(above) * len(below))


def hits(values: Sequence[float], threshold: float) -> str:
    return f"{sum(value > threshold for value in values)} of {len(values)}"


def quartiles(values: Sequence[float]) -> str:
    if len(values) < 2:
        return "–"
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"
