"""The one adviser; `ebmguard check RUN`: every problem of a run. Limits are those of the rules."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import tyro

from ..alerts import DEFAULT_RULES, FloorRule, Level, MedianRule, Remedy
from ..alerts.remedies import ABOVE_DATA_WARN, BLOWUP_WARN, agreeing, recorded
from ..check import NEED_GRADIENT, show, unknown_problems
from ..check.problem import Problem, by_severity, error, info, warn
from ..tags import ALERT_LEVEL, ENERGY_GAP
from .folder import RecordedRun

__all__ = ["Advice", "CheckConfig", "advice", "check", "next_steps", "problems_of_run"]

_MEDIANS = tuple(rule for rule in DEFAULT_RULES if isinstance(rule, MedianRule))
_FLOORS = tuple(rule for rule in DEFAULT_RULES if isinstance(rule, FloorRule))
_MOST_RULES = 50  # that a page has advice of
_NONFINITE = {"Energies": "energies pos neg", "Samples": "samples", "Gradients": "gradients"}
# All tags that the checks below read.
_READ = {
    *(r.reference_prefix * n + bound.tag for r in _MEDIANS for bound in r.bounds for n in (0, 1)),
    *(tag for rule in _FLOORS for tag in (rule.tag, rule.reference_tag)),
    *(f"nonfinite/{name}" for names in _NONFINITE.values() for name in names.split()),
    *(ALERT_LEVEL, "beta_star", "buffer/reinit", "energy_gap", "energy_gap_scaled"),
    *("f_neg/std", "optim/amplification", "scaler/skipped", *NEED_GRADIENT),
}
# The meaning of a median beyond a rule's limit.
_MEANINGS = {
    ("ess", "below"): "The effective sample size is {:.1%} of the negatives: a few carry it all.",
    ("pareto_k", "above"): "The weights' Pareto shape is {:.2g}: do not trust their variance.",
    ("energy_overlap", "above"): "{:.0%} of the pairs have a negative likelier than the data.",
    ("sampler/repeated", "above"): "{:.0%} of the samples are bit for bit the last call's.",
    ("buffer/duplicates", "above"): "{:.0%} of the chains in a draw are there more than once.",
    ("buffer/age", "above"): "The chains are {:.0f} steps old.",
    ("sampler/clamped", "above"): "{:.0%} of the samples' entries lie at an end of the clamp.",
    ("sampler/acceptance", "below"): "A Metropolis test would accept {:.1%} of the steps: they are "
    "too long for its density, as JEM's are on purpose.",
    ("sampler/drift_to_noise", "above"): "The drift is {:.3g} times the noise: gradient ascent.",
    ("sampler/drift_to_noise", "below"): "The drift is {:.3g} times the noise: a random walk.",
}


@dataclass(frozen=True)
class Advice:
    """The advice of one rule about a run."""

    rule: str  # its name, which is that of its section in docs/alerts.md
    level: str  # the worst that it reported
    count: int
    first: int  # step of its first report
    last: int
    alert: Mapping[str, Any]  # the first of the worst level
    remedies: tuple[str, ...]  # those of the worst level first, likeliest first


def _moved_by_rollbacks(run: RecordedRun) -> dict[str, int]:
    """Return the settings that rollbacks have moved, and which way: no advice contradicts them.

    A run that is not lost, or that was rolled back, is not advised to go back either.
    """
    pairs = [pair for rollback in run.rollbacks for pair in rollback["changes"].items()]
    names = {"sgld_steps": "steps"}
    moved = {names.get(what, what): 1 if new > old else -1 for what, (old, new) in pairs}
    return moved if run.verdict.is_lost and not run.rollbacks else {**moved, Remedy.ROLL_BACK: 1}


def _next_settings(run: RecordedRun) -> str:
    """Return the advice for the next run after one that was rolled back."""
    changes = {
        name: pair[1] for rollback in run.rollbacks for name, pair in rollback["changes"].items()
    }
    settings = ", ".join(f"{name} {after:g}" for name, after in changes.items())
    return f"begin the next run with {settings or 'new random numbers, which were enough'}"


def next_steps(run: RecordedRun, advised: Iterable[Advice]) -> tuple[str, ...]:
    """Return remedies for the verdict, the likeliest first; empty if none is needed."""
    steps = [_next_settings(run)] if run.rollbacks else []
    steps += [remedy for entry in advised if entry.level != "INFO" for remedy in entry.remedies]
    if run.verdict.is_lost and not steps:
        steps = ['action="rollback" next time, which takes it back and goes on']
    return tuple(steps)


def advice(run: RecordedRun, moved: dict[str, int] | None = None) -> list[Advice]:
    """Return an entry for every rule that fired unanswered, the worst first, then the earliest."""
    by_rule: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for alert in sorted(run.alerts[run.answered :], key=lambda alert: -Level[alert["level"]]):
        by_rule[alert["rule"]].append(alert)
    entries = []
    for rule, alerts in by_rule.items():
        worst, steps = alerts[0], [alert["step"] for alert in alerts]
        remedies = tuple(remedy for alert in alerts for remedy in recorded(alert))
        numbers = len(steps), min(steps), max(steps)
        entries.append(Advice(rule, worst["level"], *numbers, worst, remedies))
    entries.sort(key=lambda entry: (-Level[entry.level], entry.first))
    del entries[_MOST_RULES:]
    moved = _moved_by_rollbacks(run) if moved is None else moved
    return [replace(entry, remedies=agreeing(entry.remedies, moved)) for entry in entries]


@dataclass(frozen=True)
class CheckConfig:
    """List every problem of a run with its fix; the exit status is 1 if one is an error."""

    run: tyro.conf.Positional[Path]
    """The folder of a run."""


def check(config: CheckConfig) -> int:
    """Run `ebmguard check RUN`; the exit status is 1 if a problem is an error, else 0."""
    problems = problems_of_run(config.run)
    show(problems)
    return int(any(problem.severity is Level.ERROR for problem in problems))


def problems_of_run(path: Path) -> list[Problem]:
    """Return every problem of a run folder, worst first.

    Raises:
        ConfigError: the folder is no run, or is damaged.
    """
    run = RecordedRun.read(path, whole=_READ)
    moved = _moved_by_rollbacks(run)  # and advised, from the first problem to the last
    checks = (_check_alerts, _check_medians, _check_grad_scale, _check_rollbacks)
    problems = [p for check in checks for p in check(run, moved)]
    others = (_check_outcome, _check_numbers, _check_sampler, _check_optimizer)
    return by_severity([*_check_loss(run), *problems, *(p for check in others for p in check(run))])


def _check_loss(run: RecordedRun) -> Iterator[Problem]:
    """Yield the loss of the run, if no alert reports it."""
    verdict, lost_at, advised = run.verdict, run.results.get("diverged_at"), advice(run)
    if lost_at is not None or (
        verdict.is_lost and verdict.rule not in [entry.rule for entry in advised]
    ):
        step = verdict.step if lost_at is None else lost_at
        text = f"The run was lost here. Verdict: {verdict}."
        yield error("diverged", f"step {step:,}", text, _fix(next_steps(run, advised)))


def _check_outcome(run: RecordedRun) -> Iterator[Problem]:
    if run.accuracy:
        best_step, best = max(run.accuracy, key=lambda pair: pair[1])
        last_step, last = run.accuracy[-1]
        if best - last > 0.05:
            text = f"Test accuracy fell from {best:.1%} (step {best_step:,}) to {last:.1%}."
            fix = f"restart from a checkpoint near step {best_step:,} with other random numbers."
            yield error("accuracy_lost", f"step {last_step:,}", text, fix)
    wanted, reached = run.setting("iterations"), run.step + 1
    if not run.results and wanted and reached < wanted:
        text = f"{reached:,} of {wanted:,.0f} steps and no results.json: going on still, or killed."
        fix = "--resume, or g.resume() with Recovery(folder=...)."
        yield info("not_over", f"step {reached:,}", text, fix)


def _check_numbers(run: RecordedRun) -> Iterator[Problem]:
    for what, names in _NONFINITE.items():
        pairs = (pair for name in names.split() for pair in run.series(f"nonfinite/{name}"))
        steps = {step for step, value in pairs if value > 0}
        if steps:
            text = f"{what} were NaN or infinite in {len(steps):,} steps, first here."
            fix = "a lower learning rate"
            fix += "." if run.rollbacks else '; action="rollback".'
            yield error("nonfinite", f"step {min(steps):,}", text, fix)
    skipped = [value > 0 for _, value in run.series("scaler/skipped")]
    if sum(skipped) > 0.05 * len(skipped):
        text = f"The AMP scaler skipped {sum(skipped) / len(skipped):.0%} of the steps."
        fix = "autocast to bfloat16, which needs no scaler."
        yield warn("scaler_skips", "scaler/skipped", text, fix)


def _check_alerts(run: RecordedRun, moved: dict[str, int]) -> Iterator[Problem]:
    verdict = run.verdict
    cause = verdict.rule if verdict.is_lost else ""
    for entry in sorted(advice(run, moved), key=lambda entry: entry.rule != cause):
        alert = entry.alert
        if entry.level != "INFO":
            times = f"{entry.count} times" if entry.count > 1 else "once"
            value, limit = float(alert["value"]), float(alert["limit"])
            text = f"Verdict: {verdict}. " if entry.rule == cause else ""
            text += f"The rule fired {times}; "
            text += f"{alert['tag']} was {value:.4g} here"
            text += "." if not limit and alert.get("window") else f" (limit {limit:.4g})."
            fix = _fix(entry.remedies, alert.get("follows", "others"))
            yield Problem(Level[entry.level], entry.rule, f"step {alert['step']:,}", text, fix)


def _check_rollbacks(run: RecordedRun, moved: dict[str, int]) -> Iterator[Problem]:
    if not run.rollbacks:
        return
    last, count, left = run.rollbacks[-1], len(run.rollbacks), run.rollbacks[-1]["budget_left"]
    text = f"{count} rollback{'s' if count > 1 else ''}, the last for {last['rule']}; {left} left."
    fix = f"{_next_settings(run)}."
    level = Level.WARN if left == 0 or count > 1 else Level.INFO
    yield Problem(level, "rollbacks", f"step {last['step']:,}", text, fix)
    for record in run.rollbacks:
        if record.get("certified") is False:
            text = f"It went back to step {record['restored_step']:,}, never quiet for long enough."
            fix = "a lower learning rate at first; Recovery(every=, certify_after=) in fewer steps."
            yield warn("uncertified", f"step {record['step']:,}", text, fix)
    if relapses := [record for record in run.rollbacks if record["relapse"]]:
        text = f"{len(relapses)} of {count} rollbacks did not hold."
        is_above = relapses[-1]["tag"] == ENERGY_GAP and relapses[-1]["value"] < 0
        lasting = (ABOVE_DATA_WARN if is_above else BLOWUP_WARN).zero[1:]
        fix = f"a change that lasts (Recovery(ladder=...)): {_fix(agreeing(lasting, moved))}"
        yield warn("relapse", f"step {relapses[-1]['step']:,}", text, fix)


def _check_medians(run: RecordedRun, moved: dict[str, int]) -> Iterator[Problem]:
    """Yield the medians at the end of the run that are beyond the limit of their rule."""
    beta_star = _late(run, "beta_star", 1)
    for rule, bound in ((x, bound) for x in _MEDIANS for bound in x.bounds):
        tag = (rule.reference_prefix if beta_star == 0 else "") + bound.tag
        value = _late(run, tag, bound.window)
        if value > bound.limit if bound.side == "above" else value < bound.limit:
            remedies = [*agreeing(bound.remedies.at(beta_star)[:2], moved)]
            spread = _late(run, "f_neg/std", bound.window)
            if bound.tag == "ess" and Remedy.LOWER_BETA in remedies and spread * beta_star > 1:
                remedies.append(f"beta_star of about {1 / spread:.2g}, one over f_neg/std")
            text = f"{_MEANINGS[bound.tag, bound.side].format(value)} It is the median of the last "
            text += f"{bound.window} values; the rule's limit is {bound.limit:g}."
            yield Problem(bound.level, rule.name, tag, text, _fix(remedies))


def _fix(remedies: Iterable[str], others: str = "others") -> str:
    return ("; ".join(remedies) or f"that of {others}") + "."


def _late(run: RecordedRun, tag: str, window: int) -> float:
    """Return the median of the last known values; NaN if there are fewer."""
    known = [value for _, value in _kept(run, tag)[-window:]]
    return median(known) if len(known) == window else math.nan


def _kept(run: RecordedRun, tag: str) -> list[tuple[int, float]]:
    """Return a series without the rows of an ERROR: a lost state is no ground for advice."""
    lost = {step for step, level in run.series(ALERT_LEVEL) if level == Level.ERROR}
    return [pair for pair in run.series(tag) if pair[0] not in lost]


def _check_grad_scale(run: RecordedRun, moved: dict[str, int]) -> Iterator[Problem]:
    """Yield a GradScale that stayed low for so long that it is an ERROR."""
    beta_star = _late(run, "beta_star", 1)
    for rule in _FLOORS:
        tag = rule.reference_tag if beta_star == 0 else rule.tag
        known = _kept(run, tag)
        groups = groupby(known, lambda pair, floor=rule.floor: pair[1] < floor)  # type: ignore[misc]
        low = [[step for step, _ in pairs] for is_low, pairs in groups if is_low]
        # Of a long run not every row was written, or is kept.
        long = [steps for steps in low if steps[-1] - steps[0] + 1 >= rule.error_patience]
        if long:
            still = long[-1][-1] == known[-1][0]
            count = long[-1][-1] - long[-1][0] + 1
            text = f"{tag} stayed under {rule.floor:g} for {count:,} steps"
            text += (", to the end" if still else "") + ": no negative was competitive."
            fix = _fix(agreeing(rule.remedies.at(beta_star)[:2], moved))
            level = Level.ERROR if still and beta_star else Level.WARN
            yield Problem(level, rule.name, f"step {long[-1][0]:,}", text, fix)


def _check_sampler(run: RecordedRun) -> Iterator[Problem]:
    """Compare step and noise with the output scale; look for chains that never start afresh."""
    step, noise = run.setting("step_size"), run.setting("noise_std")
    gaps = dict(run.series("energy_gap"))
    # The ratio of the gap in both units is o as the guard used it.
    scales = [scaled / gaps[i] for i, scaled in run.series("energy_gap_scaled") if gaps.get(i)]
    if step and noise and scales:
        implied, used = 2 * step / noise**2, median(scales)
        if abs(used / implied - 1) > 0.02:
            text = (
                f"The guard ran with output_scale = {used:.6g}; 2 * step / noise**2 = {implied:g}."
            )
            yield error("output_scale", "config.json", text, f"output_scale={implied:g}.")
    reinit = [value for _, value in run.series("buffer/reinit")]
    if len(reinit) >= 100 and not any(reinit):
        text = "No chain has started afresh in the whole run."
        yield info("stale_chains", "buffer/reinit", text, "a reinit rate of 0.05, as JEM.")
    unknown = {tag for tag in NEED_GRADIENT if tag in run.latest and not run.series(tag)}
    if run.row_count > 2:
        yield from unknown_problems(unknown)
    if not run.series("sampler/drift_to_noise") and "sampler/drift_to_noise" not in unknown:
        text = "Drift, clamp and acceptance are unknown: step and noise were not attached."
        fix = "g.attach(step_size=..., noise_std=..., clamp=...)."
        yield info("unknown", "sampler/drift_to_noise", text, fix)


def _check_optimizer(run: RecordedRun) -> Iterator[Problem]:
    series = _kept(run, "optim/amplification")
    begin, end = (series[i][0] if series else 0 for i in (0, -1))
    quarter = (end - begin) / 4
    first = median([value for step, value in series if step <= begin + quarter] or [0.0])
    last = median([value for step, value in series if step >= end - quarter] or [0.0])
    if len(series) >= 8 and last > 10 * first > 0:
        text = (
            f"The adaptive optimizer undoes GradScale (Appendix H): {first:.3g} grew to {last:.3g}."
        )
        fix = "more SGLD steps or a lower learning rate, so that GradScale comes back."
        yield warn("amplification", "optim/amplification", text, fix)
