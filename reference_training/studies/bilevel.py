"""Figure "bilevel": how far the unrolled gradient is from the exact one, and how far it can be.

The lower level of an RBM has its end in closed form, phi*: logits b_h + v^T W. With it BiSM's upper
loss is score matching of the free energy, whose gradient g* in theta has no bias. Through N steps

    g_N - g* = [J_theta(phi_N) - J_theta(phi*)] + D_N^T [J_phi(phi_N) - J_phi(phi*)]
               + (D_N - D*)^T J_phi(phi*),

of the upper loss J and D = d phi / d theta. So, with C the largest spectral norm of a second
derivative of J on the way from phi* to phi_N,

    |g_N - g*| <= (C_theta,phi + |D_N| C_phi,phi) |phi_N - phi*| + |D_N - D*| |J_phi(phi*)|.

This is a bound of our own, with constants measured where they are needed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import pandas as pd
import torch
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
from ..plots.canvas import COLOURS, constrained, plain
from .config import BilevelFigure
from .study import Study

N, K = "unrolled_steps", "inner_steps"
_size: Callable[[Tensor], Tensor] = partial(torch.linalg.matrix_norm, ord=2)
PANELS = {
    "of φ": {"drift": "moved by N steps", "distance": "missing to φ*"},
    "of the gradient's error": {"bound": "bound", "error": "a minibatch's", "bias": "bias"},
    "log-likelihood, nats": {"log_likelihood": ""},
}
PLACES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""On the way from phi* to phi_N, where second derivatives are measured."""


def biases(runs: Sequence[Path], config: BilevelFigure) -> pd.DataFrame:
    """A row for each N and K: means over the runs that have them."""
    frame = pd.DataFrame([of_run(path, config.minibatches, config.seed) for path in runs])
    by_steps = frame.groupby([N, K])
    means = by_steps.mean(skipna=False).reset_index()
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
    own = {"log_likelihood": results["log_likelihood"]}
    own["ms"] = 1000 * results["wall_seconds"] / results["steps"]
    return {N: config.unrolled_steps, K: config.inner_steps, **norms, **own}


def exact_posterior(model: GaussianBernoulliRBM) -> Parameters:
    """phi*, the parameters of a :class:`..BernoulliPosterior`, differentiable in the model's."""
    return {"weight": model.weight.T, "bias": model.hidden_bias}


def gradient_bias(model: GaussianBernoulliRBM, levels: Levels) -> tuple[dict[str, float], Tensor]:
    """Of one minibatch, everything at the same random numbers: norms by name, and g_N - g*."""
    theta, exact = list(model.parameters()), exact_posterior(model)
    before, after, upper = levels
    start, end, goal = (_flat([phi[n] for n in before]) for phi in (before, after, exact))
    best = _jacobian(upper(exact), theta)
    error = _jacobian(upper(after), theta) - best

    def slopes(place: float) -> tuple[Tensor, Tensor, Tensor]:
        """J_phi, and its derivatives in theta and phi."""
        phi = {n: torch.lerp(exact[n], after[n], place).detach().requires_grad_() for n in before}
        leaves = list(phi.values())
        slope = _flat(torch.autograd.grad(upper(phi), leaves, create_graph=True))
        return slope.detach(), _jacobian(slope, theta), _jacobian(slope, leaves)

    exactly, mixed, own = zip(*map(slopes, PLACES), strict=True)
    moved, ideal = _jacobian(end, theta), _jacobian(goal, theta)
    distance = (end - goal).norm()
    bound = (max(map(_size, mixed)) + _size(moved) * max(map(_size, own))) * distance
    norms = {
        "drift": (end - start).norm(),
        "distance": distance,
        "left": distance / (start - goal).norm(),
        "gradient": best.norm(),
        "error": error.norm(),
        "bound": bound + _size(moved - ideal) * exactly[0].norm(),
    }
    return {name: norm.item() for name, norm in norms.items()}, error


def measured(model: GaussianBernoulliRBM, batches: Iterable[Levels]) -> dict[str, float]:
    """Means over at least two minibatches of norms, and of g_N - g* with its standard error."""
    norms, errors = zip(*(gradient_bias(model, levels) for levels in batches), strict=True)
    of_all = torch.stack(errors)
    means = {name: statistics.fmean(each[name] for each in norms) for name in norms[0]}
    spread = (of_all.var(0).sum() / len(of_all)).sqrt()
    return means | {"bias": of_all.mean(0).norm().item(), "bias_error": spread.item()}


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tensors])


def _jacobian(y: Tensor, x: Sequence[Tensor]) -> Tensor:
    """``(..., entries of x)`` of y of a shape (...); 0 where y does not depend on x."""
    if not y.requires_grad:
        return y.new_zeros(*y.shape, sum(each.numel() for each in x))
    slopes = partial(torch.autograd.grad, inputs=x, retain_graph=True, materialize_grads=True)
    return torch.stack([_flat(slopes(each)) for each in y.reshape(-1)]).view(*y.shape, -1)


def draw(frame: pd.DataFrame, title: str) -> Figure:
    """Each of N and K, with the other as most of the rows have it."""
    said = "N unrolled and K inner steps; norms are means over minibatches"
    heading = f"{title}\n{said}; on their axes there is no 0"
    figure, panels = constrained(heading, (2, 3), (11.5, 7.3))
    sides = (N, "N", K, "K"), (K, "K", N, "N")
    for (axis, by, other, held_by), row in zip(sides, panels, strict=True):
        held = statistics.mode(frame[other])
        shown = frame[frame[other] == held].astype(float)
        for axes, (words, lines) in zip(row, PANELS.items(), strict=True):
            for (name, label), colour in zip(lines.items(), COLOURS, strict=False):
                axes.plot(shown[axis], shown[name], "o-", ms=3, color=colour, label=label)
            if len(lines) > 1:
                axes.legend(frameon=False, fontsize=8)
                axes.set_yscale("log")
                axes.tick_params(which="minor", labelsize=6)
            axes.set_xlim(left=0)
            plain(axes, f"{words} by {by}, {held_by} = {held:g}", "Adam steps")
    return figure


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
