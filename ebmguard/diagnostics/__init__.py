"""Pure functions of detached tensors, with any leading dimensions: numbers by tag.

There is one file per family. Rows of several steps, or of the members of an ensemble, are leading
dimensions of the tensors, and of every number.
"""

from .raw_energies import energy_diagnostics, nonfinite_diagnostics, wide
from .sampler_steps import (
    ChainState,
    buffer_diagnostics,
    drift_to_noise,
    energy_unit,
    metropolis_acceptance,
    norm_diagnostics,
    oriented,
    sample_diagnostics,
    sample_marks,
    sharpness,
)
from .weights import pareto_k, weight_diagnostics

__all__ = [
    "ChainState",
    "buffer_diagnostics",
    "drift_to_noise",
    "energy_diagnostics",
    "energy_unit",
    "metropolis_acceptance",
    "nonfinite_diagnostics",
    "norm_diagnostics",
    "oriented",
    "pareto_k",
    "sample_diagnostics",
    "sample_marks",
    "sharpness",
    "weight_diagnostics",
    "wide",
]
