"""One process at a time writes into a folder."""

from __future__ import annotations

import errno
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ebmguard import guard
from ebmguard.errors import ConfigError
from ebmguard.sinks import LOCK, lock_folder, writer

fork_only = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")


@contextmanager
def another(code: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that runs code with FOLDER as its argument, once it has said a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(folder)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        process.first_line = process.stdout.readline()  # type: ignore[attr-defined]
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


HOLDS = """
    import sys, time
    from pathlib import Path
    from ebmguard.sinks import lock_folder
    held = lock_folder(Path(sys.argv[1]))
    print("held", flush=True)
    time.sleep(600)
"""

FORKS = """
    import os, sys, time
    from pathlib import Path
    from ebmguard.sinks import lock_folder
    held = lock_folder(Path(sys.argv[1]))
    if os.fork() == 0:
        print(os.getpid(), flush=True)  # it has let go of the lock by now
    time.sleep(600)
"""


def test_a_second_process_is_refused_by_the_name_of_the_first_until_that_is_killed(
    tmp_path: Path,
) -> None:
    with another(HOLDS, tmp_path) as process:
        wanted = rf"in use by process {process.pid} on {socket.gethostname()}, since \d{{4}}-\d\d-"
        before = sorted(tmp_path.iterdir())
        for _ in range(2):
            with pytest.raises(ConfigError, match=wanted):
                lock_folder(tmp_path / ".")
            with pytest.raises(ConfigError, match=wanted):  # their rows could not be told apart
                guard(None, None, beta_star=0.5, log_dir=tmp_path)
        assert sorted(tmp_path.iterdir()) == before
        process.send_signal(signal.SIGKILL)
        process.wait()
        lock_folder(tmp_path)


def test_a_closed_guard_lets_go_and_so_does_one_that_is_forgotten(tmp_path: Path) -> None:
    first = guard(None, None, beta_star=0.5, log_dir=tmp_path)
    first.close()
    with another(HOLDS, tmp_path) as process:
        assert process.first_line == "held\n"  # type: ignore[attr-defined]
    second = guard(None, None, beta_star=0.5, log_dir=tmp_path)
    del second
    gc.collect()
    with another(HOLDS, tmp_path) as process:
        assert process.first_line == "held\n"  # type: ignore[attr-defined]


@fork_only
def test_a_forked_child_neither_keeps_the_lock_nor_gives_it_away(tmp_path: Path) -> None:
    with another(FORKS, tmp_path) as process:
        child = int(process.first_line)  # type: ignore[attr-defined]
        try:
            with pytest.raises(ConfigError, match=f"in use by process {process.pid}"):
                lock_folder(tmp_path)
            process.kill()
            process.wait()
            lock_folder(tmp_path)
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}'])
def test_a_holder_that_cannot_be_read_is_another_process(tmp_path: Path, content: str) -> None:
    with another(HOLDS, tmp_path):
        (tmp_path / LOCK).write_text(content)
        with pytest.raises(ConfigError, match="in use by another process"):
            lock_folder(tmp_path)


def test_where_there_are_no_locks_a_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(writer, "_flock", refuse)
    with caplog.at_level(logging.WARNING, logger="ebmguard"):
        held = lock_folder(tmp_path)
    assert "cannot be locked (No locks available): nothing keeps a second process" in caplog.text
    del held
