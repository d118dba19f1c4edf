"""Pure functions of detached tensors of one model: named numbers, one file per family.

What is taken in every step comes in two halves: sums in one tensor, which nothing waits for, and
the names and the arithmetic that make numbers of them when the host has them.
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
    metropolis_acceptance,
    named_samples,
    oriented,
    sample_shares,
)
from .weights import (
    grad_scale_of,
    mixture_sums,
    named_mixture,
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
    "grad_scale_of",
    "metropolis_acceptance",
    "mixture_sums",
    "named_energies",
    "named_mixture",
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
