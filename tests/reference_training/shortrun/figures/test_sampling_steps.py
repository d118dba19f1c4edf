from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matplotlib.patches import Rectangle

from ebmguard.reference_training.shortrun.figures.config import FigureConfig
from ebmguard.reference_training.shortrun.figures.measured import Measured
from ebmguard.reference_training.shortrun.figures.sampling_steps import (
    columns,
    draw,
    make,
    statements,
    table,
)
from ebmguard.reference_training.shortrun.figures.step_sweep import Sweep, sweep
from ebmguard.sinks import to_json
from tests.reference_training.pictures import assert_no_text_on_text
from tests.reference_training.shortrun.parts import Quadratic, tiny_run

NAMES = ("beyond", "excess", "ends", "size", "contrast", "colour", "f", "slope", "distance")


def config(count: int | None = 4) -> FigureConfig:
    return FigureConfig("steps", (Path("a"),), count=count)


def fixed(*values: float, **named: float) -> Measured:
    """Images with these contrasts, and for each other name one number."""
    one = dict.fromkeys(NAMES, 0.25) | named
    each = {name: torch.full((len(values),), value).double() for name, value in one.items()}
    return Measured({**each, "contrast": torch.tensor(values).double()})


def made_sweep(at: dict[int, Measured], most: int = 10) -> Sweep:
    data = fixed(0.5, 0.5, beyond=0.125, ends=0.5)
    run = tiny_run("some-run", sgld_steps=10, most_sgld_steps=most)
    return Sweep(
        run=run,
        stops=tuple(at),
        chains=tuple(at.values()),
        data=data,
        clean=data,
        held_out=fixed(0.5, 0.5, distance=0.2),
        images=torch.zeros(2, len(at), 1, 8, 8),
    )


@pytest.mark.parametrize(
    ("late", "grown", "words", "verdict"),
    [
        ((0.75, 0.75), 2, "× 1.500, from 1.000 to 1.500 of", ": over-saturation for K2 > K1."),
        ((0.3, 0.8), 1, "× 1.100, from 1.000 to 1.100 of", ": over-saturation for K2 > K1."),
        ((0.25, 0.25), 0, "× 0.500, from 1.000 to 0.500 of", "contrast does not grow."),
        ((0.5, 0.5), 0, "× 1.000, from 1.000 to 1.000 of", "contrast does not grow."),
    ],
)
def test_the_sentence_on_saturation_follows_from_the_numbers(late, grown, words, verdict):
    found = made_sweep(
        {
            0: fixed(0.1, 0.1),
            10: fixed(0.5, 0.5, beyond=0.1, ends=0.3),
            20: fixed(*late, beyond=0.4, ends=0.7),
        }
    )
    said = statements(found)[0]
    assert said.startswith("some-run, from K2 = K1 = 10 to K2 = 20: contrast " + words)
    assert f"(it grows in {grown} of 2 chains)" in said
    assert "entries outside [-1, 1] from 10.0% to 40.0% (data: 12.5%)" in said
    assert "at its ends from 30.0% to 70.0% (data: 50.0%)" in said
    assert said.endswith(verdict)


def test_contrast_that_grows_towards_the_data_is_no_over_saturation():
    found = made_sweep({10: fixed(0.2, 0.2), 20: fixed(0.4, 0.4)})
    assert statements(found)[0].endswith(
        "no over-saturation, contrast grows and stays below that of data."
    )


def test_where_data_have_no_contrast_there_is_no_verdict():
    found = made_sweep({10: fixed(0.2, 0.2), 20: fixed(0.4, 0.4)})
    flat = replace(found, data=fixed(0.0, 0.0))
    said = statements(flat)[0]
    assert said.endswith(": the data have no contrast to compare it with.")


def test_of_lost_chains_nothing_is_said():
    lost = fixed(math.nan, 0.5, distance=math.nan)
    on_saturation, on_distance = statements(made_sweep({10: fixed(0.5, 0.5), 20: lost}))
    assert on_saturation.endswith("nothing can be said; 1 of 2 chains are not finite.")
    assert on_distance.endswith("is undefined at some K2, where chains are not finite.")


