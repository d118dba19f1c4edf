"""``lhao499/HDGE``, ``train_wrn.py`` (commit 9f12b3e).

::

    cd_loss, sample_q = guard(None, get_sample_q(args), beta_star=0.5, **hdge.settings(args))
    ...
    l_pxsgld = cd_loss(fp_all, fq_all)

The contrastive terms (``--pxcontrast``, ``--pxycontrast``) have no samples and stay as they are.
"""

from __future__ import annotations

from typing import Any

from ebmguard.errors import ConfigError

from ._settings import check_term, keywords, langevin_steps, read

__all__ = ["sampler_settings", "settings"]

_SCRIPT = "HDGE's train_wrn.py"


def settings(args: object, term: str | None = None) -> dict[str, Any]:
    """Keywords of :func:`ebmguard.guard`, from the script's own settings.

    Rows and alerts go to ``ebmguard`` inside ``--log_dir``.

    Args:
        args: the script's arguments, as ``main`` gets them.
        term: the term that this guard is for, "pxsgld" or "pxysgld"; None if ``--pxysgld`` is off.
            The script multiplies both by the weight of the first.

    Raises:
        ConfigError: as :func:`ebmguard.adapters.jem.settings`, or ``--plot_contrast``.
    """
    px, pxy, plots_contrast = read(args, _SCRIPT, "pxsgld", "pxysgld", "plot_contrast")
    lr, std, folder = read(args, _SCRIPT, "sgld_lr", "sgld_std", "log_dir")
    if plots_contrast:
        raise ConfigError(
            "--plot_contrast calls the sampler with contrast=True, which climbs f.joint(...), "
            "another function than the f(x) that the guard tempers. Leave it out, and draw these "
            "pictures from a checkpoint."
        )
    check_term({"pxsgld": px, "pxysgld": pxy}, term)
    return keywords(step_size=lr, noise_std=std, folder=folder, term=term)


def sampler_settings(args: object) -> dict[str, Any]:
    """Keywords of :meth:`ebmguard.Guard.attach` about the sampler, from the script's own settings.

    Raises:
        ConfigError: settings are missing.
    """
    return langevin_steps(args, _SCRIPT)
