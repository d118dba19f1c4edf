"""A run from its settings to its folder: the one loop of all trainers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from ebmguard.errors import ConfigError, DivergenceError, printable

from ..device import find_device
from .checkpoints import restoring
from .graphs import Replayed
from .interrupt import INTERRUPTED, DeferredInterrupt
from .progress import Reporter, default_reporter, log_to_terminal
from .ranks import ONE_RANK, Ranks, joined_ranks
from .record import Record
from .run_config import RunConfig
from .run_folder import RunFolder
from .task import Task

Config = TypeVar("Config", bound=RunConfig)

FORMAT = 3
"""Of the checkpoints: what they hold, and under which names."""


def train(
    build: Callable[[Config, Record], Task],
    config: Config,
    folder: RunFolder,
    reporter: Reporter | None = None,
    ranks: Ranks = ONE_RANK,
) -> dict[str, Any] | None:
    """Run a training, or what is left of it, and write the run folder.

    Args:
        build: makes what is trained.
        config: the settings, checked for these ranks.
        folder: a folder of its own; if it has a checkpoint, the run goes on from there.
        reporter: what a person sees; None chooses for the terminal.
        ranks: the processes that train together.

    Returns:
        What results.json holds, or None where Ctrl-C stopped the run; it can then be resumed.

    Raises:
        ConfigError: the device does not exist, no checkpoint of the run can be read or is of this
            version, or the task cannot be built.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    device = find_device(config.device)
    state = folder.checkpoints.load(device)
    if state is not None and (found := state.get("format", 1)) != FORMAT:
        raise ConfigError(
            f"{folder.path} cannot be resumed: its checkpoints have format {found}, this version "
            f"of ebmguard reads and writes format {FORMAT}. Go on with the version that began the "
            "run, or begin one in another folder; its rows and results, and its network for "
            "`evaluate` and `figure`, are read as before"
        )
    with restoring(folder.path):
        folder.cut_rows(state["row_sizes"] if state else {})
    record = Record(config, folder, device, ranks)
    task = build(config, record)
    if state is None:
        task.begin()
    else:
        with restoring(folder.path):
            for name, part in task.parts.items():
                part.load_state_dict(state[name])
            for name, own in task.guards.items():
                own.load_state_dict(state["guards"][name])
            record.load_state_dict(state["record"])
    del state
    if ranks.group is None:  # ranks exchange messages, which are not captured
        for own in task.guards.values():
            own.compute = Replayed(device)
    reporter = (reporter or default_reporter(task.lines_every)) if ranks.is_first else Reporter()
    run = Run(task, reporter, interrupt := DeferredInterrupt())
    reporter.start(task.title, record.next_step, config.total_steps)
    try:
        with interrupt:
            while not (run.is_over or run.is_stopped):
                run.step()
            if record.ended is None:  # else it may be the middle of a step
                run.save()
                if run.is_stopped:
                    return None
            for own in task.guards.values():
                own.close()
            run.follow()  # the rows that were still under way on a GPU
            results = record.finish(task.results())
            # A caller with more to do must hear of a Ctrl-C that came at the very end.
            return None if interrupt.requested else results
    finally:
        reporter.stop()
        for own in task.guards.values():
            own.close()


