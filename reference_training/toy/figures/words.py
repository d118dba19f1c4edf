"""Numbers and names as they are written under panels and in tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .runs import ToyRun

DATA = {"gmm": "GMM", "circles": "circles", "mixture1d": "1D mixture"}
VARIANT = {"default": "default", "no_pos": "no pos", "batch": "batch corr", "true": "true obj"}
"""Variants by the names that the paper's figures give them."""

OFF = "0"
"""β of the standard trainer, at which all variants are the same loss."""

NUMBERS = (
    r"Below $p_\theta$: KL$(p_d\,\|\,p_\theta)$ in nats and total variation. "
    r"Below the kernel density estimate of SGLD$(p_\theta)$: the same, both blurred alike."
)
"""What the numbers below panels are."""


def listed(words: Sequence[str]) -> str:
    """Words joined by commas and a last "and"."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def column_title(across: str, column: str) -> str:
    """What stands above a column of a figure: its β, or its variant."""
    return f"β = {column}" if across == "betas" else VARIANT.get(column, column)


def negatives(run: ToyRun) -> str:
    """How many negatives a run has, and whether its learning rate decays."""
    count = run.settings["n_neg"]
    decays = run.settings["lr_end"] < run.settings["lr"]
    return f"{count} negative{'s' * (count > 1)}" + (", decaying rate" if decays else "")


def who_draws(run: ToyRun) -> str:
    """A run's samplers, and how many negatives each of them draws."""
    each = " each" if len(run.samplers) > 1 else ""
    return f"{' + '.join(run.samplers)}: {run.settings['n_neg']}{each}"


def run_title(run: ToyRun) -> str:
    """A run by its scenario and size."""
    seeds = f"{run.seeds} seed" + ("s" if run.seeds > 1 else "")
    return f"{run.scenario}: {run.settings['iterations']:,} updates, {seeds}"
