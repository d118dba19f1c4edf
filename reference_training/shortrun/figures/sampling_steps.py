"""Figure "steps": samples after fewer and after more steps than training gave the chains.

Nijkamp et al. (2019), author response, question 3: models trained with K1 steps, sampled with K2 =
0, 20, ..., 200; "over-saturation occurs for K2 > K1".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...plots.markdown import NONE, markdown_table
from .config import FigureConfig
from .made import Made
from .measured import Measured, describe
from .sampling_steps_picture import MOST_RUNS, draw
from .several import at_most, from_noise
from .step_sweep import Sweep, stops_of, sweep

if TYPE_CHECKING:
    from ..trained import TrainedRun

COUNT = 128
"""Chains of each run."""


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


LEGEND = (
    "Means over the chains, of x⁻ after K2 steps. Beyond: share of entries outside [-1, 1], and by "
    "how much on the mean of all entries. Ends: share shown as pure black or white. Contrast: "
    "standard deviation of an image's entries. Slope: length of ∇f(x). Distance: root mean square "
    "difference to the nearest training image, after cutting to [-1, 1]. 'Data' has the noise of "
    "training, and is what x⁻ is to be like; its numbers are what 'of data' refers to, the "
    "distance's are those of held-out images."
)


def table(own: Sweep) -> str:
    """A run's numbers, a line for each K2 and three of what they are held against."""
    coloured = own.run.data.sample_shape[0] > 1
    head = ["K2", "beyond", "by", "ends", "mean |x|", "contrast", "of data"]
    head += ["colour", "of data"] if coloured else []
    head += ["f", "gap", "slope", "distance", "of held-out"]
    rows = []
    for steps, chains in zip(own.stops, own.chains, strict=True):
        mark = " = K1" if steps == own.trained[0] else ""
        ratios = {name: f"{own.over_data(steps, name):.3f}" for name in RATIOS}
        rows.append(_row(f"{steps}{mark}", chains, coloured, f"{own.gap(steps):.3g}", ratios))
    nothing = dict.fromkeys(RATIOS, NONE)
    rows.append(_row("data", own.data, coloured, NONE, nothing))
    rows.append(_row("without noise", own.clean, coloured, NONE, nothing))
    rows.append(_row("held-out", own.held_out, coloured, NONE, nothing))
    count = len(own.chains[0].each["f"])
    title = f"{describe(own.run)}; {count:,} chains"
    return f"{title}\n\n{markdown_table(head, rows)}"


RATIOS = ("contrast", "colour", "distance")


def _row(
    name: str, images: Measured, coloured: bool, gap: str, ratios: dict[str, str]
) -> list[str]:
    cells = [name, f"{images.mean('beyond'):.1%}", f"{images.mean('excess'):.4f}"]
    cells += [f"{images.mean('ends'):.1%}", f"{images.mean('size'):.3f}"]
    cells += [f"{images.mean('contrast'):.3f}", ratios["contrast"]]
    if coloured:
        cells += [f"{images.mean('colour'):.3f}", ratios["colour"]]
    cells += [f"{images.mean('f'):.4g}", gap, f"{images.mean('slope'):.3g}"]
    return [*cells, f"{images.mean('distance'):.3f}", ratios["distance"]]


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
        "chains": len(own.chains[0].each["f"]),
        "data": own.data.means(),
        "data_without_noise": own.clean.means(),
        "held_out": own.held_out.means(),
        "steps": [
            {
                "steps": steps,
                **chains.means(),
                "gap": own.gap(steps),
                **{f"{name}_of_data": own.over_data(steps, name) for name in RATIOS},
            }
            for steps, chains in zip(own.stops, own.chains, strict=True)
        ],
    }
