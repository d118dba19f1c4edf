"""The script once more, in a fresh process, with the lines of a plan at beta* = 0."""

from __future__ import annotations

import importlib
import importlib.machinery
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from .script import run

__all__ = ["Replay", "replay"]


@dataclass(frozen=True)
class Replay:
    """How a run has ended, and the number of guards, and of calls and losses that they saw."""

    state: str  # hash of parameters and random states after the given number of optimizer steps
    error: str = ""  # that ended the script before
    guards: int = 0
    sampler_calls: int = 0
    losses: int = 0


def replay(script: Path, arguments: Sequence[str], steps: int, texts: Mapping[str, str]) -> Replay:
    """Run a script for a number of optimizer steps, some of its files with another text."""
    with tempfile.TemporaryDirectory() as folder:
        task, told = Path(folder) / "task.json", Path(folder) / "told.json"
        task.write_text(json.dumps([str(script), list(arguments), steps, dict(texts), str(told)]))
        done = subprocess.run(
            [sys.executable, "-m", __name__, str(task)], capture_output=True, text=True, check=False
        )
        if not told.exists():
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            return Replay("", lines[-1] if lines else f"exit status {done.returncode}")
        return Replay(**json.loads(told.read_text()))


def _main(task: Path) -> None:
    facade: Any = importlib.import_module("ebmguard")
    script, arguments, steps, texts, told = json.loads(task.read_text())
    guards: list[Any] = []
    make, count = facade.guard, itertools.count(1)

    def guard(*args: Any, **kwargs: Any) -> Any:
        guards.append(make(*args, **kwargs))
        return guards[-1]

    facade.guard = guard
    _replace_sources(texts)
    text = texts.get(str(Path(script).resolve()))
    state, error = run(Path(script), arguments, lambda _: next(count) >= steps, text)
    states = [each.state_dict() for each in guards]
    seen = {name: sum(each[name] for each in states) for name in ("sampler_calls", "losses")}
    Path(told).write_text(json.dumps(asdict(Replay(state, error, len(guards), **seen))))


def _replace_sources(texts: Mapping[str, str]) -> None:
    loader = importlib.machinery.SourceFileLoader
    original = loader.get_code

    def get_code(self: Any, name: str) -> CodeType | None:
        path = self.get_filename(name)
        if path in texts:
            return compile(texts[path], path, "exec", dont_inherit=True)
        return original(self, name)

    loader.get_code = get_code  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
