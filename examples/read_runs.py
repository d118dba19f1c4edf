"""Runs as pandas frames: python read_runs.py runs. It needs pandas: pip install ".[train]" """

import sys

from ebmguard import EbmguardError, runs

try:
    found = runs.load(sys.argv[1:])
except (EbmguardError, ImportError) as error:  # no runs there, or no pandas
    sys.exit(str(error))
latest = found.rows.groupby("run").tail(100)
print(latest.groupby("run")[["energy_gap", "grad_scale"]].median().round(2))
if len(found.alerts):
    print(found.alerts[["step", "level", "rule"]].to_string())
