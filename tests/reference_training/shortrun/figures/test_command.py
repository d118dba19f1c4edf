"""The command: what it checks before it computes, and what it writes."""

from __future__ import annotations

import json
import math
import sys
from types import ModuleType
from typing import Any, get_args, get_type_hints

import pytest
from matplotlib.image import imread

from ebmguard.errors import ConfigError, DiskError
from ebmguard.reference_training.plots.canvas import new_figure
from ebmguard.reference_training.plots.figure import Made
from ebmguard.reference_training.shortrun.figures import command
from ebmguard.reference_training.shortrun.figures.config import FigureConfig
from tests.reference_training.shortrun.parts import trained_folder

PACKAGE = command.__name__.rpartition(".")[0]


def test_every_figure_has_a_module():
    names = set(get_args(get_type_hints(FigureConfig)["name"]))
    assert names == set(command.MODULES)


def test_default_files():
    config = FigureConfig(name="long-run", runs=())
    assert str(config.file) == "figure_long_run.png"


def test_a_run_is_opened_drawn_and_written(tmp_path, capsys):
    path = trained_folder(tmp_path / "run")
    capsys.readouterr()
    picture = tmp_path / "there.png"
    config = FigureConfig(name="12", runs=(path,), out=picture, device="cpu")
    assert command.run(config) == 0
    printed = capsys.readouterr().out
    assert "| β* = 0.02 |" in printed
    assert printed.endswith(f"picture: {picture}\nnumbers: {tmp_path / 'there.json'}\n")
    assert imread(picture).shape[1] > 500
    numbers = json.loads((tmp_path / "there.json").read_text())
    assert numbers["runs"][0]["updates"] == 6


def fake(monkeypatch: pytest.MonkeyPatch, numbers: dict[str, Any]) -> list[Any]:
    """A figure that draws nothing; what it was called with is kept."""
    seen: list[Any] = []
    module: Any = ModuleType("fake")

    def make(runs: Any, config: Any) -> Made:
        seen.append((runs, config))
        return Made(new_figure(1, 1), "text", numbers)

    module.make = make
    monkeypatch.setitem(sys.modules, f"{PACKAGE}.long_run", module)
    monkeypatch.setattr(command, "load_run", lambda path, device, data_root: (path, device.type))
    return seen


def test_numbers_that_are_not_finite_stay_readable(tmp_path, monkeypatch):
    seen = fake(monkeypatch, {"a": math.nan, "b": [math.inf, 1.5, None]})
    out = tmp_path / "x.png"
    runs = (tmp_path / "one", tmp_path / "two")
    config = FigureConfig(name="long-run", runs=runs, out=out, device="cpu")
    assert command.run(config) == 0
    assert json.loads((tmp_path / "x.json").read_text()) == {
        "a": "NaN",
        "b": ["Infinity", 1.5, None],
    }
    assert seen == [([(path, "cpu") for path in runs], config)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"runs": ()}, "runs is empty, expected run folders"),
        ({"count": 0}, "count is 0, expected 1 or more"),
        ({"seed": -1}, "seed is -1, expected 0 or more"),
        ({"threads": -2}, "threads is -2, expected 0 or more"),
        ({"out": "x.what"}, r"a picture's name ends in one of .*png"),
        ({"out": "x.json"}, r"a picture's name ends in one of .*png"),
        ({"out": "no/x.png"}, "no is not a folder"),
        ({"device": "quantum"}, "device is 'quantum'"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_opened(
    settings, words, tmp_path, monkeypatch
):
    seen = fake(monkeypatch, {})
    monkeypatch.setattr(command, "load_run", lambda *_: pytest.fail("a run was opened"))
    if "out" in settings:
        settings["out"] = tmp_path / settings["out"]
    given = {"runs": (tmp_path,), "out": tmp_path / "x.png", **settings}
    with pytest.raises(ConfigError, match=words):
        command.run(FigureConfig(name="long-run", **given))
    assert not seen


def test_all_wrong_settings_are_one_error():
    with pytest.raises(ConfigError, match=r"runs is empty(.|\n)*seed is -1"):
        FigureConfig(name="13", runs=(), seed=-1).check()


def test_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "load_run", lambda *_: pytest.fail("a run was opened"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pictures need matplotlib"):
        command.run(FigureConfig(name="13", runs=(tmp_path,), out=tmp_path / "x.png"))


def test_files_that_cannot_be_written_are_told(tmp_path, monkeypatch):
    fake(monkeypatch, {})
    (tmp_path / "x.json").mkdir()
    config = FigureConfig(name="long-run", runs=(tmp_path,), out=tmp_path / "x.png")
    with pytest.raises(DiskError, match=r"x\.json"):
        command.run(config)
    (tmp_path / "y.png").mkdir()
    config = FigureConfig(name="long-run", runs=(tmp_path,), out=tmp_path / "y.png")
    with pytest.raises(ConfigError, match=r"y\.png cannot be written"):
        command.run(config)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no run"):
        command.run(FigureConfig(name="13", runs=(tmp_path,), out=tmp_path / "x.png"))


def test_a_folder_in_the_pictures_place_is_seen_before_a_run_is_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "load_run", lambda *_: pytest.fail("a run was opened"))
    (tmp_path / "x.png").mkdir()
    with pytest.raises(ConfigError, match=r"x\.png cannot be written: it is a folder"):
        command.run(FigureConfig(name="13", runs=(tmp_path,), out=tmp_path / "x.png"))
