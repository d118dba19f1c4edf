"""From a trainer's settings to keywords of the guard, above all for JEM's family."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ebmguard.errors import ConfigError

__all__ = ["check_term", "keywords", "langevin", "langevin_steps", "read"]


def read(args: object, script: str, *names: str) -> tuple[Any, ...]:
    """Settings of a trainer, by name.

    Args:
        args: the trainer's parsed arguments.
        script: the trainer's name, for the message.

    Raises:
        ConfigError: one of them is missing or None.
    """
    missing = [name for name in names if getattr(args, name, None) is None]
    if missing:
        raise ConfigError(
            f"{script} has the settings {', '.join(names)}; in these args {', '.join(missing)} is "
            f"missing or None. Pass the script's own args, after it has completed them, or give "
            "guard() its keywords by hand."
        )
    return tuple(getattr(args, name) for name in names)


def check_term(weights: Mapping[str, float], term: str | None) -> None:
    """Refuse a guard for a term of the loss that is off, or one that would mix several terms.

    Args:
        weights: the weight of each term that has samples of its own; the usual term first.
        term: the caller's choice; None is the usual term, if no other is on.

    Raises:
        ConfigError: the term is off, or it must be named because others are on.
    """
    usual = next(iter(weights))
    others = [name for name, weight in weights.items() if weight > 0 and name != usual]
    if term is None and others:
        raise ConfigError(
            f"The term {', '.join(others)} is on: a second objective, with chains and energies of "
            "its own. Under one guard its samples would be tempered and its loss left as it is. "
            "Make a guard for each term that is on, each with a sampler of its own: "
            + ", ".join(f"settings(args, {name!r})" for name in weights if weights[name] > 0)
            + ", passed on as guard(None, sampler, **those)."
        )
    chosen = usual if term is None else term
    if chosen not in weights:
        raise ConfigError(f"term={chosen!r}; expected one of {', '.join(map(repr, weights))}.")
    if not weights[chosen] > 0:
        raise ConfigError(
            f"The weight of the term {chosen} is {weights[chosen]:g}: this run has no such loss to "
            "guard. Give it a weight above 0, or leave the guard out."
        )


def langevin(step_size: float, noise_std: float) -> dict[str, float]:
    """The settings of an SGLD step; none without noise, where there is no output scale."""
    return {"step_size": step_size, "noise_std": noise_std} if noise_std > 0 else {}


def langevin_steps(args: object, script: str) -> dict[str, Any]:
    """What ``attach`` can be told of JEM's sampler: its SGLD step and the number of steps.

    Raises:
        ConfigError: settings are missing.
    """
    lr, std, n_steps = read(args, script, "sgld_lr", "sgld_std", "n_steps")
    return {**langevin(lr, std), "sgld_steps": n_steps, "steps_argument": "n_steps"}


def keywords(
    *, step_size: float, noise_std: float, folder: str | os.PathLike[str], term: str | None = None
) -> dict[str, Any]:
    """Keywords of ``guard`` for a sampler that climbs f by ``step_size * df/dx`` plus noise.

    Args:
        step_size: of one SGLD step, in units of x² per unit of f.
        noise_std: of one SGLD step; 0 leaves the sampler as it is.
        folder: where the trainer saves its run. The guard writes to ``ebmguard`` inside, because
            TensorBoard reads only the newest of two writers in one folder.
        term: with several guards, a folder for each inside that one.

    Raises:
        ConfigError: the step size is 0.
    """
    if not step_size > 0:
        raise ConfigError(
            f"The sampler's step size is {step_size:g}: its chains do not climb f, and the samples "
            "are where they started. Set a step size above 0."
        )
    log_dir = os.path.join(folder, "ebmguard", *([] if term is None else [term]))
    return {
        **langevin(step_size, noise_std),
        "convention": "log_density",
        "log_dir": log_dir,
    }
