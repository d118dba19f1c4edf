"""Figure "bilevel": the bias of the unrolled gradient by N and by K, and where the runs ended."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ebmguard.errors import ConfigError
from ebmguard.runs import load

from ..bism.config import BismConfig
from ..bism.methods import Update
from ..bism.rbm import GaussianBernoulliRBM
from ..engine.checkpoints import load_all_ranks
from ..engine.run_folder import read_config
from ..plots.canvas import COLOURS
from ..plots.page import Panels, page
from .bism_bias import measured
from .config import BilevelFigure
from .study import Study

N, K = "unrolled_steps", "inner_steps"
PANELS = {
    "of φ": {"drift": "moved by N steps", "distance": "missing to φ*"},
    "of the gradient's error": {"bound": "bound", "error": "a minibatch's", "bias": "bias"},
    "log-likelihood, nats": {"log_likelihood": ""},
}


def biases(runs: Sequence[Path], config: BilevelFigure) -> pd.DataFrame:
    """A row for each N and K: means over the runs that have them.

    Raises:
        ConfigError: a folder holds no finished run of a bi-level method.
    """
    frame = pd.DataFrame([of_run(path, config.minibatches, config.seed) for path in runs])
    by_steps = frame.groupby([N, K])
    means = by_steps.agg(lambda values: statistics.fmean(values)).reset_index()
    means.insert(2, "runs", by_steps.size().to_numpy())
    return means.astype(object)


def of_run(path: Path, minibatches: int, seed: int) -> dict[str, float]:
    """Numbers of one run.

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


def draw(frame: pd.DataFrame, title: str) -> Figure:
    """Each of N and K, with the other as most of the rows have it."""

    def curve(shown: pd.DataFrame, axis: str, lines: dict[str, str], axes: Axes) -> None:
        for (name, label), colour in zip(lines.items(), COLOURS, strict=False):
            x, y = (shown[c].tolist() for c in (axis, name))
            axes.plot(x, y, "o-", ms=3, color=colour, label=label)
        if len(lines) > 1:
            axes.legend(frameon=False, fontsize=8)
            axes.set_yscale("log")
            axes.tick_params(which="minor", labelsize=6)

    def from_zero(axes: Axes) -> None:
        axes.set_xlim(left=0)

    curves: dict[str, Any] = {}
    for axis, by, other, held_by in ((N, "N", K, "K"), (K, "K", N, "N")):
        held = statistics.mode(frame[other])
        shown = frame[frame[other] == held]
        for words, lines in PANELS.items():
            name = f"{words} by {by}, {held_by} = {held:g}"
            curves[name] = partial(curve, shown, axis, lines)
    caption = "norms are means over minibatches; on their axes there is no 0"
    panels = Panels(caption, curves, "Adam steps", from_zero, [])
    return page(title, "N unrolled and K inner steps", [], panels)


STUDIES = {
    "bilevel": Study(
        "Bi-level gradients",
        "bi-level score matching: the bias of its gradient, by a bound of our own",
        lambda config: config.runs,
        biases,
        draw,
        "Norms, means over minibatches: drift, of what the N steps change in φ; distance, of what "
        "is missing to the exact φ*, and left, the part of it that the N steps leave; gradient, of "
        "the exact one of a minibatch; error, of the unrolled one, and its bound by second "
        "derivatives; bias: the norm of the error's mean over all minibatches, ± its standard "
        "error. ms: of an update.",
        "the mean error of the unrolled gradient stays below its bound",
        lambda frame: bool((frame["error"] <= frame["bound"]).all()),
    )
}
