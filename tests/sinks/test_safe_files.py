"""What may be read of a run folder: regular files inside it, of a size."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ebmguard.errors import ConfigError
from ebmguard.sinks.safe_files import safe_open


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder beside a secret, both reached through links too."""
    run = tmp_path / "run"
    (run / "inner").mkdir(parents=True)
    (run / "rows").write_bytes(b"12345")
    (tmp_path / "secret").write_bytes(b"TOPSECRET")
    (tmp_path / "link").symlink_to(run)
    return run


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda run: run / "rows", {}),
        (lambda run: run / "rows", {"most": 5}),
        (lambda run: run / "inner/../rows", {"inside": "."}),
        (lambda run: run.parent / "link/rows", {}),
        (lambda run: linked(run, run / "rows"), {}),
        (lambda run: linked(run, "../rows", "inner/rows"), {"inside": "."}),
    ],
)
def test_a_file_is_read(make: Callable[[Path], Path], options: dict[str, object], run: Path):
    if "inside" in options:
        options = options | {"inside": run}
    file = safe_open(make(run), **options)  # type: ignore[arg-type]
    assert file is not None
    with file:
        assert file.read() == b"12345"


def linked(run: Path, to: str | Path, name: str = "config.json") -> Path:
    (run / name).symlink_to(to)
    return run / name


def pipe(run: Path) -> Path:
    os.mkfifo(run / "pipe")
    return run / "pipe"


@pytest.mark.parametrize(
    ("make", "most", "why"),
    [
        (lambda run: linked(run, run.parent / "secret"), 9, "it leads out of"),
        (lambda run: linked(run, "../secret"), 9, "it leads out of"),
        (lambda run: linked(run, "/dev/zero"), 9, "it leads out of"),
        (lambda run: linked(run, "../rows", "inner/rows"), 9, "it leads out of"),
        (lambda run: linked(run, "config.json"), 9, "symbolic links"),
        (pipe, 9, "it is not a file"),
        (lambda run: run / "inner", 9, "it is not a file"),
        (lambda run: run / "rows", 4, "it has 5 bytes, more than 4"),
        (lambda run: run / "ro\0ws", 9, "null"),
        (lambda run: run / ("x" * 300), 9, "name too long"),
    ],
)
def test_all_else_is_refused(make: Callable[[Path], Path], most: int, why: str, run: Path):
    with pytest.raises(ConfigError, match=f"cannot be read: .*(?i:{why}).*Remove it"):
        safe_open(make(run), most=most)


@pytest.mark.parametrize("name", ["nothing", "rows/below", "inner/nothing"])
def test_what_is_not_there_is_none(name: str, run: Path):
    assert safe_open(run / name) is None
