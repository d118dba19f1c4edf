"""Checkpoints of a run that survive a kill at any moment, one file for each rank."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ebmguard.errors import MISFITS, ConfigError, DiskError, EbmguardError
from ebmguard.recovery import load_durably, save_durably

from .ranks import ONE_RANK, Ranks

KEPT = 2
"""Checkpoints that stay: the newest, and the one before for the case that it is damaged."""

_NAME = re.compile(r"step-(\d+)(?:\.rank(\d+)of(\d+))?\.pt")
_logger = logging.getLogger("ebmguard.train")


@dataclass(frozen=True)
class Checkpoints:
    """The last two checkpoints of a run.

    A file gets its name only when all of it is on the disk, and a checkpoint counts only with the
    files of all ranks, so that a kill in between leaves the one before. Files are read with
    ``weights_only=True``: they hold tensors and plain values, and reading them executes nothing.

    Attributes:
        folder: where they lie.
        ranks: who writes them. A run goes on with as many ranks as it began with.
    """

    folder: Path
    ranks: Ranks = ONE_RANK

    def file(self, step: int) -> Path:
        """This rank's file of the checkpoint after `step` steps."""
        ranks = self.ranks
        part = f".rank{ranks.rank}of{ranks.world}" if ranks.world > 1 else ""
        return self.folder / f"step-{step:08d}{part}.pt"

    def steps(self) -> list[int]:
        """Steps of the checkpoints that all ranks have, ascending.

        Raises:
            ConfigError: there are checkpoints of another number of ranks only.
        """
        found, own = _found(self.folder), self.ranks.world
        worlds = {world for _, world in found}
        if worlds and own not in worlds:
            raise ConfigError(
                f"{self.folder} holds checkpoints of {min(worlds)} processes, this run has {own}; "
                "the chains of the replay buffer are divided among them, so go on with as many as "
                "the run began with"
            )
        return sorted(at for (at, world), files in found.items() if world == own == len(files))

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Write a checkpoint, on every rank, and remove all but this one and the one before.

        Raises:
            DiskError: the disk does not take it; the checkpoints before are whole.
        """
        # Listed while all ranks still have theirs: none removes one before all have come here.
        older = [old for old in self.steps() if old < step]
        if self.ranks.world > 1:
            # A killed run may have left parts of this step, and a GPU does not repeat itself to
            # the bit: with parts of both times the ranks would go on with different networks.
            self.file(step).unlink(missing_ok=True)
            self.ranks.wait()
        try:
            save_durably(self.file(step), state)
        except DiskError as error:
            raise DiskError(
                f"{error}. The checkpoints before it are whole: go on with --resume"
            ) from error
        self.ranks.wait()
        kept = [*older, step][-KEPT:]
        for at, world in _found(self.folder):
            if world == self.ranks.world and at not in kept:
                self.file(at).unlink(missing_ok=True)

    def load(self, device: torch.device) -> dict[str, Any] | None:
        """This rank's part of the newest checkpoint, its tensors on `device`; None without one.

        A damaged file is passed over for the checkpoint before it, with a warning.

        Raises:
            ConfigError: no checkpoint can be read, or there are some of another number of ranks.
        """
        damaged: list[str] = []
        for step in reversed(self.steps()):
            problem = ""
            try:
                state = load_durably(self.file(step), device)
            except ConfigError as error:
                problem = str(error)
            # Ranks go back together, or not at all.
            problems = [each for each in self.ranks.from_all(problem) if each]
            if not problems:
                return state
            text = "; ".join(problems)
            _logger.warning("a checkpoint cannot be read and is passed over: %s", text)
            damaged += problems
        if damaged:
            raise ConfigError("no checkpoint can be read:\n  " + "\n  ".join(damaged))
        return None


def load_all_ranks(folder: Path) -> tuple[int, list[dict[str, Any]]]:
    """Every rank's part of the newest checkpoint in a folder, for who did not write it.

    Returns:
        its step, and a part for each rank, on the CPU.

    Raises:
        ConfigError: there is no whole checkpoint, or a part cannot be read.
    """
    found = _found(folder).items()
    whole = {step: files for (step, world), files in found if len(files) == world}
    if not whole:
        raise ConfigError(
            f"{folder.parent} has no checkpoint yet; wait for its first one, or go on with it by "
            "--resume"
        )
    step = max(whole)
    return step, [load_durably(file) for _, file in sorted(whole[step].items())]


@contextmanager
def restoring(run: Path) -> Iterator[None]:
    """Context in which a run takes what its folder holds: settings and the newest checkpoint.

    Raises:
        ConfigError: something is missing, or, though it can be read, not what this run wrote.
    """
    try:
        yield
    except EbmguardError:
        raise
    except (OSError, *MISFITS) as error:
        what = (str(error).splitlines() or [""])[0][:200]
        raise ConfigError(
            f"{run} cannot be resumed: its config.json or its newest checkpoint is damaged "
            f"({type(error).__name__}: {what}). Restore it, remove that checkpoint to go on from "
            "the one before, or begin a run in another folder."
        ) from error


def _found(folder: Path) -> dict[tuple[int, int], dict[int, Path]]:
    """The files of checkpoints in a folder by rank, for each step and number of ranks."""
    found: dict[tuple[int, int], dict[int, Path]] = {}
    for path in folder.glob("step-*.pt"):
        if match := _NAME.fullmatch(path.name):
            step, rank, world = int(match[1]), int(match[2] or 0), int(match[3] or 1)
            found.setdefault((step, world), {})[rank] = path
    return found
