"""Pure functions of detached tensors: named numbers, one file per family."""

from .buffer import buffer_diagnostics
from .energies import energy_diagnostics, nonfinite_diagnostics
from .mixture import mixture_gaps, mixture_weights
from .optimizer import amplification, total_norm
from .pareto import pareto_k
from .ranks import diagnostics_of_ranks
from .repeats import fingerprint, repeated
from .sampler import ChainState, clamped, drift_to_noise, metropolis_acceptance, oriented
from .weights import weight_diagnostics, weight_diagnostics_at

__all__ = [
    "ChainState",
    "amplification",
    "buffer_diagnostics",
    "clamped",
    "diagnostics_of_ranks",
    "drift_to_noise",
    "energy_diagnostics",
    "fingerprint",
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
