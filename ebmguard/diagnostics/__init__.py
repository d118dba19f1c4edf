"""Pure functions of detached tensors of one model: named numbers, one file per family.

The diagnostics of a step have two halves: sums in one tensor on the device, without waiting, and
names and arithmetic on the host, which turn the sums into numbers once they have arrived.
"""

from .raw_energies import (
    energy_diagnostics,
    energy_sums,
    named_energies,
    named_nonfinite,
    nonfinite_diagnostics,
)
from .sampler_steps import (
    ChainState,
    buffer_diagnostics,
    drift_to_noise,
    energy_unit,
    metropolis_acceptance,
    named_samples,
    oriented,
    sample_shares,
)
from .weights import (
    grad_scale_of,
    named_weights,
    pareto_k,
    weight_diagnostics,
    weight_sums,
)

__all__ = [
    "ChainState",
    "buffer_diagnostics",
    "drift_to_noise",
    "energy_diagnostics",
    "energy_sums",
    "energy_unit",
    "grad_scale_of",
    "metropolis_acceptance",
    "named_energies",
    "named_nonfinite",
    "named_samples",
    "named_weights",
    "nonfinite_diagnostics",
    "oriented",
    "pareto_k",
    "sample_shares",
    "weight_diagnostics",
    "weight_sums",
]
