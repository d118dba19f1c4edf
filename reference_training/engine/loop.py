"""A run from its settings to its folder: the one loop of all trainers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from ebmguard.errors import ConfigError, DivergenceError

from ..device import find_device
from .graphs import replayed
from .interrupt import DeferredInterrupt
from .progress import Reporter, default_reporter
from .ranks import ONE_RANK, Ranks
from .record import Record
from .restoring import restoring
from .run_config import RunConfig
from .run_folder import RunFolder
from .task import Task

Config = TypeVar("Config", bound=RunConfig)

FORMAT = 2
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
    if state is not None:
        check_format(state, folder)
    with restoring(folder.path):
        folder.cut_rows(state["row_sizes"] if state else {})
    record = Record(config, folder, device, ranks)
    task = record.task = build(config, record)
    if state is None:
        task.begin()
    else:
        with restoring(folder.path):
            _load(task, state)
    del state
    if ranks.group is None:  # ranks exchange messages, which are not captured
        for own in task.guards.values():
            own.compute = replayed(device)
    reporter = (reporter or default_reporter(task.lines_every)) if ranks.is_first else None
    record.reporter = reporter = reporter or Reporter()
    reporter.start(task.title, record.next_step, config.total_steps)
    try:
        with DeferredInterrupt() as interrupt:

            def stopped() -> bool:
                # Ctrl-C on any rank stops all of them, after the same step.
                return record.interrupted if ranks.world > 1 else interrupt.requested

            while not (record.finished or stopped()):
                if not _step(record, interrupt):
                    break
            if record.ended is None:  # else it may be the middle of a step
                _checkpoint(record)
                if stopped():
                    return None
            for own in task.guards.values():
                own.close()
            results = record.finish()
            # A caller with more to do must hear of a Ctrl-C that came at the very end.
            return None if interrupt.requested else results
    finally:
        reporter.stop()
        record.close()
        for own in task.guards.values():
            own.close()


def check_format(state: Mapping[str, Any], folder: RunFolder) -> None:
    """Refuse a checkpoint that holds other things than this version's.

    Raises:
        ConfigError: it is another version's.
    """
    found = state.get("format", 1)
    if found != FORMAT:
        raise ConfigError(
            f"{folder.path} cannot be resumed: its checkpoints have format {found}, this version "
            f"of ebmguard reads and writes format {FORMAT}. Go on with the version that began the "
            "run, or begin one in another folder; its rows and results, and its network for "
            "`evaluate` and `figure`, are read as before"
        )


def _step(record: Record, interrupt: DeferredInterrupt) -> bool:
    """Train one step and what follows from it; false where a guard has ended the run."""
    task, step = record.task, record.next_step
    first = next(iter(task.guards.values()))
    task.before_step(step)
    rollbacks = len(first.rollbacks)
    try:
        done = task.step(step)
    except DivergenceError as error:
        record.end(first.step, str(error))
        return False
    record.after_step(step, done, first.last, interrupt.requested)
    went_back = len(first.rollbacks) > rollbacks
    if went_back:
        record.roll_back(first.rollbacks[-1].record())
    evaluated = task.evaluate(record.next_step)
    # Checkpoints of the course that a rollback gives up are not to be resumed.
    if evaluated or went_back or record.next_step % record.config.checkpoint_every == 0:
        _checkpoint(record)
    return True


def _checkpoint(record: Record) -> None:
    task = record.task
    for own in task.guards.values():
        own.flush()
    record.flush()
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


def _load(task: Task, state: Mapping[str, Any]) -> None:
    for name, part in task.parts.items():
        part.load_state_dict(state[name])
    for name, own in task.guards.items():
        own.load_state_dict(state["guards"][name])
    task.record.load_state_dict(state["record"])
