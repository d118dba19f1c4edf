"""What the tests of the sinks share."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

ALERT: dict[str, Any] = {
    "rule": "energy_blowup",
    "level": "ERROR",
    "step": 7,
    "tag": "energy_gap",
    "value": math.inf,
    "limit": 8.0,
    "window": 200,
    "remedies": ["roll back", "raise beta_star"],
    "message": "ERROR energy_blowup at step 7",
}

RECOVERY: dict[str, Any] = {
    "step": 9,
    "restored_step": 4,
    "attempt": 1,
    "rule": "energy_blowup",
    "tag": "energy_gap",
    "value": math.inf,
    "relapse": False,
    "condemned": [],
    "changes": {"beta_star": [0.0, 0.5], "sgld_steps": [20, 40]},
    "reseeded": 3,
    "budget_left": 4,
    "message": "back to step 4 after energy_blowup",
}


def load(folder: Path) -> EventAccumulator:
    """The event files of a folder, by TensorBoard's own reader."""
    # 0: keep every event.
    guidance = {"scalars": 0, "histograms": 0, "text": 0}
    return EventAccumulator(str(folder), tensor_size_guidance=guidance).Reload()


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [
        (event.step, float(make_ndarray(event.tensor_proto))) for event in load(folder).Tensors(tag)
    ]


def texts(events: EventAccumulator, tag: str) -> list[str]:
    return [event.tensor_proto.string_val[0].decode() for event in events.Tensors(tag)]
