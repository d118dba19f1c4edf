"""JEM runs, read from their folders: finished ones, stopped ones, and those still in progress."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ebmguard.errors import ConfigError

from ..engine.run_folder import CONFIG, RESULTS, course, last_course, read_json, read_rows
from ..plots.numbers import word
from .course import SEEN, why_lost
from .paper import TABLE_2
from .scenarios import SCENARIOS

EVALUATIONS_FILE = "evaluations.jsonl"
SAMPLES = "samples"

PUBLISHED_CONFIG: dict[str, Any] = {
    "data": "cifar10",
    "image_size": None,
    "variant": "default",
    "p_x_weight": 1.0,
    "p_y_x_weight": 1.0,
    "p_x_y_weight": 0.0,
    "class_conditional": False,
    "energy_l2": 0.0,
    "clip_norm": None,
    "activation": "leaky_relu",
    "action": "warn",
    "most_steps": 1,
}
"""What the published runs have in common beside their scenario's settings."""

ADDED = {
    name: value
    for name, value in PUBLISHED_CONFIG.items()
    if name not in ("data", "variant", "class_conditional") and not name.endswith("_weight")
}
"""Settings that older folders do not name: what all runs had before there was a choice."""

PUBLISHED_SCENARIOS = tuple(TABLE_2)

PUBLISHED_IMAGES = {"train_images": 45_000, "valid_images": 5_000, "test_images": 10_000}
"""All images of CIFAR-10 in the published split."""

FREE = ("eval_every", "quality_samples", "alert_context", "alert_window", "stop_after")
"""Settings that decide what is looked at, and not how the network is trained."""


class Deviation(NamedTuple):
    """A setting whose value in a run is not that of the published run of the same scenario."""

    name: str
    own: Any
    published: Any

    def __str__(self) -> str:
        return f"{self.name.replace('_', ' ')} {word(self.own)}, not {word(self.published)}"


class Evaluation(NamedTuple):
    """One line of evaluations.jsonl, of :class:`..judge.evaluator.Evaluator`.

    None is what was not due, or what there are no images for; Inception score and FID are of so
    many samples of the replay buffer, by the features of a network.
    """

    step: int
    epoch: float
    valid_accuracy: float | None
    test_accuracy: float | None
    inception: float | None
    fid: float | None
    features: str | None
    samples: int | None
    features_comparable: bool = False
    features_fixed: bool = False

    @property
    def published_measure(self) -> bool:
        """Whether IS and FID are of what the paper's are of: Inception, all of the buffer."""
        return self.features_comparable and self.samples == SCENARIOS["1"].buffer_size


