"""How a JEM goes: its accuracy around alerts, its best, and what results.json tells."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ebmguard import tags

from ..engine.task import DIVERGED_GAP
from ..plots.numbers import median

GAP_WINDOW = 100

CROSS_ENTROPY, GAP_XY = "cross_entropy", "p_x_y/energy_gap"
"""The trainer's own numbers: the gap is that of f(x, y), whose guard has a folder of its own."""
SEEN = (CROSS_ENTROPY, tags.ENERGY_GAP, GAP_XY)
"""Numbers of a row by which a run is lost."""


class Kept:
    """A part of a run: some attributes of an object, which are plain values or a deque of pairs."""

    def __init__(self, owner: object, *names: str) -> None:
        self.owner = owner
        self.names = names

    def state_dict(self) -> dict[str, Any]:
        """The values as they are now, for a checkpoint."""
        found = {name: getattr(self.owner, name) for name in self.names}
        return {k: list(x) if isinstance(x, deque) else copy.copy(x) for k, x in found.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to saved values."""
        for name in self.names:
            old, new = getattr(self.owner, name), copy.copy(state[name])
            is_deque = isinstance(old, deque)
            setattr(self.owner, name, deque(map(tuple, new), old.maxlen) if is_deque else new)


class Course:
    """Accuracy at every step around what :meth:`look_at` points to, and the best evaluations.

    Test accuracy "at step t" is that of the parameters with which step t's energies were computed,
    before the update of step t. An evaluation costs a good part of a training step, so it cannot be
    had at each step; copies of the parameters of the last steps make those *before* an alert known
    as well.

    Args:
        network: in training.
        measure: its test accuracy as it is.
        before: steps before an alert or a divergence that are evaluated too.
        after: steps after it.

    Attributes:
        accuracy: test accuracy by step, where it was evaluated.
        best: rows of evaluations.jsonl that are the best by a number, by its name.
        past: the last steps and their parameters.
        watched_until: the last step that is evaluated in any case.
    """

    def __init__(
        self, network: nn.Module, measure: Callable[[], float], before: int, after: int
    ) -> None:
        self.network = network
        self.measure = measure
        self.before = before
        self.after = after
        self.accuracy: dict[int, float] = {}
        self.best: dict[str, dict[str, Any]] = {}
        self.past: deque[tuple[int, dict[str, Tensor]]] = deque(maxlen=before)
        self.watched_until = -1

    def before_step(self, step: int) -> list[int]:
        """Evaluate what `step` starts with, if watched and not known yet; its number, or none."""
        if self.before:
            self.past.append((step, self._parameters()))
        if step > self.watched_until or step in self.accuracy:
            return []
        self.accuracy[step] = self.measure()
        return [step]

    def look_at(self, step: int) -> list[int]:
        """Evaluate the remembered steps before the current one, and watch those after `step`.

        Call it between the optimizer's update and the next :meth:`before_step`. It returns the
        steps that were evaluated now, ascending.
        """
        self.watched_until = max(self.watched_until, step + self.after)
        missing = [(past, state) for past, state in self.past if past not in self.accuracy]
        now = self._parameters()
        for past, state in missing:
            self.network.load_state_dict(state)
            self.accuracy[past] = self.measure()
        self.network.load_state_dict(now)
        return [past for past, _ in missing]

    def _parameters(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.network.state_dict().items()}

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
        were the best stay too, as checkpoints/best.pt does. Nothing is watched any more.
        """
        for alert in alerts.values():
            if "accuracy_around" not in alert:
                alert["accuracy_around"] = self.accuracy_around(alert["step"])
        self.accuracy = {at: value for at, value in self.accuracy.items() if at <= step}
        self.past = deque((pair for pair in self.past if pair[0] < step), self.before)
        self.watched_until = -1

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
