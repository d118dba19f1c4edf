"""What the tests of the sinks share."""

from __future__ import annotations

import math
from typing import Any

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
    "purged_rows": 12,
    "budget_left": 4,
    "message": "back to step 4 after energy_blowup",
}
