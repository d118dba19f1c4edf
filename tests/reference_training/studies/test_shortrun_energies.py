"""Figure 12 against rows written by hand and numbers computed in plain Python."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ebmguard.errors import ConfigError
from ebmguard.reference_training.studies.command import find
from ebmguard.reference_training.studies.config import ShortRunFigure
from ebmguard.reference_training.studies.shortrun import by_beta
from ebmguard.reference_training.studies.shortrun_energies import threshold, windows
from tests.reference_training.pictures import assert_no_text_on_text
from tests.reference_training.shortrun.parts import tiny_run, write_rows

FIGURE_12 = find("12")


def rows(gaps: Any) -> dict[str, list[float]]:
    """Rows whose gaps are these; every number is another one."""
    gaps = [float(gap) for gap in gaps]
    return {
        "f_pos/mean": [1 + gap for gap in gaps],
        "f_neg/mean": [1.0 for _ in gaps],
        "grad_scale": [0.5 + i / 1000 for i in range(len(gaps))],
        "ess": [0.7 + i / 1000 for i in range(len(gaps))],
        "ref/grad_scale": [0.1 + i / 1000 for i in range(len(gaps))],
        "ref/ess": [0.2 + i / 1000 for i in range(len(gaps))],
    }


def run_of(path: Path, beta_star: float, gaps: Any, **settings: Any) -> Any:
    write_rows(path, rows(gaps))
    return tiny_run(path, beta_star=beta_star, **settings)


def numbers(runs: Any, count: int | None = None) -> pd.DataFrame:
    return FIGURE_12.numbers(runs, ShortRunFigure(name="12", runs=(), count=count))


def test_the_end_is_the_last_tenth(tmp_path):
    gaps = np.random.default_rng(0).normal(size=57).tolist()
    (found,) = numbers([run_of(tmp_path / "x", 2.0, gaps)]).to_dict("records")
    low, middle, high = statistics.quantiles(gaps[-5:], n=4, method="inclusive")
    assert (found["low"], found["gap"], found["high"]) == pytest.approx((low, middle, high))
    assert found["grad_scale"] == pytest.approx(0.5 + 54 / 1000)
    assert found["ess"] == pytest.approx(0.7 + 54 / 1000)
    assert found["not_finite"] == 0
    # β is β* over the output scale of the published step, 2 / 0.01².
    assert found["beta"] == pytest.approx(2 / 20_000)


def test_equal_weights_say_nothing_so_the_reference_is_shown(tmp_path):
    (found,) = numbers([run_of(tmp_path / "0", 0.0, [1.0] * 10)]).to_dict("records")
    assert found["grad_scale"] == pytest.approx(0.1 + 9 / 1000)
    assert found["ess"] == pytest.approx(0.2 + 9 / 1000)


def test_runs_are_told_by_beta_star_and_the_claim_is_answered(tmp_path):
    gaps = {20.0: 0.9, 0.0: 0.1, 2.0: 0.5}
    runs = [run_of(tmp_path / f"{b:g}", b, [gap] * 20) for b, gap in gaps.items()]
    found = numbers(runs)
    assert found["beta_star"].tolist() == [0, 2, 20]
    assert FIGURE_12.verdict(found).endswith("with every step up of β*: holds.")
    runs[-1] = run_of(tmp_path / "narrow", 2.0, [0.05] * 20)
    assert FIGURE_12.verdict(numbers(runs)).endswith(": does not hold.")
    assert FIGURE_12.verdict(numbers(runs[:1])).endswith(": cannot be told.")


def test_seeds_count_as_one_beta_star(tmp_path):
    runs = [
        run_of(tmp_path / f"{i}", beta_star, [gap] * 10, seed=i)
        for i, (beta_star, gap) in enumerate([(0, 1), (0, 2), (0, 9), (2, 4), (2, 6)])
    ]
    found = numbers(runs)
    assert by_beta(found, "gap").to_dict() == {0: 2, 2: 5}
    assert found["run"].tolist()[::4] == ["β* = 0, seed 0", "β* = 2, seed 4"]


def test_a_lost_run_is_undefined_and_counted(tmp_path):
    gaps = [1.0] * 90 + [math.nan] * 8 + [math.inf] * 2
    found = numbers([run_of(tmp_path / "0", 0.0, gaps), run_of(tmp_path / "2", 2.0, [1.0] * 100)])
    assert math.isnan(found["gap"][0])
    assert found["not_finite"].tolist() == [10, 0]
    assert math.isnan(found["widening"][1])
    assert FIGURE_12.verdict(found).endswith(": cannot be told.")


def test_widening_is_in_ranges_of_the_gap_without_weights(tmp_path):
    # The last tenth of both are five values: quartiles 1, 2, 3 and 10, 20, 30.
    waves = [0.0, 1.0, 2.0, 3.0, 4.0], [0.0, 10.0, 20.0, 30.0, 40.0]
    plain = [
        run_of(tmp_path / f"{i}", 0, [9.0] * 45 + wave, seed=i) for i, wave in enumerate(waves)
    ]
    others = [run_of(tmp_path / f"{g}", b, [float(g)] * 50) for b, g in ((2.0, 5), (3.0, 44))]
    found = numbers([plain[0], *others])["widening"].tolist()
    assert found == [None, pytest.approx((5 - 2) / 2), pytest.approx((44 - 2) / 2)]
    # Of two seeds the middle of both: a gap of 11 and a range of 11.
    found = numbers([*plain, *others])["widening"].tolist()
    assert found == [None, None, pytest.approx((5 - 11) / 11), pytest.approx(3)]
    # Without such a run, or where its gap does not vary, there is nothing to measure by.
    flat = run_of(tmp_path / "flat", 0, [1.0] * 50)
    for at_zero in ([], [flat]):
        assert numbers([*at_zero, others[0]])["widening"].tolist()[-1] is None


def test_of_a_step_that_was_written_twice_the_later_row_counts(tmp_path):
    write_rows(tmp_path / "x", rows([1.0] * 10))
    write_rows(tmp_path / "x", rows([5.0] * 4), first=8)
    (found,) = numbers([tiny_run(tmp_path / "x")]).to_dict("records")
    np.testing.assert_array_equal(found["steps"], range(12))
    np.testing.assert_allclose(found["f_pos"] - found["f_neg"], [1.0] * 8 + [5.0] * 4)


def test_windows_are_those_of_a_loop():
    gaps = np.random.default_rng(1).normal(size=260)
    gaps[7] = math.nan
    steps, found = windows(np.arange(260.0), gaps)
    assert len(steps) == 52
    for k in range(52):
        assert steps[k] == 5 * k + 2
        if k == 1:
            assert np.isnan(found[:, k]).all()
        else:
            part = gaps[5 * k : 5 * k + 5].tolist()
            expected = statistics.quantiles(part, n=4, method="inclusive")
            np.testing.assert_allclose(found[:, k], expected)


def test_the_panels_show_every_hundredth_batch_or_more(tmp_path):
    gaps = np.random.default_rng(2).normal(size=400)
    runs = [run_of(tmp_path / "0", 0.0, gaps), run_of(tmp_path / "2", 2.0, 3 + gaps[:300])]
    (figure,) = FIGURE_12.drawn(numbers(runs)).values()
    first, second, both = figure.axes
    assert [first.get_title(), second.get_title()] == ["β* = 0", "β* = 2"]
    assert first.get_ylim() == second.get_ylim()
    assert first.get_xlim() == second.get_xlim() == (0, 400)
    assert first.get_yscale() == "linear"
    positive, negative = first.lines
    np.testing.assert_array_equal(positive.get_xdata(), range(0, 400, 4))
    np.testing.assert_allclose(positive.get_ydata(), 1 + gaps[::4])
    np.testing.assert_allclose(negative.get_ydata(), 1)
    assert [line.get_label() for line in both.lines[:2]] == ["β* = 0", "β* = 2"]
    texts = [text.get_text() for text in figure.texts]
    assert texts == [
        "Figure 12: f during training, digits",
        "means over one batch, every 4 updates",
    ]


def test_runs_that_lie_far_apart_share_an_axis_that_is_logarithmic(tmp_path):
    # The smallest spreads by 0.02 and the largest by 200.
    assert threshold([np.array([0.02, -0.02]), np.array([200.0, -200.0])]) == 0.01
    assert threshold([np.array([1.0]), np.array([19.0])]) is None
    assert threshold([np.array([math.nan]), np.array([3.0, math.nan])]) is None
    wave = np.sin(np.arange(150))
    runs = [run_of(tmp_path / f"{i}", i, (0.02 + wave / 100) * 100**i) for i in range(5)]
    (figure,) = FIGURE_12.drawn(numbers(runs)).values()
    assert {axes.get_yscale() for axes in figure.axes} == {"symlog"}
    assert_no_text_on_text(figure)


def test_what_cannot_be_drawn_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"metrics\.jsonl is missing"):
        numbers([tiny_run(tmp_path / "none")])
    write_rows(tmp_path / "empty", {"f_pos/mean": []})
    with pytest.raises(ConfigError, match="no rows yet"):
        numbers([tiny_run(tmp_path / "empty")])
    run = run_of(tmp_path / "x", 1.0, [1.0])
    with pytest.raises(ConfigError, match="leave --count out"):
        numbers([run], 3)
    other = run_of(tmp_path / "y", 1.0, [1.0], image_size=4)
    with pytest.raises(ConfigError, match="digits, 1x4x4"):
        numbers([run, other])


def test_other_differences_are_told(tmp_path):
    runs = [
        run_of(tmp_path / "0", 0.0, [1.0], sgld_steps=3),
        run_of(tmp_path / "2", 2.0, [1.0], sgld_steps=5, step=9),
        run_of(tmp_path / "3", 3.0, [1.0], most_steps=4, start_from="x", precision="bfloat16"),
    ]
    assert numbers(runs[:2]).attrs["note"] == (
        "The runs differ in more than β*: sgld steps 3, 5; most sgld steps 3, 5; updates 6, 9."
    )
    assert numbers(runs[::2]).attrs["note"] == (
        "The runs differ in more than β*: most steps 1, 4; start from None, x; "
        "precision float32, bfloat16."
    )
    assert not numbers(runs[:1]).attrs["note"]
