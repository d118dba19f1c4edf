"""How close each member is to the truth: its density on the grid, and what its sampler delivers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from . import kde, metrics
from .distributions import DISTRIBUTIONS
from .draws import Draws
from .grid import Grid
from .members import Members
from .network import EnsembleMLP
from .sampler import make_sampler
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

    Args:
        settings: the scenario.
        members: of the ensemble.
        device: where to compute.
    """

    def __init__(self, settings: Scenario, members: Members, device: torch.device) -> None:
        self.settings, self.members, self.device = settings, members, device
        self.distribution = DISTRIBUTIONS[settings.data]
        self.grid = Grid.of(self.distribution)
        self.bandwidth = kde.bandwidth(self.distribution, self.grid)
        points = self.grid.points
        self.truth = self.distribution.log_density(points).to(device)
        self.modes = self.distribution.component_log_densities(points).argmax(-1).to(device)
        blurred = kde.blurred(self.distribution, self.grid, self.bandwidth).to(device)
        self.blurred_truth = blurred / blurred.sum()
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
        draws = Draws(self.distribution, self.settings, self.members, seeds, self.device)
        sample_q = make_sampler(self.settings)
        parts = [
            sample_q(network, *draws.chains(SAMPLES_AT_ONCE))
            for _ in range(SAMPLES // SAMPLES_AT_ONCE)
        ]
        return torch.cat(parts, 1)

    def measure(self, log_density: Tensor) -> list[dict[str, float]]:
        """Of :meth:`log_density`: a dict of metrics for each member."""
        scale, r2 = metrics.energy_scale(log_density, self.truth, self.truth)
        columns = {
            "kl": metrics.kl(self.truth, log_density),
            "tv": metrics.total_variation(self.truth, log_density),
            "mode_mass_error": metrics.mode_mass_error(self.truth, log_density, self.modes),
            "energy_scale": scale,
            "energy_r2": r2,
        }
        if self.optimum is not None:
            weight = self.truth.exp()
            columns["oracle_r2"] = metrics.offset_r2(log_density, self.optimum, weight)
        return _rows(columns)

    def measure_samples(self, samples: Tensor) -> list[dict[str, float]]:
        """Of :meth:`samples`: a dict of metrics for each member.

        Masses of the samples are those in the cells, which add up to less than 1 where samples lie
        outside the grid: what is outside counts as wrong.
        """
        truth = self.blurred_truth
        found = kde.kde(samples, self.grid, self.bandwidth) * self.grid.cell
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
            for beta in self.members.betas
        ]
        each = torch.tensor([[beta or torch.nan] for beta in betas], dtype=torch.float64)
        optimum: Tensor = ratio / self.members.spread_betas(each)
        return optimum


def _rows(columns: Mapping[str, Tensor]) -> list[dict[str, float]]:
    values = [column.tolist() for column in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]
