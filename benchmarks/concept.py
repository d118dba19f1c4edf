"""The picture of docs/words.md: data, chains, steps, weights. `python -m benchmarks.concept`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes
from torch import Tensor

from ebmguard.objective import weights
from ebmguard.reference_training.plots.canvas import DARK, new_figure

PICTURE = Path("docs/pictures/words.png")
DATA, SAMPLES = "#0072B2", "#D55E00"
GRID = torch.linspace(-4.2, 4.2, 600)
FLOOR = -5.6


def f(x: Tensor) -> Tensor:
    """The network's output at points of a line: two hills, high where there are data."""
    parts = [
        torch.tensor(weight).log() - ((x - centre) / std).square() / 2
        for weight, centre, std in ((1.0, -1.6, 0.55), (0.6, 1.7, 0.55))
    ]
    return torch.stack([*parts, -4.0 - 0.12 * x.square()]).logsumexp(0)


def slope(x: Tensor) -> Tensor:
    """The gradient of f."""
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(f(x).sum(), x)
    return gradient


def chain(start: float, steps: int, size: float, noise: float = 0.0) -> Tensor:
    """The points of a Langevin chain: x + size * slope + noise * ξ."""
    points = [torch.tensor(start)]
    for _ in range(steps):
        points.append(points[-1] + size * slope(points[-1]) + noise * torch.randn(()))
    return torch.stack(points)


def panel(axes: Axes, title: str) -> None:
    """The curve of f, and no ticks, as the numbers mean nothing."""
    axes.plot(GRID, f(GRID), color=DARK, lw=1.6)
    axes.set(ylim=(FLOOR - 0.9, 1.7), xticks=[], yticks=[], xlabel="x", ylabel="f(x)")
    axes.set_title(title, fontsize=12, loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def walk(axes: Axes, points: Tensor, colour: str, width: float = 1.2) -> None:
    """A chain as arrows along f."""
    heights = f(points)
    for i in range(len(points) - 1):
        axes.annotate(
            "",
            (float(points[i + 1]), float(heights[i + 1])),
            (float(points[i]), float(heights[i])),
            arrowprops={"arrowstyle": "->", "color": colour, "lw": width, "shrinkA": 0},
        )


def learn(axes: Axes) -> None:
    """What an update does: f goes up at data and down at the ends of the chains."""
    panel(axes, "1. What training does")
    data = torch.cat([-1.6 + 0.5 * torch.randn(14), 1.7 + 0.5 * torch.randn(8)])
    axes.plot(data, torch.full_like(data, FLOOR), "|", color=DATA, ms=13, mew=1.6)
    axes.text(-4.1, FLOOR - 0.72, "data: f goes up here", color=DATA, fontsize=10)
    for start, steps in ((-3.9, 6), (3.9, 5), (0.35, 6)):
        points = chain(start, steps, 0.12, 0.12)
        walk(axes, points, SAMPLES)
        axes.plot(points[-1], f(points[-1]), "o", color=SAMPLES, ms=6)
    axes.text(-4.1, 1.25, "chains climb f; f sinks there", color=SAMPLES, fontsize=10)


def overstep(axes: Axes) -> None:
    """Drifts that pass the top of a hill, and the same path in four times finer steps."""
    panel(axes, "2. When steps are too long")
    walk(axes, chain(-2.35, 4, 0.56), SAMPLES, 1.4)
    axes.text(-4.1, 1.25, "S > 1: each step turns back", color=SAMPLES, fontsize=10)
    walk(axes, chain(0.95, 8, 0.14), "#009E73", 1.4)
    axes.text(0.75, -4.4, "finer\nsteps\narrive", color="#009E73", fontsize=10)


def weigh(axes: Axes) -> None:
    """The weights of negatives at β* > 0: one where f is low has next to none."""
    panel(axes, "3. What β* > 0 adds")
    x = torch.tensor([-3.7, -2.9, -1.75, -1.2, 0.1, 1.5, 2.1, 3.5])
    shares = weights(f(x), 1.0)
    sizes = 900 * shares / shares.max()
    axes.scatter(x, f(x), s=(20 + sizes).numpy(), color=SAMPLES, alpha=0.45, lw=0)
    axes.plot(x, f(x), ".", color=SAMPLES, ms=4)
    axes.text(-4.1, 1.25, "circle: weight of a sample", color=SAMPLES, fontsize=10)
    axes.text(-1.9, -4.75, "unlikely ones fade", color=SAMPLES, fontsize=10)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw it."""
    parser = argparse.ArgumentParser(description=str(__doc__).split(".")[0])
    parser.add_argument("--out", type=Path, default=PICTURE)
    out = parser.parse_args(arguments).out
    torch.manual_seed(3)
    figure = new_figure(9.6, 3.5)
    for place, draw in enumerate((learn, overstep, weigh), start=1):
        draw(figure.add_subplot(1, 3, place))
    figure.tight_layout()
    figure.savefig(out)
    print(out)


if __name__ == "__main__":
    main()
