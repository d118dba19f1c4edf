"""The path of a row once it is due: judged, acted on, written, reported; and what an ERROR does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..alerts import Alert, Level, error_for
from ..check import find_problems
from ..sinks.call_queue import queued
from .loop import Loop, remove_hooks, write_the_rest
from .rows import StepRow

if TYPE_CHECKING:
    from ..recovery import Recoverer

__all__ = ["close", "follow", "keep_or_roll_back", "raise_pending", "read_all"]

_log = logging.getLogger("ebmguard")


def read_all(loop: Loop) -> None:
    """Read the rows that wait, and the one under way so far."""
    follow(loop, loop.rows.so_far)


@queued
def follow(loop: Loop, due: Callable[..., Iterable[StepRow]], *args: Any) -> None:
    """Judge the rows that are due, act on them, write them and report them."""
    for row in due(*args):
        try:
            alerts = _judge_row(loop, row)
        finally:
            if row.is_over and not loop.is_closed:  # as one that a handler has closed
                loop.writer.write(row.step, row.numbers | row.logged, row.samples)
        is_due = row.is_over and loop.self_check.is_due(row.numbers)
        if is_due and loop.latest is not None and loop.settings.ranks.is_first:
            loop.self_check.say(find_problems(loop.setup(loop.latest[1], is_running=True)))
        if alerts:
            loop.actions.report(alerts)


def _judge_row(loop: Loop, row: StepRow) -> list[Alert]:
    judge, actions = loop.judge, loop.actions
    if loop.strength.is_scheduled:  # else it was checked when it was passed
        for member in row.members or [row.numbers]:
            if "beta_star" in member:
                loop.strength.check_measured(row.step, member["beta_star"])
    loop.last, loop.members = row.numbers | row.logged, row.members
    observed = judge.observe(row.step, row.numbers, row.members) if row.is_news else []
    if row.is_over and row.logged:
        observed += loop.skill.observe(row.step, row.logged)
    alerts: list[Alert] = []
    for alert in observed:
        numbers = row.numbers if alert.member is None else row.members[alert.member]
        values = numbers.get("beta_star"), loop.strength.most_raised, numbers
        now = loop.fineness.known(actions.situation(loop.trainer, *values), row.step)
        alerts.append(actions.advised(alert, now, loop.verdicts.lost_since))
    level = max(judge.level, loop.skill.level)
    if row.is_news or alerts:
        loop.rows.note({"alert_level": float(level)}, row)
    if row.is_over:
        is_lost = Level.ERROR in judge.active.values()
        alerts += loop.fineness.read(row.step, row.numbers, is_lost=is_lost)
    actions.observe(row, alerts)
    is_whole = row.is_over and actions.takes_back and actions.pending is None
    if is_whole and (recoverer := actions.recoverer) is not None:
        actions.attempt(recoverer.certify, row.step + 1, judge.active)
    worst = ""
    if alerts:
        # So that a reader of the folder knows what an ERROR at its end has done.
        action = "rollback" if actions.takes_back else loop.settings.action
        acts = {Level.ERROR: {"action": action}} if actions.answers else {}
        loop.writer.write_alerts([x.record() | acts.get(x.level, {}) for x in alerts])
        worst = max(alerts, key=lambda alert: alert.level).rule
    if loop.verdicts.update(row.step, level, worst):
        loop.writer.write_verdict(row.step, str(loop.verdicts.verdict))
    return alerts


def raise_pending(loop: Loop) -> None:
    """Raise, at a safe point, the ERROR that waits with ``action="raise"``."""
    if loop.settings.action == "raise" and (alert := loop.actions.take_pending()) is not None:
        loop.verdicts.is_ended = True
        loop.writer.write_verdict(loop.verdicts.since, str(loop.verdicts.verdict))
        loop.writer.flush()
        raise error_for(alert, loop.judge.rules)(alert)


def keep_or_roll_back(loop: Loop, recoverer: Recoverer) -> None:
    """Take a snapshot if one is due, or take the run back to one if an ERROR waits."""
    actions, step = loop.actions, loop.rows.step
    error = actions.pending  # until all is back: an interrupt leaves it to the next step
    if error is None:
        recoverer.check_alive(actions.alerts, is_lost=loop.judge.level is Level.ERROR)
        if recoverer.is_due(step, loop.trainer):
            read_all(loop)  # which may be an ERROR
            if actions.pending is None and recoverer.is_due(step, loop.trainer):
                recoverer.keep(step, loop.trainer, loop.own_state())
        return
    write_the_rest(loop.rows, loop.writer)  # rows of steps that are taken back
    broken = loop.situation  # as the chains were then
    rollback, guard_state = recoverer.restore(step, loop.trainer, error)
    loop.load_own_state(guard_state)
    loop.judge.after_rollback()
    loop.verdicts.rolled_back(recoverer.attempt, rollback.restored_step, error.rule)
    names = "substeps", "most_substeps", "is_sharp"
    now = replace(loop.situation, **{name: getattr(broken, name) for name in names})
    rollback = recoverer.change(rollback, loop.trainer, now, knows_steps=actions.asks_steps)
    loop.fineness.least = recoverer.effect.substeps
    recoverer.save_restored(loop.trainer, loop.own_state())
    loop.writer.write_recovery(rollback.record())


@queued
def close(loop: Loop) -> None:
    """See :meth:`ebmguard.Guard.close`."""
    loop.ownership.is_over = True
    remove_hooks(loop.first_losses, loop.hook_refs)
    for row in loop.rows.drain():  # one by one: all of them, whatever a callback raises
        follow(loop, iter, [row])
    _close_writer(loop)


@queued
def _close_writer(loop: Loop) -> None:
    speaks = loop.settings.ranks.is_first and not loop.is_closed
    if speaks and loop.verdicts.level:
        _log.warning("the run as it was closed: %s", loop.verdicts.verdict)
    if speaks and loop.last and not loop.skill.is_known:
        _log.warning("skill=%r: g.log was given no such number.", loop.settings.skill)
    try:
        loop.writer.flush(whole=True)
    finally:
        loop.is_closed = True
        loop.writer.release()
