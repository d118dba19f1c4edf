"""What figures of several runs share: which runs they refuse, and how numbers are written."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest

from ebmguard.errors import ConfigError
from ebmguard.reference_training.plots.page import tiling
from ebmguard.reference_training.shortrun.figures.command import MODULES
from ebmguard.reference_training.shortrun.figures.config import FigureConfig
from ebmguard.reference_training.shortrun.figures.several import cells, counted, heads, number
from tests.reference_training.shortrun.parts import tiny_run


def refused(name: str, words: str, runs: int = 1, count: int | None = None, **given: Any) -> None:
    """The figure of so many runs ends in an error of these words."""
    package = FigureConfig.__module__.rpartition(".")[0]
    module = importlib.import_module(f".{MODULES[name]}", package)
    own = [tiny_run(f"kept{i}", activation="gelu", **given) for i in range(runs)]
    config = FigureConfig(name=name, runs=(), count=count)  # type: ignore[arg-type,unused-ignore]
    with pytest.raises(ConfigError, match=words):
        module.make(own, config)


@pytest.mark.parametrize(
    "name", ["13", "14", "15", "steps", "interpolation", "reconstruction", "likelihood"]
)
def test_persistent_chains_are_refused(name):
    what = f"^Figure {name} draws negatives as in training"
    words = what + ".*kept0 were persistent and are not kept.*--init noise"
    refused(name, words, init="persistent", buffer_size=20)


@pytest.mark.parametrize(
    ("name", "room"),
    [
        ("steps", 12),
        ("interpolation", 4),
        ("reconstruction", 4),
        ("likelihood", 4),
        ("long-run", 4),
    ],
)
def test_more_runs_than_there_is_room_for_are_refused(name, room):
    refused(name, f"room for {room} runs, and {room + 1} were given", runs=room + 1)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("reconstruction", r"33 held-out images were asked for, .* have 32"),
        ("likelihood", r"33 held-out images were asked for, .* have 32"),
        ("long-run", r"33 chains were asked for.* has 32 test images"),
    ],
)
def test_more_images_than_are_held_out_are_refused(name, words):
    refused(name, words, count=33)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (math.nan, "undefined"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
        (None, "–"),
        (0.12345, "0.123"),
        (465.2, "465"),
        (1234.5, "1,234"),
        (-1234.5, "-1,234"),
        (1e12, "1e+12"),
    ],
)
def test_numbers_as_people_read_them(value, words):
    assert number(value) == words


def test_a_row_has_a_dash_for_what_it_lacks():
    columns = {"a": ("share", "{:.1%}".format), "b": ("lost", counted), "c": ("mean", number)}
    assert heads(columns) == ["share", "lost", "mean"]
    assert cells(columns, {"a": 0.25, "b": 1200, "other": 1.0}) == ["25.0%", "1,200", "–"]
    assert cells(columns, {"b": 0, "c": math.nan}) == ["–", "–", "undefined"]


@pytest.mark.parametrize(
    ("count", "most", "rows", "columns"),
    [(1, 3, 1, 1), (3, 3, 1, 3), (4, 3, 2, 2), (7, 3, 3, 3), (9, 4, 3, 3)],
)
def test_panels_stand_in_even_rows(count, most, rows, columns):
    assert tiling(count, most) == (rows, columns)
