"""Settings for ``rosinality/igebm-pytorch`` (Du & Mordatch 2019, arXiv:1903.08689).

``train.py`` (commit 3c4f104): an energy (low on data) of shape ``(B, 1)``, sampled by a loop inside
``train``. There is no sampler to wrap, so the energy is tempered inside that loop. The chains are
conditional on a class, so that samples are compared with data of their own class only::

    g = guard(None, None, beta_star=0.5, **igebm.settings(step_size))
    neg_out = g.temper(model(neg_img, neg_id))  # inside the loop
    loss = loss.mean() + g.loss(pos_out, neg_out, groups=(pos_id, neg_id))

The L2 term on the energies stays outside the guarded loss. The sampler clips each entry of the
gradient at ±0.01; where an entry is clipped, tempering does not shorten the move.
"""

from __future__ import annotations

from typing import Any

__all__ = ["settings"]


def settings(step_size: float, *, noise_std: float = 0.005) -> dict[str, Any]:
    """Keywords for :func:`ebmguard.guard`.

    The update is ``x += -step_size * clip(dE/dx) + noise_std * randn``.

    Args:
        step_size: the argument of the trainer's ``train`` (10 by default).
        noise_std: in units of the images, which are in [0, 1]; a literal of the published loop.
    """
    return {"convention": "energy", "step_size": step_size, "noise_std": noise_std}
