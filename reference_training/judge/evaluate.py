"""`ebmguard evaluate`: judge the run of any trainer, print a table, write evaluation.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import tyro

from ebmguard.errors import ConfigError

from ..device import find_device
from ..engine.progress import log_to_terminal
from ..engine.run_folder import write_json
from .likelihood import described

EVALUATION = "evaluation.json"


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """What every `ebmguard evaluate` is told."""

    run: tyro.conf.Positional[Path]
    """Run folder, as `ebmguard train` left it."""
    device: str = "auto"
    """auto takes a GPU where there is one; or a name that PyTorch knows, such as cpu or cuda:1."""
    likelihood: bool = False
    """Bracket log Z, and with it the log-likelihood of held-out samples, by annealed importance
    sampling from both sides."""
    temperatures: int = 500
    """Of the annealing; more narrow the bracket."""
    ais_chains: int = 100
    """Chains of each side."""

    @property
    def effort(self) -> dict[str, int]:
        """What the annealing is given."""
        return {"temperatures": self.temperatures, "chains": self.ais_chains}

    def check(self) -> None:
        """Refuse settings that cannot be meant.

        Raises:
            ConfigError: names the setting, its value and what was expected.
        """
        for name, least in (("temperatures", 1), ("ais_chains", 2)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected {least} or more")


@dataclass(frozen=True, kw_only=True)
class ImageEvaluateConfig(EvaluateConfig):
    """What the evaluation of a model of images is told beside that."""

    features: str | None = None
    """Network that judges samples."""
    features_sha256: str | None = None
    """SHA-256 of the file of the features, checked before it is read; the published Inception
    weights need none."""
    data_root: str | None = None
    """Folder of the data sets; None is that of the run, else the environment variable
    EBMGUARD_DATA."""


C = TypeVar("C", bound=EvaluateConfig)


def run(
    evaluate: Callable[[C, torch.device], Mapping[str, Any]],
    table: Callable[[Mapping[str, Any]], str],
    config: C,
) -> int:
    """Evaluate a run, print a table, write evaluation.json into its folder.

    Args:
        evaluate: what the file holds, by plain values, of checked settings and a device.
        table: the same for people, but for a `likelihood`.
        config: the settings.

    Returns:
        exit status, 0.

    Raises:
        ConfigError: the settings cannot be meant, or the run has no such checkpoint; before
            anything is computed.
        DiskError: evaluation.json could not be written; the table is printed by then.
        ImportError: a package that is needed is not installed.
    """
    log_to_terminal()
    config.check()
    results = evaluate(config, find_device(config.device))
    print(table(results))
    if "likelihood" in results:
        print(f"\n{described(results['likelihood'])}")
    write_json(config.run / EVALUATION, results)
    print(f"\nwritten to {config.run / EVALUATION}")
    return 0
