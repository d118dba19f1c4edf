from __future__ import annotations

import json
import math
import re
import shutil
import sys
import time

import pytest

from ebmguard import cli
from ebmguard.report.bins import BinnedSeries
from ebmguard.report.watch import WatchConfig, sparkline, watch

from .folders import BACK_TO, write
from .test_plots import binned


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "run")


def once(folder, monkeypatch, capsys, columns=110):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert watch(WatchConfig(folder, once=True)) == 0
    return capsys.readouterr().out


def test_a_frame_shows_diagnostics_alerts_and_rollbacks(folder, monkeypatch, capsys):
    shown = once(folder, monkeypatch, capsys)
    flat = " ".join(shown.split())
    assert "step 300 of 300" in flat
    assert "100% over, took 12 s" in flat
    assert "saved by 1 rollback, the last to step 130 (nonfinite), in bounds now" in flat
    assert "in bounds now so far 2 ERROR, 1 rollback β* = 0.5" in flat
    for title in ("energy gap", "GradScale", "ESS / M", "energy overlap", "test accuracy"):
        assert title in shown
    assert "≥ 0.1" in shown  # the floors of GradScale and ESS
    for name in ("alerts", "recovery"):
        for line in (folder / f"{name}.jsonl").read_text().splitlines():
            assert json.loads(line)["message"] in flat
    assert "\x1b" not in shown


def test_what_is_out_of_bounds_says_so_without_colour(tmp_path, monkeypatch, capsys):
    shown = once(write(tmp_path / "run", rescued=False), monkeypatch, capsys)
    assert "● lost since step 180 (energy_blowup), ERROR now" in shown
    assert "step 192 of 300" in shown
    assert "64%" in shown
    assert re.search(r"ERROR energy gap +inf .*×", shown)
    assert re.search(r"WARN +GradScale +0 ", shown)
    assert "at the reference exponent" in " ".join(shown.split())


@pytest.mark.parametrize("columns", [24, 40, 60, 80, 200])
def test_frames_fit_the_terminal(folder, columns, monkeypatch, capsys):
    shown = once(folder, monkeypatch, capsys, columns)
    assert max(map(len, shown.splitlines())) <= columns
    assert "0.98" in shown
    assert ("≥ 0.1" in shown) == (columns >= 80)


class Stages:
    """Instead of time.sleep: between two looks at the folder, something happens in it."""

    def __init__(self, *stages):
        self.stages = list(stages)

    def sleep(self, seconds):
        if not self.stages:
            raise KeyboardInterrupt
        self.stages.pop(0)()


@pytest.fixture
def staged(folder, tmp_path, monkeypatch):
    """Plays a run into a folder that is not there at first; returns that folder."""
    live = tmp_path / "live"
    rows = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)

    def append(lines):
        with (live / "metrics.jsonl").open("ab") as file:
            file.write(b"".join(lines))

    stages = Stages(
        lambda: live.mkdir(),
        lambda: shutil.copy(folder / "config.json", live),
        lambda: append([*rows[:100], rows[100][:30]]),
        lambda: append([rows[100][30:], *rows[101:]]),
        lambda: shutil.copy(folder / "alerts.jsonl", live),
        lambda: shutil.copy(folder / "recovery.jsonl", live),
        lambda: (live / "results.json").write_text('{"steps": 300, "diverged_at": null}'),
        lambda: pytest.fail("it goes on after the end"),
    )
    clock = iter(range(0, 10**6, 30))  # just the time from one frame to the next
    monkeypatch.setattr(time, "sleep", stages.sleep)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    return live


def test_without_a_terminal_frames_are_appended_until_the_run_is_over(staged, capsys):
    assert watch(WatchConfig(staged)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "live yet; runs that are there:" in shown
    assert "waiting: no such folder yet" in shown
    assert "waiting for the first row" in shown
    assert shown.index("step 100 of 300") < shown.index("step 300 of 300")
    assert "steps/s" in shown
    last = shown.rpartition("step 300")[2]
    assert "100% over" in last
    assert f"back to step {BACK_TO}" in last
    assert "\x1b" not in shown


def test_on_a_terminal_the_frame_is_redrawn_in_place(staged, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "40")
    assert watch(WatchConfig(staged)) == 0
    shown = capsys.readouterr().out
    assert "\x1b[1A" in shown  # up a line
    assert shown.count("energy_blowup at step 180") >= 2
    assert "\x1b[?25h" in shown  # the cursor is back


def test_ctrl_c_is_the_way_out(folder, monkeypatch, capsys):
    (folder / "results.json").unlink()
    monkeypatch.setattr(time, "sleep", Stages().sleep)
    assert cli.main(["watch", str(folder)]) == 0
    shown = capsys.readouterr()
    assert re.search(r"last row \d+ s ago", shown.out)
    assert shown.err == ""


def test_without_rich_it_says_what_to_install(folder, monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "ebmguard.report.watch")
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert cli.main(["watch", str(folder), "--once"]) == cli.USAGE_ERROR
    assert 'pip install ".[cli]"' in capsys.readouterr().err


def test_a_spike_of_one_step_is_seen_in_a_sparkline_of_any_run():
    values = [0.5 + 0.01 * (i % 7) for i in range(20_000)]
    values[13_333] = 40.0
    (line,) = sparkline(binned(values, 600).bins, "symlog", 30)
    assert len(line) == 30
    assert line[13_333 * 29 // 19_999] == "█"
    assert line.count("█") == 1


def test_a_sparkline_shows_shares_on_their_own_scale_and_marks_what_is_no_number():
    low = binned([0.02] * 50, 600)
    assert sparkline(low.bins, "share", 10) == ["▁" * 10]
    lines = sparkline(binned([1.0] * 50, 600).bins, "share", 10, height=2)
    assert lines == ["█" * 10, "█" * 10]
    broken = binned([0.5] * 10 + [math.nan] * 10, 600)
    (line,) = sparkline(broken.bins, "share", 20)
    assert line == "▄" * 10 + "×" * 10
    # Every tenth step has a value: it holds in between.
    sparse = BinnedSeries()
    for step in range(0, 100, 10):
        sparse.extend([step], [0.5])
    assert sparkline(sparse.bins, "share", 50) == ["▄" * 50]
    assert sparkline([], "log", 3, height=2) == ["   ", "   "]
