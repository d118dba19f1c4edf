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
