"""``wgrathwohl/JEM``, ``train_wrn_ebm.py`` (commit 3d01161), and forks that kept its arguments.

::

    cd_loss, sample_q = guard(
        None, get_sample_q(args, device), beta_star=0.5, **jem.settings(args)
    )
    ...
    l_p_x = cd_loss(fp_all, fq_all)
"""

from __future__ import annotations

from typing import Any

from ._settings import check_term, keywords, langevin_steps, read

__all__ = ["sampler_settings", "settings"]

_SCRIPT = "JEM's train_wrn_ebm.py"


def settings(args: object, term: str | None = None) -> dict[str, Any]:
    """Keywords of :func:`ebmguard.guard`, from the script's own settings.

    The output scale is that of ``--sgld_lr`` and ``--sgld_std`` (2 · 1 / 0.01² = 20,000). Rows and
    alerts go to ``ebmguard`` inside ``--save_dir``.

    Args:
        args: the script's parsed arguments.
        term: the term that this guard is for, "p_x" or "p_x_y"; None if ``--p_x_y_weight`` is 0.

    Raises:
        ConfigError: settings are missing, the term is off or must be named, or the sampler's step
            size is 0.
    """
    p_x, p_x_y, lr, std, folder = read(
        args, _SCRIPT, "p_x_weight", "p_x_y_weight", "sgld_lr", "sgld_std", "save_dir"
    )
    check_term({"p_x": p_x, "p_x_y": p_x_y}, term)
    return keywords(step_size=lr, noise_std=std, folder=folder, term=term)


def sampler_settings(args: object) -> dict[str, Any]:
    """Keywords of :meth:`ebmguard.Guard.attach` about the sampler, from the script's own settings.

    Diagnostics of the Langevin step need them, and so does whatever changes the number of steps
    (rollbacks, ``adapt=``)::

        cd_loss.guard.attach(
            model=f, optimizer=optim, buffer=replay_buffer, **jem.sampler_settings(args)
        )

    Raises:
        ConfigError: settings are missing.
    """
    return langevin_steps(args, _SCRIPT)
