"""`ebmguard demo`: the same JEM run without and with the guard, then a page about both."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

from ebmguard.errors import ConfigError
from ebmguard.report import RecordedRun
from ebmguard.report.page import CompareConfig, compare

RUNS = {"unguarded": (), "guarded": ("--finer-steps",)}
"""Folder and title of each run, and what it is told beside the settings of both."""
# Of a line of a training: the step, and accuracy, energy gap and GradScale.
_STATE = re.compile(r"(\d+)/\d+  ((?:\S+ \S+ *){3})")


@dataclass(frozen=True)
class DemoConfig:
    """Train a JEM on real digits twice with the same seed, without and with the guard.

    The guarded one takes the sampler's steps finer once they are too long. Both run side by side,
    one thread each; then a page and a table show what happened.
    """

    out: Path = Path("demo")
    """Folder for the two runs and demo.html; must be new or empty."""
    seed: int = 0
    """Seed of both runs."""
    iterations: int = 2000
    """Training steps of each run."""


def run(config: DemoConfig) -> int:
    """Run the demonstration.

    Returns:
        exit status: 0, or that of a training that failed.

    Raises:
        ConfigError: the folder is not empty.
    """
    if config.out.exists() and any(config.out.iterdir()):
        raise ConfigError(f"{config.out} is not empty; remove it, or choose another --out.")
    config.out.mkdir(parents=True, exist_ok=True)
    _say(
        f"Trains the same JEM on real digits twice, {config.iterations:,} steps each and side by "
        "side: without the guard and with it, which leaves all as it is until the sampler's steps "
        "are too long, and takes finer ones from then on. 2,000 steps take three to six "
        f"minutes on two cores; then both are drawn in {config.out / 'demo.html'}. To look on: "
        f"ebmguard watch {config.out}/guarded"
    )
    folders = [config.out / name for name in RUNS]
    children = [*map(_train, RUNS.values(), folders, repeat(config))]
    with _screen(config.iterations) as follow, ThreadPoolExecutor() as threads:
        try:
            statuses = [*threads.map(follow, RUNS, children)]
        finally:
            for child in children:
                child.terminate()
    if any(statuses):
        print(f"A training failed, exit status {max(statuses)}; its messages are above.")
        return max(statuses)
    print()
    compare(CompareConfig((folders[0], folders[1]), config.out / "demo.html"))
    print()
    _say(verdict(*(RecordedRun.read(folder).results for folder in folders)))
    print(f"TensorBoard: tensorboard --logdir {config.out}")
    return 0


def verdict(unguarded: Mapping[str, Any], guarded: Mapping[str, Any]) -> str:
    """What the results of the two runs show, in a sentence, whichever way they went."""
    lost, alive = unguarded["diverged_at"], guarded["diverged_at"]
    if lost is None:
        first = (
            f"Without the guard the run happened to survive its {unguarded['steps']:,} "
            "steps: divergence is chaotic, and depends on the machine's arithmetic. Try --seed 1."
        )
    else:
        first = (
            f"Without the guard the run was lost at step {lost:,}: test accuracy "
            f"{unguarded['best_accuracy']:.1%} before, "
            f"{unguarded['accuracy']:.1%} after."
        )
    if alive is None:
        second = f"With it the same run finished at {guarded['accuracy']:.1%}."
    else:
        second = f"With it the run was lost as well, at step {alive:,}."
    return f"{first} {second}"


def _say(text: str) -> None:
    print(textwrap.fill(text, shutil.get_terminal_size().columns))


def _train(own: Sequence[str], folder: Path, config: DemoConfig) -> subprocess.Popen[str]:
    words = [sys.executable, "-u", "-X", "utf8", "-m", "ebmguard", "train", "jem"]
    words += ["--beta-star", "0", "--out", str(folder), "--seed", str(config.seed)]
    words += ["--iterations", str(config.iterations), *own]
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8"
    )


@contextmanager
def _screen(total: int) -> Iterator[Callable[[str, subprocess.Popen[str]], int]]:
    """What follows a training to its exit status: with a bar, or its lines off a terminal."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    words = TextColumn("{task.description}", markup=False)
    state = TextColumn("{task.fields[state]}", markup=False)
    columns = words, BarColumn(bar_width=12), MofNCompleteColumn(), TimeRemainingColumn(), state
    is_terminal = sys.stdout.isatty()
    with Progress(*columns, disable=not is_terminal) as progress:

        def follow(title: str, child: subprocess.Popen[str]) -> int:
            task = progress.add_task(title, total=total, state="starting")
            with child:
                for line in child.stdout or ():
                    if is_terminal and (found := _STATE.match(line)):
                        step, text = int(found[1]), found[2].strip()
                        progress.update(task, completed=step, state=text)
                    else:
                        print(f"[{title}] {line.rstrip()}", flush=True)  # above the bars
            progress.stop_task(task)
            return child.returncode

        yield follow
