"""Every study of the same small runs: its numbers are those that were recorded, and it is drawn.

numbers.json has them as the code before this one made them, rounded to six digits; of arrays the
first, the middle and the last number; those of JEM runs as tables have them, and jem_tables.md is
a whole page. On another processor chains differ in their last digits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ebmguard.reference_training.jem.runs import find_runs
from ebmguard.reference_training.studies.command import MODULES, find, numbers
from ebmguard.reference_training.studies.config import JemFigure, ToyFigure
from ebmguard.reference_training.studies.jem_tables import page
from ebmguard.reference_training.studies.study import text
from ebmguard.reference_training.studies.toy import FIGURES, load_run, training
from tests.reference_training.jem import fabricate as jem
from tests.reference_training.jem.fabricate import OWN, made_up_evaluation
from tests.reference_training.pictures import assert_no_text_on_text
from tests.reference_training.studies.small import RECORDED, assert_recorded
from tests.reference_training.toy.fabricate import write_run


def test_every_study_is_recorded():
    # 21 to 25 are 20 of other scenarios.
    assert set(RECORDED) == set(MODULES) - {"21", "22", "23", "24", "25"}


@pytest.mark.parametrize("name", FIGURES)
def test_toys(name: Any, tmp_path):
    config, runs = ToyFigure(name=name, out=tmp_path), []
    for scenario in FIGURES[name].scenarios:
        lost = scenario.startswith(("circles", "gmm-exploding")) and name in ("6", "mixture")
        own = training(config, scenario)
        write_run(own, diverged={"0": 1200} if lost else None, resolution=16, samples=20)
        runs.append(load_run(own.out))
    study = find(name)
    frame = study.numbers(runs, config)
    assert_recorded(name, numbers(study, frame)["rows"])
    if name in ("1d", "7", "8", "9"):  # each other layout is drawn where a figure is trained
        for figure in study.drawn(frame).values():
            assert_no_text_on_text(figure)


@pytest.fixture(scope="module")
def jem_runs(tmp_path_factory):
    """Runs made by hand: healthy, lost, unfinished, of two setups and two scenarios."""
    folder = tmp_path_factory.mktemp("jem")
    lost = [{"rule": "energy_blowup", "level": "ERROR", "step": 457}]
    early, all_along = (0, 300, 400, 500), (0, *range(100, 1200, 100))
    runs: dict[str, dict[str, Any]] = {
        "zero": {"diverged_at": 460, "samples": early, "alerts": lost},
        "half-0": {"beta_star": 0.5, "samples": all_along},
        "half-1": {"beta_star": 0.5, "seed": 1},
        "ten": {"beta_star": 10, "steps": 700, "finished": False, "samples": (0, 600)},
    }
    own: dict[str, Any] = {"scenario": "2", "data": "digits"}
    own["evaluate"] = lambda *given: made_up_evaluation(*given) | OWN
    runs |= {f"other-{beta_star}": own | {"beta_star": beta_star} for beta_star in (0, 1)}
    small: dict[str, Any] = {"iterations": 1200, "steps_per_epoch": 100, "depth": 10, "width": 1}
    for name, settings in runs.items():
        jem.write_run(folder / name, train_images=640, **small, **settings)
    return find_runs([folder])


@pytest.mark.parametrize("name", ["3", "4", "16", "17", "18", "19", "20"])
def test_jem(name: Any, jem_runs):
    study = find(name)
    frame = study.numbers(jem_runs, JemFigure(name=name, runs=()))
    head, _, *lines = text(frame).splitlines()
    names, *rows = ([c.strip() for c in line.strip("|").split("|")] for line in (head, *lines))
    found = [dict(zip(names, row, strict=True)) for row in rows]
    kept = [{k: row[k] for k in told} for row, told in zip(found, RECORDED[name], strict=True)]
    assert kept == RECORDED[name]
    for figure in study.drawn(frame).values():
        assert_no_text_on_text(figure)


def test_tables_of_jem_runs(jem_runs):
    assert page(jem_runs) == (Path(__file__).parent / "jem_tables.md").read_text(encoding="utf-8")