class Run:
    """A run under way."""

    def __init__(self, task: Task, reporter: Reporter, interrupt: DeferredInterrupt) -> None:
        self.task, self.record, self.reporter = task, task.record, reporter
        self._interrupt, self._told = interrupt, False

    @property
    def is_over(self) -> bool:
        """All steps are done, the guard ended the run, or it diverged long enough ago."""
        record, more = self.record, self.task.stop_after
        lost = record.diverged_at
        stopped = lost is not None and more is not None and record.next_step > lost + more
        return stopped or record.ended is not None or record.next_step >= record.config.total_steps

    @property
    def is_stopped(self) -> bool:
        """It was asked to stop; of several ranks any one was, and all stop after the same step."""
        return self._told if self.record.ranks.world > 1 else self._interrupt.requested

    def step(self) -> None:
        """Train one step, evaluate, and write a checkpoint, where these are due."""
        task, record = self.task, self.record
        went_back = self.advance()
        if record.ended is None:
            evaluated = task.evaluate(record.next_step)
            # Checkpoints of the course that a rollback gives up are not to be resumed.
            if evaluated or went_back or record.next_step % record.config.checkpoint_every == 0:
                self.save()

    def advance(self) -> bool:
        """Train one step; true where a guard has taken the run back to an earlier one."""
        task, record = self.task, self.record
        step = record.next_step
        first = next(iter(task.guards.values()))
        task.before_step(step)
        rollbacks = len(first.rollbacks)
        try:
            samples = task.step(step)
        except DivergenceError as error:
            record.end(step, first.step, str(error))
            self.reporter.note(f"ended after {first.step} {task.unit}s: {error}")
            return False
        record.next_step = step + 1
        task.keep(step, samples)
        self.follow()
        self.reporter.step(record.next_step, task.shown(first.last))
        if len(first.rollbacks) == rollbacks:
            return False
        rollback = first.rollbacks[-1].record()
        task.roll_back(int(rollback["restored_step"]))
        record.roll_back(rollback)
        return True

    def follow(self) -> None:
        """Take in what the guards have told; on every rank what some have told or been asked."""
        task, record = self.task, self.record
        told = record.ranks.from_all((self._interrupt.requested, record.take_rows()))
        self._told = any(asked for asked, _ in told)
        for step, row in told[0][1]:
            why = task.see(step, row)
            if why is not None and record.diverged_at is None:
                record.diverged_at = step
                self.reporter.note(f"diverged at {task.unit} {step}: {why}")
        for alert in record.take_alerts():
            task.first_alert(alert)

    def save(self) -> None:
        """Write a checkpoint."""
        task, record = self.task, self.record
        for own in task.guards.values():
            own.flush()
        record.folder.checkpoints.save(
            record.next_step,
            {
                **{name: part.state_dict() for name, part in task.parts.items()},
                "guards": {name: own.state_dict() for name, own in task.guards.items()},
                "record": record.state_dict(),
                "row_sizes": record.folder.row_sizes(),
                "format": FORMAT,
            },
        )


def launch(
    train: Callable[..., dict[str, Any] | None],
    told: Callable[[Mapping[str, Any]], str],
    config: RunConfig,
) -> int:
    """Join the ranks, open the run folder, train, and say how it went.

    Args:
        train: trains, by the settings that count, in a folder, with `ranks=`; returns what
            results.json holds, or None where Ctrl-C stopped the run.
        told: of that what is the trainer's own, in a few lines.
        config: the settings as given.

    Returns:
        Exit status: 0, or 130 where Ctrl-C stopped the run. That the guard ended it is a result.

    Raises:
        ConfigError: the settings, the folder or the device cannot be meant.
    """
    log_to_terminal()
    with joined_ranks(config.device) as ranks:
        if not ranks.is_first:  # all see the same alerts, which are said once
            logging.getLogger("ebmguard").setLevel(logging.CRITICAL)
        config, folder = config.open(ranks)
        results = train(config, folder, ranks=ranks)
    if ranks.is_first:
        if results is None:
            by = f", by torchrun with {ranks.world} processes" if ranks.world > 1 else ""
            print(printable(f"stopped; go on with: {config.command()} --resume{by}"))
        else:
            print(printable("\n".join([*course(results, folder.path), told(results)])))
    return INTERRUPTED if results is None else 0


def course(results: Mapping[str, Any], path: Path) -> Iterator[str]:
    """How a run went; an alert that is the first WARN and the first ERROR, or the end, once."""
    yield f"results in {path}"
    for rollback in results["rollbacks"]:
        yield rollback["message"]
    if results["ended"] is not None:
        yield f"ENDED by the guard after {results['steps']} steps: {results['ended']}"
    elif results["diverged_at"] is not None:
        yield f"DIVERGED at step {results['diverged_at']}"
    else:
        yield f"finished {results['steps']} steps without divergence"
    said, alerts = {results["ended"]}, []
    for level in ("first_error", "first_warn"):
        alert = results[level]
        if alert is not None and alert["message"] not in said:
            said.add(alert["message"])
            alerts.append(f"{level.replace('_', ' ')}: {alert['message']}")
    yield from reversed(alerts)
