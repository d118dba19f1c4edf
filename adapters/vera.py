"""``wgrathwohl/VERA``, ``train.py`` (commit 91ff0dd), with ``--jem_baseline``: its MCMC mode.

The script imports its sampler, so wrap it in the script's last lines, before ``main(args)``. The
script maximises ``logp_obj``, the negated loss. ::

    cd_loss, sample_q = guard(None, sample_q, beta_star=0.5, **vera.settings(args))
    ...
    logp_obj = -cd_loss(ld, lg_detach)

Its step size is half the squared noise, so that the output scale is 1 and β* = β, at most 1 here.
"""

from __future__ import annotations

from typing import Any

from ebmguard.errors import ConfigError

from ._settings import keywords, langevin, read

__all__ = ["sampler_settings", "settings"]

_SCRIPT = "VERA's train.py"
# The script checks these first.
_OTHER_MODES = ("clf_only", "maximum_likelihood", "ssm", "vat")


def settings(args: object) -> dict[str, Any]:
    """Keywords of :func:`ebmguard.guard`, from the script's own settings.

    Args:
        args: the script's arguments, after it has filled in ``sgld_lr``.

    Raises:
        ConfigError: settings are missing, the sampler's step size is 0, or a mode without a
            sampler.
    """
    baseline, *others = read(args, _SCRIPT, "jem_baseline", *_OTHER_MODES)
    chosen = [name for name, on in zip(_OTHER_MODES, others, strict=True) if on]
    if chosen:
        raise ConfigError(
            f"--{chosen[0]} trains without contrastive samples, also beside --jem_baseline: there "
            "is nothing to guard. Leave it out, or leave the guard out."
        )
    if not baseline:
        raise ConfigError(
            "Without --jem_baseline, VERA's negatives come from a generator that is trained along, "
            "and not from a sampler: nothing runs on (1 - beta) f, and the weights would correct "
            "for a proposal that is not there. Add --jem_baseline, or leave the guard out."
        )
    lr, std, folder = read(args, _SCRIPT, "sgld_lr", "sgld_std", "save_dir")
    return keywords(step_size=lr, noise_std=std, folder=folder)


def sampler_settings(args: object) -> dict[str, Any]:
    """Keywords of :meth:`ebmguard.Guard.attach` about the sampler, from the script's own settings.

    The number of steps is not among them: the script passes it by position, so that nothing can
    change it.

    Raises:
        ConfigError: settings are missing.
    """
    lr, std = read(args, _SCRIPT, "sgld_lr", "sgld_std")
    return langevin(lr, std)
