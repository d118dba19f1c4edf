"""log Z of a model exp(f), by annealed importance sampling from both sides, and its oracles.

:func:`bracket_log_z` does all of it. Parameters' gradients and the inputs stay untouched.
"""

from .annealing import Estimate, Path, Schedule, forward, pilot, reverse
from .bracket import Bracket, bracket_log_z
from .exact import Bernoulli, Density, Gaussian, enumerated_log_z, quadrature_log_z

__all__ = [
    "Bernoulli",
    "Bracket",
    "Density",
    "Estimate",
    "Gaussian",
    "Path",
    "Schedule",
    "bracket_log_z",
    "enumerated_log_z",
    "forward",
    "pilot",
    "quadrature_log_z",
    "reverse",
]
