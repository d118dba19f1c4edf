"""JEM runs, read from their folders: finished ones, stopped ones, and those still in progress."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ebmguard.errors import ConfigError

from ..engine.run_folder import CONFIG, RESULTS, course, last_course, read_json, read_rows
from ..judge.stored import read_config
from ..plots.numbers import word
from .config import JemConfig
from .course import SEEN, why_lost
from .paper import TABLE_2
from .scenarios import SCENARIOS, Scenario

_LOOKS = "eval_every quality_samples alert_context alert_window stop_after features"
_PLACE = "out resume seed device checkpoint_every threads data_root download compile"
FREE = {*_LOOKS.split(), *_PLACE.split(), "scenario", "beta_star", "precision", "settings"}
"""Settings that decide what is looked at and where, or that tables tell of in another way."""

PUBLISHED_IMAGES = {"train_images": 45_000, "valid_images": 5_000, "test_images": 10_000}
"""All images of CIFAR-10 in the published split."""

EVALUATED = {
    "test_accuracy": "accuracy",
    "buffer_is": "inception",
    "buffer_fid": "fid",
    "buffer_samples": "samples",
}


@dataclass(frozen=True)
class JemRun:
    """What the folder of a JEM run holds.

    Attributes:
        path: the folder.
        config: config.json, and some of its entries: the `scenario` is "1" to "7" of Appendix M.1,
            or "digits"; `settings` are the scenario's with what was overridden.
        results: results.json, or None while there is none: the run goes on, or was stopped.
        evaluations: as :func:`evaluated` has them.
        first_error: the guard's first alert of level ERROR as a record, or None.
        steps: updates done, as far as the files say.
        diverged_at: the step at which the run was lost, as far as the files say; None where it was
            not.
    """

    path: Path
    config: dict[str, Any]
    scenario: str
    beta_star: float
    seed: int
    precision: str
    settings: dict[str, Any]
    results: dict[str, Any] | None
    evaluations: pd.DataFrame
    first_error: dict[str, Any] | None
    steps: int
    diverged_at: int | None

    @property
    def network(self) -> str:
        """The network in words, with the arithmetic where it is not float32."""
        name = f"WRN-{self.settings.get('depth', '?')}-{self.settings.get('width', '?')}"
        return name if self.precision == "float32" else f"{name}, {self.precision}"

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
        later = self.evaluations[self.evaluations["epoch"] > 0]
        if len(later):
            return int((later["step"].iloc[0] / later["epoch"].iloc[0]).round())
        images = self.settings.get("train_images")
        if images is None and self.config["data"] == "cifar10":
            images = PUBLISHED_IMAGES["train_images"]
        return None if images is None else int(images // self.settings["n_pos"])

    def epoch(self, step: float) -> float:
        """A step in epochs; NaN where the length of an epoch is unknown."""
        return step / self.steps_per_epoch if self.steps_per_epoch else math.nan

    def deviations(self) -> dict[str, str]:
        """How the run differs from the published one of its scenario, in words, by setting.

        Empty for a run at the published size and settings. How far the run got is not part of it:
        see :meth:`state`.
        """
        if self.scenario not in TABLE_2:
            return {"scenario": f"scenario {self.scenario}, not 1 to 7"}
        published = JemConfig(self.path, data="cifar10", scenario=self.scenario)  # type: ignore[arg-type]
        own, found = _flat(self.config), {}
        for name, value in _flat(published.to_json()).items():
            here, all_images = own.get(name, "not recorded"), PUBLISHED_IMAGES.get(name, value)
            if name not in FREE and here not in (value, all_images):
                found[name] = f"{name.replace('_', ' ')} {word(here)}, not {word(all_images)}"
        return found

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
        files = (self.path / "samples").glob("*.npy")
        return {int(file.stem): file for file in sorted(files) if file.stem.isdigit()}


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    # Of what a scenario sets, a config.json has the overrides too, null for none.
    names = {field.name for field in dataclasses.fields(Scenario)}
    return {**{k: x for k, x in config.items() if k not in names}, **config["settings"]}


def evaluated(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Lines of evaluations.jsonl, of :class:`.train.Jem`, NaN where not due.

    Its columns are "step", "epoch", "valid_accuracy", "accuracy" of the test; of so many "samples"
    of the replay buffer "inception" and "fid" by "features"; whether these are "fixed" while the
    run goes on; and whether they are of what the paper's are of, Inception and the whole buffer:
    "published".
    """
    looks = ("features", "features_comparable", "features_fixed")
    numbers = ("step", "epoch", "valid_accuracy", *EVALUATED)
    frame = pd.DataFrame(list(rows)).reindex(columns=[*numbers, *looks])
    frame = frame.astype(dict.fromkeys(numbers[1:], float) | {"step": int})
    whole = frame["buffer_samples"] == SCENARIOS["1"].buffer_size
    return frame.rename(columns=EVALUATED).assign(
        fixed=frame["features_fixed"].eq(True),
        published=frame["features_comparable"].eq(True) & whole,
    )


def find_runs(paths: Iterable[Path]) -> list[JemRun]:
    """The JEM runs in some folders, ordered by scenario, β*, seed and path.

    Args:
        paths: run folders, or folders with run folders somewhere below.
    """
    found: dict[Path, JemRun] = {}
    for path in paths:
        files = [path / CONFIG] if (path / CONFIG).is_file() else sorted(path.rglob(CONFIG))
        runs = [load_run(file.parent) for file in files if _is_jem(file.parent)]
        if not runs:
            raise ConfigError(
                f"{path} holds no JEM run: expected a run folder of `ebmguard train jem`, or a "
                "folder with some below it"
            )
        found |= {run.path.resolve(): run for run in runs}
    return sorted(
        found.values(), key=lambda run: (run.scenario, run.beta_star, run.seed, str(run.path))
    )


def _is_jem(path: Path) -> bool:
    # Toys and other programs have files of this name too.
    try:
        return bool(read_config(path))
    except ConfigError:
        return False


def load_run(path: Path) -> JemRun:
    """Read a folder that `ebmguard train jem` has written, or is writing."""
    config = read_config(path)
    results = read_json(path / RESULTS) if (path / RESULTS).is_file() else None
    if results is not None and results["iterations"] != config["settings"]["iterations"]:
        # The results are those of a shorter run, which is being made longer.
        results = None
    errors = [alert for alert in read_rows(path, "alerts.jsonl") if alert["level"] == "ERROR"]
    if results is None:
        rows = course(path, SEEN)
        steps = rows[-1]["step"] + 1 if rows else 0
        lost = next((row["step"] for row in rows if why_lost(row)), None)
    else:
        steps, lost = results["steps"], results["diverged_at"]
    return JemRun(
        path=path,
        config=config,
        **{name: config[name] for name in ("scenario", "beta_star", "seed", "precision")},
        settings=config["settings"],
        results=results,
        evaluations=evaluated(last_course(read_rows(path, "evaluations.jsonl"))),
        first_error=min(errors, key=lambda alert: int(alert["step"]), default=None),
        steps=steps,
        diverged_at=lost,
    )
