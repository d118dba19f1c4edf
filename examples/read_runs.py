"""Reads what guarded runs wrote, as pandas frames: python read_runs.py "runs/*" """

import sys

from ebmguard import runs

found = runs.load(sys.argv[1:])
latest = found.rows.groupby("run").tail(100)
print(latest.groupby("run")[["energy_gap", "grad_scale"]].median().round(2))
if len(found.alerts):
    print(found.alerts[["step", "level", "rule"]].to_string())
