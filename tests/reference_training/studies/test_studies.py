"""Every study of the same small runs: its numbers are those that were recorded, and it is drawn.

numbers.json has them as the code before this one made them, rounded to six digits; of arrays the
first, the middle and the last number; those of JEM runs as tables have them, and jem_tables.md is
a whole page. On another processor chains differ in their last digits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ebmguard.reference_training.bism.config import BismConfig
from ebmguard.reference_training.bism.train import train
from ebmguard.reference_training.jem.runs import find_runs
from ebmguard.reference_training.studies.command import MODULES, find, numbers, told
from ebmguard.reference_training.studies.config import (
    BilevelFigure,
    JemFigure,
    ShortRunFigure,
    ToyFigure,
)
from ebmguard.reference_training.studies.jem_tables import page
from ebmguard.reference_training.studies.study import text
from ebmguard.reference_training.studies.toy import FIGURES, load_run, training
from ebmguard.sinks import to_json
from tests.reference_training.pictures import assert_no_text_on_text
from tests.reference_training.studies import small, small_jem
from tests.reference_training.toy.fabricate import write_run

RECORDED: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parent / "numbers.json").read_text(encoding="utf-8")
)
SHORT_RUNS: dict[str, tuple[Any, int | None]] = {
    "12": (small.courses, None),
    "13": (small.chains, 40),
    "14": (small.chains, 40),
    "15": (small.chains, 16),
    "steps": (small.chains, 12),
    "interpolation": (small.flows, 4),
    "reconstruction": (small.flows, 18),
    "likelihood": (small.flows, 6),
    "long-run": (small.long_chains, 12),
}
"""Of each study its runs, and how many images or chains."""


def compact(row: dict[str, Any]) -> dict[str, Any]:
    """Numbers and words as JSON has them; of many numbers the first, the middle and the last."""
    found: dict[str, Any] = {}
    for name, value in to_json(row).items():
        if isinstance(value, list):
            flat = np.ravel(np.array(value, dtype=object)).tolist()
            found |= {f"{name}[{i}]": flat[i] for i in (0, len(flat) // 2, -1)}
        elif isinstance(value, dict):
            found |= {f"{name}.{key}": own for key, own in value.items()}
        else:
            found[name] = value
    return {k: float(f"{v:.10g}") if isinstance(v, float) else v for k, v in found.items()}


def assert_recorded(name: str, rows: list[dict[str, Any]]) -> None:
    """Numbers are the recorded ones, and there is a row for each of those."""
    assert len(rows) == len(RECORDED[name])
    for row, expected in zip(map(compact, rows), RECORDED[name], strict=True):
        words = {k for k, value in expected.items() if isinstance(value, str)}
        assert {k: row[k] for k in words} == {k: expected[k] for k in words}
        figures = {k: row[k] for k in expected if k not in words}
        told = {k: expected[k] for k in figures}
        assert figures == pytest.approx(told, rel=1e-3, abs=1e-6)


def test_every_study_is_recorded():
    # 21 to 25 are 20 of other scenarios.
    assert set(RECORDED) == set(MODULES) - {"21", "22", "23", "24", "25"}


@pytest.mark.parametrize("name", SHORT_RUNS)
def test_short_runs(name: Any, tmp_path):
    make, count = SHORT_RUNS[name]
    runs = make(tmp_path) if name == "12" else make()
    study = find(name)
    frame = study.numbers(runs, ShortRunFigure(name=name, runs=(), count=count))
    assert_recorded(name, numbers(study, frame)["rows"])
    for figure in study.drawn(frame).values():
        assert_no_text_on_text(figure)
    assert f"Claim: {study.claim}" in told(study, frame)


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
    folder = tmp_path_factory.mktemp("jem")
    small_jem.write(folder)
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


def test_bilevel(tmp_path):
    for n, k, seed in ((2, 2, 0), (2, 2, 1), (0, 2, 0), (2, 0, 0)):
        own: dict[str, Any] = {"unrolled_steps": n, "inner_steps": k, "seed": seed}
        own |= {"iterations": 5, "batch": 20, "evaluations": 1, "test_samples": 50}
        train(*BismConfig(out=tmp_path / f"{n}_{k}_{seed}", fresh_inner=k == 0, **own).open())
    runs = tuple(sorted(tmp_path.glob("?_*")))
    config = BilevelFigure(name="bilevel", runs=runs, minibatches=3)
    study = find("bilevel")
    frame = study.numbers(study.runs(config), config)
    assert_recorded("bilevel", numbers(study, frame)["rows"])
    for figure in study.drawn(frame).values():
        assert_no_text_on_text(figure)
