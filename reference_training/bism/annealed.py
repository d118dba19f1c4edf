"""log Z of a Gaussian-Bernoulli RBM with any number of latents, by annealing from both sides."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from ..likelihood import Bernoulli, Bracket, Gaussian, Path, bracket_log_z
from .rbm import GaussianBernoulliRBM

__all__ = ["Independent", "bracket", "joint_path"]


@dataclass(frozen=True)
class Independent:
    """v and h in one row, every entry on its own; the factor of v's holds standard deviations."""

    visible: Gaussian
    hidden: Bernoulli

    def log_prob(self, x: Tensor) -> Tensor:
        """``(B, visible + hidden)`` to ``(B,)``."""
        v, h = x.tensor_split([len(self.visible.factor)], dim=1)
        return self.visible.log_prob(v) + self.hidden.log_prob(h)

    def sample(self, count: int, generator: Generator | None = None) -> Tensor:
        """``(count, visible + hidden)``."""
        parts = self.visible.sample(count, generator), self.hidden.sample(count, generator)
        return torch.cat(parts, 1)


def joint_path(model: GaussianBernoulliRBM, base: Independent) -> Path:
    """From the base to the model's p(v, h), whose marginal has the same Z, by block Gibbs steps.

    At every temperature h given v is Bernoulli and v given h Gaussian: logits are averages of the
    base's and the model's, precisions too, and means by their precisions.
    """
    size = len(model.visible_bias)
    std, mean = (x.to(model.weight) for x in (base.visible.factor, base.visible.mean))

    def f(x: Tensor) -> Tensor:
        return -model.energy(*x.tensor_split([size], dim=1))

    def gibbs(x: Tensor, beta: float, generator: Generator | None) -> Tensor:
        logits = torch.lerp(base.hidden.logits, model.posterior_logits(x[:, :size]), beta)
        h = torch.bernoulli(logits.sigmoid(), generator=generator)
        ours, theirs = beta * (-2 * model.log_std).exp(), (1 - beta) * std**-2
        centre = (ours * model.visible_mean(h) + theirs * mean) / (ours + theirs)
        v = centre + torch.empty_like(centre).normal_(generator=generator) * (ours + theirs) ** -0.5
        return torch.cat([v, h], 1)

    return Path(f, base, transition=gibbs)


@torch.no_grad()
def bracket(
    model: GaussianBernoulliRBM, v: Tensor, *, temperatures: int, generator: Generator
) -> Bracket:
    """Both sides of log Z, and the verdict on them.

    Long chains start at v, ``(2 B, visible)``, such as data, and first go as many Gibbs steps as
    there are temperatures. The base is fitted to one half of their ends; the other half walks back.
    """
    v = model.gibbs(v, temperatures, generator)
    h = model.sample_hidden(v, generator)
    chains = len(v) // 2
    # No entry of v is narrower than the model's own noise.
    noise = float(model.log_std.exp().min())
    visible = Gaussian.fit(v[:chains], noise=noise, independent=True)
    base = Independent(visible, Bernoulli.fit(h[:chains]))
    return bracket_log_z(
        joint_path(model, base),
        torch.cat([v, h], 1)[chains:],
        starts="long-run",
        temperatures=temperatures,
        chains=chains,
        generator=generator,
    )
