"""Figure "long-run": chains that go on for a hundred times the steps of training.

A short-run model samples well after K steps and over-saturates beyond them; one that was learned
convergently keeps its chains like data (Nijkamp et al. 2020, AAAI, section 3.3 and Figure 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...plots.markdown import NONE, markdown_table
from .config import FigureConfig
from .long_chains import Chains, LongRun, chain_count, last_stop, long_run, stops_of
from .long_run_picture import MOST_RUNS, draw
from .made import Made
from .several import at_most, number

if TYPE_CHECKING:
    from ..trained import TrainedRun

LEGEND = (
    "Means over the chains that are still finite. Beyond: share of entries outside [-1, 1]; "
    "excess: by how much, on the mean of all entries. Contrast: standard deviation of an image's "
    "entries; above: share of the chains with more of it than 97.5% of the data. Variety: root of "
    "the variance over chains, on the mean of all entries, over that of the data; below 1 many "
    "chains have become one image. f off: mean f minus that of the data, in standard deviations "
    "of f over the data. Pull: length of a step's "
    "drift over that of its noise. Distance: root mean square difference to the nearest training "
    "image, after cutting to [-1, 1]; moved: likewise to the chain's start. 'Data' are training "
    "images with the noise of training, and what 'of data' refers to; but the distance is held "
    "against that of test images with the same noise, as which chains from data start."
)
NAMES = ("beyond", "excess", "ends", "size", "contrast", "f", "slope", "distance")
WORDS = (
    ("contrast", "over-saturated", "washed out"),
    ("f", "on peaks above the data", "below the data"),
)
"""What many chains above and below the quantiles of the data are called."""
MANY = 0.25
"""Share of the chains that is many beyond a quantile which 2.5% of the data are beyond."""


def make(runs: Sequence[TrainedRun], config: FigureConfig) -> Made:
    """Run long chains of every run, from noise and from held-out data.

    All runs are followed for as many steps: 100 times the largest K.

    Args:
        runs: any, short-run or persistent.
        config: `count` is the number of chains from each kind of start.

    Raises:
        ConfigError: there are more runs than colours, or fewer test images than chains.
        ImportError: matplotlib is not installed.
    """
    at_most(runs, MOST_RUNS)
    counts = [chain_count(run, config.count) for run in runs]
    last = last_stop([run.settings.sgld_steps for run in runs])
    found = [
        long_run(run, stops_of(run.settings.sgld_steps, last), count=count, seed=config.seed)
        for run, count in zip(runs, counts, strict=True)
    ]
    said = [sentence for own in found for sentence in statements(own)]
    text = "\n\n".join([LEGEND, *map(table, found), "\n".join(said)])
    return Made(draw(found), text, {"runs": [_numbers(o) for o in found], "statements": said})


def table(own: LongRun) -> str:
    """A run's chains at K and at the end, from either start, and what they are held against."""
    head = [
        "chains",
        "steps",
        "finite",
        "beyond",
        "excess",
        "contrast",
        "of data",
        "above",
        "variety",
    ]
    head += ["f", "f off", "pull", "distance", "of held-out", "moved"]
    rows = []
    for chains in own.chains:
        for stop in dict.fromkeys((own.trained, own.last)):
            finite = chains.finite(stop)
            rows.append(
                [
                    f"from {chains.start}",
                    f"{stop:,}{' = K' if stop == own.trained else ''}",
                    f"{int(finite.sum())} of {len(finite)}",
                    f"{chains.mean('beyond', stop):.1%}",
                    number(chains.mean("excess", stop)),
                    number(chains.mean("contrast", stop)),
                    number(own.of_data("contrast", chains, stop)),
                    f"{own.above('contrast', chains, stop):.0%}",
                    number(own.variety(chains, stop)),
                    number(chains.mean("f", stop)),
                    number(own.shift(chains, stop)),
                    number(own.pull(chains.mean("slope", stop))),
                    number(chains.mean("distance", stop)),
                    number(own.of_data("distance", chains, stop)),
                    number(chains.mean("moved", stop)),
                ]
            )
    for name, images in (("data", own.data), ("held-out", own.held_out)):
        rows.append(
            [
                name,
                *[NONE] * 2,
                f"{images.mean('beyond'):.1%}",
                number(images.mean("excess")),
                number(images.mean("contrast")),
                *[NONE] * 3,
                number(images.mean("f")),
                NONE,
                number(own.pull(images.mean("slope"))),
                number(images.mean("distance")),
                *[NONE] * 2,
            ]
        )
    return f"{own.run.name}, {own.training}\n\n{markdown_table(head, rows)}"


