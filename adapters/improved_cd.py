"""Settings for ``yilundu/improved_contrastive_divergence`` (Du et al. 2021, arXiv:2012.01316).

``train.py`` (commit 7d3d4ee): energies (low on data) of shape ``(B, heads)``, three heads where
``FLAGS.multiscale``. The sampler descends the *sum* of the heads, hence the weights are those of
the sum. The loss is a mean over the heads, a third of that, and :func:`difference` keeps this
factor::

    cd_loss, gen_image = guard(
        improved_cd.difference, gen_image, beta_star=0.5, **improved_cd.settings(FLAGS)
    )
    loss = cd_loss(energy_pos, energy_neg)

The KL term stays as the trainer has it; the robust objective has none. It differentiates through
the last Langevin step, which runs on (1 - β) E: the term is taken at the tempered sampler's
samples, and its gradient has the factor 1 - β.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ebmguard.errors import ConfigError

from ._settings import read

__all__ = ["difference", "settings"]

_SCRIPT = "train.py of improved contrastive divergence"


def difference(energy_pos: Tensor, energy_neg: Tensor) -> Tensor:
    """The trainer's own loss: the difference of means over samples and heads.

    Args:
        energy_pos: ``(N, heads)``, or any other shape.
        energy_neg: ``(M, heads)``.

    Returns:
        0-dim tensor.
    """
    return energy_pos.mean() - energy_neg.mean()


def settings(FLAGS: object, *, noise_std: float = 0.001) -> dict[str, Any]:
    """Keywords for :func:`ebmguard.guard`.

    The update is ``x += noise_std * randn``, then ``x -= step_lr * dE/dx``. With ``FLAGS.anneal``
    the noise falls to 0 within each call, so that there is no one output scale: the sampler stays
    as it is, and the weights alone act.

    Args:
        FLAGS: the trainer's flags; read are ``step_lr``, ``anneal`` and ``hmc``.
        noise_std: in units of the images, which are in [0, 1]; a literal of the published
            ``gen_image``.

    Raises:
        ConfigError: ``FLAGS.hmc``, or flags of another script.
    """
    hmc, anneal, step_lr = read(FLAGS, _SCRIPT, "hmc", "anneal", "step_lr")
    if hmc:
        raise ConfigError(
            "FLAGS.hmc draws with gen_hmc_image, leapfrog steps without a Metropolis test, for "
            "which an output scale is not defined. Turn hmc off and guard gen_image; or guard "
            "gen_hmc_image with beta_star alone, which leaves the sampler as it is: "
            'guard(improved_cd.difference, gen_hmc_image, beta_star=0.5, convention="energy").'
        )
    if anneal:
        return {"convention": "energy"}
    return {"convention": "energy", "step_size": step_lr, "noise_std": noise_std}
