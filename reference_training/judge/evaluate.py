"""`ebmguard evaluate`: judge the run of any trainer, print a table, write evaluation.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..device import find_device
from ..engine.progress import log_to_terminal
from ..engine.run_folder import write_json
from .config import EvaluateConfig
from .likelihood import described

EVALUATION = "evaluation.json"


def run(
    evaluate: Callable[[Any, torch.device], Mapping[str, Any]],
    table: Callable[[Mapping[str, Any]], str],
    config: EvaluateConfig,
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
