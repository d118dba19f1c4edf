"""How a JEM goes, as results.json tells it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ebmguard import tags

from ..engine.task import DIVERGED_GAP
from ..plots.numbers import median

GAP_WINDOW = 100

CROSS_ENTROPY, GAP_XY = "cross_entropy", "p_x_y/energy_gap"
"""The trainer's own numbers: the gap is that of f(x, y), whose guard has a folder of its own."""
SEEN = (CROSS_ENTROPY, tags.ENERGY_GAP, GAP_XY)
"""Numbers of a row by which a run is lost."""


class Course:
    """Accuracy and the best evaluations: plain values that a checkpoint can hold.

    Test accuracy "at step t" is that of the parameters with which step t's energies were computed,
    before the update of step t.

    Attributes:
        before: steps before an alert or a divergence that are listed with their accuracy.
        after: steps after it.
        accuracy: test accuracy by step, where it was evaluated. It stays the same object.
        best: rows of evaluations.jsonl that are the best by a number, by its name.
    """

    def __init__(self, before: int = 0, after: int = 0) -> None:
        self.before = before
        self.after = after
        self.accuracy: dict[int, float] = {}
        self.best: dict[str, dict[str, Any]] = {}

    def see_evaluation(self, row: Mapping[str, Any]) -> bool:
        """Take in a row of evaluations.jsonl; true where it is the best by validation accuracy.

        Of equals the first one stays. Scores of samples count where the network that judges them
        stays the same: an untrained one finds all images alike.
        """
        self.accuracy[row["step"]] = row["test_accuracy"]
        is_best = False
        for name, better in (("valid_accuracy", 1), ("buffer_is", 1), ("buffer_fid", -1)):
            value, best = row.get(name), self.best.get(name)
            if value is None or math.isnan(value):
                continue
            if name != "valid_accuracy" and not row["features_fixed"]:
                continue
            if best is None or better * value > better * best[name]:
                self.best[name] = dict(row)
                is_best |= name == "valid_accuracy"
        return is_best

    def roll_back(self, step: int, alerts: Mapping[str, dict[str, Any]]) -> None:
        """Go back to `step`: what came after it belongs to a course given up.

        The accuracy around the first alerts, records by level, stays with them; evaluations that
        were the best stay too, as checkpoints/best.pt does.
        """
        for alert in alerts.values():
            if "accuracy_around" not in alert:
                alert["accuracy_around"] = self.accuracy_around(alert["step"])
        for late in [at for at in self.accuracy if at > step]:
            del self.accuracy[late]

    def last_accuracy(self) -> float | None:
        """Test accuracy at the latest evaluated step."""
        return self.accuracy[max(self.accuracy)] if self.accuracy else None

    def accuracy_around(self, step: int) -> list[tuple[int, float]]:
        """(step, accuracy) pairs of the evaluated steps around `step`."""
        near = range(step - self.before, step + self.after + 1)
        return [(at, self.accuracy[at]) for at in near if at in self.accuracy]

    def results(
        self,
        rows: Sequence[Mapping[str, Any]],
        alerts: Mapping[str, Mapping[str, Any]],
        diverged_at: int | None,
    ) -> dict[str, Any]:
        """The entries of results.json that describe how the run went.

        Args:
            rows: the guard's rows, oldest first (metrics.jsonl), of the last course.
            alerts: the records of the first alerts, by level.
            diverged_at: first diverged step, after which no accuracy is the best.
        """
        end = math.inf if diverged_at is None else diverged_at
        before = [(value, -step) for step, value in self.accuracy.items() if step <= end]
        best, at = max(before, default=(None, 0))  # the first of equals
        last = rows[-1] if rows else {}
        gaps = [gap for row in rows[-GAP_WINDOW:] if (gap := gap_of(row)) is not None]
        results: dict[str, Any] = {
            "accuracy": self.last_accuracy(),
            "best_accuracy": best,
            "best_accuracy_step": None if best is None else -at,
            "median_abs_gap_last_100": median([abs(gap) for gap in gaps]),
            "best_evaluations": self.best,
        }
        weights = (tags.GRAD_SCALE, tags.ESS)
        for tag in (*weights, *(tags.REFERENCE + tag for tag in weights)):
            name = tag.replace(tags.REFERENCE, "reference_")
            values = [row[tag] for row in rows[-GAP_WINDOW:] if row.get(tag) is not None]
            results |= {name: last.get(tag), f"{name}_median_last_100": median(values)}
        results[tags.ENERGY_GAP] = last.get(tags.ENERGY_GAP)
        for level, alert in alerts.items():
            around = self.accuracy_around(alert["step"])
            results[f"first_{level.lower()}"] = {"accuracy_around": around, **alert}
        if diverged_at is not None:
            results["accuracy_around_divergence"] = self.accuracy_around(diverged_at)
        return results

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {"accuracy": dict(self.accuracy), "best": dict(self.best)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved course."""
        self.accuracy.clear()
        self.accuracy.update(state["accuracy"])
        self.best = dict(state["best"])


def gap_of(row: Mapping[str, float]) -> float | None:
    """Energy gap, mean f+ - mean f-, of a row: that of f(x), or else of f(x, y)."""
    return row.get(tags.ENERGY_GAP, row.get(GAP_XY))


def why_lost(row: Mapping[str, float]) -> str | None:
    """In words, why a run with such a row has diverged; None while it has not."""
    cross_entropy, gap = row.get(CROSS_ENTROPY, 0.0), gap_of(row)
    if math.isfinite(cross_entropy) and (gap is None or abs(gap) <= DIVERGED_GAP):
        return None
    words = f"cross-entropy {cross_entropy:.3g}"
    return words if gap is None else f"energy gap {gap:.3g}, {words}"
