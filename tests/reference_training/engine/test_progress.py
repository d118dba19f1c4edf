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


def test_what_is_logged_controls_no_terminal():
    record = logging.LogRecord("ebmguard", logging.INFO, "", 0, "%s", ("a\x1b[31mb\x9bc",), None)
    shown = progress.PrintableFormatter("%(message)s").format(record)
    assert shown == "ebmguard: a\ufffd[31mb\ufffdc"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.98765, "0.988"), (123456.0, "123,456"), (-2e9, "-2e+09"), (float("nan"), "undefined")],
)
def test_numbers_are_short(value, text):
    assert progress.state_text({"x": value}) == f"x {text}"


def test_bar_shows_the_state_and_notes(monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm")
    reporter = progress.BarReporter()
    reporter.start("run", 3, 10)
    reporter.step(10, {"acc": 0.5})
    reporter.note("WARN [bold]energy_blowup")
    logging.getLogger("ebmguard").warning("a %s of the guard", "warning")
    reporter.stop()
    out = capsys.readouterr().out
    assert "WARN [bold]energy_blowup" in out  # brackets are text, not markup
    assert "a warning of the guard" in out
    assert not logging.getLogger("ebmguard").handlers
    assert logging.getLogger("ebmguard").propagate


def test_chooses_lines_without_a_terminal():
    assert isinstance(progress.default_reporter(), progress.LineReporter)


def test_chooses_the_bar_on_a_terminal(monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert isinstance(progress.default_reporter(), progress.BarReporter)


def test_the_other_processes_of_a_run_say_nothing(caplog, capsys):
    caplog.set_level(logging.INFO)
    reporter = progress.Reporter()
    reporter.start("run", 0, 10)
    reporter.step(10, {"acc": 0.5})
    reporter.note("diverged at step 7")
    reporter.stop()
    assert not caplog.records
    assert capsys.readouterr() == ("", "")
