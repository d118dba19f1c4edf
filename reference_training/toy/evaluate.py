"""How close each member is to the truth: its density on the grid, and what its sampler delivers.

Every density is given as its logarithm on the cells of a grid, up to a constant: it is normalised
here, over the grid. That is how an unnormalised model F = o f is compared, and it means that mass
outside the grid is not seen. Values are ``(..., cells)`` with leading dimensions that broadcast,
results ``(...)`` in float64. A NaN, or a +inf, anywhere in a member makes its results NaN.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .distributions import DISTRIBUTIONS
from .grid import Grid, bandwidth, blurred, kde
from .members import Members
from .network import EnsembleMLP
from .sampler import Draws, make_sampler
from .scenario import Scenario

SAMPLES = 10_000
SAMPLES_AT_ONCE = 1_000
POINTS_AT_ONCE = 4_000


class Evaluator:
    """Measures all members of an ensemble by quadrature on the published grid.

    ``kl`` and ``tv`` compare p_d with p_θ, both normalised on the grid; ``kl_sgld`` and ``tv_sgld``
    the truth with a kernel density estimate of 10,000 short-run samples of the whole f (no
    tempering, footnote 5 of the paper), both blurred by the same kernel. Where the negatives come
    from a fixed proposal q (no Langevin steps), ``oracle_r2`` is the p_d-weighted R² of F against
    the optimum (log p_d - log q) / β + c of the default variant (Appendix I).
    """

    def __init__(self, settings: Scenario, members: Members, device: torch.device) -> None:
        self.settings, self.members, self.device = settings, members, device
        self.distribution = DISTRIBUTIONS[settings.data]
        self.grid = Grid.of(self.distribution)
        self.bandwidth = bandwidth(self.distribution, self.grid)
        points = self.grid.points
        self.truth = self.distribution.log_density(points).to(device)
        self.modes = self.distribution.component_log_densities(points).argmax(-1).to(device)
        smooth = blurred(self.distribution, self.grid, self.bandwidth).to(device)
        self.blurred_truth = smooth / smooth.sum()
        self.optimum = None if settings.sgld_steps else self._optimum(points).to(device)

    @torch.no_grad()
    def log_density(self, network: EnsembleMLP) -> Tensor:
        """F = o f on the grid, the learned log density up to a constant: (G, cells) float64."""
        points = self.grid.points.to(network.weights[0])
        chunks = torch.split(points.expand(network.members, -1, -1), POINTS_AT_ONCE, 1)
        return torch.cat([network(x) for x in chunks], 1).double() * self.settings.output_scale

    def samples(self, network: EnsembleMLP, step: int) -> Tensor:
        """Fresh samples of SGLD(p_θ) as in training, but on the whole f: (G, 10000, dim).

        Their random numbers are those of the seed and the step, apart from the training's.
        """
        seeds = [(step + 1) * 1_000_003 + seed for seed in self.members.seeds]
        draws = Draws(self.settings, self.members, seeds, self.device)
        sample_q, parts = make_sampler(self.settings), range(SAMPLES // SAMPLES_AT_ONCE)
        return torch.cat([sample_q(network, *draws.chains(SAMPLES_AT_ONCE)) for _ in parts], 1)

    def measure(self, log_density: Tensor) -> list[dict[str, float]]:
        """Of :meth:`log_density`: a dict of metrics for each member."""
        scale, r2 = energy_scale(log_density, self.truth, self.truth)
        columns = {
            "kl": kl(self.truth, log_density),
            "tv": total_variation(self.truth, log_density),
            "mode_mass_error": mode_mass_error(self.truth, log_density, self.modes),
            "energy_scale": scale,
            "energy_r2": r2,
        }
        if self.optimum is not None:
            columns["oracle_r2"] = offset_r2(log_density, self.optimum, self.truth.exp())
        return _rows(columns)

    def measure_samples(self, samples: Tensor) -> list[dict[str, float]]:
        """Of :meth:`samples`: a dict of metrics for each member.

        Masses of the samples are those in the cells, which add up to less than 1 where samples lie
        outside the grid: what is outside counts as wrong.
        """
        truth = self.blurred_truth
        found = kde(samples, self.grid, self.bandwidth) * self.grid.cell
        gain = torch.where(truth == 0, 0.0, truth * (truth.log() - found.log()))
        outside = 1 - found.sum(-1)
        distance = 0.5 * ((truth - found).abs().sum(-1) + outside)
        return _rows({"kl_sgld": gain.sum(-1), "tv_sgld": distance})

    def _optimum(self, points: Tensor) -> Tensor:
        """What F converges to for each member, (G, cells); NaN where β is 0 or not one number."""
        settings = self.settings
        # The log density of the Gaussian, up to a constant.
        log_q = -((points - settings.init_mean) / settings.init_std).square().sum(-1) / 2
        ratio = self.distribution.log_density(points) - log_q
        betas = [
            beta.starts[0] if beta.starts == beta.ends and len(beta.starts) == 1 else 0.0
            for beta in self.members.beta_of_each
        ]
        return ratio / torch.tensor([[beta or torch.nan] for beta in betas], dtype=torch.float64)


def _rows(columns: Mapping[str, Tensor]) -> list[dict[str, float]]:
    values = torch.stack([*columns.values()], 1).tolist()
    return [dict(zip(columns, row, strict=True)) for row in values]


def log_masses(log_values: Tensor) -> Tensor:
    """Log of the probability in each cell: the log softmax over cells, in float64."""
    return torch.log_softmax(log_values.double(), -1)


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Kullback-Leibler divergence KL(p‖q) in nats.

    0 log 0 is 0; where q is 0 and p is not the divergence is inf.
    """
    log_p, log_q = log_masses(log_p), log_masses(log_q)
    p = log_p.exp()
    return torch.where(p == 0, 0.0, p * (log_p - log_q)).sum(-1)


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Total variation distance: half the sum of |P - Q|, between 0 and 1."""
    return 0.5 * (log_masses(log_p).exp() - log_masses(log_q).exp()).abs().sum(-1)


def mode_masses(log_p: Tensor, labels: Tensor) -> Tensor:
    """Mass of each mode, ``(..., modes)``.

    The labels, ``(cells,)``, are each cell's mode: the truth's likeliest component there.
    """
    masses = log_masses(log_p).exp()
    modes = masses.new_zeros(*masses.shape[:-1], int(labels.max()) + 1)
    return modes.index_add(-1, labels, masses)


def mode_mass_error(log_p: Tensor, log_q: Tensor, labels: Tensor) -> Tensor:
    """Half the sum over modes of the absolute difference in mass: mass in the wrong mode."""
    return 0.5 * (mode_masses(log_p, labels) - mode_masses(log_q, labels)).abs().sum(-1)


def energy_scale(f: Tensor, log_density: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """Slope of the least-squares line of F on the true log density, weighted by p, and its R².

    A slope of 1 is a model at the right temperature, 0.5 one that is twice as flat as the truth.
    ``log_p`` is the logarithm of the weights up to a constant. R² is NaN where F is constant.
    """
    weight = log_masses(log_p).exp()
    y, x = _centred(f, weight), _centred(log_density, weight)
    xx, xy, yy = ((weight * a * b).sum(-1) for a, b in ((x, x), (x, y), (y, y)))
    return xy / xx, xy.square() / (xx * yy)


def offset_r2(f: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """R² of F against a target where only an additive constant is free.

    1 means that F equals the target up to a constant, 0 that it is no better than a constant; it
    may be negative. Only ratios of the weights matter. NaN where the target is constant.
    """
    weight = weight.double() / weight.double().sum(-1, keepdim=True)
    wanted = _centred(target, weight)
    left = _centred(f, weight) - wanted
    return 1 - (weight * left.square()).sum(-1) / (weight * wanted.square()).sum(-1)


def _centred(values: Tensor, weight: Tensor) -> Tensor:
    # Cells without weight may hold -inf, the log of a density that is 0 there. Their value has no
    # part in any weighted sum.
    values = torch.where((weight == 0) & (values == -torch.inf), 0.0, values.double())
    return values - (weight * values).sum(-1, keepdim=True)
