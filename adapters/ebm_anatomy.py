"""Settings for ``point0bar1/ebm-anatomy`` (Nijkamp et al. 2020, arXiv:1903.12370).

``train_data.py`` and ``train_toy.py`` (commit 24c819b): the network is the global ``f``, an energy
(low on data), and ``sample_s_t`` is a closure over it. ``x_q`` are data there, ``x_s_t`` samples::

    cd_loss, sample_s_t = guard(None, sample_s_t, beta_star=0.5, **ebm_anatomy.settings(config, f))
    d_s_t = cd_loss(f(x_q), f(x_s_t))

The trainer then multiplies ``d_s_t`` by 2/ε². Keep that: β* is the exponent on the raw output of
``f``, whatever factor the loss gets. Draw long-run chains and pictures with
``sample_s_t.original``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ebmguard.errors import ConfigError

from ._settings import langevin

__all__ = ["settings"]


def settings(config: Mapping[str, Any], f: nn.Module) -> dict[str, Any]:
    """Keywords for :func:`ebmguard.guard`.

    The update is ``x += -df/dx + epsilon * randn``; the usual step ε²/2 is part of the energy, so
    that the output scale is 2/ε². With ``epsilon`` 0 (learning without noise) there is no output
    scale: the sampler stays as it is, and the weights alone act.

    Args:
        config: what the trainer reads from its JSON file; ``epsilon`` is in units of the images.
        f: the network that ``sample_s_t`` calls.

    Raises:
        ConfigError: the configuration has no ``epsilon``.
    """
    if "epsilon" not in config:
        raise ConfigError(
            "The configuration has no 'epsilon', the Langevin noise of ebm-anatomy's trainers; it "
            f"has {', '.join(sorted(config)) or 'no entry'}. Pass the dict that train_data.py or "
            "train_toy.py reads from its config_locker file."
        )
    return {"model": f, "convention": "energy", **langevin(1.0, config["epsilon"])}
