from __future__ import annotations

import sys
from typing import Any

import pytest
from matplotlib.image import imread

from ebmguard import cli
from ebmguard.errors import ConfigError
from ebmguard.reference_training.jem.figures.command import run
from ebmguard.reference_training.jem.figures.config import FigureConfig
from tests.reference_training.jem.table.fabricate import write_run

SMALL: dict[str, Any] = {"iterations": 60, "steps_per_epoch": 10, "depth": 10, "width": 1}


def test_draws_and_prints(tmp_path, capsys, monkeypatch):
    write_run(tmp_path / "runs" / "x", scenario="2", diverged_at=20, **SMALL)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["figure", "20", "--runs", "runs"]) == 0
    printed = capsys.readouterr().out
    assert "| `x` |" in printed
    assert "diverged in the first epoch" in printed
    assert printed.endswith("picture: figure_20.png\n")
    assert imread(tmp_path / "figure_20.png").shape[1] > 1000
    assert cli.main(["figure", "20", "--runs", "runs", "--out", "there.png"]) == 0
    assert (tmp_path / "there.png").is_file()


def test_samples_are_drawn_too(tmp_path, capsys):
    path = write_run(tmp_path / "x", beta_star=10, samples=(10, 20), **SMALL)
    config = FigureConfig(name="19", runs=(path,), out=tmp_path / "19.png")
    assert run(config) == 0
    assert "epoch 2, iteration 0" in capsys.readouterr().out
    assert (tmp_path / "19.png").stat().st_size > 10_000


def test_what_cannot_be_drawn_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="--runs takes run folders"):
        run(FigureConfig(name="16", runs=()))
    path = write_run(tmp_path / "x", **SMALL)
    with pytest.raises(ConfigError, match="cannot be written"):
        run(FigureConfig(name="16", runs=(path,), out=tmp_path / "no" / "x.png"))
    with pytest.raises(ConfigError, match="cannot be written"):
        run(FigureConfig(name="16", runs=(path,), out=tmp_path / "x.what"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pictures need matplotlib"):
        run(FigureConfig(name="16", runs=(path,)))
