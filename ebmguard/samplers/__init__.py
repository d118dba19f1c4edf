"""The samplers of energy-based models: pure functions with an explicit random generator.

- A sampler is called as ``(f, x0, steps=, step_size=, noise_std=, generator=)`` and returns
  detached samples like ``x0``.
- A step is called as ``(f, chains, step_size=, noise_std=, generator=)`` and returns ``(chains,
  proposal)``; :func:`start_chains` makes the first chains.

Parameters' gradients and inputs stay untouched. The generator lives on the device of the samples.
"""

from .hmc import hmc, hmc_step, mala, mala_step
from .mixture import Mixture
from .replay_buffer import ReplayBuffer
from .sgld import Chains, Proposal, annealed, random_steps, sgld, sgld_step, start_chains

__all__ = [
    "Chains",
    "Mixture",
    "Proposal",
    "ReplayBuffer",
    "annealed",
    "hmc",
    "hmc_step",
    "mala",
    "mala_step",
    "random_steps",
    "sgld",
    "sgld_step",
    "start_chains",
]