def statements(own: LongRun) -> list[str]:
    """A sentence for each kind of start, that follows from the numbers."""
    return [_statement(own, chains) for chains in own.chains]


def verdict(own: LongRun, chains: Chains) -> str:
    """In a few words what became of the chains.

    "diverged" where one is not finite at the end. Otherwise by a quarter of the chains or more,
    first by their contrast and then by f, held against the quantiles that 95% of the data lie
    between: "over-saturated" and "washed out" above and below in contrast, "on peaks above the
    data" and "below the data" in f, and "like data in contrast and f" where none of these holds.
    """
    if not chains.finite(own.last).all():
        return "diverged"
    for name, above, below in WORDS:
        up, down = own.above(name, chains, own.last), own.below(name, chains, own.last)
        if max(up, down) >= MANY:
            return above if up >= down else below
    return "like data in contrast and f"


def _statement(own: LongRun, chains: Chains) -> str:
    who = f"{own.run.name}, chains from {chains.start} after {own.last:,} steps"
    lost = chains.lost()
    if lost is not None:
        finite = chains.finite(own.last)
        kept = [size for size in chains.largest if math.isfinite(size)]
        return (
            f"{who}: diverged; {int((~finite).sum())} of {len(finite)} are not finite, the first "
            f"between {lost[0]:,} and {lost[1]:,} steps; the largest |x| that was seen is "
            f"{number(max(kept))}."
        )
    before, after = (own.of_data("contrast", chains, stop) for stop in (own.trained, own.last))
    above = own.above("contrast", chains, own.last)
    return (
        f"{who}: {verdict(own, chains)}; contrast {number(before)} of the data's at K = "
        f"{own.trained} and {number(after)} at the end, where {above:.0%} of the chains have more "
        f"than 97.5% of the data; their variety is {number(own.variety(chains, own.last))} of the "
        f"data's; mean f is {_off(own.shift(chains, own.last))} the data's, and "
        f"{own.above('f', chains, own.last):.0%} of the chains are above 97.5% of the data."
    )


def _off(shift: float) -> str:
    if math.isnan(shift):
        return "not comparable with"
    side = "above" if shift >= 0 else "below"
    return f"{number(abs(shift))} standard deviations {side}"


def _numbers(own: LongRun) -> dict[str, Any]:
    return {
        "run": str(own.run.path),
        "name": own.run.name,
        "trained_steps": own.trained,
        "init": own.run.settings.init,
        "data": {name: own.data.mean(name) for name in NAMES},
        "held_out": {name: own.held_out.mean(name) for name in NAMES},
        "contrast_quantiles": own.quantiles("contrast"),
        "f_quantiles": own.quantiles("f"),
        "chains": {chains.start: _course(own, chains) for chains in own.chains},
    }


def _course(own: LongRun, chains: Chains) -> dict[str, Any]:
    lost = chains.lost()
    return {
        "verdict": verdict(own, chains),
        "first_lost_between": lost,
        "steps": [
            {
                "steps": stop,
                "finite": int(chains.finite(stop).sum()),
                "count": len(chains.finite(stop)),
                "largest": largest,
                **{name: chains.mean(name, stop) for name in (*NAMES, "moved")},
                "contrast_of_data": own.of_data("contrast", chains, stop),
                "contrast_above": own.above("contrast", chains, stop),
                "contrast_below": own.below("contrast", chains, stop),
                "f_above": own.above("f", chains, stop),
                "f_below": own.below("f", chains, stop),
                "variety": own.variety(chains, stop),
                "f_off": own.shift(chains, stop),
                "pull": own.pull(chains.mean("slope", stop)),
                "distance_of_held_out": own.of_data("distance", chains, stop),
            }
            for stop, largest in zip(chains.stops, chains.largest, strict=True)
        ],
    }
