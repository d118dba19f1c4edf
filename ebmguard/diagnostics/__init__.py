"""Pure functions of detached tensors: named numbers, one file per family.

Nothing waits for the device.
"""

from .buffer import buffer_diagnostics
from .joined_row import diagnostics_of_ranks
from .mixture_parts import mixture_gaps, mixture_weights
from .pareto import pareto_k
from .raw_energies import energy_diagnostics, nonfinite_diagnostics
from .sampler_steps import (
    ChainState,
    clamped,
    drift_to_noise,
    fingerprint,
    metropolis_acceptance,
    oriented,
    repeated,
)
from .update_size import amplification, total_norm
from .weights import log_weights, weight_diagnostics, weight_diagnostics_at

__all__ = [
    "ChainState",
    "amplification",
    "buffer_diagnostics",
    "clamped",
    "diagnostics_of_ranks",
    "drift_to_noise",
    "energy_diagnostics",
    "fingerprint",
    "log_weights",
    "metropolis_acceptance",
    "mixture_gaps",
    "mixture_weights",
    "nonfinite_diagnostics",
    "oriented",
    "pareto_k",
    "repeated",
    "total_norm",
    "weight_diagnostics",
    "weight_diagnostics_at",
]
