"""What a run remembers of itself for results.json."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ebmguard import tags
from ebmguard.alerts import Alert, Level

from ..numbers import median

DIVERGED_GAP = 1e4
"""A run has diverged at the first step whose |energy gap| exceeds this, or is not finite."""
GAP_WINDOW = 100


@dataclass
class RunRecord:
    """The numbers of a run as it goes, all of them plain values that a checkpoint can hold.

    Test accuracy "at step t" is that of the parameters with which step t's energies were computed,
    before the update of step t.

    Attributes:
        next_step: steps finished so far.
        diverged_at: first diverged step, or None.
        accuracy: test accuracy by step, where it was evaluated.
        gaps: energy gap, mean f+ - mean f-, of the last 100 steps.
        best: rows of evaluations.jsonl that are the best by a number, by its name.
        alerts: records of the first alert that reached WARN and ERROR, by level name.
        elapsed: seconds of training in earlier sessions of a resumed run.
        rollbacks: records of the guard's rollbacks, oldest first.
        ended: why the guard ended the run, or None.
    """

    next_step: int = 0
    diverged_at: int | None = None
    accuracy: dict[int, float] = field(default_factory=dict)
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=GAP_WINDOW))
    alerts: dict[str, dict[str, Any]] = field(default_factory=dict)
    best: dict[str, dict[str, Any]] = field(default_factory=dict)
    elapsed: float = 0.0
    rollbacks: list[dict[str, Any]] = field(default_factory=list)
    ended: str | None = None

    @property
    def attempt(self) -> dict[str, int]:
        """What a row says about rollbacks: how many there were before it; nothing without any."""
        return {"attempt": len(self.rollbacks)} if self.rollbacks else {}

    def see_step(self, step: int, cross_entropy: float, gap: float | None) -> bool:
        """Take in the numbers of a step; true at the one that diverges.

        Args:
            step: its number.
            cross_entropy: of the classifier.
            gap: energy gap, None without samples.
        """
        lost = not math.isfinite(cross_entropy)
        if gap is not None:
            self.gaps.append(gap)
            lost = lost or not abs(gap) <= DIVERGED_GAP
        if self.diverged_at is None and lost:
            self.diverged_at = step
            return True
        return False

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

    def see_alert(self, alert: Alert) -> bool:
        """Take in an alert; true for the first of level WARN or more, and the first ERROR."""
        reached = [level for level in (Level.WARN, Level.ERROR) if alert.level >= level]
        new = [level.name for level in reached if level.name not in self.alerts]
        self.alerts.update({name: {**alert.record(), **self.attempt} for name in new})
        return bool(new)

    def see_rollback(self, rollback: Mapping[str, Any], *, before: int, after: int) -> None:
        """Go back to an earlier step. What was steps after it belongs to a course given up.

        The accuracy around the first alerts stays with them; evaluations that were the best stay
        too, as checkpoints/best.pt does.

        Args:
            rollback: its record.
            before, after: as for :meth:`results`.
        """
        for alert in self.alerts.values():
            if "accuracy_around" not in alert:
                around = self.accuracy_around(alert["step"], before=before, after=after)
                alert["accuracy_around"] = around
        step = int(rollback["restored_step"])
        for late in [at for at in self.accuracy if at > step]:
            del self.accuracy[late]
        for _ in range(min(len(self.gaps), self.next_step - step)):
            self.gaps.pop()
        if self.diverged_at is not None and self.diverged_at >= step:
            self.diverged_at = None
        self.next_step = step
        self.rollbacks.append(dict(rollback))

    def best_accuracy(self) -> tuple[int, float] | None:
        """Step and value of the best test accuracy before the divergence, the first of equals."""
        end = math.inf if self.diverged_at is None else self.diverged_at
        before = [(step, value) for step, value in self.accuracy.items() if step <= end]
        return max(before, key=lambda pair: (pair[1], -pair[0]), default=None)

    def last_accuracy(self) -> float | None:
        """Test accuracy at the latest evaluated step."""
        return self.accuracy[max(self.accuracy)] if self.accuracy else None

    def accuracy_around(self, step: int, *, before: int, after: int) -> list[tuple[int, float]]:
        """(step, accuracy) pairs of the evaluated steps around `step`."""
        near = range(step - before, step + after + 1)
        return [(at, self.accuracy[at]) for at in near if at in self.accuracy]

    def results(
        self, rows: Sequence[Mapping[str, Any]], *, before: int, after: int
    ) -> dict[str, Any]:
        """The entries of results.json that describe how the run went.

        Args:
            rows: the guard's rows, oldest first (metrics.jsonl), of the last course.
            before: steps before an alert that are listed with their accuracy.
            after: steps after it.
        """
        best = self.best_accuracy()
        last = rows[-1] if rows else {}
        results: dict[str, Any] = {
            "steps": self.next_step,
            "diverged_at": self.diverged_at,
            "accuracy": self.last_accuracy(),
            "best_accuracy": best[1] if best else None,
            "best_accuracy_step": best[0] if best else None,
            "median_abs_gap_last_100": median([abs(gap) for gap in self.gaps]),
            "best_evaluations": self.best,
            "rollbacks": self.rollbacks,
            "ended": self.ended,
        }
        weights = (tags.GRAD_SCALE, tags.ESS)
        for tag in (*weights, *(tags.REFERENCE + tag for tag in weights), tags.ENERGY_GAP):
            name = tag.replace(tags.REFERENCE, "reference_")
            results[name] = last.get(tag)
            values = [row[tag] for row in rows[-GAP_WINDOW:] if row.get(tag) is not None]
            if tag != tags.ENERGY_GAP:
                results[f"{name}_median_last_100"] = median(values)
        for level in ("WARN", "ERROR"):
            record = self.alerts.get(level)
            entry = None
            if record is not None:
                around = self.accuracy_around(record["step"], before=before, after=after)
                entry = {"accuracy_around": around, **record}
            results[f"first_{level.lower()}"] = entry
        if self.diverged_at is not None:
            results["accuracy_around_divergence"] = self.accuracy_around(
                self.diverged_at, before=before, after=after
            )
        return results

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {
            "next_step": self.next_step,
            "diverged_at": self.diverged_at,
            "accuracy": dict(self.accuracy),
            "gaps": list(self.gaps),
            "alerts": dict(self.alerts),
            "best": dict(self.best),
            "elapsed": self.elapsed,
            "rollbacks": list(self.rollbacks),
            "ended": self.ended,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved record."""
        self.next_step = state["next_step"]
        self.diverged_at = state["diverged_at"]
        self.accuracy = dict(state["accuracy"])
        self.gaps = deque(state["gaps"], maxlen=GAP_WINDOW)
        self.alerts = dict(state["alerts"])
        self.best = dict(state["best"])
        self.elapsed = state["elapsed"]
        self.rollbacks = list(state["rollbacks"])
        self.ended = state["ended"]


def last_course(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows in the order of a file, without those of steps that a rollback gave up.

    A step that comes again replaces what there was from it on.
    """
    kept: list[Mapping[str, Any]] = []
    for row in rows:
        while kept and kept[-1]["step"] >= row["step"]:
            kept.pop()
        kept.append(row)
    return kept
