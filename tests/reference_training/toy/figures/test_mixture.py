"""Figures of several samplers: what is said of each run beside the first, and the curves."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from ebmguard.reference_training.toy.figures import command, table
from ebmguard.reference_training.toy.figures.config import FigureConfig
from ebmguard.reference_training.toy.figures.curves import draw_curves
from ebmguard.reference_training.toy.figures.mixture import compare_samplers, weight_on_the_good
from ebmguard.reference_training.toy.figures.panels import pictures
from ebmguard.reference_training.toy.figures.runs import GOOD_WEIGHT, load_run
from ebmguard.reference_training.toy.figures.statements import statements
from ebmguard.sinks import read_jsonl
from tests.reference_training.toy.figures.fabricate import KL_AT_ZERO, made_up, write_run


def fabricate(tmp_path, name="mixture", *, kl=None, seeds=3, betas=("0", "0.5")):
    """A figure's runs; `kl` is of (scenario, beta, seed)."""
    config = FigureConfig(name=name, out=tmp_path, seeds=seeds)
    spec = dataclasses.replace(config.spec, betas=betas)
    runs = {}
    for scenario in spec.scenarios:

        def metrics(beta, variant, seed, scenario=scenario):
            own = {"kl": kl(scenario, beta, seed)} if kl else {}
            return made_up(beta, variant, seed) | own

        training = dataclasses.replace(config.training(scenario), betas=betas)
        write_run(training, metrics=metrics, resolution=8, samples=5)
        runs[scenario] = load_run(training.out)
    return spec, runs


def test_means_and_seeds_own_ratios_are_both_told(tmp_path):
    values: dict[str, dict[str, tuple[float, ...]]] = {
        "gmm-default": {"0": (1, 1, 1), "0.5": (1, 2, 3)},
        "gmm-good+exploding": {"0": (1e9, 1, 1), "0.5": (1.5, 2.2, 3.3)},
        "gmm-exploding": {"0": (1, 1, math.nan), "0.5": (10, 20, 30)},
    }
    spec, runs = fabricate(tmp_path, kl=lambda scenario, beta, seed: values[scenario][beta][seed])
    first, mixture, alone = runs.values()
    # Of the means 7 / 6; of the seeds 1.5, 1.1 and 1.1.
    assert compare_samplers(spec, first, mixture) == (
        "gmm-good+exploding: KL(p_d‖p_θ) over the one of gmm-default, ratio of the means over "
        "seeds: 3.33e+08 at 0 and 1.17 at 0.5; median of the seeds' own ratios: 1 at 0 and 1.1 at "
        "0.5. The means are at most 20% above it at β = 0.5; further above at β = 0."
    )
    lost = compare_samplers(spec, first, alone)
    assert "undefined at 0 and 10 at 0.5" in lost
    assert lost.endswith("The means are further above at β = 0 and 0.5.")


@pytest.mark.parametrize(("ratio", "as_well"), [(0.5, True), (1.2, True), (1.21, False)])
def test_as_well_is_a_fifth_above_or_better(tmp_path, ratio, as_well):
    def kl(scenario, beta, seed):
        return ratio if "+" in scenario else 1.0

    spec, runs = fabricate(tmp_path, kl=kl, seeds=1, betas=("0.5",))
    first, mixture, _ = runs.values()
    verdict = "at most 20% above it at β = 0.5." if as_well else "further above at β = 0.5."
    assert compare_samplers(spec, first, mixture).endswith(f"The means are {verdict}")


