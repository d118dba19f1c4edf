"""What figures of several runs share: which runs they refuse."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from ebmguard.errors import ConfigError
from ebmguard.reference_training.shortrun.figures.command import MODULES
from ebmguard.reference_training.shortrun.figures.config import FigureConfig
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
