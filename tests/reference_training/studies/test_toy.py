"""Toy figures: their numbers, the claims on them, what pictures show, and which runs they train."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import gaussian_kde

from ebmguard.errors import ConfigError
from ebmguard.reference_training.engine.run_folder import RunFolder
from ebmguard.reference_training.studies import command, toy
from ebmguard.reference_training.studies.config import ToyFigure
from ebmguard.reference_training.studies.toy import (
    FIGURES,
    Spread,
    default_is_best,
    first_alert,
    load_run,
    members,
    one_good_is_enough,
    over,
    training,
)
from ebmguard.reference_training.toy.config import ToyConfig
from ebmguard.reference_training.toy.distributions import DISTRIBUTIONS
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
        # One of three is lost: the median is the worse of the other two, and the loss shows.
        ([0.5, math.nan, 0.25], 0.5, 0.25, math.nan, "0.5 [0.25, undefined]"),
        ([math.nan, math.nan, 0.1], math.nan, 0.1, math.nan, "undefined [0.1, undefined]"),
    ],
)
def test_median_and_range(values, median, low, high, text):
    spread = Spread.of(values)
    assert tuple(spread) == pytest.approx((median, low, high), nan_ok=True)
    assert str(spread) == text


@pytest.mark.parametrize(
    ("base", "own", "means", "seeds"),
    [
        # Ratios 0.1, 0.5 and 1/300: neither their mean nor the ratio of medians, 1/30.
        ((10, 100, 30), (1, 50, 0.1), 51.1 / 140, 0.1),
        # A seed that is lost is worse than any number; nothing is known where both are.
        ((10, 20, math.nan), (1, math.nan, math.nan), math.nan, math.inf),
        ((1e9, 1, 1), (1, 1.1, 1.2), 3.3 / (1e9 + 2), 1.1),
    ],
)
def test_ratios_are_of_means_and_of_the_same_seeds(base, own, means, seeds):
    frames = (pd.DataFrame({"kl": kl, "kl_sgld": kl}, dtype=float) for kl in (base, own))
    expected = {"kl over": means, "kl of seeds": seeds, "kl_sgld of seeds": seeds}
    assert over(*frames) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("default", "other", "held"),
    [
        # Better, but within the spread of seeds; and beyond it.
        ((1.0, 1.1, 1.2), (0.9, 1.0, 1.1), True),
        ((1.0, 1.1, 1.2), (0.1, 0.11, 0.2), False),
        ((math.nan,) * 3, (1.0, 1.1, 1.2), False),
        ((math.nan,) * 3, (math.nan,) * 3, None),
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


@pytest.mark.parametrize(
    ("ratio", "held"), [(0.5, True), (1.2, True), (1.21, False), (math.nan, None)]
)
def test_as_well_is_a_fifth_above_or_better(numbers, ratio, held):
    def kl(scenario: str, *_: str) -> tuple[float]:
        return (ratio if "+" in scenario else 1.0,)

    frame = numbers("mixture", kl, ("0.5",), seeds=1)
    assert frame["kl over"].tolist()[0] is None
    assert one_good_is_enough(frame) is held


def test_densities_are_those_of_the_model_its_samples_and_the_truth(numbers, tmp_path):
    frame = numbers("2", None, ("0", "0.5"), ("gmm-default",), resolution=80, samples=500)
    row, run = frame.iloc[1], load_run(tmp_path / "gmm-default")
    cell = float(run.axis[1] - run.axis[0]) ** 2
    (truth, log_truth), (learned, _), (sampled, _) = (
        [shown for shown, _ in row["picture"][name]] for name in ("truth", "learned", "sampled")
    )
    np.testing.assert_allclose(log_truth, np.log(truth + 1e-10))
    assert truth.shape == (80, 80)
    assert truth.sum() * cell == pytest.approx(1, abs=1e-3)
    # The made-up energies are the true log density times a slope.
    power = truth ** made_up("0.5", "default", 0)["energy_scale"]
    bright = truth > 0.01
    np.testing.assert_allclose(learned[bright], (power / power.sum() / cell)[bright], rtol=1e-3)
    # Rows are y, columns are x: the kernel estimate of scipy at the points (x, y).
    x, y = np.meshgrid(run.axis[::8], run.axis[::8])
    index = run.members.index[run.members["beta"] == "0.5"][0]
    samples = run.samples[index].astype(np.float64)
    published = gaussian_kde(samples.T, bw_method=DISTRIBUTIONS["gmm"].kde_factor)
    expected = published(np.stack([x.ravel(), y.ravel()])).reshape(x.shape)
    assert np.abs(sampled[::8, ::8] - expected).max() < 0.1 * expected.max()


def test_reads_members_grids_and_alerts(tmp_path):
    own: dict[str, Any] = {"betas": ("0", "0.5"), "variants": ("default", "no_pos"), "seeds": 3}
    config = ToyConfig(out=tmp_path / "run", scenario="circles-shifted", **own)
    write_run(config, diverged={"0": 1200}, resolution=20, samples=50)
    run = load_run(config.out)
    # Variant-major, then β, then seed.
    assert run.members.loc[9, ["beta", "variant", "seed"]].tolist() == ["0.5", "no_pos", 0]
    # What is not a number in JSON is one here: words, and what is left open.
    lost = ([True] * 3 + [False] * 3) * 2
    assert run.members["kl"].isna().tolist() == lost
    assert (run.members["diverged_at"] == 1200).tolist() == lost
    alert = first_alert(run, 1)
    assert alert is not None
    # Not the INFO before it, nor the first seed's.
    assert (alert["level"], alert["step"], alert["member"]) == ("ERROR", 1198, 1)
    assert first_alert(run, 9) is None
    (config.out / "figures" / "grids.npz").unlink()
    with pytest.raises(ConfigError, match=r"grids\.npz is missing"):
        load_run(config.out)


@pytest.fixture
def trained(monkeypatch):
    """Replaces the training by a folder made by hand; lists the runs that were asked for."""
    asked = []

    def train_run(config):
        asked.append(config)
        if config.resume:
            shutil.rmtree(config.out)
        write_run(config, resolution=8, samples=5)
        return {}

    monkeypatch.setattr(toy, "train_run", train_run)
    return asked


def test_trains_what_is_missing_goes_on_with_what_is_begun_and_draws(trained, tmp_path, capsys):
    config = ToyFigure(name="8", out=tmp_path, seeds=2, iterations=50, device="cpu", threads=1)
    first, second = (training(config, own) for own in FIGURES["8"].scenarios)
    RunFolder.create(first.out, first.to_json())
    assert command.run(config) == 0
    assert trained == [dataclasses.replace(first, resume=True), second]
    assert (second.seeds, second.iterations, second.device, second.threads) == (2, 50, "cpu", 1)
    assert (second.betas, second.variants) == (FIGURES["8"].betas, FIGURES["8"].variants)
    for name in ("figure_8.png", "tradeoff.png"):
        assert (tmp_path / name).stat().st_size > 10_000
    printed = capsys.readouterr().out
    results = json.loads((tmp_path / "results.json").read_text())
    page = (tmp_path / "table.md").read_text()
    for line in ("| batch corr |", "in all seeds: holds.", results["verdict"]):
        assert line in page
        assert line in printed
    # The same command again trains nothing.
    assert command.run(config) == 0
    assert len(trained) == 2
    # One that is being made longer has the results of the shorter one.
    longer = dataclasses.replace(config, iterations=500)
    # As `ebmguard train toy --resume --iterations 500` leaves it where Ctrl-C stops it.
    settings = training(longer, first.scenario).to_json()
    (first.out / "config.json").write_text(json.dumps(settings))
    shutil.rmtree(second.out)
    assert command.run(longer) == 0
    assert [(asked.resume, asked.iterations) for asked in trained[2:]] == [
        (True, 500),
        (False, 500),
    ]


def test_ctrl_c_says_how_to_go_on(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(toy, "train_run", lambda config: None)
    config = ToyFigure(name="2", out=tmp_path, seeds=1, iterations=200, threads=1)
    assert command.run(config) == 130
    assert not (tmp_path / "results.json").exists()
    words = f"--out {tmp_path} --seeds 1 --iterations 200 --threads 1"
    assert f"go on with: ebmguard figure 2 {words}" in capsys.readouterr().out


def test_a_run_with_other_settings_is_refused_before_anything_is_trained(trained, tmp_path):
    other = ToyFigure(name="2", out=tmp_path, seeds=2, iterations=300)
    write_run(training(other, "circles-default"), resolution=8, samples=5)
    with pytest.raises(ConfigError) as refused:
        command.run(ToyFigure(name="2", out=tmp_path, seeds=1))
    assert "seeds: 2 there, 1 here" in str(refused.value)
    assert "iterations: 300 there, " in str(refused.value)
    RunFolder.create(tmp_path / "mixture1d-default", {"scenario": "digits"})
    with pytest.raises(ConfigError, match="scenario: digits there, mixture1d-default here"):
        command.run(ToyFigure(name="1d", out=tmp_path))
    assert trained == []


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_can_be_trained_as_it_is_specified(name: Any, tmp_path):
    for scenario in FIGURES[name].scenarios:
        # A short run is evaluated after every update.
        for iterations, evaluations in ((None, 20), (1, 1), (10, 10), (21, 20)):
            config = ToyFigure(name=name, out=tmp_path, iterations=iterations)
            own = training(config, scenario)
            own.check()
            assert own.evaluations == evaluations
    assert ToyFigure(name=name).folder.parts == ("figures", name)
