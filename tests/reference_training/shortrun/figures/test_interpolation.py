from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from ebmguard.reference_training.shortrun.figures.config import FigureConfig
from ebmguard.reference_training.shortrun.figures.interpolation import make, statements, table
from ebmguard.reference_training.shortrun.figures.paths import POINTS, interpolate
from ebmguard.sinks import to_json
from tests.reference_training.pictures import assert_no_text_on_text
from tests.reference_training.shortrun.parts import Quadratic, tiny_run


def config(count: int | None = 2) -> FigureConfig:
    return FigureConfig("interpolation", (Path("a"),), count=count)


class Ridges(torch.nn.Module):
    """f with a maximum at every pixel of -0.8 and of 0.8: its flow sorts pixels by their sign."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, C, H, W) -> (B,)."""
        return -(x.abs() - 0.8).square().flatten(1).sum(1)


def test_of_an_affine_flow_the_path_is_as_even_as_that_of_its_starts():
    said = statements(interpolate(tiny_run(network=Quadratic(0.1)), count=20, seed=0))
    # A quarter of a circle is 1.11 times its chord; starts are at right angles on the mean only.
    assert said[0].startswith(
        "tiny: a path is 1.12 times as long as the distance of its ends (its starts': 1.12)"
    )
    assert "and 0.50 (the worst: 0.51) of the largest at twice the spacing" in said[0]
    pattern = r"to ([\d.]+)% of .* as far as ([\d.]+) .* half-way has ([\d.]+) .* with ([\d.]+)"
    ((share, largest, kept, convex),) = (
        map(float, match) for match in re.findall(pattern, said[2])
    )
    # The largest of some 20 shares of 1,280 entries each, about 8.6% where they are largest.
    assert 8 < share < 10.5
    assert 1.3 < largest <= 1.41
    assert kept == pytest.approx(1, abs=0.04)
    assert convex == pytest.approx(0.71, abs=0.03)


def test_where_pixels_are_sorted_the_path_jumps_and_keeps_what_the_blend_loses():
    run = tiny_run(network=Ridges(), sgld_steps=30, step_size=0.2)
    found = interpolate(run, count=6, seed=0)
    on_smoothness, on_likeness, _ = statements(found)
    # Each pixel jumps once, or not at all: half the pixels in 20 steps.
    length = float(on_smoothness.split("a path is ")[1].split(" ")[0])
    assert length > 2
    for name in ("f", "contrast"):
        part = next(p for p in on_likeness.split(": ", 1)[1].split("; ") if p.startswith(name))
        assert "nearer to in 6 of 6 pairs" in part
    assert found.inside("f") > 10 * found.inside("f", blend=True)


def test_of_lost_paths_nothing_is_said():
    found = interpolate(tiny_run(network=Quadratic(-1e30)), count=2, seed=0)
    said = statements(found)
    assert said[0] == "tiny: nothing can be said; 2 paths are not finite."
    assert said[1] == "tiny, between the ends: nothing can be said; not all is finite."


def test_the_table_has_a_line_for_each_pair_their_mean_and_held_out_images():
    found = interpolate(tiny_run(network=Quadratic(0.1)), count=3, seed=0)
    title, _, *lines = table(found).splitlines()
    assert title.endswith("; 3 pairs, 21 points each")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[0] for row in rows[2:]] == ["1", "2", "3", "mean", "held-out"]
    named = dict(zip(rows[0], zip(*rows[2:], strict=True), strict=True))
    at_ends = found.along("f")[:, [0, -1]].mean(dim=1)
    inside = found.along("f", blend=True)[:, 1:-1].mean(dim=1)
    assert [float(cell) for cell in named["f at ends"][:3]] == pytest.approx(
        at_ends.tolist(), abs=1e-3
    )
    assert [float(cell) for cell in named["f blend"][:4]] == pytest.approx(
        [*inside.tolist(), inside.mean().item()], abs=1e-3
    )
    assert float(named["distance at ends"][4]) == pytest.approx(
        found.held_out.mean("distance"), abs=1e-3
    )


@pytest.mark.parametrize("names", [("one",), ("first", "second", "third")])
def test_make(names):
    runs = [tiny_run(name, activation="gelu", seed=i) for i, name in enumerate(names)]
    made = make(runs, config())
    assert [numbers["name"] for numbers in made.numbers["runs"]] == list(names)
    for numbers in made.numbers["runs"]:
        assert len(numbers["rho"]) == POINTS
        assert [len(pair) for pair in numbers["along_path"]["f"]] == [POINTS] * 2
    assert all(said in made.text for said in made.numbers["statements"])
    json.dumps(to_json(made.numbers), allow_nan=False)
    assert_no_text_on_text(made.figure)
    # A row for each of 2 pairs and one for the blend, of every run; and 6 panels.
    assert len(made.figure.axes) == 3 * len(names) + 6


def test_one_pair_and_lost_ones_can_be_drawn():
    assert_no_text_on_text(make([tiny_run()], config(1)).figure)
    made = make([tiny_run(network=Quadratic(-1e30))], config(1))
    assert "nothing can be said" in made.text
    assert_no_text_on_text(made.figure)
