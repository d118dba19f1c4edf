"""The published numbers agree with each other and with what the text says of them."""

from __future__ import annotations

import pytest

from ebmguard.reference_training.jem.paper import TABLE_1, TABLE_2
from ebmguard.reference_training.jem.scenarios import SCENARIOS


def test_the_first_line_of_table_2_is_the_best_of_table_1():
    line = TABLE_2["1"]
    assert line.at_zero == TABLE_1[0.0]
    others = {beta_star: scores for beta_star, scores in TABLE_1.items() if beta_star}
    for metric, pick in (("accuracy", max), ("inception", max), ("fid", min)):
        values = {beta_star: getattr(scores, metric) for beta_star, scores in others.items()}
        best = pick(values, key=values.__getitem__)
        assert getattr(line.best_beta_star, metric) == best
        assert getattr(line.best, metric) == values[best]


def test_where_beta_is_better_in_table_2():
    lines = TABLE_2.values()
    assert [line.best.accuracy > line.at_zero.accuracy for line in lines].count(True) == 7
    assert [line.best.inception > line.at_zero.inception for line in lines].count(True) == 7
    assert [line.best.fid < line.at_zero.fid for line in lines].count(True) == 4


def test_table_1_prints_beta():
    scale = SCENARIOS["1"].output_scale
    assert scale == 20_000
    printed = ["0.000000", "0.000025", "0.000050", "0.000100", "0.000200", "0.000500"]
    assert [f"{beta_star / scale:.6f}" for beta_star in TABLE_1] == printed


@pytest.mark.parametrize(
    ("scenario", "name", "factor"),
    [
        ("2", "sgld_steps", 5 / 20),
        ("3", "n_neg", 8 / 64),
        ("4", "output_scale", 2),
        ("5", "output_scale", 0.5),
    ],
)
def test_a_setup_says_what_its_scenario_changes(scenario, name, factor):
    changed, default = (getattr(SCENARIOS[key], name) for key in (scenario, "1"))
    assert changed / default == pytest.approx(factor)
    word = {"sgld_steps": "20 → 5", "n_neg": "64 → 8"}.get(name, f"output scale × {factor:g}")
    assert word in TABLE_2[scenario].setup


@pytest.mark.parametrize(("scenario", "factor"), [("6", 4), ("7", 0.25)])
def test_a_setup_says_how_the_step_size_changes(scenario, factor):
    # The paper's α is the variance of the noise.
    ratio = (SCENARIOS[scenario].noise_std / SCENARIOS["1"].noise_std) ** 2
    assert ratio == pytest.approx(factor)
    assert f"step size × {factor:g}" in TABLE_2[scenario].setup
