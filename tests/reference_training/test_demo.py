from __future__ import annotations

import io
import json
import re
import subprocess
import sys

import pytest

from ebmguard.errors import ConfigError
from ebmguard.reference_training.demo import DemoConfig, _screen, run


def test_both_runs_and_the_page(tmp_path, capsys):
    out = tmp_path / "demo"
    assert run(DemoConfig(out=out, iterations=12)) == 0
    printed = capsys.readouterr().out
    assert "[unguarded] " in printed
    assert "[guarded] " in printed
    # Twelve steps are too few to diverge, and the demo says so instead of claiming the effect.
    assert "happened to survive" in printed
    assert (out / "demo.html").stat().st_size > 10_000
    for name, is_guarded in {"unguarded": False, "guarded": True}.items():
        config = json.loads((out / name / "config.json").read_text())
        assert (config["beta_star"], config["finer_steps"]) == (0.0, is_guarded)
        assert json.loads((out / name / "results.json").read_text())["steps"] == 12


def test_a_terminal_shows_a_bar_for_each_run(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    with _screen(2000) as follow:
        for title, line in {
            "unguarded": "ebmguard: ERROR energy_blowup at step 716: energy_gap = 5.5 (limit 3.7)",
            "guarded": "400/2000  acc 0.981  gap 0.00653  GradScale 0.986  ESS 0.767  alert none",
        }.items():
            child = subprocess.Popen(["echo", line], stdout=subprocess.PIPE, text=True)
            assert follow(title, child) == 0
    shown = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", terminal.getvalue())
    assert "[unguarded] ebmguard: ERROR energy_blowup at step 716" in shown
    last = shown.replace("\r", "\n").strip().splitlines()[-2:]
    assert re.fullmatch(r"unguarded .* 0/2000 .* starting *", last[0])
    assert re.fullmatch(
        r"guarded .* 400/2000 .* acc 0.981  gap 0.00653  GradScale 0.986 *", last[1]
    )


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(ConfigError, match="not empty"):
        run(DemoConfig(out=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
