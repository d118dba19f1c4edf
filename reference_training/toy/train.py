"""The toy trainer: an ensemble of small EBMs as one batched network under one guard.

The training loop is that of Nijkamp et al. (2020), with a leading dimension for the members.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ebmguard import guard, tags

from ..engine import loop
from ..engine.graphs import graphed_energies
from ..engine.launch import launch
from ..engine.progress import log_to_terminal
from ..engine.record import Record
from ..engine.task import Task
from ..plots.markdown import markdown_table
from ..plots.numbers import median, number
from .config import ToyConfig
from .course import Course
from .distributions import DISTRIBUTIONS
from .draws import Draws
from .evaluate import Evaluator
from .members import averaged_loss
from .network import EnsembleMLP
from .sampler import make_training_sampler


class Ensemble(Task):
    """Every member of a run."""

    def __init__(self, config: ToyConfig, record: Record) -> None:
        settings, members, device = config.settings, config.members, record.device
        distribution = DISTRIBUTIONS[settings.data]
        self.title, self.lines_every = config.scenario, max(1, settings.iterations // 20)
        self.settings, self.members, self.record = settings, members, record
        self.network = EnsembleMLP(members.seed_of_each, distribution.dim).to(device)
        # Every member's gradient is its own, and so is every entry of Adam's state.
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=settings.lr, fused=True)
        self.draws = Draws(distribution, settings, members, members.seeds, device)
        evaluator = Evaluator(settings, members, device)
        self.course = Course(config, record.folder, evaluator, self.network)
        # One guard for the whole ensemble: beta* is a vector over the members, and so is the
        # variant.
        self.loss_fn, self.sample_q = guard(
            None,
            make_training_sampler(settings, device),
            variant=[member["variant"] for member in members.describe()],
            **record.for_guard,
            **members.strength(settings.output_scale, settings.iterations, device),
        )
        self.exponents = members.exponents(settings.output_scale, settings.iterations, device)
        self.guard = self.loss_fn.guard
        sizes = ((len(members), n, distribution.dim) for n in (settings.n_pos, settings.negatives))
        zeros = (torch.zeros(size, device=device) for size in sizes)
        self.energies = graphed_energies(self.network, *zeros)
        self.guards = {"guard": self.guard}
        self.parts = {
            "network": self.network,
            "optimizer": self.optimizer,
            "draws": self.draws,
            "course": self.course,
        }

    def step(self, step: int) -> None:
        """One update of every member."""
        self.optimizer.param_groups[0]["lr"] = self.settings.lr_at(step)
        x_pos = self.draws.positives()
        x0, noise = self.draws.chains(self.settings.n_neg)
        x_neg = self.sample_q(self.network, x0, noise) if self.sample_q else x0
        f_pos, f_neg = self.energies(x_pos, x_neg)
        loss = self.loss_fn(f_pos, f_neg)  # summed over the members
        if self.members.terms > 1:
            starts, slopes = self.exponents
            loss = averaged_loss(f_pos, f_neg, starts + step * slopes, self.members.variants)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.course.after_update(step, f_pos.detach(), f_neg.detach())

    def see(self, step: int, row: Mapping[str, float]) -> None:
        """Nothing: members diverge one by one, and the course knows which."""

    def evaluate(self, step: int) -> bool:
        """Measure all members where that is due."""
        if is_due := self.course.is_due(step):
            self.course.evaluate(step, self.guard.members)
        return is_due

    def shown(self, row: Mapping[str, float]) -> dict[str, float | str]:
        """The latest KL, the guard's latest row, and how many alerts there were."""
        state: dict[str, float | str] = {}
        if not math.isnan(self.course.kl):
            state["median KL"] = self.course.kl
        if tags.GRAD_SCALE in row:
            state["mean GradScale"] = row[tags.GRAD_SCALE]
        counts = self.record.counts.items()
        return {**state, "alerts": ", ".join(f"{n} {name}" for name, n in counts) or "none"}

    def results(self) -> dict[str, Any]:
        """How close every member came."""
        return self.course.results(self.record.next_step, self.guard.members)


def table(members: Sequence[Mapping[str, Any]]) -> str:
    """Medians over the seeds, one line for each variant and β."""
    columns = ("kl", "tv", "mode_mass_error", "energy_scale", "kl_sgld")
    rows = []
    for variant, beta in dict.fromkeys((m["variant"], m["beta"]) for m in members):
        same = [m for m in members if (m["variant"], m["beta"]) == (variant, beta)]
        medians = (number(median([m[name] for m in same]), 4) for name in columns)
        lost = sum(m["diverged_at"] is not None for m in same)
        rows.append([variant, beta, *medians, f"{lost} of {len(same)}"])
    return markdown_table(["variant", "beta", *columns, "diverged"], rows, words=2)


train = partial(loop.train, Ensemble)
run = partial(launch, train, lambda results: table(results["members"]))


def train_run(config: ToyConfig) -> dict[str, Any] | None:
    """Open or resume the run folder and train; None where Ctrl-C stopped the run."""
    log_to_terminal()
    return train(*config.open())
