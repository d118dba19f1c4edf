"""`ebmguard figure`, of JEM runs: read what is there, draw it, print its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ebmguard.errors import ConfigError

from ...plots.figure import Made, draw
from ..paper import PROGRESS_FIGURES, TABLE_2
from ..runs import JemRun, find_runs
from ..table.scores import setups
from .config import FigureConfig
from .grids import BETA_STARS, choose, draw_grids, grid_table
from .progress import PANELS, curves, draw_progress, progress_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GRID_TITLES = {
    "4": "Figure 4: negatives of JEM, scenario 1, β* = 0.5",
    "17": "Figure 17: negatives of JEM around the divergence, scenario 1, β* = 0",
    "18": "Figure 18: negatives of JEM, scenario 1, β* = 0.5",
    "19": "Figure 19: negatives of JEM, scenario 1, β* = 10",
}


def run(config: FigureConfig) -> int:
    """`ebmguard figure`, of JEM runs.

    Returns:
        Exit status 0.

    Raises:
        ConfigError: the runs lack what the figure shows, or the picture cannot be written.
        ImportError: matplotlib is not installed.
    """
    if not config.runs:
        raise ConfigError("--runs takes run folders of `ebmguard train jem`, or a folder of some")
    return draw(config, lambda: Made(*make(config.name, find_runs(config.runs))))


def make(name: str, runs: Sequence[JemRun]) -> tuple[Figure, str]:
    """A figure and its numbers.

    Args:
        name: its number in the paper.
        runs: from which those of its scenario are taken.

    Raises:
        ConfigError: they lack what the figure shows.
    """
    if name in BETA_STARS:
        grids = choose(name, runs)
        return draw_grids(grids, GRID_TITLES[name]), grid_table(grids)
    scenario = "1" if name == "3" else PROGRESS_FIGURES[name]
    found = curves(_of_scenario(name, scenario, runs))
    title = f"Figure {name}: JEM, scenario {scenario} ({TABLE_2[scenario].setup})"
    figure = draw_progress(found, title, ["IS"] if name == "3" else list(PANELS))
    return figure, progress_table(found, scenario)


def _of_scenario(name: str, scenario: str, runs: Sequence[JemRun]) -> list[JemRun]:
    own = [run for run in runs if run.scenario == scenario]
    if not own:
        raise ConfigError(
            f"Figure {name} shows scenario {scenario}, which none of the {len(runs)} given runs "
            "has. Make one by `ebmguard train jem --out DIR --data cifar10 --scenario "
            f"{scenario} --beta-star 0`."
        )
    groups = setups(own)
    if len(groups) > 1:
        lines = [
            f"{group.describe()}: {', '.join(run.path.name for run in group.runs)}"
            for group in groups
        ]
        raise ConfigError(
            f"the runs of scenario {scenario} have {len(groups)} different setups, which one "
            "picture would mix; give those of one:\n  " + "\n  ".join(lines)
        )
    return own
