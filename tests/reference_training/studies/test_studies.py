"""Every study of the same small runs: its numbers are those that were recorded, and it is drawn.

numbers.json has them as the code before this one made them, rounded to ten digits; of arrays the
first, the middle and the last number. On another processor chains differ in their last digits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ebmguard.reference_training.studies.command import MODULES, find, numbers, told
from ebmguard.reference_training.studies.config import ShortRunFigure
from ebmguard.sinks import to_json
from tests.reference_training.pictures import assert_no_text_on_text
from tests.reference_training.studies import small

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
    assert set(RECORDED) == set(MODULES)


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
