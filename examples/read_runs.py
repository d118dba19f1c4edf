"""Reads what guarded runs wrote: python read_runs.py runs/ring runs/jem"""

import sys
from pathlib import Path
from statistics import median

from ebmguard.sinks import read_jsonl

for folder in map(Path, sys.argv[1:]):
    rows = list(read_jsonl(folder / "metrics.jsonl"))  # dicts, one for each step
    alerts = list(read_jsonl(folder / "alerts.jsonl"))
    latest = rows[-100:]
    gap = median(row["energy_gap"] for row in latest)
    scale = median(row["grad_scale"] for row in latest)
    print(f"{folder}: {len(rows)} rows, energy gap {gap:.3f}, GradScale {scale:.3f}")
    for alert in alerts:
        print(f"  step {alert['step']}: {alert['level']} {alert['rule']}, {alert['remedies']}")
    # pandas.DataFrame(rows) makes a table of them.
