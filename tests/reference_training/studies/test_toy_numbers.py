"""Numbers of toy figures, and the claims on them, whichever way the numbers went."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pandas as pd
import pytest

from ebmguard.reference_training.studies import toy, toy_numbers
from ebmguard.reference_training.studies.command import find, told
from ebmguard.reference_training.studies.config import ToyFigure
from ebmguard.reference_training.studies.toy import FIGURES, load_run, training
from ebmguard.reference_training.studies.toy_numbers import (
    GOOD_WEIGHT,
    Spread,
    default_is_best,
    members,
    one_good_is_enough,
)
from ebmguard.sinks import read_jsonl
from tests.reference_training.toy.fabricate import made_up, write_run


@pytest.fixture
def numbers(monkeypatch, tmp_path):
    """The frame of a figure whose runs are made by hand; `kl` is of (scenario, beta, variant)."""

    def make(
        name: Any, kl: Any = None, betas: Any = None, scenarios: Any = None, **given: Any
    ) -> Any:
        spec = FIGURES[name]
        changed = dataclasses.replace(
            spec, betas=betas or spec.betas, scenarios=scenarios or spec.scenarios
        )
        monkeypatch.setitem(toy.FIGURES, name, changed)
        config = ToyFigure(name=name, out=tmp_path, seeds=given.pop("seeds", 3))
        runs = []
        for scenario in changed.scenarios:

            def metrics(beta: str, variant: str, seed: int, scenario: str = scenario) -> Any:
                own = made_up(beta, variant, seed)
                return own | ({"kl": kl(scenario, beta, variant)[seed]} if kl else {})

            own = training(config, scenario)
            write_run(own, **{"metrics": metrics, "resolution": 4, "samples": 4, **given})
            runs.append(load_run(own.out))
        return members(runs, config)

    return make


@pytest.mark.parametrize(
    ("values", "median", "low", "high", "text"),
    [
        ([3.0, 1.0, 2.0], 2.0, 1.0, 3.0, "2 [1, 3]"),
        ([4.0, 1.0, 2.0, 3.0], 2.5, 1.0, 4.0, "2.5 [1, 4]"),
        ([0.5], 0.5, 0.5, 0.5, "0.5"),
        # One of three is lost: the median is the worse of the other two, and the loss shows.
        ([0.5, math.nan, 0.25], 0.5, 0.25, math.nan, "0.5 [0.25, undefined]"),
        ([math.inf, 1.0, 2.0], 2.0, 1.0, math.inf, "2 [1, ∞]"),
        ([math.nan, math.nan, 0.1], math.nan, 0.1, math.nan, "undefined [0.1, undefined]"),
        ([math.nan, math.nan], math.nan, math.nan, math.nan, "undefined"),
    ],
)
def test_median_and_range(values, median, low, high, text):
    spread = Spread.of(values)
    assert tuple(spread) == pytest.approx((median, low, high), nan_ok=True)
    assert str(spread) == text


def test_overlaps():
    low, high = Spread.of([1.0, 2.0, 3.0]), Spread.of([4.0, 5.0, 6.0])
    touching, lost = Spread.of([3.0, 4.0, 5.0]), Spread.of([math.nan] * 3)
    assert not low.overlaps(high)
    assert low.overlaps(touching)
    assert touching.overlaps(high)
    # Undefined is worse than every number.
    assert not low.overlaps(lost)
    assert lost.overlaps(lost)


def trade_off(kl: dict[str, Any], kl_sgld: Any = None) -> dict[str, float]:
    """Of values at β = 0 and at 0.5, one a seed."""
    at = {
        beta: {
            i: {"kl": value, "kl_sgld": kl_sgld(beta, i) if kl_sgld else 1.0}
            for i, value in enumerate(own)
        }
        for beta, own in kl.items()
    }
    found: dict[str, float] = toy_numbers.trade_off(at["0"], at["0.5"])
    return found


def test_the_ratio_is_the_median_of_the_seeds_own_ratios():
    values = {"0": (10.0, 100.0, 30.0), "0.5": (1.0, 50.0, 0.1)}
    found = trade_off(values, lambda beta, seed: 0.1 * (seed + 1) * (1 + 4 * float(beta)))
    # Ratios 10, 2 and 300: not the ratio of the medians, 30.
    assert found == pytest.approx({"gain": 10, "price": 3})


def test_seeds_that_are_lost_at_beta_are_no_gain():
    # Gains of 10, none and none: not a median of infinitely many times.
    values = {"0": (10.0, 20.0, math.nan), "0.5": (1.0, math.nan, math.nan)}
    assert trade_off(values)["gain"] == 0
    undefined = {"0": (math.nan, math.nan, 1.0), "0.5": (1.0, 1.0, 1.0)}
    assert math.isnan(trade_off(undefined)["gain"])


def test_a_row_for_each_variant_and_beta(numbers):
    frame = numbers("7", betas=("0", "0.5"), scenarios=("gmm-default",), diverged={"0": 900})
    rows = frame[["variant", "beta", "diverged", "seeds"]].to_numpy().tolist()
    assert rows[:2] == [["default", "0", 3, 3], ["default", "0.5", 0, 3]]
    assert {row[0] for row in rows} == {"default", "no pos", "batch corr", "true obj"}
    assert str(frame["kl"][0]) == "undefined"
    assert frame["kl"][1] == pytest.approx((0.438, 0.398, 0.478), abs=1e-3)
    assert "| 0.438 [0.398, 0.478] |" in told(find("7"), frame)
    words = "gmm-default: 10,000 updates, 3 seeds"
    assert frame["about"][0] == words or frame["about"][0].endswith("updates, 3 seeds")
    # Of what diverged, when, and when the guard first alerted: three updates before.
    lost = frame.iloc[0]
    assert (lost["first lost at"], lost["alerted"], lost["first alert at"]) == (900, 3, 897)
    assert frame["first lost at"][1] is None


@pytest.mark.parametrize(
    ("default", "other", "held"),
    [
        ((1.0, 1.1, 1.2), (2.0, 2.2, 2.4), True),
        ((1.0, 1.1, 1.2), (1.1, 1.21, 1.3), True),
        # Better, but within the spread of seeds; and beyond it.
        ((1.0, 1.1, 1.2), (0.9, 1.0, 1.1), True),
        ((1.0, 1.1, 1.2), (0.1, 0.11, 0.2), False),
        ((1.0, 1.1, 1.2), (math.nan,) * 3, True),
        ((math.nan,) * 3, (1.0, 1.1, 1.2), False),
        ((math.nan,) * 3, (math.nan,) * 3, None),
        ((1.0, 1.1, 1.2), (1.2, 1.1, 1.0), True),  # a tie
        # One seed has no spread to judge by.
        ((1.0,), (2.0,), None),
    ],
)
def test_the_claim_on_the_default_variant_follows_the_numbers(default, other, held):
    rows = {"scenario": "a", "beta": "0.5", "seeds": len(default), "variant": ["default", "no pos"]}
    kl = pd.Series([Spread.of(default), Spread.of(other)], dtype=object)
    frame = pd.DataFrame(rows).assign(kl=kl)
    assert default_is_best(frame) is held
    # At β = 0 the variants are one and the same loss; and what is undefined elsewhere is left out.
    assert default_is_best(frame.assign(beta="0")) is None
    undefined = pd.Series([Spread.of([math.nan])] * 2, dtype=object)
    both = pd.concat([frame, frame.assign(beta="0.9", kl=undefined)])
    assert default_is_best(both) is held


def test_gains_decide_on_the_claim_on_beta(numbers):
    frame = numbers("2", betas=("0", "0.5"))
    # As made up: 8 exp(-6 β).
    assert frame["gain"].tolist() == [
        None,
        pytest.approx(math.exp(3)),
        None,
        pytest.approx(math.exp(3)),
    ]
    assert find("2").verdict(frame).endswith("is below that at β = 0: holds.")
    gains = pd.Series([None, 0.9, None, math.nan], dtype=object)
    assert find("2").verdict(frame.assign(gain=gains)).endswith(": cannot be told.")
    assert find("2").verdict(frame.assign(gain=gains.fillna(2.0))).endswith(": does not hold.")


def test_means_and_seeds_own_ratios_are_both_told(numbers):
    values: dict[str, dict[str, tuple[float, ...]]] = {
        "gmm-default": {"0": (1, 1, 1), "0.5": (1, 2, 3)},
        "gmm-good+exploding": {"0": (1e9, 1, 1), "0.5": (1.5, 2.2, 3.3)},
        "gmm-exploding": {"0": (1, 1, math.nan), "0.5": (10, 20, 30)},
    }
    frame = numbers("mixture", lambda scenario, beta, _: values[scenario][beta], ("0", "0.5"))
    # Of the means 7 / 6; of the seeds 1.5, 1.1 and 1.1.
    means, seeds = (frame[name].tolist() for name in ("kl over the first's", "of seeds"))
    assert means[:4] == [None, None, pytest.approx(1e9 / 3, rel=1e-6), pytest.approx(7 / 6)]
    assert seeds[2:4] == [1, pytest.approx(1.1)]
    assert math.isnan(means[4])
    assert means[5] == 10


@pytest.mark.parametrize(
    ("ratio", "held"), [(0.5, True), (1.2, True), (1.21, False), (math.nan, None)]
)
def test_as_well_is_a_fifth_above_or_better(numbers, ratio, held):
    def kl(scenario: str, *_: str) -> tuple[float]:
        return (ratio if "+" in scenario else 1.0,)

    frame = numbers("mixture", kl, ("0.5",), seeds=1)
    assert one_good_is_enough(frame) is held


def test_the_weight_is_a_mean_over_the_whole_training(numbers, tmp_path):
    numbers("mixture", betas=("0", "0.5"))
    file = tmp_path / "gmm-good+exploding" / "members.jsonl"
    rows = [
        row | {GOOD_WEIGHT: 0.6 if row["step"] == 100 else 0.9 + 0.01 * row["member"]}
        for row in read_jsonl(file)
    ]

    def found() -> list[float]:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        run = load_run(file.parent)
        frame = members([run, run], ToyFigure(name="mixture"))
        assert [str(x) for x in frame[GOOD_WEIGHT][:2]] == ["0.5", "0.75"]
        kept: list[float] = frame["weight of the whole training"][:2].tolist()
        return kept

    # Members 0 to 2 are of β = 0, members 3 to 5 of β = 0.5.
    assert found() == pytest.approx([0.755, 0.77])
    del rows[-1][GOOD_WEIGHT]
    assert math.isnan(found()[1])


def test_figure_9_says_how_close_the_optimum_came(numbers, monkeypatch):
    # The table's own tests show what it reaches; it takes seconds for each β.
    monkeypatch.setattr(toy_numbers, "r2_of_a_table", lambda data, beta: len(data) * beta)
    frame = numbers("9", scenarios=("gmm-degenerate", "circles-proposal"))
    # The made-up value is 0.9 + β / 10 for the first seed, 0.01 less for each further one.
    reached = [spread.median for spread in frame["oracle_r2"][1:6]]
    assert reached == pytest.approx([0.9, 0.92, 0.94, 0.96, 0.98])
    assert math.isnan(frame["oracle_r2"][0].median)
    own = frame["r2 of a table"].tolist()
    assert own[:2] + own[4:5] == [None] * 3
    assert [own[2], own[3], own[5]] == pytest.approx([0.9, 1.5, 2.7])
    assert "oracle_r2: of the learned" in told(find("9"), frame)
    assert "oracle_r2" not in told(find("2"), numbers("2", betas=("0", "0.5")))
