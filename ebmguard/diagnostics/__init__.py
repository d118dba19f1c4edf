"""Pure functions of detached tensors: named numbers, one file per family."""

from .energies import energy_diagnostics, nonfinite_diagnostics
from .pareto import pareto_k
from .ranks import diagnostics_of_ranks
from .weights import weight_diagnostics, weight_diagnostics_at

__all__ = [
    "diagnostics_of_ranks",
    "energy_diagnostics",
    "nonfinite_diagnostics",
    "pareto_k",
    "weight_diagnostics",
    "weight_diagnostics_at",
]
