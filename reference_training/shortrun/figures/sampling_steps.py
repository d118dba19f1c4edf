"""Figure "steps": samples after fewer and after more steps than training gave the chains.

Nijkamp et al. (2019), author response, question 3: models trained with K1 steps, sampled with K2 =
0, 20, ..., 200; "over-saturation occurs for K2 > K1".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...plots.canvas import COLOURS, DARK, Canvas
from ...plots.figure import Made
from ...plots.markdown import Columns, cells, heads, markdown_table
from ...plots.page import SIDE, WIDTH, Block, Panels, page, show_chains
from .config import FigureConfig
from .measured import describe
from .several import at_most, from_noise
from .step_sweep import Sweep, even_stops, stops_of, sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..trained import TrainedRun

COUNT = 128
"""Chains of each run."""
LINES = ("-", "--", ":")
MOST_RUNS = len(COLOURS) * len(LINES)
MOST_PANELS = 6
LARGEST, HEADER = 0.95, 0.55
"""Of an image, at most, and of what stands above a run's images, in inches."""
RATIOS = ("contrast", "colour", "distance")
LEGEND = (
    "Means over the chains, of x⁻ after K2 steps. Beyond: share of entries outside [-1, 1], and by "
    "how much on the mean of all entries. Ends: share shown as pure black or white. Contrast: "
    "standard deviation of an image's entries. Slope: length of ∇f(x). Distance: root mean square "
    "difference to the nearest training image, after cutting to [-1, 1]. 'Data' has the noise of "
    "training, and is what x⁻ is to be like; its numbers are what 'of data' refers to, the "
    "distance's are those of held-out images."
)
COLUMNS: Columns = {
    "beyond": ("beyond", "{:.1%}".format),
    "excess": ("by", "{:.4f}".format),
    "ends": ("ends", "{:.1%}".format),
    "size": ("mean |x|", "{:.3f}".format),
    "contrast": ("contrast", "{:.3f}".format),
    "contrast_of_data": ("of data", "{:.3f}".format),
    "colour": ("colour", "{:.3f}".format),
    "colour_of_data": ("of data", "{:.3f}".format),
    "f": ("f", "{:.4g}".format),
    "gap": ("gap", "{:.3g}".format),
    "slope": ("slope", "{:.3g}".format),
    "distance": ("distance", "{:.3f}".format),
    "distance_of_data": ("of held-out", "{:.3f}".format),
}


def make(runs: Sequence[TrainedRun], config: FigureConfig) -> Made:
    """Sample every run with fewer and more steps, from the same starts and with the same noise.

    Args:
        runs: any, if their chains start from noise.
        config: `count` is the number of chains.

    Raises:
        ConfigError: a run's chains go on from update to update, or there are more runs than
            colours.
        ImportError: matplotlib is not installed.
    """
    from_noise(runs, "Figure steps")
    at_most(runs, MOST_RUNS)
    stops = stops_of([run.settings.sgld_steps for run in runs])
    sweeps = [sweep(run, stops, count=config.count or COUNT, seed=config.seed) for run in runs]
    said = [sentence for own in sweeps for sentence in statements(own)]
    text = "\n\n".join([LEGEND, *map(table, sweeps), "\n".join(said)])
    return Made(draw(sweeps), text, {"runs": [_numbers(s) for s in sweeps], "statements": said})


def table(own: Sweep) -> str:
    """A run's numbers, a line for each K2 and three of what they are held against."""
    grey = own.run.data.sample_shape[0] == 1
    shown = {k: v for k, v in COLUMNS.items() if not (grey and k.startswith("colour"))}
    named = {
        **{f"{k}{' = K1' if k == own.trained[0] else ''}": _numbers_at(own, k) for k in own.stops},
        "data": own.data.means(),
        "without noise": own.clean.means(),
        "held-out": own.held_out.means(),
    }
    rows = [[name, *cells(shown, values)] for name, values in named.items()]
    title = f"{describe(own.run)}; {_chains(own):,} chains"
    return f"{title}\n\n{markdown_table(['K2', *heads(shown)], rows)}"


