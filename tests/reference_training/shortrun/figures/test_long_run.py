"""Figure "long-run": its tables, sentences, numbers and picture."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ebmguard.reference_training.plots.numbers import number
from ebmguard.reference_training.shortrun.figures import long_run as figure
from ebmguard.reference_training.shortrun.figures.config import FigureConfig
from ebmguard.reference_training.shortrun.figures.long_chains import LongRun, long_run
from ebmguard.reference_training.shortrun.figures.long_run import (
    draw,
    make,
    short,
    statements,
    verdict,
)
from ebmguard.reference_training.shortrun.trained import TrainedRun
from ebmguard.sinks import to_json

from ...pictures import assert_no_text_on_text
from ..parts import Quadratic, tiny_run

STOPS = (0, 3, 30, 300)


def config(runs: Sequence[TrainedRun], count: int | None = None) -> FigureConfig:
    return FigureConfig(name="long-run", runs=tuple(run.path for run in runs), count=count)


def followed(strength: float, **settings: Any) -> LongRun:
    run = tiny_run("model", network=Quadratic(strength), beta_star=0.0, **settings)
    return long_run(run, STOPS, count=8, seed=0)


def verdicts(own: LongRun) -> list[str]:
    return [verdict(own, chains) for chains in own.chains]


def test_verdicts() -> None:
    # x grows by a tenth each step, and is 1.1**300 in the end: finite, and beyond all data.
    assert [verdict(own, c) for own in [followed(-0.1)] for c in own.chains] == [
        "over-saturated"
    ] * 2
    assert [verdict(own, c) for own in [followed(-9.0)] for c in own.chains] == ["diverged"] * 2
    # To a grey image with a noise of 0.01 / sqrt(1 - 0.9**2).
    assert verdicts(followed(0.1)) == ["washed out"] * 2
    # A flat f leaves data where they are, and noise, of contrast 0.58, below them.
    flat = followed(0.0, noise_std=1e-4)
    assert verdicts(flat) == ["washed out", "like data in contrast and f"]


def test_verdict_on_f_where_contrast_is_that_of_data() -> None:
    class Sum(torch.nn.Module):
        """Moves all pixels up, or down, by one amount: contrast stays, f does not."""

        def __init__(self, sign: float) -> None:
            super().__init__()
            self.sign = sign

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.sign * x.flatten(1).sum(dim=1) / 10

    # Up the hill chains go beyond the data by themselves, in either direction.
    for sign in (1.0, -1.0):
        run = tiny_run(network=Sum(sign), noise_std=1e-4, beta_star=0.0)
        own = long_run(run, STOPS, count=8, seed=0)
        assert verdicts(own) == ["washed out", "on peaks above the data"]
        assert own.above("f", own.chains[1], 300) == 1


@pytest.mark.parametrize(
    ("up", "down", "word"),
    [(3, 5, "washed out"), (5, 3, "over-saturated"), (4, 4, "over-saturated")],
)
def test_many_above_and_more_below(up: int, down: int, word: str) -> None:
    own = followed(0.0)
    chains = own.chains[0]
    contrast = torch.tensor([1e3] * up + [0.0] * down).double()
    end = replace(chains.seen[-1], each={**chains.seen[-1].each, "contrast": contrast})
    assert verdict(own, replace(chains, seen=(*chains.seen[:-1], end))) == word


def test_statements_say_where_chains_were_lost() -> None:
    noise, data = statements(followed(-9.0))
    assert noise.startswith("model, chains from noise after 300 steps: diverged; 8 of 8 are not")
    assert "the first between 30 and 300 steps" in noise
    assert "the largest |x| that was seen is 1" in noise or "is 9" in noise
    assert "chains from data" in data


def test_the_largest_entry_is_that_of_all_stops() -> None:
    own = followed(-9.0)
    first = replace(own.chains[0], largest=(5.0, 2.0, 3.0, math.inf))
    said = statements(replace(own, chains=(first, own.chains[1])))[0]
    assert said.endswith("the largest |x| that was seen is 5.")


def test_statements_give_the_contrast() -> None:
    own = followed(-0.1)
    noise, _ = statements(own)
    early = own.of_data("contrast", own.chains[0], 3)
    late = own.of_data("contrast", own.chains[0], 300)
    assert f"contrast {number(early)} of the data's at K = 3 and {number(late)} at the end" in noise
    assert "100% of the chains have more than 97.5% of the data" in noise
    assert "standard deviations above the data's" in noise
    flat, _ = statements(followed(0.0))
    assert "mean f is not comparable with the data's" in flat


def test_runs_side_by_side() -> None:
    runs = [
        tiny_run("short", beta_star=0.0),
        tiny_run(
            "long",
            sgld_steps=2,
            noise_std=0.05,
            init="persistent",
            buffer_size=16,
            optimizer="sgd",
        ),
    ]
    made = make(runs, config(runs, count=4))
    assert made.text.count("4 of 4") == 8
    assert "short, trained with K = 3, chains from noise, σ = 0.01" in made.text
    assert "long, trained with K = 2, persistent chains, σ = 0.05" in made.text
    assert_no_text_on_text(made.figure)
    first, second = json.loads(json.dumps(to_json(made.numbers), allow_nan=False))["runs"]
    assert [row["steps"] for row in first["chains"]["noise"]["steps"]] == [
        *(0, 3, 6, 15, 30, 60, 150, 300)
    ]
    # The end is that of the run of more steps.
    assert [row["steps"] for row in second["chains"]["data"]["steps"]] == [
        *(0, 2, 4, 10, 20, 40, 100, 200, 300)
    ]
    assert [run["init"] for run in (first, second)] == ["noise", "persistent"]
    assert len(made.numbers["statements"]) == 4


def test_table_holds_the_numbers() -> None:
    own = followed(0.1)
    lines = [line for line in figure.table(own).splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[:2] for row in rows[2:]] == [
        ["from noise", "3 = K"],
        ["from noise", "300"],
        ["from data", "3 = K"],
        ["from data", "300"],
        ["data", "–"],
        ["held-out", "–"],
    ]
    last = dict(zip(rows[0], rows[3], strict=True))
    chains = own.chains[0]
    assert last["contrast"] == number(chains.mean("contrast", 300))
    assert last["f off"] == number(own.shift(chains, 300))
    assert last["variety"] == number(own.variety(chains, 300))
    assert last["moved"] == number(chains.mean("moved", 300))
    data = dict(zip(rows[0], rows[6], strict=True))
    assert data["distance"] == number(own.data.mean("distance"))
    assert data["contrast"] == number(own.data.mean("contrast"))


def test_a_diverged_run_is_drawn_as_such() -> None:
    # Beside one that is none: the curves of both are to be seen.
    picture = draw([followed(-9.0), followed(0.1)])
    assert_no_text_on_text(picture)
    labels = [text.get_text() for text in picture.texts]
    assert labels.count("300\n8 lost") == 2
    assert labels.count("300") == 2
    lines = [line for axes in picture.axes for line in axes.lines]
    assert not any(float("inf") in line.get_ydata() for line in lines)
    # The other run's curves are not flattened by one that goes up to 1e38.
    heights = [max(map(abs, axes.get_ylim())) for axes in picture.axes if axes.axison]
    assert len(heights) == 6
    assert max(heights) < 1e4


def test_words() -> None:
    words = [short(steps) for steps in (0, 200, 1000, 2500, 10**6)]
    assert words == ["0", "200", "1k", "2.5k", "1M"]


def test_random_numbers_of_steps_are_named() -> None:
    run = tiny_run(Path("random"), most_sgld_steps=5, sgld_steps=3)
    own = long_run(run, (0, 3), count=2, seed=0)
    assert own.training == "trained with K from 3 to 5, chains from noise, σ = 0.01"
    finer = long_run(tiny_run("finer", most_steps=4), STOPS, count=2, seed=0)
    assert "K = 3 (up to 4 times as many, as much finer), chains from noise" in finer.training
    assert_no_text_on_text(draw([finer]))
