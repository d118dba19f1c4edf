"""How a run went: its end, what was not finite, alerts and rollbacks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from ..alerts import Level
from ..check import Problem
from .run import FinishedRun

__all__ = ["of_alerts", "of_numbers", "of_outcome", "of_rollbacks"]

_LOST_ACCURACY = 0.05
_SKIPPED = 0.05


def of_outcome(run: FinishedRun) -> Iterator[Problem]:
    """How it ended."""
    lost = run.results.get("diverged_at")
    if lost is not None:
        yield Problem(
            Level.ERROR,
            "diverged",
            f"step {lost:,}",
            "The run was lost here.",
            'action="rollback" takes it back and goes on; beta_star of 0.5 to 2 makes it rarer.',
        )
    if run.accuracy:
        best_step, best = max(run.accuracy, key=lambda pair: pair[1])
        last_step, last = run.accuracy[-1]
        if best - last > _LOST_ACCURACY:
            yield Problem(
                Level.ERROR,
                "accuracy_lost",
                f"step {last_step:,}",
                f"Test accuracy fell from {best:.1%} (step {best_step:,}) to {last:.1%}.",
                f"restart from a checkpoint near step {best_step:,} with other random numbers; see "
                "the alerts between the two.",
            )
    wanted = run.setting("iterations")
    reached = run.rows[-1]["step"] + 1
    if not run.results and wanted and reached < wanted:
        yield Problem(
            Level.INFO,
            "not_over",
            f"step {reached:,}",
            f"The run has {reached:,} of {wanted:,.0f} steps and no results.json: it is still "
            "going on, or was killed.",
            "--resume, or g.resume() with Recovery(folder=...).",
        )


def of_numbers(run: FinishedRun) -> Iterator[Problem]:
    """What was NaN or infinite, and steps that were left out."""
    for what, tags in (
        ("energies", ("nonfinite/energies", "nonfinite/pos", "nonfinite/neg")),
        ("samples", ("nonfinite/samples",)),
        ("gradients", ("nonfinite/gradients",)),
    ):
        steps = sorted({step for tag in tags for step, value in run.series(tag) if value > 0})
        if steps:
            yield Problem(
                Level.ERROR,
                "nonfinite",
                f"step {steps[0]:,}",
                f"{what.capitalize()} were NaN or infinite in {len(steps):,} steps, first here.",
                'a lower learning rate; action="rollback", which replaces such rows of the replay '
                "buffer too.",
            )
    scaler = [value for _, value in run.series("scaler/skipped")]
    if scaler and sum(value > 0 for value in scaler) > _SKIPPED * len(run.rows):
        share = sum(value > 0 for value in scaler) / len(run.rows)
        yield Problem(
            Level.WARN,
            "scaler_skips",
            "scaler/skipped",
            f"The AMP scaler skipped {share:.0%} of the steps.",
            "autocast to bfloat16, which needs no scaler.",
        )


def of_alerts(run: FinishedRun) -> Iterator[Problem]:
    """What the rules said, and no rollback has answered."""
    # What a rollback has answered is told by the audit log.
    since = max((record["step"] for record in run.rollbacks), default=-1)
    fresh = [a for a in run.alerts if a.get("level") in ("WARN", "ERROR")]
    if run.rollbacks:
        last = max(
            (i for i, a in enumerate(fresh) if a["step"] == since and a["level"] == "ERROR"),
            default=-1,
        )
        fresh = fresh[last + 1 :]
    for rule, group in groupby(sorted(fresh, key=lambda a: str(a["rule"])), lambda a: a["rule"]):
        alerts = list(group)
        errors = [a for a in alerts if a["level"] == "ERROR"]
        first = (errors or alerts)[0]
        times = f"{len(alerts)} times" if len(alerts) > 1 else "once"
        yield Problem(
            Level.ERROR if errors else Level.WARN,
            str(rule),
            f"step {first['step']:,}",
            f"The rule fired {times}; {first['tag']} was {float(first['value']):.4g} here (limit "
            f"{float(first['limit']):.4g}).",
            "; ".join(first["remedies"]) + ".",
        )


def of_rollbacks(run: FinishedRun) -> Iterator[Problem]:
    """What the audit log tells."""
    if not run.rollbacks:
        return
    last = run.rollbacks[-1]
    left = last.get("budget_left")
    yield Problem(
        Level.WARN if left == 0 or len(run.rollbacks) > 1 else Level.INFO,
        "rollbacks",
        f"step {last['step']:,}",
        f"{len(run.rollbacks)} rollback{'s' if len(run.rollbacks) > 1 else ''}, the last one for "
        f"{last['rule']}; {left} left.",
        "keep what the last one changed from the start: "
        + (_changes(run) or "new random numbers were enough")
        + ".",
    )
    for record in run.rollbacks:
        if record.get("certified") is False:
            yield Problem(
                Level.WARN,
                "uncertified",
                f"step {record['step']:,}",
                f"It went back to step {record['restored_step']:,}, a state that had never been "
                "quiet for long enough to count as good.",
                "a lower learning rate or more SGLD steps for the first steps; Recovery(every=, "
                "certify_after=) smaller than the time to the first ERROR.",
            )
    relapses = [record for record in run.rollbacks if record.get("relapse")]
    if relapses:
        yield Problem(
            Level.WARN,
            "relapse",
            f"step {relapses[-1]['step']:,}",
            f"{len(relapses)} of {len(run.rollbacks)} rollbacks did not hold.",
            "a change that lasts: beta_star up, more SGLD steps (Recovery(ladder=...)).",
        )


def _changes(run: FinishedRun) -> str:
    found: dict[str, float] = {}
    for record in run.rollbacks:
        for name, (_, after) in record.get("changes", {}).items():
            found[name] = after
    return ", ".join(f"{name} {value:g}" for name, value in found.items())