@dataclass(frozen=True)
class JemRun:
    """What the folder of a JEM run holds.

    Attributes:
        path: the folder.
        config: config.json; "settings" are those of the scenario, resolved.
        results: results.json, or None while there is none: the run goes on, or was stopped.
        evaluations: oldest first.
        first_error: the guard's first alert of level ERROR as a record, or None.
        steps: updates done, as far as the files say.
        diverged_at: the step at which the run was lost, as far as the files say; None where it was
            not.
    """

    path: Path
    config: dict[str, Any]
    results: dict[str, Any] | None
    evaluations: tuple[Evaluation, ...]
    first_error: dict[str, Any] | None
    steps: int
    diverged_at: int | None

    @property
    def settings(self) -> Mapping[str, Any]:
        """The scenario's settings with what was overridden."""
        settings: dict[str, Any] = self.config["settings"]
        return settings

    @property
    def scenario(self) -> str:
        """ "1" to "7" of Appendix M.1, or "digits"."""
        return str(self.config["scenario"])

    @property
    def beta_star(self) -> float:
        """Exponent of the weights on raw outputs."""
        return float(self.config["beta_star"])

    @property
    def seed(self) -> int:
        """Seed of everything random in the run."""
        return int(self.config["seed"])

    @property
    def network(self) -> str:
        """The network in words, with the arithmetic where it is not float32."""
        name = f"WRN-{self.settings.get('depth', '?')}-{self.settings.get('width', '?')}"
        return name if self.precision == "float32" else f"{name}, {self.precision}"

    @property
    def precision(self) -> str:
        """The arithmetic of the convolutions."""
        return str(self.config["precision"])

    @property
    def iterations(self) -> int:
        """Updates that were asked for."""
        return int(self.settings["iterations"])

    @property
    def complete(self) -> bool:
        """Whether the run is over: all updates done, or diverged or ended by its guard."""
        return self.results is not None and (
            self.diverged_at is not None
            or self.results.get("ended") is not None
            or self.steps >= self.iterations
        )

    @property
    def steps_per_epoch(self) -> int | None:
        """Updates of an epoch, from the evaluations or else the settings; None where unknown."""
        for row in self.evaluations:
            if row.epoch > 0:
                return round(row.step / row.epoch)
        images = self.settings.get("train_images")
        if images is None and self.config["data"] == PUBLISHED_CONFIG["data"]:
            images = PUBLISHED_IMAGES["train_images"]
        return None if images is None else int(images // self.settings["n_pos"])

    def epoch(self, step: float) -> float:
        """A step in epochs; NaN where the length of an epoch is unknown."""
        return step / self.steps_per_epoch if self.steps_per_epoch else math.nan

    def deviations(self) -> tuple[Deviation, ...]:
        """How the run differs from the published one of its scenario.

        Empty for a run at the published size and settings. What is missing from config.json counts
        as different. How far the run got is not part of it: see :meth:`state`.
        """
        if self.scenario not in PUBLISHED_SCENARIOS:
            return (Deviation("scenario", self.scenario, "1 to 7"),)
        published = {**PUBLISHED_CONFIG, **SCENARIOS[self.scenario].to_json()}
        # Of what a scenario sets, config.json has the overrides too, null for none.
        config = ADDED | self.config
        own = {k: v for k, v in config.items() if k in PUBLISHED_CONFIG} | {**self.settings}
        return tuple(
            Deviation(name, own.get(name, "not recorded"), PUBLISHED_IMAGES.get(name, value))
            for name, value in published.items()
            if name not in FREE and not _as_published(name, own, value)
        )

    def state(self) -> str:
        """How far the run got, in a few words."""
        so_far = "finished" if self.complete else "stopped or still running,"
        if self.results is not None and self.results.get("ended") is not None:
            so_far = "ended by its guard after"
        words = f"{so_far} {self.steps:,} of {self.iterations:,} iterations"
        if self.diverged_at is None:
            return words
        epoch = self.epoch(self.diverged_at)
        where = "" if math.isnan(epoch) else f" (epoch {epoch:.4g})"
        lost = f"diverged at step {self.diverged_at:,}{where}"
        return lost if self.complete else f"{lost}; {words}"

    def grids(self) -> dict[int, Path]:
        """The stored negatives, uint8 (64, C, H, W) each, by step, first step first."""
        files = (self.path / SAMPLES).glob("*.npy")
        return {int(file.stem): file for file in sorted(files) if file.stem.isdigit()}


def find_runs(paths: Iterable[Path]) -> list[JemRun]:
    """The JEM runs in some folders, ordered by scenario, β*, seed and path.

    Args:
        paths: run folders, or folders with run folders somewhere below.
    """
    found: dict[Path, JemRun] = {}
    for path in paths:
        files = [path / CONFIG] if (path / CONFIG).is_file() else sorted(path.rglob(CONFIG))
        runs = [load_run(file.parent) for file in files if _is_jem(file)]
        if not runs:
            raise ConfigError(
                f"{path} holds no JEM run: expected a run folder of `ebmguard train jem`, or a "
                "folder with some below it"
            )
        found |= {run.path.resolve(): run for run in runs}
    return sorted(
        found.values(), key=lambda run: (run.scenario, run.beta_star, run.seed, str(run.path))
    )


def load_run(path: Path) -> JemRun:
    """Read a folder that `ebmguard train jem` has written, or is writing."""
    if not (path / CONFIG).is_file() or not _is_jem(path / CONFIG):
        raise ConfigError(f"{path} is not a run folder of `ebmguard train jem`")
    config = read_json(path / CONFIG)
    results = read_json(path / RESULTS) if (path / RESULTS).is_file() else None
    if results is not None and results["iterations"] != config["settings"]["iterations"]:
        # The results are those of a shorter run, which is being made longer.
        results = None
    errors = [alert for alert in read_rows(path, "alerts.jsonl") if alert["level"] == "ERROR"]
    found = last_course(read_rows(path, EVALUATIONS_FILE))
    evaluations = {row["step"]: _evaluation(row) for row in found}
    steps, lost = so_far(path) if results is None else (results["steps"], results["diverged_at"])
    return JemRun(
        path=path,
        config=config,
        results=results,
        evaluations=tuple(evaluations[step] for step in sorted(evaluations)),
        first_error=min(errors, key=lambda alert: int(alert["step"]), default=None),
        steps=steps,
        diverged_at=lost,
    )


def _is_jem(config: Path) -> bool:
    # Toys have several β, and no data set. Other programs have files of this name too.
    try:
        names = set(read_json(config))
    except ValueError:
        return False
    return {"data", "beta_star", "scenario", "precision", "settings"} <= names


def _evaluation(row: Mapping[str, Any]) -> Evaluation:
    return Evaluation(
        step=int(row["step"]),
        epoch=float(row["epoch"]),
        valid_accuracy=row.get("valid_accuracy"),
        test_accuracy=row.get("test_accuracy"),
        inception=row.get("buffer_is"),
        fid=row.get("buffer_fid"),
        features=row.get("features"),
        samples=row.get("buffer_samples"),
        features_comparable=row.get("features_comparable", False),
        features_fixed=row.get("features_fixed", False),
    )


def so_far(path: Path) -> tuple[int, int | None]:
    """Updates done and the step that was lost, of a run without results."""
    steps, lost = 0, None
    for row in course(path, SEEN):
        steps = row["step"] + 1
        if lost is None and why_lost(row):
            lost = row["step"]
    return steps, lost


def _as_published(name: str, own: Mapping[str, Any], published: Any) -> bool:
    if name not in own:
        return False
    if name in PUBLISHED_IMAGES:
        return own[name] in (None, PUBLISHED_IMAGES[name])
    return bool(own[name] == published)
