"""Figure "bilevel": the bias of the unrolled gradient by N and by K, and where the runs ended."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ebmguard.errors import ConfigError
from ebmguard.runs import load

from ...engine.checkpoints import load_all_ranks
from ...engine.run_folder import read_config
from ...plots.canvas import COLOURS
from ...plots.figure import Made, draw
from ...plots.markdown import Columns, cells, heads, markdown_table
from ...plots.page import Panels, page
from ..config import BismConfig
from ..methods import Update
from ..rbm import GaussianBernoulliRBM
from .bias import measured
from .config import FigureConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

N, K = "unrolled_steps", "inner_steps"
COLUMNS: Columns = {
    N: ("N", "{:.0f}".format),
    K: ("K", "{:.0f}".format),
    "runs": ("runs", "{:.0f}".format),
    "drift": ("φN − φ0", "{:.4f}".format),
    "distance": ("φN − φ*", "{:.3f}".format),
    "left": ("left", "{:.3f}".format),
    "gradient": ("g*", "{:.2f}".format),
    "error": ("gN − g*", "{:.3f}".format),
    "bound": ("bound", "{:.3f}".format),
    "bias": ("bias", "{:.3f}".format),
    "bias_error": ("±", "{:.3f}".format),
    "log_likelihood": ("log-likelihood", "{:.3f}".format),
    "ms": ("ms an update", "{:.1f}".format),
}
LEGEND = (
    "Norms, means over minibatches: of what the N steps change in φ; of what is missing to the "
    "exact φ*, and the part of it that the N steps leave; of the exact gradient g* of a minibatch; "
    "of the error of the unrolled one, and its bound by second derivatives. Bias: the norm of the "
    "error's mean over all minibatches, ± its standard error."
)
PANELS = {
    "of φ": {"drift": "moved by N steps", "distance": "missing to φ*"},
    "of the gradient's error": {"bound": "bound", "error": "a minibatch's", "bias": "bias"},
    "log-likelihood, nats": {"log_likelihood": ""},
}


def run(config: FigureConfig) -> int:
    """`ebmguard figure bilevel`.

    Returns:
        Exit status 0.

    Raises:
        ConfigError: the settings cannot be meant, a folder holds no finished run of a bi-level
            method, or the picture cannot be written.
        DiskError: the numbers cannot be written.
        ImportError: matplotlib or pandas is not installed.
    """
    config.check()
    return draw(config, partial(make, config))


def make(config: FigureConfig) -> Made:
    """Measure every run; arguments and errors are those of :func:`run`."""
    by_steps: dict[tuple[float, float], list[dict[str, float]]] = {}
    for path in config.runs:
        found = of_run(path, config.minibatches, config.seed)
        by_steps.setdefault((found[N], found[K]), []).append(found)
    rows = [
        {**{k: statistics.fmean(each[k] for each in of) for k in of[0]}, "runs": len(of)}
        for _, of in sorted(by_steps.items())
    ]
    table = markdown_table(heads(COLUMNS), [cells(COLUMNS, row) for row in rows], words=0)
    return Made(picture(rows), f"{LEGEND}\n\n{table}", {"rows": rows})


def picture(rows: Sequence[Mapping[str, float]]) -> Figure:
    """Each of N and K, with the other as most of the rows have it."""
    curves: dict[str, Callable[[Axes], None]] = {}
    for axis, other in ((N, K), (K, N)):
        held = statistics.mode(row[other] for row in rows)
        shown = [row for row in rows if row[other] == held]
        for title, lines in PANELS.items():
            named = f"{title} by {COLUMNS[axis][0]}, {COLUMNS[other][0]} = {held:g}"
            curves[named] = partial(_curves, shown, axis, lines)
    caption = "norms are means over minibatches; on their axes there is no 0"
    panels = Panels(caption, curves, "Adam steps", _from_zero, [])
    return page("Bi-level gradients", "N unrolled and K inner steps", [], panels)


def of_run(path: Path, minibatches: int, seed: int) -> dict[str, float]:
    """Numbers of one run by the names of :data:`COLUMNS`.

    Raises:
        ConfigError: the folder holds no finished run of a bi-level method.
    """
    stored = read_config(path)
    if not {N, K} <= stored.keys() or stored["method"] not in ("bidsm", "bissm", "bimdsm"):
        raise ConfigError(
            f"{path} holds no run of `ebmguard train bism` by bidsm, bissm or bimdsm, which alone "
            "have unrolled steps"
        )
    config = BismConfig(out=path, resume=True).resumed(stored)
    (results,) = load(path).runs.to_dict("records")
    if "log_likelihood" not in results:
        raise ConfigError(f"{path} is not finished, or has too many latents; log p is not known")
    _, (state, *_) = load_all_ranks(path / "checkpoints")
    generator = torch.Generator().manual_seed(seed)
    data = config.open_data(generator.device)
    model = GaussianBernoulliRBM(data.dim, config.hidden, generator)
    model.load_state_dict(state["model"])
    update = Update(model, config, generator)
    update.load_state_dict(state["update"])
    batch = partial(data.sample, config.batch, generator)
    inner = batch if config.fresh_inner else None
    norms = measured(model, (update.levels(batch(), inner) for _ in range(minibatches)))
    own = {N: config.unrolled_steps, K: config.inner_steps}
    time = 1000 * results["wall_seconds"] / results["steps"]
    return {**own, **norms, "log_likelihood": results["log_likelihood"], "ms": time}


def _curves(
    rows: Sequence[Mapping[str, float]], axis: str, lines: Mapping[str, str], axes: Axes
) -> None:
    for (name, label), colour in zip(lines.items(), COLOURS, strict=False):
        values = [row[name] for row in rows]
        axes.plot([row[axis] for row in rows], values, "o-", ms=3, color=colour, label=label)
    if len(lines) > 1:
        axes.legend(frameon=False, fontsize=8)
        axes.set_yscale("log")
        axes.tick_params(which="minor", labelsize=6)


def _from_zero(axes: Axes) -> None:
    axes.set_xlim(left=0)
