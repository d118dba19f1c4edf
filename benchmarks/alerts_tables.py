"""The tables of how well alerts tell dying runs from living ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

from ebmguard.alerts import DEFAULT_RULES, Alert, Level

from .alerts_fates import TUNE, Fate
from .cells import number, percent

REACHED, LOST = 0.9, 0.05
EARLY, EARLY_GAP = 100, 1e3
HALVES = ((True, "tune"), (False, "report"))


def detection(fates: Sequence[Fate]) -> list[str]:
    """The section on detection: what is meant, both halves, every run."""
    return [
        "## Divergences found, and healthy runs left alone",
        "",
        "JEM on digits, settings over learning rate (`lr`, 3e-3 where not named), SGLD steps (`k`, "
        "5), negatives (`neg`, 64), width (`w`, 1) and SGLD step size (`step`, 1), seeds 10 to 12 "
        "(10 and 11 of those hoped to be healthy); `b0` is β* = 0. The runs were only watched; "
        "their rows are replayed through the rules that are shipped. A run has *diverged* at "
        "the first step with |energy gap| > 1e4. It is *healthy* if it finished 2,000 steps and "
        "ended with a median |gap| under 20 and a median GradScale at the reference exponent of "
        "at least 0.5, both of the last 100 steps, and an accuracy within 2 points of its best. "
        "What is neither is *in between*. Accuracy at an ERROR is that of the parameters before "
        "that step's update, which is what a held step keeps; *lost* is the best accuracy so "
        "far minus it. With 360 test images one image is 0.3 points.",
        "",
        "Thresholds were chosen on the runs of one half of the settings ("
        + ", ".join(f"`{each}`" for each in sorted(TUNE))
        + "), at whatever β*; the other half was only counted.",
        "",
        *summary(fates),
        "",
        "### Every run that diverged",
        "",
        *diverged(fates),
        "",
        "### Alerts in healthy runs",
        "",
        *counts([fate for fate in fates if fate.kind == "healthy"]),
        "",
        "### Runs in between",
        "",
        *between([fate for fate in fates if fate.kind == "in between"]),
        "",
    ]


def summary(fates: Sequence[Fate]) -> list[str]:
    columns = [facts([fate for fate in fates if fate.is_tune is half]) for half, _ in HALVES]
    columns.append(facts(fates))
    head = [
        "| | " + " | ".join([name for _, name in HALVES] + ["both"]) + " |",
        "|---|---|---|---|",
    ]
    return [
        *head,
        *(
            f"| {name} | " + " | ".join(each[name] for each in columns) + " |"
            for name in columns[0]
        ),
    ]


def facts(fates: Sequence[Fate]) -> dict[str, str]:
    """One column of the summary."""
    lost = [fate for fate in fates if fate.kind == "diverged"]
    healthy = [fate for fate in fates if fate.kind == "healthy"]
    found = [(fate, fate.error) for fate in lost]
    errors = [(fate, error) for fate, error in found if error is not None and in_time(fate, error)]
    ahead = [
        fate.diverged_at - fate.last_error.step
        for fate in lost
        if fate.diverged_at is not None and fate.last_error is not None
    ]
    early = [fate for fate in lost if fate.diverged_at is not None and fate.diverged_at < EARLY]
    caught = [
        fate for fate in early if fate.error and fate.largest_gap(fate.error.step) <= EARLY_GAP
    ]
    trained = [(fate, error) for fate, error in errors if fate.best(error.step) >= REACHED]
    losses = [fate.best(error.step) - fate.accuracy_at(error.step) for fate, error in trained]
    kept = [fate.accuracy_at(error.step) for fate, error in trained]
    checked = [
        (fate.field_check, fate.accuracy_at(fate.field_check), fate.last_error)
        for fate in lost
        if fate.field_check is not None
    ]
    leads = [step - error.step for step, _, error in checked if error is not None]
    return {
        "runs": str(len(fates)),
        "diverged": str(len(lost)),
        "... with an ERROR at or before that step": f"{len(errors)} of {len(lost)}",
        "... median (least) steps from the ERROR that announced it": spread(ahead, min),
        f"died in the first {EARLY} steps, ERROR before a gap of 1e3": (
            f"{len(caught)} of {len(early)}"
        ),
        "had reached 90% accuracy at the first ERROR": str(len(trained)),
        "... lost under 5 points by then": share(
            sum(round(x, 6) < LOST for x in losses), len(trained)
        ),
        "... median (worst) points lost": spread([100 * x for x in losses], max, ".1f"),
        "... median (worst) accuracy at the ERROR": spread([100 * x for x in kept], min, ".1f"),
        "field's check, loss > 1e8 in size, fired": f"{len(checked)} of {len(lost)}",
        "... median (best) accuracy then": spread([100 * each[1] for each in checked], max, ".1f"),
        "... median (least) steps from our ERROR to it": spread(leads, min),
        "healthy": str(len(healthy)),
        "... ERRORs in all of them": str(count(healthy, Level.ERROR)),
        "... WARNs in all of them": str(count(healthy, Level.WARN)),
        "in between": str(sum(fate.kind == "in between" for fate in fates)),
    }


def in_time(fate: Fate, error: Alert) -> bool:
    return fate.diverged_at is not None and error.step <= fate.diverged_at


def spread(values: Sequence[float], extreme, form: str = "g") -> str:
    """Median and an extreme."""
    return f"{median(values):{form}} ({extreme(values):{form}})" if values else "–"


def share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({percent(part / whole)})" if whole else "–"


def count(fates: Sequence[Fate], level: Level) -> int:
    return sum(alert.level is level for fate in fates for alert in fate.alerts)


def diverged(fates: Sequence[Fate]) -> list[str]:
    lines = [
        "| run | half | first ERROR | by | best so far | at the ERROR | lost | last ERROR "
        "| gap > 1e4 | gap > 1e8 | accuracy then |",
        "|---|---|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for fate in fates:
        if fate.kind != "diverged":
            continue
        error, last, check = fate.error, fate.last_error, fate.field_check
        if error is None:
            first = ["–"] * 5
        else:
            best, kept = fate.best(error.step), fate.accuracy_at(error.step)
            tag = f"`{error.tag}`"
            first = [
                str(error.step),
                tag,
                percent(best),
                percent(kept),
                f"{100 * (best - kept):.1f}",
            ]
        cells = [
            fate.name,
            "tune" if fate.is_tune else "report",
            *first,
            "–" if last is None else str(last.step),
            str(fate.diverged_at),
            "–" if check is None else str(check),
            percent(None if check is None else fate.accuracy_at(check)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def counts(fates: Sequence[Fate]) -> list[str]:
    """Alerts by rule, of each half."""
    lines = [
        "| rule | " + " | ".join(f"WARN, {name} | ERROR, {name}" for _, name in HALVES) + " |",
        "|---|" + "---:|" * 4,
    ]
    found = Counter(
        (alert.rule, fate.is_tune, alert.level) for fate in fates for alert in fate.alerts
    )
    for rule in DEFAULT_RULES:
        cells = [
            str(found[rule.name, half, level])
            for half, _ in HALVES
            for level in (Level.WARN, Level.ERROR)
        ]
        lines.append(f"| `{rule.name}` | {' | '.join(cells)} |")
    steps = [sum(len(fate.rows) for fate in fates if fate.is_tune is half) for half, _ in HALVES]
    lines += ["", f"In {steps[0]:,} steps of the one half and {steps[1]:,} of the other."]
    return lines


def between(fates: Sequence[Fate]) -> list[str]:
    lines = [
        "| run | half | final accuracy | best | median gap | GradScale | WARN | ERROR "
        "| first ERROR |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for fate in fates:
        error = fate.error
        cells = [
            fate.name,
            "tune" if fate.is_tune else "report",
            percent(fate.accuracy[-1][1]),
            percent(fate.best()),
            number(fate.gap),
            number(fate.grad_scale),
            str(count([fate], Level.WARN)),
            str(count([fate], Level.ERROR)),
            "–" if error is None else f"{error.step}, `{error.rule}`",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
