"""`ebmguard evaluate toy`: the newest checkpoint by quadrature, and by annealing beside it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ebmguard.errors import ConfigError

from ..engine.checkpoints import load_all_ranks
from ..engine.run_folder import read_config
from ..likelihood import Path as Annealed
from ..likelihood import quadrature_log_z
from ..plots.numbers import NONE, markdown_table
from ..toy.config import ToyConfig
from ..toy.distributions import DISTRIBUTIONS
from ..toy.evaluate import Evaluator
from ..toy.network import EnsembleMLP
from . import evaluate as command
from .config import EvaluateToy
from .likelihood import SEED, Cube, measure

HELD_OUT = 10_000
POOL = 200_000
"""Uniform points, of which exact samples are drawn by their weights."""


def evaluate(config: EvaluateToy, device: torch.device) -> dict[str, Any]:
    """What evaluation.json holds."""
    stored = read_config(config.run)
    if "scenario" not in stored or "members" not in stored:
        raise ConfigError(f"{config.run} is not a run folder of `ebmguard train toy`")
    step, (state, *_) = load_all_ranks(config.run / "checkpoints")
    toy = ToyConfig(out=config.run, resume=True).resumed(stored)
    evaluator = Evaluator(toy.settings, toy.members, device)
    network = _network(state["network"], evaluator, device)
    rows = evaluator.measure(evaluator.log_density(network))
    members = [
        member | {name: row[name] for name in ("kl", "tv")}
        for member, row in zip(toy.members.describe(), rows, strict=True)
    ]
    if config.likelihood:
        for index, member in enumerate(members):
            one = {name: value[index : index + 1] for name, value in state["network"].items()}
            member |= _likelihood(_network(one, evaluator, device), evaluator, member["kl"], config)
    return {"scenario": toy.scenario, "step": step, "members": members}


def table(results: Mapping[str, Any]) -> str:
    """The results for people."""
    head = ["variant", "beta", "seed", "KL", "TV"]
    members = results["members"]
    annealed = "log_z" in members[0]
    if annealed:
        head += ["log Z", "forward", "reverse", "KL by annealing", "bracket"]
    rows = []
    for member in members:
        row = [member["variant"], member["beta"], str(member["seed"])]
        row += [f"{member[name]:.4f}" for name in ("kl", "tv")]
        if annealed:
            sides = (member[name]["log_z"] for name in ("forward", "reverse"))
            row += [f"{log_z:.3f}" for log_z in (member["quadrature_log_z"], *sides)]
            low, high = member["annealed_kl"]
            row += [f"{low:.3f} to {high:.3f}", f"{high - low:.2f}" if member["holds"] else NONE]
        rows.append(row)
    lines = [f"{results['scenario']}, after {results['step']:,} updates", ""]
    lines.append(markdown_table(head, rows, words=2))
    reasons = dict.fromkeys(m["verdict"] for m in members if annealed and not m["holds"])
    return "\n".join([*lines, *reasons])


def _network(
    parameters: Mapping[str, Tensor], evaluator: Evaluator, device: torch.device
) -> EnsembleMLP:
    members = len(next(iter(parameters.values())))
    network = EnsembleMLP([0] * members, evaluator.distribution.dim)
    network.load_state_dict(parameters)
    return network.requires_grad_(False).to(device)


def _likelihood(
    network: EnsembleMLP, evaluator: Evaluator, kl: float, config: EvaluateToy
) -> dict[str, Any]:
    """Of one member; its KL by annealing is that by quadrature with another log Z."""
    distribution, device = DISTRIBUTIONS[evaluator.settings.data], evaluator.device
    generator = torch.Generator(device).manual_seed(SEED)
    cube = Cube(distribution.limit, torch.zeros(distribution.dim, device=device))

    def f(x: Tensor) -> Tensor:
        values: Tensor = network(cube.fold(x).unsqueeze(0)).squeeze(0)
        return values * evaluator.settings.output_scale

    corner = [distribution.limit] * distribution.dim
    log_z = float(quadrature_log_z(f, [-each for each in corner], corner, like=cube.like))
    pool = cube.sample(POOL, generator)
    with torch.no_grad():
        share = f(pool).double().softmax(0)
    chosen = torch.multinomial(share, config.ais_chains, replacement=True, generator=generator)
    held_out = distribution.sample(HELD_OUT, generator)
    held_out = held_out[(held_out.abs() <= distribution.limit).all(1)]
    path = Annealed(f, cube)
    found = measure(path, pool[chosen], held_out, generator, **config.effort, exact=True)
    off = tuple(kl + end - log_z for end in found["log_z"])
    return found | {"quadrature_log_z": log_z, "annealed_kl": off}


run = partial(command.run, evaluate, table)
