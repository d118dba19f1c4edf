"""Settings for ``enijkamp/short_run`` (Nijkamp et al. 2019, arXiv:1904.09770).

``train_cifar10_minimal.py`` (commit d779e9a): the network is the global ``f``, high on data, and
``sample_q`` is a closure over it. The script *maximises* its difference L, so negate the guarded
loss::

    cd_loss, sample_q = guard(None, sample_q, beta_star=0.5, **short_run.settings(f))
    L = -cd_loss(f(x_p_d), f(x_q))
"""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["settings"]


def settings(f: nn.Module, *, step_size: float = 1.0, noise_std: float = 1e-2) -> dict[str, Any]:
    """Keywords for :func:`ebmguard.guard`.

    The update is ``x += step_size * df/dx + noise_std * randn``. Both defaults are literals of the
    published ``sample_q``. The script's ``sigma`` is another number: the noise on the data.

    Args:
        f: the network that ``sample_q`` calls.
        step_size: the factor of the gradient.
        noise_std: the factor of the Gaussian noise, in units of the images.
    """
    return {"model": f, "step_size": step_size, "noise_std": noise_std}
