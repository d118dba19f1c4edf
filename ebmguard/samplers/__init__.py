"""Samplers of energy-based models: pure steps with an explicit random generator.

Nothing here knows of the guard. Every function works on any device and draws its random numbers
from the ``torch.Generator`` it is given, which must live on the device of the samples.
"""

from .mixture import Mixture
from .replay_buffer import ReplayBuffer
from .sgld import sgld, sgld_step

__all__ = ["Mixture", "ReplayBuffer", "sgld", "sgld_step"]
