"""Settings for ``EnergyBasedModel`` of ``swyoon/normalized-autoencoders`` (arXiv:2105.05735).

``models/energybased.py`` (commit 77e1987): sampler, loss and network are one class, whose energy is
low on data. The guard is kept in the class; it is not a module, so that parameters and
``state_dict`` stay as they are::

    # at the end of __init__
    self.cd_loss, self.sample = guard(None, self.sample, beta_star=0.5, **nae.settings(self))
    # in train_step
    ebm_loss = self.cd_loss(pos_e, neg_e)

The L2 term on the energies stays outside the guarded loss. The sampler clips the norm of the
gradient over its last dimension, a row of pixels, at ``langevin_clip_grad``; where it is clipped,
tempering does not shorten the move. Draw pictures with ``self.sample.original``.
"""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from ebmguard.errors import ConfigError

__all__ = ["settings"]


def settings(model: nn.Module) -> dict[str, Any]:
    """Keywords for :func:`ebmguard.guard`.

    The update is ``x += -step_size * clip(dE/dx) + noise_std * randn``. As in the trainer's
    sampler, ``noise_std=None`` stands for the root of 2 ``step_size``, and ``step_size=None`` for
    ``noise_std``²/2: the output scale is then 1. With ``noise_std`` 0 there is none: the sampler
    stays as it is, and the weights alone act.

    Args:
        model: the ``EnergyBasedModel``, whose ``step_size`` and ``noise_std`` are set.

    Raises:
        ConfigError: another class of that project, or neither a step size nor noise.
    """
    found = vars(model)
    if "step_size" not in found or "noise_std" not in found:
        raise ConfigError(
            f"{type(model).__name__} has no step_size and noise_std; expected EnergyBasedModel of "
            "models/energybased.py. The autoencoders of models/nae.py are not covered: they divide "
            "the energy by a temperature that is trained along, and sample in two spaces."
        )
    step_size, noise_std = found["step_size"], found["noise_std"]
    if step_size is None and noise_std is None:
        raise ConfigError("step_size and noise_std are both None; set one, as the sampler asks.")
    keywords = {"model": model, "convention": "energy"}
    if noise_std == 0:
        return keywords
    if noise_std is None:
        noise_std = math.sqrt(2 * step_size)
    if step_size is None:
        step_size = noise_std**2 / 2
    return keywords | {"step_size": step_size, "noise_std": noise_std}
