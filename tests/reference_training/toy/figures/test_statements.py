"""Tables and sentences follow the numbers, whichever way these went."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest

from ebmguard.reference_training.toy.config import ToyConfig
from ebmguard.reference_training.toy.figures import oracle, table
from ebmguard.reference_training.toy.figures.runs import load_run
from ebmguard.reference_training.toy.figures.specs import FIGURES, FigureSpec
from ebmguard.reference_training.toy.figures.statements import statements
from tests.reference_training.toy.figures.fabricate import made_up, write_run


def spec_of(betas=("0", "0.5"), variants=("default",)):
    return FigureSpec(
        name="x",
        title="A figure",
        scenarios=("gmm-default",),
        betas=betas,
        seeds=3,
        variants=variants,
    )


def run_of(tmp_path, spec, metrics=made_up, diverged=None):
    config = ToyConfig(
        out=tmp_path / "run",
        scenario="gmm-default",
        betas=spec.betas,
        variants=spec.variants,
        seeds=spec.seeds,
    )
    write_run(config, metrics=metrics, diverged=diverged, resolution=4, samples=4)
    return {"gmm-default": load_run(config.out)}


def kl_by(values):
    """Metrics with a KL from a table of variant -> one value a seed."""

    def metrics(beta: str, variant: str, seed: int) -> dict[str, Any]:
        return made_up(beta, variant, seed) | {"kl": values[variant][seed]}

    return metrics


def test_the_ratio_is_the_median_of_the_seeds_own_ratios(tmp_path):
    values = {"0": (10.0, 100.0, 30.0), "0.5": (1.0, 50.0, 0.1)}

    def metrics(beta: str, variant: str, seed: int) -> dict[str, Any]:
        own = {"kl": values[beta][seed], "kl_sgld": 0.1 * (seed + 1) * (1 + 4 * float(beta))}
        return made_up(beta, variant, seed) | own

    spec = spec_of()
    said = statements(spec, run_of(tmp_path, spec, metrics))
    # Ratios 10, 2 and 300: not the ratio of the medians, 30.
    assert "KL(p_d‖p_θ) at β = 0 over the one at β: 10 at 0.5." in said[0]
    assert "KL of SGLD(p_θ) at β over the one at β = 0: 3 at 0.5." in said[0]
    assert said[1] == "gmm-default: none of 6 members diverged."


def test_no_ratio_of_samples_to_those_that_have_left_the_plane(tmp_path):
    def metrics(beta: str, variant: str, seed: int) -> dict[str, Any]:
        return made_up(beta, variant, seed) | ({"kl_sgld": math.inf} if beta == "0" else {})

    spec = spec_of()
    said = statements(spec, run_of(tmp_path, spec, metrics))
    assert "KL of SGLD(p_θ) is not finite at β = 0." in said[0]
    assert "at β over the one at β = 0" not in said[0]


def test_divergence_is_told_with_the_guards_first_alert(tmp_path):
    spec = spec_of()
    said = statements(spec, run_of(tmp_path, spec, diverged={"0": 1200}))
    assert said == [
        "gmm-default: at β = 0 KL(p_d‖p_θ) is undefined, and so is every ratio to it.",
        "gmm-default: at β = 0 3 of 3 seeds diverged, the first at update 1,200; the guard alerted "
        "on 3 of them, first at update 1,197 (energy_blowup). No other member diverged.",
    ]


def test_a_ratio_to_members_that_diverged_says_so(tmp_path):
    def metrics(beta: str, variant: str, seed: int) -> dict[str, Any]:
        lost = beta == "0" and seed < 2
        return made_up(beta, variant, seed) | {"diverged_at": 30 if lost else None}

    spec = spec_of()
    said = statements(spec, run_of(tmp_path, spec, metrics))
    assert "at β = 0 (2 of 3 seeds diverged there) over the one at β: 20 at 0.5." in said[0]
    assert "2 of 3 seeds diverged, the first at update 30; the guard alerted on 0" in said[1]


@pytest.mark.parametrize(
    ("values", "beta_says", "claim_says"),
    [
        (
            {"default": (1.0, 1.1, 1.2), "no_pos": (2.0, 2.2, 2.4)},
            "median KL 1.1 for default, 2.2 for no pos (2 times, spreads apart). A lower median "
            "than the default's: no other variant.",
            "is the lowest at 1 of 1 β (0.5); its seeds are apart from all others' at 1 of 1 β "
            "(0.5). The claim that the default is at least as good as every other variant holds",
        ),
        (
            {"default": (1.0, 1.1, 1.2), "no_pos": (1.1, 1.21, 1.3)},
            "1.2 for no pos (1.1 times, spreads overlap)",
            "apart from all others' at 0 of 1 β. The claim that the default is at least as good "
            "as every other variant holds for these medians.",
        ),
        (
            {"default": (1.0, 1.1, 1.2), "no_pos": (0.9, 1.0, 1.1)},
            "A lower median than the default's: no pos.",
            "is not refuted: no pos at β = 0.5 is better, but within the spread of seeds.",
        ),
        (
            {"default": (1.0, 1.1, 1.2), "no_pos": (0.1, 0.11, 0.2)},
            "0.11 for no pos (0.1 times, spreads apart). A lower median than the default's: no pos",
            "does not hold: beyond the spread of seeds no pos at β = 0.5 is better.",
        ),
        (
            {"default": (1.0, 1.1, 1.2), "no_pos": (math.nan,) * 3},
            "undefined for no pos (undefined times, spreads apart)",
            "holds for these medians.",
        ),
        (
            {"default": (math.nan,) * 3, "no_pos": (1.0, 1.1, 1.2)},
            "A lower median than the default's: no pos.",
            "does not hold: beyond the spread of seeds no pos",
        ),
        (
            {"default": (math.nan,) * 3, "no_pos": (math.nan,) * 3},
            "A lower median than the default's: no other variant.",
            "is the lowest at 0 of 1 β; its seeds are apart from all others' at 0 of 1 β. The "
            "claim that the default is at least as good as every other variant cannot be judged",
        ),
        (
            {"default": (1.0, 1.1, 1.2), "no_pos": (1.2, 1.1, 1.0)},  # a tie
            "A lower median than the default's: no other variant.",
            "is the lowest at 1 of 1 β (0.5); its seeds are apart from all others' at 0 of 1 β. "
            "The claim that the default is at least as good as every other variant holds",
        ),
    ],
)
def test_the_claim_on_the_default_variant_follows_the_numbers(
    tmp_path, values, beta_says, claim_says
):
    spec = spec_of(betas=("0", "0.5"), variants=("default", "no_pos"))
    _, by_beta, claim, _ = statements(spec, run_of(tmp_path, spec, kl_by(values)))
    assert by_beta.startswith("gmm-default, β = 0.5: ")
    assert beta_says in by_beta
    assert claim_says in claim


@pytest.mark.parametrize(
    ("other", "says"),
    [(2.0, "at 1 of 1 β (0.5). The"), (0.5, "at 0 of 1 β. no pos at β = 0.5 is better. The")],
)
def test_one_seed_has_no_spread_to_judge_by(tmp_path, other, says):
    spec = dataclasses.replace(spec_of(betas=("0.5",), variants=("default", "no_pos")), seeds=1)
    values = {"default": (1.0,), "no_pos": (other,)}
    _, claim, _ = statements(spec, run_of(tmp_path, spec, kl_by(values)))
    assert claim == (
        f"gmm-default: the default's median KL is the lowest {says} claim that the default is at "
        "least as good as every other variant needs more seeds than one."
    )


def test_the_claim_is_for_what_is_defined(tmp_path):
    def metrics(beta: str, variant: str, seed: int) -> dict[str, Any]:
        return made_up(beta, variant, seed) | ({"kl": math.nan} if beta == "0.9" else {})

    spec = spec_of(betas=("0.5", "0.9"), variants=("default", "no_pos"))
    *_, claim, _ = statements(spec, run_of(tmp_path, spec, metrics))
    assert "is the lowest at 1 of 2 β (0.5); " in claim
    assert claim.endswith("every other variant holds for the medians that are defined.")


def test_seeds_that_are_lost_at_beta_are_no_gain(tmp_path):
    values = {"0": (10.0, 20.0, math.nan), "0.5": (1.0, math.nan, math.nan)}

    def metrics(beta: str, variant: str, seed: int) -> dict[str, Any]:
        return made_up(beta, variant, seed) | {"kl": values[beta][seed]}

    spec = spec_of()
    said = statements(spec, run_of(tmp_path, spec, metrics))
    # Gains of 10, none and none: not a median of infinitely many times.
    assert "over the one at β: 0 at 0.5." in said[0]


def test_beaten_within_and_beyond_the_spread(tmp_path):
    values = {
        "default": (1.0, 1.1, 1.2),
        "no_pos": (0.1, 0.2, 0.3),
        "batch": (0.9, 1.0, 1.1),
    }
    spec = spec_of(betas=("0.5",), variants=("default", "no_pos", "batch"))
    _, claim, _ = statements(spec, run_of(tmp_path, spec, kl_by(values)))
    assert claim.endswith(
        "beyond the spread of seeds no pos at β = 0.5 is better, within it batch corr at β = 0.5."
    )


def test_the_tables_have_a_line_for_each_variant_and_beta(tmp_path):
    spec = spec_of(variants=("default", "true"))
    runs = run_of(tmp_path, spec, diverged={"0": 900})
    head, *lines = table.cells(spec, runs["gmm-default"])
    assert head[:3] == ["variant", "β", "KL(p_d‖p_θ)"]
    assert [line[:2] for line in lines] == [
        ["default", "0"],
        ["default", "0.5"],
        ["true obj", "0"],
        ["true obj", "0.5"],
    ]
    assert lines[0][2] == "undefined"
    assert lines[0][-1] == "3 of 3"
    assert lines[1][2] == "0.438 [0.398, 0.478]"
    assert lines[1][-1] == "0 of 3"
    text = table.text(spec, runs)
    assert text.startswith("## gmm-default: ")
    assert "updates, 3 seeds" in text
    page = table.page(spec, runs, ["One sentence.", "Another."])
    assert re.search(r"\| true obj +\| 0.5 +\| +0.526 \[0.478, 0.574\] \|", page)
    assert page.endswith("- One sentence.\n- Another.\n")
    row = table.rows(spec, runs["gmm-default"])[1]
    assert row["kl"] == pytest.approx({"median": 0.438, "low": 0.398, "high": 0.478}, abs=1e-3)
    assert (row["diverged"], row["seeds"]) == (0, 3)


def test_a_table_of_one_variant_does_not_name_it(tmp_path):
    spec = spec_of()
    assert table.cells(spec, run_of(tmp_path, spec)["gmm-default"])[0][0] == "β"


def test_figure_9_says_how_close_the_optimum_came(tmp_path, monkeypatch):
    spec = FIGURES["9"]
    runs = {}
    for scenario in spec.scenarios:
        config = ToyConfig(out=tmp_path / scenario, scenario=scenario, betas=spec.betas, seeds=3)
        write_run(config, resolution=4, samples=4)
        runs[scenario] = load_run(config.out)
    # The table's own tests show what it reaches; it takes seconds for each β.
    monkeypatch.setattr(
        oracle, "oracle_r2", lambda distribution, beta, resolution: 1 - distribution.limit * beta
    )
    said = statements(spec, runs)
    (single,) = (s for s in said if s.startswith("circles-degenerate, 1 negative: R²"))
    # The made-up value is 0.9 + β / 10 for the first seed, 0.01 less for each further one.
    assert "(log p_d − log q)/β + c: 0.9 at 0.1, 0.92 at 0.3, 0.94 at 0.5, 0.96" in single
    assert any(
        s.startswith("gmm-proposal, 100 negatives, decaying rate: R², weighted by p_d")
        for s in said
    )
    gmm, circles = said[-2:]
    assert gmm.startswith("GMM: a table of 40 cells a side")
    assert gmm.endswith("has R² 0.520000 at 0.3, 0.200000 at 0.5 and -0.440000 at 0.9.")
    assert circles.startswith("circles: a table")


def test_the_optimum_has_a_column_where_it_is_known(tmp_path):
    spec = FIGURES["8"]
    scenario = "gmm-degenerate"
    config = ToyConfig(out=tmp_path / "a", scenario=scenario, betas=("0", "0.5"), seeds=3)
    write_run(config, resolution=4, samples=4)
    fixed = dataclasses.replace(spec, betas=("0", "0.5"), variants=("default",))
    run = load_run(config.out)
    head, zero, half = table.cells(fixed, run)
    column = head.index("R² to the optimum")
    assert (zero[column], half[column]) == ("undefined", "0.94 [0.93, 0.95]")
    assert table.rows(fixed, run)[1]["oracle_r2"]["median"] == pytest.approx(0.94)
    assert "R² to the optimum: of the learned" in table.legend(fixed, {scenario: run})
    other = run_of(tmp_path, spec_of())
    assert "R² to the optimum" not in table.cells(spec_of(), other["gmm-default"])[0]
    assert "oracle_r2" not in table.rows(spec_of(), other["gmm-default"])[0]
    assert "optimum" not in table.legend(spec_of(), other)


def test_every_figure_can_be_trained_as_it_is_specified(tmp_path):
    for spec in FIGURES.values():
        for scenario in spec.scenarios:
            ToyConfig(
                out=tmp_path,
                scenario=scenario,
                betas=spec.betas,
                variants=spec.variants,
                seeds=spec.seeds,
            ).check()
