"""Foreseeing: scores without leaks, and the page is that of the rows that are kept."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

from benchmarks.foreseeing import (
    HORIZONS,
    PAGE,
    area,
    area_under_curve,
    asked,
    auc,
    by_lead,
    by_run,
    caught,
    false,
    false_alarms,
    interval,
    judge,
    states,
)
from benchmarks.grid import read_rows


def table_of(rng, signal):
    """Twelve runs of ten states each, half of them dying; a signal says how much is known."""
    lines = []
    for run in range(12):
        for i in range(10):
            lost_in = 20 * i + 5 if run % 2 else None
            near = 0 if lost_in is None else 1 - lost_in / 200
            lines.append(
                {
                    "run": f"r{run}",
                    "lives": not run % 2,
                    "lost within 50": float(bool(lost_in and lost_in <= 50)),
                    "lost within 100": float(bool(lost_in and lost_in <= 100)),
                    "known": -signal * near + rng.normal(),
                    "number": float(run),
                }
            )
    return pd.DataFrame(lines)


@pytest.mark.parametrize("features", [["known"], ["known", "number"]])
@pytest.mark.parametrize("horizon", HORIZONS, ids=str)
def test_what_is_known_is_found_and_what_is_not_is_not(features, horizon):
    rng = np.random.default_rng(0)
    strong, none = (judge(table_of(rng, s), horizon, features) for s in (1000, 0))
    assert auc(strong) > 0.95
    assert false(strong)[0] == 0
    assert caught(strong)[0] >= 0.5 * strong["doomed"].sum()
    assert [*by_run(strong)] == [f"r{run}" for run in range(1, 12, 2)]
    assert min(map(auc, by_run(strong).values())) > 0.9
    assert auc(none) < 0.75
    low, high = interval(none)
    assert low < auc(none) < high


def test_the_states_of_a_question():
    kept = table_of(np.random.default_rng(0), 1)
    counts = {str(h): (len(asked(kept, h)), asked(kept, h)["doomed"].sum()) for h in HORIZONS}
    # Of each of six dying runs three are lost within 50 steps, and five within 100.
    assert counts == {"within 50": (120, 18), "within 100": (120, 30), "50 to 100": (102, 12)}


def test_a_feature_that_is_unknown_now_and_then_is_no_problem():
    kept = table_of(np.random.default_rng(0), 50)
    kept.loc[::7, "known"] = math.nan
    for features in (["known"], ["known", "number"]):
        assert auc(judge(kept, HORIZONS[1], features)) > 0.8


def test_area_under_the_curve_with_ties():
    scores, labels = np.array([1.0, 2, 2, 2, 3, 3, 5]), np.array([0, 0, 1, 0, 1, 0, 1]) > 0
    assert area_under_curve(labels, scores) == pytest.approx(roc_auc_score(labels, scores))
    assert math.isnan(area_under_curve(labels[:2], scores[:2]))


def test_the_share_of_futures_that_are_lost():
    """One of five is not, and one later than 100 steps."""
    row: dict[str, Any] = {
        "cell": "a",
        "lives": False,
        "died": 9,
        "snapshots": [{"step": 1, "features": {"x": 2}}],
    }
    row["snapshots"][0]["deaths"] = [None, 40, 60, 100, 101]
    (line,) = states([row]).to_dict("records")
    assert (line["lost within 50"], line["lost within 100"], line["x"]) == (0.2, 0.6, 2)


def test_the_page_is_that_of_the_rows_that_are_kept():
    kept, text = states(read_rows(PAGE.with_suffix(".csv.gz"))), PAGE.read_text(encoding="utf-8")
    assert by_lead(kept) in text
    single = judge(kept, HORIZONS[-1], ["row/f_pos/std"])
    line = next(x for x in text.splitlines() if x.startswith("| `row/f_pos/std`"))
    assert f"| {area(single)} |" in line
    assert false_alarms(single) in line