def _chains(own: Sweep) -> int:
    return len(own.chains[0].each["f"])


def _numbers_at(own: Sweep, steps: int) -> dict[str, float]:
    ratios = {f"{name}_of_data": own.over_data(steps, name) for name in RATIOS}
    return {**own.at(steps).means(), "gap": own.gap(steps), **ratios}


def statements(own: Sweep) -> list[str]:
    """Two sentences that follow from a run's numbers: on over-saturation, and on the distance."""
    return [_on_saturation(own), _on_distance(own)]


def _on_saturation(own: Sweep) -> str:
    first = own.trained[0]
    early, late = own.at(first), own.at(2 * first)
    who = f"{own.run.name}, from K2 = K1 = {first} to K2 = {2 * first}"
    change = late.each["contrast"] - early.each["contrast"]
    lost = int((~change.isfinite()).sum())
    if lost:
        return f"{who}: nothing can be said; {lost} of {len(change)} chains are not finite."
    before, after = (own.over_data(steps, "contrast") for steps in (first, 2 * first))
    beyond, ends = (
        f"{early.mean(name):.1%} to {late.mean(name):.1%} (data: {own.data.mean(name):.1%})"
        for name in ("beyond", "ends")
    )
    if math.isnan(after):
        verdict = "the data have no contrast to compare it with"
    elif after <= before:
        verdict = "no over-saturation, contrast does not grow"
    elif after <= 1:
        verdict = "no over-saturation, contrast grows and stays below that of data"
    else:
        verdict = "over-saturation for K2 > K1"
    return (
        f"{who}: contrast × {late.mean('contrast') / early.mean('contrast'):.3f}, from "
        f"{before:.3f} to {after:.3f} of the data's (it grows in {int((change > 0).sum())} of "
        f"{len(change)} chains); entries outside [-1, 1] from {beyond}, at its ends from {ends}: "
        f"{verdict}."
    )


def _on_distance(own: Sweep) -> str:
    distances = [chains.mean("distance") for chains in own.chains]
    who = f"{own.run.name}: the mean distance to the nearest training image"
    if not all(map(math.isfinite, distances)):
        return f"{who} is undefined at some K2, where chains are not finite."
    least = min(distances)
    place = own.stops[distances.index(least)]
    low, high = own.trained
    at_trained = low <= place <= high
    last = ", the most that was tried" if place == own.stops[-1] else ""
    others = dict.fromkeys(steps for steps in (low, 2 * low) if steps != place)
    values = " and ".join(f"{own.at(steps).mean('distance'):.3f} at {steps}" for steps in others)
    return (
        f"{who} is smallest at K2 = {place}{last}, {'' if at_trained else 'not '}at K1: "
        f"{least:.3f}, {own.over_data(place, 'distance'):.3f} of that of held-out images. It is "
        f"{values}."
    )


def _numbers(own: Sweep) -> dict[str, Any]:
    return {
        "run": str(own.run.path),
        "name": own.run.name,
        "trained_steps": own.trained,
        "chains": _chains(own),
        "data": own.data.means(),
        "data_without_noise": own.clean.means(),
        "held_out": own.held_out.means(),
        "steps": [{"steps": steps, **_numbers_at(own, steps)} for steps in own.stops],
    }


