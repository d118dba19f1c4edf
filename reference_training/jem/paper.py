"""What the paper reports of its JEM runs: Tables 1 and 2, the figures, and when runs diverged.

Section 4.3 and Appendix M.1. Accuracies are fractions, of the CIFAR-10 test set. The strength is
given as β* = β · o, o being the output scale: Table 2 calls it β/o, but its numbers, and those of
Table 1, are β · o.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Metric = Literal["accuracy", "inception", "fid"]

METRICS: dict[Metric, str] = {"accuracy": "ACC (%)", "inception": "IS", "fid": "FID"}
"""The metrics and their heads. Higher is better but for the FID."""


class Scores(NamedTuple):
    """What the paper's tables say of one run."""

    accuracy: float
    """Test accuracy, a fraction, at the epoch of the best validation accuracy."""
    inception: float
    """The best Inception score of the training, of the replay buffer."""
    fid: float
    """Its best Fréchet Inception distance."""


class Comparison(NamedTuple):
    """A line of Table 2."""

    setup: str
    """How the scenario differs from the published trainer's defaults."""
    at_zero: Scores
    """β = 0."""
    best: Scores
    """The best of all β ≠ 0, each metric for itself."""
    best_beta_star: Scores
    """β* of each of these."""


TABLE_1: dict[float, Scores] = {
    0.0: Scores(0.905, 7.7, 39.6),
    0.5: Scores(0.912, 8.6, 38.9),
    1.0: Scores(0.912, 7.7, 44.1),
    2.0: Scores(0.916, 7.1, 50.9),
    4.0: Scores(0.917, 6.6, 59.6),
    10.0: Scores(0.915, 5.2, 85.3),
}
"""Scenario 1 by β*; the table itself prints β = β* / 20,000."""


TABLE_2: dict[str, Comparison] = {
    scenario: Comparison(setup, *(Scores(*numbers[i : i + 3]) for i in (0, 3, 6)))
    for scenario, setup, *numbers in (
        ("1", "the default setup", 0.905, 7.7, 39.6, 0.917, 8.6, 38.9, 4.0, 0.5, 0.5),
        ("2", "SGLD steps 20 → 5", 0.100, 1.8, 439.6, 0.883, 7.9, 48.0, 2.0, 0.5, 0.5),
        ("3", "negatives 64 → 8", 0.893, 7.6, 41.9, 0.911, 7.9, 42.0, 2.0, 0.5, 0.5),
        ("4", "output scale × 2", 0.910, 7.4, 41.7, 0.928, 7.8, 41.9, 10.0, 0.5, 0.5),
        ("5", "output scale × 0.5", 0.876, 7.4, 43.2, 0.902, 8.2, 41.8, 2.0, 0.5, 0.5),
        ("6", "SGLD step size × 4", 0.362, 2.9, 154.1, 0.924, 8.0, 41.5, 4.0, 0.5, 0.5),
        ("7", "SGLD step size × 0.25", 0.865, 7.7, 41.9, 0.880, 8.1, 42.7, 1.0, 0.1, 0.1),
    )
}
"""Every scenario by its number: its setup; and by accuracy, IS and FID at β = 0, the best of all
β ≠ 0, and the β* of each best."""

PROGRESS_FIGURES = {"16": "1"} | {str(18 + i): str(i) for i in range(2, 8)}
"""Figures of a training's progress, and the scenario of each."""

DIVERGED: dict[str, str] = {
    "1": "β* = 0 diverged around epoch 55",
    "2": "β* = 0 diverged in the first epoch",
    "4": "β* = 0 diverged earlier than in scenario 1; at β* = 2 the negatives worsened from epoch "
    "100 on, and the run diverged more than 30 epochs later",
    "5": "β* = 0 diverged earlier than in scenario 1",
    "6": "β* = 0 diverged by the third epoch",
}
"""When runs diverged, where the text says it."""