def test_the_weight_is_a_mean_over_the_whole_training(tmp_path):
    spec, _ = fabricate(tmp_path)
    file = tmp_path / "gmm-good+exploding" / "members.jsonl"
    rows = [
        row | {GOOD_WEIGHT: 0.6 if row["step"] == 100 else 0.9 + 0.01 * row["member"]}
        for row in read_jsonl(file)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = load_run(file.parent)
    # Members 0 to 2 are of β = 0, members 3 to 5 of β = 0.5.
    assert weight_on_the_good(spec, run).endswith("seeds: 0.755 at 0 and 0.77 at 0.5.")
    del rows[-1][GOOD_WEIGHT]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert weight_on_the_good(spec, load_run(file.parent)).endswith("undefined at 0.5.")


def test_every_run_is_compared_with_the_first_and_the_trade_off_is_left_out(tmp_path):
    spec, runs = fabricate(tmp_path)
    said = statements(spec, runs)
    assert [sentence.partition(": ")[0] for sentence in said] == [
        "gmm-default",
        *["gmm-good+exploding"] * 3,
        *["gmm-exploding"] * 2,
    ]
    assert [sentence.startswith("gmm-") and "diverged" in sentence for sentence in said] == [
        True,
        *(False, False, True),
        *(False, True),
    ]


def test_the_weight_has_a_column_where_there_is_a_mixture(tmp_path):
    spec, runs = fabricate(tmp_path)
    heads = [table.cells(spec, run)[0] for run in runs.values()]
    assert [("weight on the good" in head, "GradScale" in head) for head in heads] == [
        (False, True),
        (True, True),
        (False, True),
    ]
    row = table.rows(spec, runs["gmm-good+exploding"])[1]
    assert row[GOOD_WEIGHT]["median"] == 0.75
    assert "always that of the good sampler" in table.legend(spec, runs)


def test_the_bands_say_who_draws(tmp_path):
    spec, runs = fabricate(tmp_path, "broken", seeds=1)
    (picture,) = pictures(spec, runs)
    assert [band.label for band in picture.bands] == [
        "GMM\ngood: 20",
        "GMM\ngood + lost: 20 each",
        "GMM\nlost: 20",
        "GMM\ngood + stuck: 20 each",
        "GMM\nstuck: 20",
        "GMM\ngood + exploding: 10 each",
        "GMM\ngood: 10",
    ]


def test_curves_are_medians_over_seeds_with_their_range(tmp_path):
    spec, runs = fabricate(tmp_path)
    figure = draw_curves(spec, runs)
    kl_at_zero, kl, weight_at_zero, weight = figure.axes
    assert [axes.get_title() for axes in (kl_at_zero, kl)] == ["β = 0", "β = 0.5"]
    assert kl.get_yscale() == "log"
    for axes, beta in ((kl_at_zero, 0.0), (kl, 0.5)):
        assert len(axes.lines) == 3
        for line in axes.lines:
            assert np.asarray(line.get_xdata()).tolist() == [100, 200]
            expected = KL_AT_ZERO * math.exp(-6 * beta) * 1.1
            np.testing.assert_allclose(np.asarray(line.get_ydata()), expected)
        ends = axes.collections[0].get_paths()[0].vertices[:, 1]
        assert (ends.min(), ends.max()) == pytest.approx((expected / 1.1, expected / 1.1 * 1.2))
    # Only the mixture has a weight; the other line is its share of the negatives.
    for axes, share in ((weight_at_zero, 0.5), (weight, 0.75)):
        mixture, expected_share = axes.lines
        assert np.asarray(mixture.get_ydata()).tolist() == [share, share]
        assert set(expected_share.get_ydata()) == {0.5}
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "good: 20",
        "good + exploding: 20 each",
        "exploding: 20",
    ]
    FigureCanvasAgg(figure).draw()


def test_no_two_curves_look_alike(tmp_path):
    spec, runs = fabricate(tmp_path, "broken", seeds=1)
    lines = draw_curves(spec, runs).axes[0].lines
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(runs)


def test_members_that_diverged_do_not_flatten_the_others(tmp_path):
    def kl(scenario, beta, seed):
        return {"gmm-default": 1.0, "gmm-exploding": 1e20}.get(scenario, math.inf)

    spec, runs = fabricate(tmp_path, kl=kl)
    axes = draw_curves(spec, runs).axes[0]
    assert axes.get_ylim()[1] == 1e3
    assert np.isnan(np.asarray(axes.lines[1].get_ydata())).all()


def test_members_that_diverged_are_counted(tmp_path):
    spec, runs = fabricate(tmp_path)
    run = runs["gmm-exploding"]
    members = (*(dataclasses.replace(m, diverged_at=7) for m in run.members[:2]), *run.members[2:])
    runs["gmm-exploding"] = dataclasses.replace(run, members=members)
    at_zero, at_half, *_ = draw_curves(spec, runs).axes
    assert [text.get_text() for text in at_zero.texts] == ["2 of 3 diverged: exploding"]
    assert not at_half.texts


def test_the_curves_stand_in_the_place_of_the_trade_off(tmp_path, monkeypatch, capsys):
    def train_run(config):
        write_run(config, resolution=8, samples=5)
        return {}

    monkeypatch.setattr(command, "train_run", train_run)
    assert command.run(FigureConfig(name="mixture", out=tmp_path, seeds=1)) == 0
    assert sorted(file.name for file in tmp_path.glob("*.png")) == [
        "curves.png",
        "figure_mixture.png",
    ]
    assert "weight on the good" in capsys.readouterr().out
