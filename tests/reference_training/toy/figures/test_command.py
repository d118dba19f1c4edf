from __future__ import annotations

import json
import shutil
import sys
from typing import get_args, get_type_hints

import pytest

from ebmguard.errors import ConfigError
from ebmguard.reference_training.engine.run_folder import RunFolder
from ebmguard.reference_training.toy.figures import command
from ebmguard.reference_training.toy.figures.config import FigureConfig
from ebmguard.reference_training.toy.figures.specs import FIGURES
from tests.reference_training.toy.figures.fabricate import write_run


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

    monkeypatch.setattr(command, "train_run", train_run)
    return asked


def test_trains_what_is_missing_draws_and_tabulates(trained, tmp_path, capsys):
    config = FigureConfig(name="8", out=tmp_path, seeds=2, iterations=50, device="cpu", threads=1)
    assert command.run(config) == 0
    assert [training.out for training in trained] == [
        tmp_path / "gmm-degenerate",
        tmp_path / "circles-degenerate",
    ]
    first = trained[0]
    assert (first.seeds, first.iterations, first.device, first.threads) == (2, 50, "cpu", 1)
    assert (first.betas, first.variants) == (FIGURES["8"].betas, FIGURES["8"].variants)
    for name in ("figure_8.png", "tradeoff.png"):
        assert (tmp_path / name).stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert "training circles-degenerate" in printed
    assert "batch corr" in printed
    assert f"pictures: {tmp_path / 'figure_8.png'}, " in printed
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["command"] == "figure 8"
    assert [run["scenario"] for run in results["runs"]] == ["gmm-degenerate", "circles-degenerate"]
    assert len(results["runs"][0]["rows"]) == 4
    page = (tmp_path / "table.md").read_text()
    assert all(f"- {said}" in page for said in results["statements"])
    assert all(said in printed for said in results["statements"])

    # The same command again trains nothing.
    assert command.run(config) == 0
    assert len(trained) == 2


def test_an_unfinished_run_is_resumed(trained, tmp_path, capsys):
    config = FigureConfig(name="1d", out=tmp_path)
    training = config.training("mixture1d-default")
    RunFolder.create(training.out, training.to_json())
    assert command.run(config) == 0
    assert [training.resume for training in trained] == [True]
    assert "resuming mixture1d-default" in capsys.readouterr().out
    assert (tmp_path / "figure_1d.png").is_file()


def test_a_run_that_is_being_made_longer_is_not_finished(trained, tmp_path, capsys):
    short = FigureConfig(name="1d", out=tmp_path, iterations=300).training("mixture1d-default")
    write_run(short, resolution=8, samples=5)
    longer = FigureConfig(name="1d", out=tmp_path, iterations=500)
    # As `ebmguard train toy --resume --iterations 500` leaves it where Ctrl-C stops it.
    settings = longer.training("mixture1d-default").to_json()
    (short.out / "config.json").write_text(json.dumps(settings))
    assert command.run(longer) == 0
    assert [(training.resume, training.iterations) for training in trained] == [(True, 500)]
    assert "resuming mixture1d-default" in capsys.readouterr().out


def test_another_trainers_folder_is_refused(trained, tmp_path):
    RunFolder.create(tmp_path / "mixture1d-default", {"scenario": "digits", "seed": 0})
    with pytest.raises(ConfigError, match="scenario: digits there, mixture1d-default here"):
        command.run(FigureConfig(name="1d", out=tmp_path))
    assert trained == []


def test_nothing_is_trained_where_nothing_can_be_drawn(trained, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pictures need matplotlib"):
        command.run(FigureConfig(name="1d", out=tmp_path))
    assert trained == []


def test_ctrl_c_says_how_to_go_on(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "train_run", lambda config: None)
    config = FigureConfig(name="2", out=tmp_path, seeds=1, iterations=200, threads=1)
    assert command.run(config) == 130
    assert not (tmp_path / "results.json").exists()
    assert (
        f"go on with: ebmguard figure 2 --out {tmp_path} --seeds 1 --iterations 200 --threads 1"
        in capsys.readouterr().out
    )


def test_a_run_with_other_settings_is_refused_before_anything_is_trained(trained, tmp_path):
    other = FigureConfig(name="2", out=tmp_path, seeds=2, iterations=300)
    write_run(other.training("circles-default"), resolution=8, samples=5)
    with pytest.raises(ConfigError) as refused:
        command.run(FigureConfig(name="2", out=tmp_path, seeds=1))
    assert "seeds: 2 there, 1 here" in str(refused.value)
    assert "iterations: 300 there, " in str(refused.value)
    assert trained == []
    with pytest.raises(ConfigError, match="betas: "):
        command.run(FigureConfig(name="5", out=tmp_path, seeds=2, iterations=300))


def test_wrong_settings_are_refused(trained, tmp_path):
    with pytest.raises(ConfigError, match="seeds"):
        command.run(FigureConfig(name="2", out=tmp_path, seeds=0))
    assert trained == []


def test_a_short_run_is_evaluated_after_every_update(tmp_path):
    def training(iterations):
        return FigureConfig(name="6", out=tmp_path, iterations=iterations).training("gmm-shifted")

    training(10).check()
    evaluations = [training(n).evaluations for n in (1, 10, 20, 21, None)]
    assert evaluations == [1, 10, 20, 20, 20]
    with pytest.raises(ConfigError, match="iterations is 0"):
        training(0).check()


def test_every_figure_has_its_word_on_the_command_line():
    names = get_args(get_type_hints(FigureConfig)["name"])
    assert names == tuple(FIGURES)
    assert FigureConfig(name="10").folder.parts == ("figures", "10")
