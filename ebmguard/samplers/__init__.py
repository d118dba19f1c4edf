"""Samplers of energy-based models: pure functions with an explicit random generator.

- A sampler (:func:`sgld`, :func:`mala`, :func:`hmc`) is called as ``(f, x0, steps=, step_size=,
  noise_std=, generator=)`` and returns the samples, a detached tensor like ``x0``.
- A step (:func:`sgld_step`, :func:`mala_step`, :func:`hmc_step`) is called as ``(f, chains,
  step_size=, noise_std=, generator=)`` and returns ``(chains, proposal)``: the new state, and what
  became of the step. :func:`start_chains` makes the first state.

Parameters' gradients and the inputs stay untouched. Everything works on any device; the
``torch.Generator`` must live on that of the samples.
"""

from .chains import Chains, Proposal, start_chains
from .hmc import hmc, hmc_step, mala, mala_step
from .mixture import Mixture
from .replay_buffer import ReplayBuffer
from .sgld import annealed, random_steps, sgld, sgld_step

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
