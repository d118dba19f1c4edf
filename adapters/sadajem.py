"""``sndnyang/SADAJEM``, ``train_sadajem.py`` (commit 9d8f3c7).

As in JEM++, wrap the sampler in the last lines of the script, before ``main(args)``. SAM needs two
losses per step, both on the same samples; together they are one row. ::

    cd_loss, sample_q = guard(None, sample_q, beta_star=0.5, **sadajem.settings(args))
    ...
    l_p_x = cd_loss(fp_all, fq_all)
    ...
    L += cd_loss(fp_all, fq_all)

Attach the inner optimizer, ``optimizer=optim.base_optimizer``: the script never calls SAM's own
``step``.
"""

from __future__ import annotations

from typing import Any

from ._settings import check_term, keywords, read

__all__ = ["sampler_settings", "settings"]

_SCRIPT = "SADAJEM's train_sadajem.py"


def settings(args: object) -> dict[str, Any]:
    """Keywords of :func:`ebmguard.guard`, from the script's own settings.

    The published sampler has no noise (``--sgld_std 0``), hence no output scale: it stays as it is,
    and the weights alone act.

    Args:
        args: the script's arguments, after ``init_env`` has completed them.

    Raises:
        ConfigError: settings are missing, ``--px`` is 0, or the sampler's step size is 0.
    """
    p_x, lr, std, folder = read(args, _SCRIPT, "px", "sgld_lr", "sgld_std", "save_dir")
    check_term({"px": p_x}, None)
    return keywords(step_size=lr, noise_std=std, folder=folder)


def sampler_settings(args: object) -> dict[str, Any]:
    """Keywords of :meth:`ebmguard.Guard.attach` about the sampler, from the script's own settings.

    Not its step size: the diagnostics of a Langevin step assume that no gradient is clipped.

    Raises:
        ConfigError: settings are missing.
    """
    (n_steps,) = read(args, _SCRIPT, "n_steps")
    return {"clamp": (-1.0, 1.0), "sgld_steps": n_steps, "steps_argument": "n_steps"}
