from __future__ import annotations

import logging

import pytest

from ebmguard.reference_training.engine import progress


def test_lines_come_every_so_many_steps_and_at_the_end(caplog):
    caplog.set_level(logging.INFO)
    reporter = progress.LineReporter(every=10)
    reporter.start("beta* = 2", 0, 25)
    for done in range(1, 26):
        reporter.step(done, {"gap": float(done), "alert": "none"})
    reporter.note("diverged at step 7")
    reporter.stop()
    assert [r.getMessage() for r in caplog.records] == [
        "beta* = 2: step 0 of 25",
        "10/25  gap 10  alert none",
        "20/25  gap 20  alert none",
        "25/25  gap 25  alert none",
        "diverged at step 7",
    ]


@pytest.fixture
def terminal(monkeypatch):
    """Where the program logs as a trainer's command does, on a terminal."""
    for name, value in (("TERM", "xterm"), ("FORCE_COLOR", "1"), ("NO_COLOR", "")):
        monkeypatch.setenv(name, value)
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", logging.WARNING)
    progress.log_to_terminal()


def test_bar_shows_the_state_and_what_is_said_above_it(terminal, capsys):
    reporter = progress.BarReporter()
    reporter.start("run", 3, 10)
    reporter.step(10, {"acc": 0.5})
    reporter.note("WARN [bold]energy_blowup")
    logging.getLogger("ebmguard").warning("a %s of the guard", "warning")
    logging.getLogger("ebmguard.train").info("a\x1b[31mb\x9bc controls no terminal")
    reporter.stop()
    out, err = capsys.readouterr()
    assert not err  # it would tear the bar apart
    assert "WARN [bold]energy_blowup" in out  # brackets are text, not markup
    assert "ebmguard: a warning of the guard" in out
    assert "a\ufffd[31mb\ufffdc controls no terminal" in out
    assert "acc 0.5" in out


def test_the_bar_is_for_a_terminal(monkeypatch):
    assert isinstance(progress.default_reporter(), progress.LineReporter)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert isinstance(progress.default_reporter(), progress.BarReporter)
