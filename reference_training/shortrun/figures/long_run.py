"""Figure "long-run": chains that go on for a hundred times the steps of training.

A short-run model samples well after K steps and over-saturates beyond them; one that was learned
convergently keeps its chains like data (Nijkamp et al. 2020, AAAI, section 3.3 and Figure 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...plots.canvas import COLOURS, DARK, Canvas
from ...plots.figure import Made
from ...plots.markdown import NONE, Columns, cells, heads, markdown_table
from ...plots.numbers import number
from ...plots.page import SIDE, WIDTH, Block, Panels, page, show_chains
from .config import FigureConfig
from .long_chains import Chains, LongRun, chain_count, last_stop, long_run, stops_of
from .several import at_most

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..trained import TrainedRun

MOST_RUNS = len(COLOURS)
LINES = {"noise": "-", "data": "--"}
TALLEST = 100.0
"""Up to here scales are linear; and beyond it, and beyond the size at the start, they are cut."""
LARGEST, BETWEEN = 0.8, 0.35
"""Of an image, at most, and between the chains of the two starts, in inches."""

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


COLUMNS: Columns = {
    "beyond": ("beyond", "{:.1%}".format),
    "excess": ("excess", number),
    "contrast": ("contrast", number),
    "contrast_of_data": ("of data", number),
    "contrast_above": ("above", "{:.0%}".format),
    "variety": ("variety", number),
    "f": ("f", number),
    "f_off": ("f off", number),
    "pull": ("pull", number),
    "distance": ("distance", number),
    "distance_of_held_out": ("of held-out", number),
    "moved": ("moved", number),
}


def table(own: LongRun) -> str:
    """A run's chains at K and at the end, from either start, and what they are held against."""
    rows = []
    for chains in own.chains:
        for stop in dict.fromkeys((own.trained, own.last)):
            finite = chains.finite(stop)
            steps = f"{stop:,}{' = K' if stop == own.trained else ''}"
            count = f"{int(finite.sum())} of {len(finite)}"
            numbers = cells(COLUMNS, _numbers_at(own, chains, stop))
            rows.append([f"from {chains.start}", steps, count, *numbers])
    for name, images in (("data", own.data), ("held-out", own.held_out)):
        values = {**images.means(), "pull": own.pull(images.mean("slope"))}
        rows.append([name, NONE, NONE, *cells(COLUMNS, values)])
    head = ["chains", "steps", "finite", *heads(COLUMNS)]
    return f"{own.run.name}, {own.training}\n\n{markdown_table(head, rows)}"


def _numbers_at(own: LongRun, chains: Chains, stop: int) -> dict[str, float]:
    return {
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
                **_numbers_at(own, chains, stop),
            }
            for stop, largest in zip(chains.stops, chains.largest, strict=True)
        ],
    }


def draw(found: Sequence[LongRun]) -> Figure:
    """For each run its chains from noise and, beside them, from data; curves of all runs below.

    Raises:
        ImportError: matplotlib is not installed.
    """
    least, last = min(own.trained for own in found), found[0].last

    def finish(axes: Axes) -> None:
        axes.set_xscale("symlog", linthresh=least, linscale=0.5)
        # A power of ten in the linear part would lie on the 0.
        powers = (10**k for k in range(len(str(last))))
        axes.set_xticks([0, *(power for power in powers if power >= least)])
        axes.set_xlim(0, last)

    return page(
        "Chains that go on for long after K steps",
        "each row is one chain on its way, cut to [-1, 1] for display, red where it is not finite; "
        "numbers of steps above, K framed",
        _blocks(found),
        Panels(
            "means over the chains that are still finite; solid: from noise; dashed: from held-out "
            "data; upright: K; level and dotted: data with the noise of training",
            {title: partial(curve, found) for title, curve in CURVES.items()},
            "steps",
            finish,
            [
                (f"{own.run.name}, {own.training}", {"color": colour})
                for own, colour in zip(found, COLOURS, strict=False)
            ],
            columns=1,
        ),
    )


