"""A grid whose runs are fakes, trained by a sweep in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.parts import PATIENCE

FAKE = Path(__file__).with_name("fake_trainer.py")
SWEEP = f"""
import sys
import tyro
from ebmguard.reference_training.sweep import command
from ebmguard.reference_training.sweep.grids import JemGrid
JemGrid.words = lambda self, cell: ["-I", "-S", {str(FAKE)!r}, "jem", *cell.words]
JemGrid.page = lambda self: "table"
if __name__ == "__main__":
    sys.exit(command.run(tyro.cli(JemGrid)))
"""


def plan(grid: Path, **does: str) -> None:
    grid.mkdir(exist_ok=True)
    (grid / "plan.json").write_text(json.dumps(does))


def calls(grid: Path, event: str = "begin") -> list[dict[str, Any]]:
    file = grid / "calls.jsonl"
    written = file.read_text() if file.is_file() else ""
    lines = written[: written.rfind("\n") + 1].splitlines()  # a run may be in the middle of a line
    return [call for call in map(json.loads, lines) if call["event"] == event]


def names(grid: Path, event: str = "begin") -> list[str]:
    return [call["name"] for call in calls(grid, event)]


def until(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def environment(**values: str) -> dict[str, str]:
    unwanted = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "RAY_ADDRESS")
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    # Ray in a test keeps no token in somebody's home.
    return {**kept, "RAY_AUTH_MODE": "disabled", **values}


def start(grid: Path, *words: str) -> Any:
    """A sweep in a process and a process group of its own."""
    script = grid.parent / "run_sweep.py"
    script.write_text(SWEEP)
    return subprocess.Popen(
        [sys.executable, str(script), "--out", str(grid), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        start_new_session=True,
    )


def end(sweep: Any) -> str:
    """What it printed."""
    said: str = sweep.communicate(timeout=PATIENCE)[0]
    return said
