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

from ebmguard.errors import ConfigError
from ebmguard.reference_training.engine.run_folder import RunFolder
from ebmguard.reference_training.studies import command, toy
from ebmguard.reference_training.studies.command import find, told
from ebmguard.reference_training.studies.config import ToyFigure
from ebmguard.reference_training.studies.toy import (
    FIGURES,
    Spread,
    first_alert,
    load_run,
    members,
    training,
)
from ebmguard.reference_training.toy.config import ToyConfig
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


def test_what_diverged_is_told_with_when_and_when_the_guard_first_alerted(numbers):
    """The other numbers of such rows are in numbers.json."""
    frame = numbers("2", betas=("0", "0.5"), scenarios=("gmm-default",), diverged={"0": 900})
    assert str(frame["kl"][0]) == "undefined"
    assert "| 0.438 [0.398, 0.478] |" in told(find("2"), frame)
    assert frame["about"][0] == "gmm-default: 10,000 updates, 3 seeds"
    lost = frame.iloc[0]
    assert (lost["first lost at"], lost["alerted"], lost["first alert at"]) == (900, 3, 897)
    assert "ERROR at 897:" in lost["picture"]["instead"]
    assert frame["first lost at"][1] is None


def test_the_claim_on_beta_follows_the_numbers(numbers):
    kl = numbers("2", betas=("0", "0.5"))["kl of seeds"]
    # As made up: 8 exp(-6 β).
    assert kl.tolist() == [None, pytest.approx(math.exp(-3))] * 2
    lost = pd.Series([None, 1.1, None, math.nan], dtype=object)
    for ratios, words in ((kl, "holds"), (lost, "cannot be told"), (lost.fillna(2), "does not")):
        said = find("2").verdict(pd.DataFrame({"kl of seeds": ratios}))
        assert f"is below its own at β = 0: {words}" in said


def test_reads_members_grids_and_alerts(tmp_path):
    own: dict[str, Any] = {"betas": ("0", "0.5"), "variants": ("default", "no_pos"), "seeds": 3}
    config = ToyConfig(out=tmp_path / "run", scenario="circles-shifted", **own)
    write_run(config, diverged={"0": 1200}, resolution=20, samples=50)
    run = load_run(config.out)
    assert (run.scenario, run.settings["data"]) == ("circles-shifted", "circles")
    assert run.negative_energy.shape == (12, 20, 20)
    assert run.samples.shape == (12, 50, 2)
    assert run.axis.tolist() == pytest.approx(np.linspace(-4.6, 4.6, 20).tolist())
    # Variant-major, then β, then seed.
    assert run.members.loc[9, ["beta", "variant", "seed"]].tolist() == ["0.5", "no_pos", 0]
    assert len(run.evaluations) == 24
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
    assert "resuming gmm-degenerate" in printed
    assert "training circles-degenerate" in printed
    assert f"picture: {tmp_path / 'figure_8.png'}\n" in printed
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results["rows"]) == 2 * 4
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
    with pytest.raises(ConfigError, match="betas: "):
        command.run(ToyFigure(name="5", out=tmp_path, seeds=2, iterations=300))
    with pytest.raises(ConfigError, match="seeds"):
        command.run(ToyFigure(name="2", out=tmp_path / "new", seeds=0))
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
