"""Figure "bilevel": how far the unrolled gradient is from the exact one, and how far it can be.

The lower level of an RBM has its end in closed form, phi*: logits b_h + v^T W. With it BiSM's upper
loss is score matching of the free energy, whose gradient g* in theta has no bias. Through N steps

    g_N - g* = [J_theta(phi_N) - J_theta(phi*)] + D_N^T [J_phi(phi_N) - J_phi(phi*)]
               + (D_N - D*)^T J_phi(phi*),

of the upper loss J and D = d phi / d theta. So, with C the largest spectral norm of a second
derivative of J on the way from phi* to phi_N,

    |g_N - g*| <= (C_theta,phi + |D_N| C_phi,phi) |phi_N - phi*| + |D_N - D*| |J_phi(phi*)|.

This is a bound of our own, with constants measured where they are needed. Where phi* is not known,
|phi_N - phi*| <= |phi_N - phi_0| r / (1 - r), if the N steps leave a part r < 1 of the distance.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from ebmguard.errors import ConfigError
from ebmguard.runs import load

from ..bism.bilevel import Parameters
from ..bism.config import BismConfig
from ..bism.images import open_data
from ..bism.methods import Levels, Update
from ..bism.rbm import GaussianBernoulliRBM
from ..engine.checkpoints import load_all_ranks
from ..engine.run_folder import read_config
from ..plots.canvas import COLOURS
from ..plots.page import Panels, page
from .config import BilevelFigure
from .study import Study

N, K = "unrolled_steps", "inner_steps"
PANELS = {
    "of φ": {"drift": "moved by N steps", "distance": "missing to φ*"},
    "of the gradient's error": {"bound": "bound", "error": "a minibatch's", "bias": "bias"},
    "log-likelihood, nats": {"log_likelihood": ""},
}
_PLACES = (0.0, 0.25, 0.5, 0.75, 1.0)


def biases(runs: Sequence[Path], config: BilevelFigure) -> pd.DataFrame:
    """A row for each N and K: means over the runs that have them."""
    frame = pd.DataFrame([of_run(path, config.minibatches, config.seed) for path in runs])
    by_steps = frame.groupby([N, K])
    means = by_steps.agg(lambda values: statistics.fmean(values)).reset_index()
    means.insert(2, "runs", by_steps.size().to_numpy())
    return means.astype(object)


def of_run(path: Path, minibatches: int, seed: int) -> dict[str, float]:
    """Numbers of one run."""
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
    data = open_data(config.data, config.data_root)
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


def exact_posterior(model: GaussianBernoulliRBM) -> Parameters:
    """phi*, the parameters of a :class:`..BernoulliPosterior`, differentiable in the model's."""
    return {"weight": model.weight.T, "bias": model.hidden_bias}


def gradient_bias(model: GaussianBernoulliRBM, levels: Levels) -> tuple[dict[str, float], Tensor]:
    """Of one minibatch, everything at the same random numbers.

    Returns:
        norms by name: ``drift``, |phi_N - phi_0|; ``distance``, |phi_N - phi*|; ``left``, that over
        |phi_0 - phi*|; ``gradient``, |g*|; ``error``, |g_N - g*|; ``bound``, on the error. And
        g_N - g*, ``(P,)``.
    """
    theta, exact = list(model.parameters()), exact_posterior(model)
    before, after, upper = levels
    names = list(before)
    start, end, goal = (_flat([phi[n] for n in names]) for phi in (before, after, exact))
    unrolled, best = (_gradient(upper(phi), theta) for phi in (after, exact))

    def slopes(place: float) -> tuple[Tensor, Tensor, Tensor]:
        """J_phi, and its derivatives in theta and phi."""
        phi = {n: torch.lerp(exact[n], after[n], place).detach().requires_grad_() for n in names}
        leaves = [phi[n] for n in names]
        slope = _flat(torch.autograd.grad(upper(phi), leaves, create_graph=True))
        return slope.detach(), _jacobian(slope, theta), _jacobian(slope, leaves)

    places = [slopes(place) for place in _PLACES]
    mixed, own = (max(_size(each[i]) for each in places) for i in (1, 2))
    moved, ideal = _jacobian(end, theta), _jacobian(goal, theta)
    start, end, goal = start.detach(), end.detach(), goal.detach()
    distance, error = float((end - goal).norm()), unrolled - best
    bound = (mixed + _size(moved) * own) * distance
    bound += _size(moved - ideal) * float(places[0][0].norm())
    norms = {
        "drift": float((end - start).norm()),
        "distance": distance,
        "left": distance / float((start - goal).norm()),
        "gradient": float(best.norm()),
        "error": float(error.norm()),
        "bound": bound,
    }
    return norms, error


def measured(model: GaussianBernoulliRBM, batches: Iterable[Levels]) -> dict[str, float]:
    """Means of :func:`gradient_bias` over at least two minibatches.

    Returns:
        its norms, and ``bias``, the norm of the mean of g_N - g*, with ``bias_error``, the standard
        error of that mean over all its entries.
    """
    found = [gradient_bias(model, levels) for levels in batches]
    errors = torch.stack([error for _, error in found])
    return {
        **{name: sum(norms[name] for norms, _ in found) / len(found) for name in found[0][0]},
        "bias": float(errors.mean(0).norm()),
        "bias_error": math.sqrt(float(errors.var(0).sum()) / len(found)),
    }


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tensors])


def _gradient(y: Tensor, x: Sequence[Tensor]) -> Tensor:
    return _flat(torch.autograd.grad(y, x, retain_graph=True, materialize_grads=True)).detach()


def _jacobian(y: Tensor, x: Sequence[Tensor]) -> Tensor:
    """``(len(y), entries of x)``; 0 where y does not depend on x."""
    if not y.requires_grad:
        return y.new_zeros(len(y), sum(each.numel() for each in x))
    return torch.stack([_gradient(each, x) for each in y])


def _size(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))


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
