"""Settings of the toy trainer: one frozen dataclass, which is also its command line."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from ebmguard.errors import ConfigError

from ..engine.ranks import ONE_RANK, Ranks
from ..engine.run_config import RunConfig, below, not_positive, refuse
from .scenario import SCENARIOS, Scenario

if TYPE_CHECKING:  # the help needs no torch
    from .members import Members


@dataclass(frozen=True)
class ToyConfig(RunConfig):
    """Train an ensemble of small EBMs on a distribution whose density is known.

    All β, variants and seeds train as one batched network under one guard. The run folder gets
    config.json, metrics.jsonl and alerts.jsonl (the guard's), members.jsonl (KL and more of each
    member, evaluation by evaluation), TensorBoard events, results.json, figures/grids.npz and
    checkpoints/.
    """

    scenario: str = "gmm-default"
    """{gmm,circles,mixture1d}-{default,long,shifted,restricted,degenerate,proposal}, and with
    broken samplers: -{exploding,lost,stuck}, -good+{exploding,lost,stuck}."""
    betas: tuple[str, ...] = ("0", "0.1", "0.3", "0.5", "0.7", "0.9")
    """β of the members: numbers up to 1, negative ones included; linear schedules such as 0:0.9;
    averages of the losses of several β such as 0.1+0.5+0.9."""
    variants: tuple[str, ...] = ("default",)
    """Variants of the objective: default, no_pos, batch, true."""
    seeds: int = 3
    """Number of seeds, counted up from --seed."""
    iterations: int | None = None
    """Updates; None is the scenario's."""
    noise_std: float | None = None
    """Standard deviation of the Langevin noise; None is the scenario's."""
    lr: float | None = None
    """Adam's learning rate, with the scenario's decay; None is the scenario's."""
    evaluations: int = 20
    """Evaluations over the run. Results are means over the last five."""
    threads: int = 0
    """CPU threads of PyTorch; 0 is its own choice, the machine's cores."""

    words: ClassVar[tuple[str, ...]] = ("ebmguard", "train", "toy")
    shown: ClassVar[tuple[str, ...]] = ("out", "scenario", "betas", "seeds")

    def check(self, ranks: Ranks = ONE_RANK) -> None:
        """Refuse settings that cannot be meant."""
        problems = below(self, seeds=1, evaluations=1, iterations=1) + self.problems()
        problems += not_positive(self, "noise_std", "lr")
        if ranks.world > 1:
            problems.append(f"an ensemble is trained by one process, not by {ranks.world}")
        if 1 <= self.total_steps < self.evaluations:
            problems.append(
                f"evaluations is {self.evaluations}, expected at most one for each of the "
                f"{self.total_steps} updates"
            )
        refuse(problems)
        _ = self.members

    @property
    def settings(self) -> Scenario:
        """The scenario with what is overridden."""
        if self.scenario not in SCENARIOS:
            known = ", ".join(SCENARIOS)
            raise ConfigError(f"scenario is {self.scenario!r}, expected one of {known}")
        scenario = SCENARIOS[self.scenario]
        if self.lr is not None:
            scenario = replace(scenario, lr_end=scenario.lr_end * self.lr / scenario.lr)
        return self.over(scenario)

    @property
    def members(self) -> Members:
        """Who is trained."""
        from .members import Members

        seeds = range(self.seed, self.seed + self.seeds)
        return Members.of(self.betas, self.variants, tuple(seeds))

    def to_json(self) -> dict[str, Any]:
        """The settings, the members and the resolved scenario as plain JSON values."""
        return {
            **super().to_json(),
            "members": self.members.describe(),
            "settings": asdict(self.settings),
        }
