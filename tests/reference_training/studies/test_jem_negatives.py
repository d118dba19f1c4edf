"""Which samples the figures of samples take, and that they are the ones that were stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ebmguard.errors import ConfigError
from ebmguard.reference_training.jem.runs import find_runs, load_run
from ebmguard.reference_training.studies.command import find, told
from ebmguard.reference_training.studies.config import JemFigure
from ebmguard.reference_training.studies.jem_negatives import chosen_steps
from tests.reference_training.jem.fabricate import write_run
from tests.reference_training.pictures import assert_no_text_on_text

EPOCH = 10
SMALL: dict[str, Any] = {"iterations": 2000, "steps_per_epoch": EPOCH, "depth": 10, "width": 1}


def made(name: Any, runs: Any) -> tuple[Any, str]:
    """The picture of a figure, and its numbers as text."""
    study = find(name)
    frame = study.numbers(runs, JemFigure(name=name, runs=()))
    (figure,) = study.drawn(frame).values()
    return figure, told(study, frame)


def steps(name: Any, runs: Any) -> list[int]:
    frame = find(name).numbers(runs, JemFigure(name=name, runs=()))
    found: list[int] = frame["step"].tolist()
    return found


def test_figure_4_is_of_epoch_107_or_the_latest(tmp_path):
    path = write_run(tmp_path / "x", beta_star=0.5, samples=(0, 900, 1060, 1090), **SMALL)
    assert chosen_steps("4", load_run(path)) == ((1060,), "")
    early = write_run(tmp_path / "y", beta_star=0.5, samples=(0, 100, 300), **SMALL)
    assert steps("4", [load_run(early)]) == [300]
    figure, text = made("4", [load_run(early)])
    assert "the latest; epoch 107 is not reached" in figure.texts[1].get_text()
    assert "\n\nthe latest; epoch 107 is not reached" in text
    assert_no_text_on_text(figure)


@pytest.mark.parametrize(
    ("stored", "steps", "note"),
    [
        ((300, 400, 500, 600), (400, 500), ""),
        ((300, 400, 450, 500, 600), (450, 500), "50 iterations apart, not 100"),
        ((100, 500), (100, 500), "400 iterations apart, not 100"),
    ],
)
def test_figure_17_is_around_the_divergence(tmp_path, stored, steps, note):
    path = write_run(tmp_path / "x", diverged_at=460, samples=stored, **SMALL)
    assert chosen_steps("17", load_run(path)) == (steps, note)


def test_figure_17_needs_a_run_that_was_lost(tmp_path):
    write_run(tmp_path / "healthy", samples=(0, 100), **SMALL)
    write_run(tmp_path / "other", beta_star=2, diverged_at=50, samples=(0, 100), **SMALL)
    write_run(tmp_path / "late", diverged_at=460, samples=(500,), seed=1, **SMALL)
    write_run(tmp_path / "early", diverged_at=460, samples=(400,), seed=2, **SMALL)
    with pytest.raises(ConfigError, match=r"--scenario 1 --beta-star 0`, if it diverges"):
        steps("17", find_runs([tmp_path]))
    write_run(tmp_path / "good", diverged_at=460, samples=(400, 500), seed=3, **SMALL)
    assert steps("17", find_runs([tmp_path])) == [400, 500]


def test_the_published_size_comes_first(tmp_path):
    write_run(tmp_path / "a", beta_star=10, samples=(703,), **SMALL)
    write_run(tmp_path / "b", beta_star=10, samples=(703,), seed=1, every=10_000)
    assert f"{tmp_path / 'b'}: finished" in made("19", find_runs([tmp_path]))[1]


def test_the_table_has_the_gap_and_the_last_evaluation(tmp_path):
    gaps = np.arange(2000.0)
    path = write_run(tmp_path / "x", beta_star=10, samples=(57,), gaps=gaps, **SMALL)
    run = load_run(path)
    _, text = made("19", [run])
    row = [cell.strip() for cell in text.splitlines()[2].split("|")]
    assert row[1:4] == ["epoch 5, iteration 7", "57", "57"]
    stored = np.load(path / "samples" / "00000057.npy") / 127.5 - 1
    assert row[4:6] == [f"{stored.mean():.3g}", f"{stored.std():.3g}"]
    before = run.evaluations.iloc[5]
    assert before.step == 50
    assert row[6] == f"{100 * before.accuracy:.1f}"
    assert row[8] == f"{before.fid:.1f}"


def test_nothing_stored_yet(tmp_path):
    write_run(tmp_path / "x", beta_star=0.5, samples=(0,), **SMALL)
    with pytest.raises(ConfigError, match="stored no samples yet"):
        steps("18", find_runs([tmp_path]))
    with pytest.raises(ConfigError, match="none of the given runs"):
        steps("19", find_runs([tmp_path]))
