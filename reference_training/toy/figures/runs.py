"""A finished toy run, read from its folder: an ensemble, its metrics, its grids and its alerts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ebmguard.errors import ConfigError

from ...engine.run_folder import CONFIG, RESULTS, read_json, read_rows
from ..broken import GOOD
from ..course import GRIDS, MEMBERS
from ..distributions import DISTRIBUTIONS, Distribution

GOOD_WEIGHT = f"mixture/{GOOD}/weight"
"""Share of the whole weight that the negatives of the good sampler carry; of mixtures only."""

METRICS = (
    "kl",
    "tv",
    "kl_sgld",
    "tv_sgld",
    "mode_mass_error",
    "energy_scale",
    "energy_r2",
    "oracle_r2",
    "grad_scale",
    GOOD_WEIGHT,
)
"""What results.json says of every member, each a mean over the run's last evaluations."""

LEVELS = ("WARN", "ERROR")


@dataclass(frozen=True)
class Member:
    """One model of an ensemble and how it ended.

    Attributes:
        index: place in the ensemble's leading dimension.
        beta: β as it was given, for example "0.5".
        variant: variant of the loss.
        seed: seed of initialisation, data and noise.
        metrics: value of each of :data:`METRICS`, NaN where it is undefined.
        diverged_at: update at which the member was lost, or None.
    """

    index: int
    beta: str
    variant: str
    seed: int
    metrics: dict[str, float]
    diverged_at: int | None


@dataclass(frozen=True)
class ToyRun:
    """What the folder of a finished toy run holds.

    Attributes:
        path: the folder.
        config: settings as config.json holds them, with the resolved scenario under "settings".
        results: how the run went.
        members: the ensemble in its order, G models.
        axis: (n,) coordinates of the grid, the same on each axis.
        negative_energy: (G, n, n), index [member, y, x], or (G, n) in 1D: the log density on the
            grid up to a constant.
        samples: (G, samples, dim) what the training's SGLD makes of each final model, with the
            full negative energy: SGLD(p_θ).
        evaluations: every evaluation of every member, {"step", "member", "kl", ...}.
        alerts: the guard's alerts as records, oldest first.
    """

    path: Path
    config: dict[str, Any]
    results: dict[str, Any]
    members: tuple[Member, ...]
    axis: NDArray[np.float64]
    negative_energy: NDArray[np.float32]
    samples: NDArray[np.float32]
    evaluations: list[dict[str, Any]]
    alerts: list[dict[str, Any]]

    @property
    def scenario(self) -> str:
        """Name of the scenario."""
        return str(self.config["scenario"])

    @property
    def settings(self) -> Mapping[str, Any]:
        """The scenario's settings as they were resolved."""
        settings: dict[str, Any] = self.config["settings"]
        return settings

    @property
    def data(self) -> str:
        """Name of the distribution of the data."""
        return str(self.settings["data"])

    @property
    def distribution(self) -> Distribution:
        """The distribution of the data."""
        return DISTRIBUTIONS[self.data]

    @property
    def fixed_proposal(self) -> bool:
        """Whether negatives are draws of the initial Gaussian: then the optimum of F is known."""
        return not self.settings["sgld_steps"]

    @property
    def samplers(self) -> tuple[str, ...]:
        """Who draws the negatives."""
        return tuple(str(self.settings["samplers"]).split("+"))

    @property
    def seeds(self) -> int:
        """Models of each β and variant."""
        return len({member.seed for member in self.members})

    def of(self, beta: str, variant: str) -> tuple[Member, ...]:
        """The members of a β and a variant, first seed first.

        Raises:
            ConfigError: the run has none.
        """
        found = tuple(m for m in self.members if (m.beta, m.variant) == (beta, variant))
        if not found:
            raise ConfigError(
                f"{self.path} has no member with beta {beta} and variant {variant}; it has "
                + ", ".join(dict.fromkeys(f"{m.beta} {m.variant}" for m in self.members))
            )
        return tuple(sorted(found, key=lambda member: member.seed))

    def first_alert(self, member: Member) -> dict[str, Any] | None:
        """The first WARN or ERROR that the guard raised on a member."""
        return next(
            (a for a in self.alerts if a["level"] in LEVELS and a.get("member") == member.index),
            None,
        )


def load_run(path: Path) -> ToyRun:
    """Read a folder that `ebmguard train toy` has written.

    Raises:
        ConfigError: a file is missing, so that this is no toy run or one that has not ended, or
            its files do not belong together.
    """
    files = {name: path / name for name in (CONFIG, RESULTS, f"figures/{GRIDS}")}
    missing = [name for name, file in files.items() if not file.is_file()]
    if missing:
        raise ConfigError(
            f"{path} is not the folder of a finished toy run: {', '.join(missing)} missing. Finish "
            "it with `ebmguard train toy --resume`, or name another folder."
        )
    config, results = (read_json(files[name]) for name in (CONFIG, RESULTS))
    with np.load(files[f"figures/{GRIDS}"]) as stored:
        grids = {name: stored[name] for name in ("axis", "negative_energy", "samples")}
    members = tuple(_member(i, record) for i, record in enumerate(results["members"]))
    if not len(members) == len(grids["negative_energy"]) == len(grids["samples"]):
        raise ConfigError(
            f"the files in {path} are of different runs: {len(members)} members in results.json, "
            f"{len(grids['negative_energy'])} energies and {len(grids['samples'])} sets of samples "
            f"in {GRIDS}. Train it again in a new folder."
        )
    return ToyRun(
        path=path,
        config=config,
        results=results,
        members=members,
        axis=grids["axis"],
        negative_energy=grids["negative_energy"],
        samples=grids["samples"],
        evaluations=read_rows(path, MEMBERS),
        alerts=read_rows(path, "alerts.jsonl"),
    )


def _member(index: int, record: Mapping[str, Any]) -> Member:
    lost = record["diverged_at"]
    return Member(
        index=index,
        beta=str(record["beta"]),
        variant=str(record["variant"]),
        seed=int(record["seed"]),
        metrics={name: _number(record.get(name)) for name in METRICS},
        diverged_at=None if lost is None else int(lost),
    )


def _number(value: float | str | None) -> float:
    """A stored number; not finite ones are stored as strings, undefined ones may be null."""
    return math.nan if value is None else float(value)
