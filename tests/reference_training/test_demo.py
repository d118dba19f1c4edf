from __future__ import annotations

import json

import pytest

from ebmguard.errors import ConfigError
from ebmguard.reference_training.demo import DemoConfig, run


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


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(ConfigError, match="not empty"):
        run(DemoConfig(out=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
