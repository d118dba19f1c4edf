"""Samplers of energy-based models: pure steps with an explicit random generator.

Nothing here knows of the guard. Every function works on any device and draws its random numbers
from the ``torch.Generator`` it is given, which must live on the device of the samples.
"""

from .hmc import Chains, Proposal, Tally, hmc, hmc_step, leapfrog, start_chains
from .mala import mala, mala_step
from .mixture import Mixture
from .replay_buffer import ReplayBuffer
from .schedules import annealed, random_steps
from .sgld import sgld, sgld_step

__all__ = [
    "Chains",
    "Mixture",
    "Proposal",
    "ReplayBuffer",
    "Tally",
    "annealed",
    "hmc",
    "hmc_step",
    "leapfrog",
    "mala",
    "mala_step",
    "random_steps",
    "sgld",
    "sgld_step",
    "start_chains",
]
