"""log Z of a model exp(f), by annealed importance sampling from both sides, and its oracles.

:func:`pilot` chooses temperatures and step sizes, :func:`forward` walks from a base to the model,
:func:`reverse` back, and :class:`Bracket` judges the two; :func:`bracket_log_z` does all of it.
Parameters' gradients and the inputs stay untouched, and random numbers come from the generator.
"""

from .annealing import Path, Schedule, Transition, forward, pilot, reverse
from .bases import Bernoulli, Density, Gaussian
from .bracket import Bracket, Starts, bracket_log_z
from .estimate import Estimate
from .oracles import enumerated_log_z, quadrature_log_z

__all__ = [
    "Bernoulli",
    "Bracket",
    "Density",
    "Estimate",
    "Gaussian",
    "Path",
    "Schedule",
    "Starts",
    "Transition",
    "bracket_log_z",
    "enumerated_log_z",
    "forward",
    "pilot",
    "quadrature_log_z",
    "reverse",
]