def _blocks(found: Sequence[LongRun]) -> list[Block]:
    columns = max(len(own.chains[0].stops) for own in found)
    cell = min(LARGEST, (WIDTH - 2 * SIDE - BETWEEN) / 2 / columns)

    def strips(own: LongRun, colour: str, header: float, canvas: Canvas, y: float) -> None:
        for chains, left in zip(own.chains, (SIDE, (WIDTH + BETWEEN) / 2), strict=True):
            start = "noise" if chains.start == "noise" else "held-out data"
            title = f"{own.run.name}: from {start}"
            canvas.write(left, y + 0.12, title, fontsize=10, ha="left", color=colour)
            lost = [int((~chains.finite(stop)).sum()) for stop in chains.stops]
            labels = [
                short(stop) + (f"\n{count} lost" if count else "")
                for stop, count in zip(chains.stops, lost, strict=True)
            ]
            framed = [chains.stops.index(own.trained)]
            top = y + header
            show_chains(
                canvas, left, top, chains.images, labels, cell, framed=framed, colour=colour
            )

    blocks: list[Block] = []
    for own, colour in zip(found, COLOURS, strict=False):
        header = 0.5 + 0.18 * any(chains.lost() is not None for chains in own.chains)
        height = header + cell * len(own.chains[0].images) + 0.2
        blocks.append((height, partial(strips, own, colour, header)))
    return blocks


def short(steps: int) -> str:
    """A number of steps in few letters: 200, 5k, 2.5k, 1M."""
    for unit, size in (("M", 10**6), ("k", 1000)):
        if steps >= size:
            return f"{steps / size:g}{unit}"
    return str(steps)


Curve = Callable[[Sequence[LongRun], "Axes"], None]


def _lines(values: Callable[[LongRun, Chains, int], float], level: float | None = None) -> Curve:
    def curve(found: Sequence[LongRun], axes: Axes) -> None:
        early, every = [TALLEST], [0.0]
        for own, colour in zip(found, COLOURS, strict=False):
            for chains in own.chains:
                course = [values(own, chains, stop) for stop in chains.stops]
                shown = [value if math.isfinite(value) else math.nan for value in course]
                style: dict[str, Any] = {"color": colour, "ls": LINES[chains.start]}
                axes.plot(chains.stops, shown, lw=1.4, marker=".", **style)
                known = {s: abs(v) for s, v in zip(chains.stops, shown, strict=True) if v == v}
                every += known.values()
                early += [size for stop, size in known.items() if stop == 0]
            axes.axvline(own.trained, lw=0.8, alpha=0.6, color=colour)
        if max(every) > TALLEST:
            axes.set_yscale("symlog", linthresh=1)
            # What diverges leaves the panel, and the other curves stay readable.
            low, high = axes.get_ylim()
            most = 2 * max(early)
            axes.set_ylim(max(low, -most), min(high, most))
        if level is not None:
            axes.axhline(level, color=DARK, lw=1.2, ls=":")

    return curve


def _relative(name: str) -> Curve:
    return _lines(lambda own, chains, stop: own.of_data(name, chains, stop), 1)


def _pull(found: Sequence[LongRun], axes: Axes) -> None:
    _lines(lambda own, chains, stop: own.pull(chains.mean("slope", stop)))(found, axes)
    for own, colour in zip(found, COLOURS, strict=False):
        axes.axhline(own.pull(own.data.mean("slope")), color=colour, lw=1.2, ls=":")


CURVES: dict[str, Curve] = {
    "mean f, off the data's, in its std": _lines(LongRun.shift, 0),
    "contrast, of the data's": _relative("contrast"),
    "variety of chains, of the data's": _lines(LongRun.variety, 1),
    "distance to data, of held-out's": _relative("distance"),
    "rms distance to the chain's start": _lines(lambda _, chains, stop: chains.mean("moved", stop)),
    "drift of a step over its noise": _pull,
}
"""The panels."""
