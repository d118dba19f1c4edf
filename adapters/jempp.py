"""``sndnyang/JEMPP``, ``train_jempp.py`` (commit fba6ba5).

The sampler is a function of the module, so wrap it there: in the last lines of the script, where
the arguments are complete, before ``main(args)``. Inside ``main`` the assignment would make its
name local, and raise an UnboundLocalError. ::

    cd_loss, sample_q = guard(None, sample_q, beta_star=0.5, **jempp.settings(args))
    ...
    l_p_x = cd_loss(fp_all, fq_all)
"""

from __future__ import annotations

from typing import Any

from ._settings import check_term, keywords, read

__all__ = ["sampler_settings", "settings"]

_SCRIPT = "JEM++'s train_jempp.py"


def settings(args: object, term: str | None = None) -> dict[str, Any]:
    """Keywords of :func:`ebmguard.guard`, from the script's own settings.

    The published sampler has no noise (``--sgld_std 0``), hence no output scale: it stays as it is,
    and the weights alone act.

    With noise, the step size is that of a whole PYLD step. Its ``in_steps`` inner steps all climb
    the same slope, since the first layer is linear and the gradient behind it is held fixed:
    together they move by ``in_steps * pyld_lr`` times df/dx, and the outer step by ``sgld_lr``.
    This holds while no gradient reaches the clip ``--eps`` and no sample the bounds.

    Args:
        args: the script's arguments, after ``init_env`` has completed them.
        term: the term that this guard is for, "p_x" or "p_x_y"; None if ``--p_x_y_weight`` is 0.
            The second guard wraps ``sample_q.original``.

    Raises:
        ConfigError: as :func:`ebmguard.adapters.jem.settings`.
    """
    p_x, p_x_y, std, folder = read(
        args, _SCRIPT, "p_x_weight", "p_x_y_weight", "sgld_std", "save_dir"
    )
    check_term({"p_x": p_x, "p_x_y": p_x_y}, term)
    return keywords(step_size=_step_size(args), noise_std=std, folder=folder, term=term)


def sampler_settings(args: object) -> dict[str, Any]:
    """Keywords of :meth:`ebmguard.Guard.attach` about the sampler, from the script's own settings.

    Not its step size: the diagnostics of a Langevin step assume that no gradient is clipped.

    Raises:
        ConfigError: settings are missing.
    """
    std, n_steps = read(args, _SCRIPT, "sgld_std", "n_steps")
    bounds = {} if std > 0 else {"clamp": (-1.0, 1.0)}  # noise is added after the clamp
    return {**bounds, "sgld_steps": n_steps, "steps_argument": "n_steps"}


def _step_size(args: object) -> float:
    outer, inner, in_steps = read(args, _SCRIPT, "sgld_lr", "pyld_lr", "in_steps")
    return float(max(outer, 0) + in_steps * max(inner, 0))
