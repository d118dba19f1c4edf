"""`ebmguard figure`: train what is missing, then draw, tabulate and say what the numbers show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...engine.interrupt import INTERRUPTED
from ...engine.run_folder import RESULTS, write_json
from ...plots.canvas import new_figure, save_picture
from ..command import train_run
from . import table
from .collect import collect
from .config import FigureConfig
from .curves import draw_curves
from .draw import draw_images
from .lines import draw_lines
from .panels import pictures
from .runs import ToyRun
from .specs import FigureSpec
from .statements import statements
from .tradeoff import draw_tradeoff


def run(config: FigureConfig) -> int:
    """`ebmguard figure`.

    Returns:
        exit status: 0, or 130 where Ctrl-C stopped a training.

    Raises:
        ConfigError: the settings cannot be meant, or the folder holds other runs.
        ImportError: matplotlib is not installed.
    """
    # What draws is tried before hours of training, not after them.
    new_figure(1, 1)
    runs = collect(config, train_run)
    if runs is None:
        print(f"stopped; go on with: {config.command()}")
        return INTERRUPTED
    said = statements(config.spec, runs)
    files = publish(config.spec, runs, said, config.folder)
    print(f"\n{table.text(config.spec, runs)}\n\n{table.legend(config.spec, runs)}\n")
    print("\n".join(said))
    print("\npictures: " + ", ".join(map(str, files)))
    return 0


def publish(
    spec: FigureSpec, runs: Mapping[str, ToyRun], said: Sequence[str], folder: Path
) -> list[Path]:
    """Write a figure's pictures, table.md and results.json, with what the numbers say.

    Returns:
        the pictures.

    Raises:
        ConfigError: a run lacks members that the figure shows, or a picture cannot be written.
        DiskError: the numbers cannot be written.
        ImportError: matplotlib is not installed.
    """
    drawn = {
        picture.name: draw_lines(spec, picture)
        if picture.bands[0].flat
        else draw_images(spec, picture)
        for picture in pictures(spec, runs)
    }
    if spec.samplers:
        drawn["curves"] = draw_curves(spec, runs)
    else:
        drawn["tradeoff"] = draw_tradeoff(spec, runs)
    files = [folder / f"{name}.png" for name in drawn]
    for file, figure in zip(files, drawn.values(), strict=True):
        save_picture(figure, file)
    (folder / "table.md").write_text(table.page(spec, runs, said), encoding="utf-8")
    write_json(folder / RESULTS, results(spec, runs, said))
    return files


def results(spec: FigureSpec, runs: Mapping[str, ToyRun], said: Sequence[str]) -> dict[str, Any]:
    """A figure's numbers: medians and ranges of every run, and the sentences on them."""
    return {
        "command": f"figure {spec.name}",
        "runs": [
            {
                "scenario": run.scenario,
                "seeds": run.seeds,
                "settings": dict(run.settings),
                "wall_seconds": run.results.get("wall_seconds"),
                "rows": table.rows(spec, run),
            }
            for run in runs.values()
        ],
        "statements": list(said),
    }
