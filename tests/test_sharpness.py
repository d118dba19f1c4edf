"""The study of S: its measures against others' and closed forms, and its rows against the guard."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy.stats import mannwhitneyu

from benchmarks import sharpness
from benchmarks.grid import RESULTS, filled, read_rows
from benchmarks.why_lost import NETWORKS


def row(tens: list[float]) -> dict[str, dict[str, list[float]]]:
    return {"tens": {"S": tens}}


def test_an_area_is_that_of_mann_and_whitney():
    rng = np.random.default_rng(0)
    one, other = rng.normal(1, 1, 12).round(1), rng.normal(0, 1, 9).round(1)
    found = sharpness.pairs([row([x] * 12) for x in one], [row([x] * 30) for x in other], "S", 5)
    assert found.mean() == pytest.approx(mannwhitneyu(one, other).statistic / (12 * 9))


def test_living_runs_are_looked_at_where_the_others_die():
    rises = row([float(x) for x in range(30)])
    for blocks, back, middle in ((12, 5, 9.0), (12, 10, 4.0), (60, 5, 27.0)):
        for near, area in ((middle - 0.1, 0.0), (middle, 0.5), (middle + 0.1, 1.0)):
            assert sharpness.pairs([row([near] * blocks)], [rises], "S", back)[0, 0] == area


def test_blocks_end_with_the_run():
    assert sharpness.in_tens(pd.Series(range(25), dtype=float)) == [9.5, 19.5]


@pytest.mark.parametrize("curvature", [0.1, 1.5])
def test_the_guard_reads_step_times_curvature_of_a_quadratic(curvature):
    # S - c is c √2 Σ⟨g, ξ⟩ / Σ⟨g, g⟩, with g² = 2c / (2 - c) in equilibrium.
    squares = 256 * 49 * 64 * 2 * curvature / (2 - curvature)
    error = curvature * (2 / squares) ** 0.5
    assert sharpness.quadratic(curvature)["S"] == pytest.approx(curvature, abs=4 * error)


@pytest.mark.parametrize("network", NETWORKS)
def test_the_guard_acts_where_the_rows_of_the_unguarded_run_pass_1(network):
    rows = {x["cell"]: x for x in read_rows(RESULTS / "sharpness.csv.gz")}
    plain, guarded = (rows[f"{network}_{arm}_s0"] for arm in ("published", "auto"))
    acts = next(i for i, n in enumerate(guarded["N"]) if n > 1)
    assert guarded["rows"][:acts] == plain["rows"][:acts]
    assert sharpness.first_over(plain) == acts - 1
    assert (plain["fate"], guarded["fate"]) == ("dead", "healthy")


def test_the_tables_of_the_page_are_those_of_its_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(sharpness, "PICTURE", tmp_path / "sharpness.png")
    text = (RESULTS / "sharpness.md").read_text(encoding="utf-8")
    rows = read_rows(RESULTS / "sharpness.csv.gz")
    assert {x["cell"] for x in rows} == {*sharpness.CELLS}
    assert filled(text, sharpness.slots(rows), whole=False) == text
    assert (tmp_path / "sharpness.png").is_file()
