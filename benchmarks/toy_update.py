"""What is measured: an update of our ensemble, one of the published loop, and torchebm's chains.

Learning rates are 0: the networks stay at their initial values, and all updates do the same work.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ebmguard import guard
from ebmguard.reference_training.engine.graphs import graphed, graphed_energies
from ebmguard.reference_training.toy.config import ToyConfig
from ebmguard.reference_training.toy.course import Course
from ebmguard.reference_training.toy.distributions import DISTRIBUTIONS
from ebmguard.reference_training.toy.draws import Draws
from ebmguard.reference_training.toy.network import NEGATIVE_SLOPE, WIDTHS, EnsembleMLP
from ebmguard.reference_training.toy.sampler import make_sampler
from ebmguard.reference_training.toy.scenario import Scenario

BETA = 0.5
"""Of the published loop. Ours has members of several β, which cost the same."""


class Ensemble:
    """The ensemble trainer's update, as ``ebmguard train toy`` runs it.

    Args:
        config: scenario, members and device; ``out`` must be a new folder.
        sinks: write TensorBoard events and JSON lines into that folder.
        graphs: on a GPU, run as CUDA graphs.
    """

    def __init__(self, config: ToyConfig, *, sinks: bool = True, graphs: bool = True) -> None:
        config, folder = config.open()
        device = torch.device(config.device)
        settings, members = config.settings, config.members
        distribution = DISTRIBUTIONS[settings.data]
        self.settings = settings
        self.network = EnsembleMLP(members.seed_of_each, distribution.dim).to(device)
        self.draws = Draws(distribution, settings, members, members.seeds, device)
        self.course = Course(config, folder, len(members), device)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=0.0, fused=True)
        self.steps = 0
        sample_q = make_sampler(settings)
        self.plain_sampler = graphed(sample_q, device) if graphs else sample_q
        # A graph belongs to the guarded calls that captured it.
        self.loss_fn, self.sample_q = guard(
            None,
            graphed(sample_q, device) if graphs else sample_q,
            variant=members.variant_of_each,
            log_dir=folder.path if sinks else None,
            **members.strength(settings.output_scale, settings.iterations, device),
        )
        if graphs:
            self.energies = graphed_energies(
                self.network,
                *(
                    torch.zeros(len(members), n, distribution.dim, device=device)
                    for n in (settings.n_pos, settings.n_neg)
                ),
            )
        else:
            self.energies = self._eager_energies

    def _eager_energies(self, x_pos: Tensor, x_neg: Tensor) -> tuple[Tensor, Tensor]:
        f = self.network(torch.cat((x_pos, x_neg), 1))
        return f[:, : x_pos.shape[1]], f[:, x_pos.shape[1] :]

    def update(self) -> None:
        """One update of every member."""
        x_pos = self.draws.positives()
        x0, noise = self.draws.chains(self.settings.n_neg)
        x_neg = self.sample_q(self.network, x0, noise)
        f_pos, f_neg = self.energies(x_pos, x_neg)
        loss = self.loss_fn(f_pos, f_neg)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.course.after_update(self.steps, f_pos.detach(), f_neg.detach())
        self.steps += 1

    def chains(self) -> Tensor:
        """The chains of every member, without a guard."""
        x0, noise = self.draws.chains(self.settings.n_neg)
        x: Tensor = self.plain_sampler(self.network, x0, noise)
        return x

    def close(self) -> None:
        """Close the sinks."""
        self.loss_fn.guard.close()


class PublishedLoop:
    """One model in a loop of the published structure, written plainly.

    That of Nijkamp et al. (2020), with the loss of Algorithm 1 of *Energy-Based Model Training
    Objective Robust to Inaccurate SGLD Samples*. Nothing is measured or written; data come from our
    samplers, which take less time than the published ones.

    Args:
        settings: what an update does.
        device: where.
        convolutions: 1x1 convolutions on (B, dim, 1, 1), as published; else linear layers.
    """

    def __init__(self, settings: Scenario, device: torch.device, *, convolutions: bool) -> None:
        self.settings = settings
        self.distribution = DISTRIBUTIONS[settings.data]
        self.f = published_network(self.distribution.dim, convolutions=convolutions).to(device)
        self.optimizer = torch.optim.Adam(self.f.parameters(), lr=0.0)
        self.rng = torch.Generator(device).manual_seed(0)
        self.trailing = (1, 1) if convolutions else ()

    def update(self) -> None:
        """One update of the model."""
        settings, rng = self.settings, self.rng
        x_pos = self.distribution.sample(settings.n_pos, rng)
        x_pos = x_pos.reshape(*x_pos.shape, *self.trailing)
        size = (settings.n_neg, *x_pos.shape[1:])
        x = settings.init_std * torch.randn(size, generator=rng, device=rng.device)
        for _ in range(settings.sgld_steps):
            x.requires_grad_()
            (gradient,) = torch.autograd.grad(self.f(x).sum(), x)
            noise = torch.randn(size, generator=rng, device=rng.device)
            step = settings.step_size * (1 - BETA) * gradient + settings.noise_std * noise
            x = x.detach() + step
        f_pos = settings.output_scale * self.f(x_pos).flatten()
        f_neg = settings.output_scale * self.f(x).flatten()
        log_sum = (BETA * f_neg).logsumexp(0)
        loss = torch.logaddexp(BETA * f_pos, log_sum).mean() / BETA - f_pos.mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def published_network(dim: int, *, convolutions: bool) -> nn.Sequential:
    """dim-32-64-64-64-1 with LeakyReLU 0.05."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise((dim, *WIDTHS)):
        layers.append(nn.Conv2d(fan_in, fan_out, 1) if convolutions else nn.Linear(fan_in, fan_out))
        layers.append(nn.LeakyReLU(NEGATIVE_SLOPE))
    return nn.Sequential(*layers[:-1])


def torchebm_chains(settings: Scenario, device: torch.device) -> Callable[[], object] | None:
    """torchebm's Langevin sampler on the network of linear layers; None where it is missing."""
    if importlib.util.find_spec("torchebm") is None:
        return None
    core: Any = importlib.import_module("torchebm.core")
    samplers: Any = importlib.import_module("torchebm.samplers")
    dim = DISTRIBUTIONS[settings.data].dim
    network = published_network(dim, convolutions=False).to(device)

    def energy(_: object, x: Tensor) -> Tensor:
        f: Tensor = network(x)
        return -f.squeeze(-1)

    model = type("Energy", (core.BaseModel,), {"forward": energy})(device=device)
    # Its noise is sqrt(2 step_size) noise_scale.
    noise_scale = settings.noise_std / (2 * settings.step_size) ** 0.5
    sampler = samplers.LangevinDynamics(
        model, step_size=settings.step_size, noise_scale=noise_scale, device=device
    )
    rng = torch.Generator(device).manual_seed(0)

    def chains() -> object:
        x0 = torch.randn((settings.n_neg, dim), generator=rng, device=device)
        return sampler.sample(x=settings.init_std * x0, n_steps=settings.sgld_steps, generator=rng)

    return chains


def config_of(
    scenario: str, betas: Sequence[str], seeds: int, device: torch.device, out: Path
) -> ToyConfig:
    """The settings of an ensemble."""
    return ToyConfig(
        out=out, scenario=scenario, betas=tuple(betas), seeds=seeds, device=str(device)
    )
