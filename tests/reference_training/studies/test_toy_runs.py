"""Which runs a toy figure takes, trains or refuses, and what it writes."""

from __future__ import annotations

import json
import shutil
from typing import Any

import numpy as np
import pytest

from ebmguard.errors import ConfigError
from ebmguard.reference_training.engine.run_folder import RunFolder
from ebmguard.reference_training.studies import command, toy
from ebmguard.reference_training.studies.config import ToyFigure
from ebmguard.reference_training.studies.toy import FIGURES, first_alert, load_run, training
from ebmguard.reference_training.toy.config import ToyConfig
from tests.reference_training.toy.fabricate import write_run


@pytest.fixture
def config(tmp_path):
    own: dict[str, Any] = {"betas": ("0", "0.5"), "variants": ("default", "no_pos")}
    return ToyConfig(out=tmp_path / "run", scenario="circles-shifted", seeds=3, **own)


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


def test_reads_members_grids_and_alerts(config):
    write_run(config, diverged={"0": 1200}, resolution=20, samples=50)
    run = load_run(config.out)
    assert (run.scenario, run.settings["data"]) == ("circles-shifted", "circles")
    assert run.negative_energy.shape == (12, 20, 20)
    assert run.samples.shape == (12, 50, 2)
    assert run.axis.tolist() == pytest.approx(np.linspace(-4.6, 4.6, 20).tolist())
    # Variant-major, then β, then seed.
    assert run.members.loc[9, ["beta", "variant", "seed"]].tolist() == ["0.5", "no_pos", 0]
    assert len(run.evaluations) == 24
    assert run.members["diverged_at"][1] == 1200
    # What is not a number in JSON is one here: words, and what is left open.
    assert run.members["kl"].isna().tolist() == [True] * 3 + [False] * 3 + [True] * 3 + [False] * 3
    assert run.members["diverged_at"].isna().sum() == 6
    alert = first_alert(run, 1)
    assert alert is not None
    # Not the INFO before it, nor the first seed's.
    assert (alert["level"], alert["step"], alert["member"]) == ("ERROR", 1198, 1)
    assert first_alert(run, 9) is None

    (config.out / "figures" / "grids.npz").unlink()
    with pytest.raises(ConfigError, match=r"grids\.npz is missing"):
        load_run(config.out)


def test_trains_what_is_missing_draws_and_tabulates(trained, tmp_path, capsys):
    config = ToyFigure(name="8", out=tmp_path, seeds=2, iterations=50, device="cpu", threads=1)
    assert command.run(config) == 0
    first = trained[0]
    assert [own.out for own in trained] == [tmp_path / own for own in FIGURES["8"].scenarios]
    assert (first.seeds, first.iterations, first.device, first.threads) == (2, 50, "cpu", 1)
    assert (first.betas, first.variants) == (FIGURES["8"].betas, FIGURES["8"].variants)
    for name in ("figure_8.png", "tradeoff.png"):
        assert (tmp_path / name).stat().st_size > 10_000
    printed = capsys.readouterr().out
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


def test_an_unfinished_run_is_resumed(trained, tmp_path, capsys):
    config = ToyFigure(name="1d", out=tmp_path)
    own = training(config, "mixture1d-default")
    RunFolder.create(own.out, own.to_json())
    assert command.run(config) == 0
    assert "resuming mixture1d-default" in capsys.readouterr().out
    assert (tmp_path / "figure_1d.png").is_file()
    # One that is being made longer has the results of the shorter one.
    longer = ToyFigure(name="1d", out=tmp_path, iterations=500)
    # As `ebmguard train toy --resume --iterations 500` leaves it where Ctrl-C stops it.
    settings = training(longer, "mixture1d-default").to_json()
    (own.out / "config.json").write_text(json.dumps(settings))
    assert command.run(longer) == 0
    assert [(asked.resume, asked.iterations) for asked in trained] == [(True, None), (True, 500)]


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