def draw(sweeps: Sequence[Sweep]) -> Figure:
    """A strip of images for each run, K1 marked, and curves of all runs below.

    Raises:
        ImportError: matplotlib is not installed.
    """
    shapes = {own.run.data.sample_shape for own in sweeps}
    # One seed gives runs the same starts and noise where their images have one shape.
    alike = len(sweeps) > 1 and len(shapes) == 1
    coloured = any(shape[0] > 1 for shape in shapes)
    titles = [title for title in CURVES if coloured or title != COLOUR][:MOST_PANELS]

    def finish(axes: Axes) -> None:
        axes.yaxis.set_major_formatter("{x:.4g}")
        axes.set_xlim(0, sweeps[0].stops[-1])

    return page(
        "Sampling with K2 steps what was trained with K1",
        "each row is one chain on its way, cut to [-1, 1] for display"
        + ("; the same starts and noise for every run" if alike else ""),
        _blocks(sweeps),
        Panels(
            f"means over {_chains(sweeps[0]):,} chains; upright: K1; level and dotted: data with "
            "the noise of training",
            {title: partial(CURVES[title], sweeps) for title in titles},
            "K2",
            finish,
            [(own.run.name, _style(i)) for i, own in enumerate(sweeps)],
        ),
    )


def columns(trained: Sequence[int]) -> tuple[int, ...]:
    """The K2 whose images are shown: the even ones and every run's K1.

    Args:
        trained: K1 of each run.
    """
    return tuple(sorted({*even_stops(trained), *trained}))


def _blocks(sweeps: Sequence[Sweep]) -> list[Block]:
    shown = columns([own.trained[0] for own in sweeps])
    cell = min(LARGEST, (WIDTH - 2 * SIDE) / len(shown))
    left = (WIDTH - cell * len(shown)) / 2

    def strip(own: Sweep, colour: str, canvas: Canvas, y: float) -> None:
        low, high = own.trained
        canvas.write(left, y + 0.12, describe(own.run), fontsize=10, ha="left", color=colour)
        images = own.images[:, [own.stops.index(steps) for steps in shown]]
        labels = [f"{'K1 = ' if steps == low else ''}{steps}" for steps in shown]
        framed = [i for i, steps in enumerate(shown) if low <= steps <= high]
        y += HEADER
        show_chains(canvas, left, y, images, labels, cell, framed=framed, colour=colour)

    return [
        (HEADER + cell * len(own.images) + 0.15, partial(strip, own, _style(i)["color"]))
        for i, own in enumerate(sweeps)
    ]


def _style(place: int) -> dict[str, str]:
    return {"color": COLOURS[place % len(COLOURS)], "ls": LINES[place // len(COLOURS)]}


Curve = Callable[[Sequence[Sweep], "Axes"], None]


def _means(values: Callable[[Sweep, int], float], level: float | None) -> Curve:
    def curve(sweeps: Sequence[Sweep], axes: Axes) -> None:
        for i, own in enumerate(sweeps):
            style: dict[str, Any] = _style(i)
            axes.plot(own.stops, [values(own, steps) for steps in own.stops], lw=1.4, **style)
            low, high = own.trained
            if low == high:
                axes.axvline(low, lw=0.8, alpha=0.6, **style)
            else:
                axes.axvspan(low, high, color=style["color"], alpha=0.12, lw=0)
        if level is not None:
            axes.axhline(level, color=DARK, lw=1.2, ls=":")

    return curve


def _relative(name: str) -> Curve:
    return _means(lambda own, steps: own.over_data(steps, name), 1)


def _absolute(name: str) -> Curve:
    means = _means(lambda own, steps: own.at(steps).mean(name), None)

    def curve(sweeps: Sequence[Sweep], axes: Axes) -> None:
        means(sweeps, axes)
        for i, own in enumerate(sweeps):
            axes.axhline(own.data.mean(name), color=_style(i)["color"], lw=1.2, ls=":")

    return curve


COLOUR = "colour, of the data's"
CURVES: dict[str, Curve] = {
    "contrast, of the data's": _relative("contrast"),
    COLOUR: _relative("colour"),
    "share shown as black or white": _absolute("ends"),
    "mean excess beyond [-1, 1]": _absolute("excess"),
    "mean f(data) − mean f(x⁻)": _means(lambda own, steps: own.gap(steps), 0),
    "distance to data, of that of held-out": _relative("distance"),
    "mean length of ∇f": _absolute("slope"),
}
"""The panels, the more telling first."""