@pytest.mark.parametrize(
    ("distances", "most", "words"),
    [
        ((0.9, 0.1, 0.3), 10, "K2 = 10, at K1: 0.100, 0.500 of that of held-out images. It is 0.3"),
        (
            (0.9, 0.4, 0.3),
            10,
            "K2 = 20, the most that was tried, not at K1: 0.300, 1.500 of that of held-out images. "
            "It is 0.400 at 10.",
        ),
        (
            (0.1, 0.4, 0.3),
            10,
            "K2 = 0, not at K1: 0.100, 0.500 of that of held-out images. It is 0.400 at 10 and "
            "0.300 at 20.",
        ),
        # K was drawn from 10 to 20.
        ((0.9, 0.4, 0.3), 20, "K2 = 20, the most that was tried, at K1: 0.300"),
    ],
)
def test_where_the_distance_to_data_is_smallest(distances, most, words):
    stops = (0, 10, 20)
    at = {k: fixed(0.5, 0.5, distance=d) for k, d in zip(stops, distances, strict=True)}
    said = statements(made_sweep(at, most))[1]
    assert f"the mean distance to the nearest training image is smallest at {words}" in said


def test_the_table_has_a_line_for_each_stop_and_three_of_data():
    found = made_sweep({0: fixed(0.1, 0.1), 10: fixed(0.5, 0.5, f=-1), 20: fixed(0.75, 0.75)})
    title, _, *lines = table(found).splitlines()
    assert title == "some-run: digits, β* = 0.02, K = 10, 6 updates; 2 chains"
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    # A cell "mean |x|" has its bars escaped.
    assert [row[0] for row in cells[2:]] == [
        "0",
        "10 = K1",
        "20",
        "data",
        "without noise",
        "held-out",
    ]
    assert "colour" not in lines[0]
    of_data = [row[6] for row in cells[2:]]
    assert of_data == ["0.200", "1.000", "1.500", "–", "–", "–"]
    assert [row[8] for row in cells[2:5]] == ["0", "1.25", "0"]


def test_make_of_runs_with_different_k1():
    runs = [
        tiny_run("short", sgld_steps=2),
        tiny_run("long", sgld_steps=10),
        tiny_run("drawn", sgld_steps=5, most_sgld_steps=6),
    ]
    made = make(runs, config())
    stops = [0, 2, 4, 5, 6, 8, 10, 12, 14, 16, 18, 20]
    for run, numbers in zip(runs, made.numbers["runs"], strict=True):
        assert [row["steps"] for row in numbers["steps"]] == stops
        assert numbers["chains"] == 4
        assert numbers["name"] == run.name
        for row in numbers["steps"]:
            assert row["gap"] == pytest.approx(numbers["data"]["f"] - row["f"])
    assert made.numbers["runs"][2]["trained_steps"] == (5, 6)
    assert len(made.numbers["statements"]) == 6
    assert all(said in made.text for said in made.numbers["statements"])
    json.dumps(to_json(made.numbers), allow_nan=False)
    assert_no_text_on_text(made.figure)


def test_make_of_one_run_that_is_lost():
    made = make([tiny_run(network=Quadratic(-1e30), sgld_steps=10)], config(2))
    assert math.isnan(made.numbers["runs"][0]["steps"][-1]["contrast"])
    assert "nothing can be said; 2 of 2 chains are not finite" in made.text
    assert_no_text_on_text(made.figure)


def test_the_columns_that_are_shown():
    assert columns([100]) == tuple(range(0, 201, 20))
    assert columns([100, 50]) == (0, 20, 40, 50, 60, 80, 100, 120, 140, 160, 180, 200)
    # Twice K1 is measured, and has no column of its own.
    assert columns([100, 55]) == (0, 20, 40, 55, 60, 80, 100, 120, 140, 160, 180, 200)


@pytest.mark.parametrize(("most", "framed"), [(50, 1), (60, 2), (90, 3)])
def test_the_picture_frames_the_columns_of_training(most, framed):
    run = tiny_run(network=Quadratic(1e-3), sgld_steps=50, most_sgld_steps=most)
    other = tiny_run(network=Quadratic(1e-3), sgld_steps=100)
    stops = (*range(0, 201, 10),)
    figure = draw([sweep(each, stops, count=2, seed=0) for each in (run, other)])
    strip = figure.axes[0]
    (image,) = strip.images
    (frame,) = [patch for patch in strip.patches if isinstance(patch, Rectangle)]
    column = image.get_array().shape[1] / 12  # 0, 20, 40, 50, 60, ..., 200
    assert frame.get_x() + 0.5 == pytest.approx(3 * column)
    assert frame.get_width() == pytest.approx(framed * column)
