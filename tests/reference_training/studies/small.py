"""Small runs of every trainer, from which the studies are drawn: the same on every call."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ebmguard.reference_training.shortrun.trained import TrainedRun
from ebmguard.reference_training.studies.command import find, numbers, told
from ebmguard.reference_training.studies.config import ShortRunFigure
from ebmguard.sinks import JsonlSink, to_json
from tests.reference_training.parts import Quadratic, tiny_run

RECORDED: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parent / "numbers.json").read_text(encoding="utf-8")
)
NETWORK: dict[str, Any] = {"activation": "gelu", "beta_star": 2000.0, "data_noise": 0.03}
"""Of an EnergyNet that was never trained."""


def courses(folder: Path) -> list[TrainedRun]:
    """Runs with rows: two seeds at β* = 0, a wide gap at 2, and one at 20 that is lost."""
    rng = np.random.default_rng(7)
    runs = []
    for i, (beta_star, size) in enumerate([(20.0, 3.0), (0.0, 0.1), (0.0, 0.2), (2.0, 1.0)]):
        path = folder / f"run{i}"
        f_neg = rng.normal(size=230)
        f_pos = f_neg + size * (1 + rng.normal(size=230) / 4)
        if beta_star == 20.0:
            f_pos[100:110] = np.nan
        weights = {name: rng.uniform(0.2, 1, 230) for name in ("grad_scale", "ess")}
        reference = {f"ref/{name}": rng.uniform(0.2, 1, 230) for name in weights}
        rows = {"f_pos/mean": f_pos, "f_neg/mean": f_neg, **weights, **reference}
        write_rows(path, {name: values.tolist() for name, values in rows.items()})
        runs.append(tiny_run(path, beta_star=beta_star, seed=i, step=230))
    return runs


def chains() -> list[TrainedRun]:
    """Runs whose chains start from noise: on quadratic f, one of it steep, and of a network."""
    return [
        tiny_run("steep", network=Quadratic(0.1, 0.2), beta_star=20.0, sgld_steps=5),
        tiny_run("flat", network=Quadratic(0.02), beta_star=0.0),
        tiny_run("drawn", most_sgld_steps=6, **NETWORK),
    ]


def flows() -> list[TrainedRun]:
    """Runs that are maps of noise to images: a linear one, and one of a network."""
    return [
        tiny_run("linear", network=Quadratic(0.2), activation="gelu", beta_star=0.0),
        tiny_run("net", **NETWORK),
    ]


def long_chains() -> list[TrainedRun]:
    """Runs whose long chains stay, grow, and are lost, the last of them persistent."""
    persistent: dict[str, Any] = {
        "init": "persistent",
        "buffer_size": 16,
        "sgld_steps": 2,
        "noise_std": 0.05,
    }
    return [
        tiny_run("stays", network=Quadratic(0.1), beta_star=0.0),
        tiny_run("grows", network=Quadratic(-0.02), beta_star=0.0),
        tiny_run("lost", network=Quadratic(-9.0), beta_star=0.0, **persistent),
    ]


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
        known = {k: expected[k] for k in figures}
        assert figures == pytest.approx(known, rel=1e-3, abs=1e-6)


def study_of(name: Any, *runs: TrainedRun, count: int | None = None, seed: int = 0) -> pd.DataFrame:
    """The numbers of a study of short runs."""
    return find(name).numbers(runs, ShortRunFigure(name=name, runs=(), count=count, seed=seed))


def recorded(name: str, runs: list[TrainedRun], count: int | None = None) -> pd.DataFrame:
    """The same, which are the recorded ones, and are drawn and told."""
    study, frame = find(name), study_of(name, *runs, count=count)
    assert_recorded(name, numbers(study, frame)["rows"])
    for figure in study.drawn(frame).values():
        assert_no_text_on_text(figure)
    assert f"Claim: {study.claim}" in told(study, frame)
    return frame


def write_rows(run: Path, columns: Mapping[str, Sequence[float]]) -> None:
    """Add rows to the metrics.jsonl of a run folder, as the guard writes them, by their columns."""
    sink = JsonlSink(run)
    for step, values in enumerate(zip(*columns.values(), strict=True)):
        sink.write_row(step, dict(zip(columns, values, strict=True)), {})
    sink.flush()


def assert_no_text_on_text(figure: Figure) -> None:
    """No text of the picture lies on another, or leaves the picture."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()  # which places everything
    parts = [figure, *figure.subfigs]
    written = [text for part in parts for text in part.texts if text.get_text()]
    for axes in [axes for axes in figure.axes if axes.axison]:
        written += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        labels = (*axes.get_xticklabels(), *axes.get_yticklabels())
        inside = axes.get_window_extent(renderer).padded(2)
        for label in labels:
            x, y = label.get_transform().transform(label.get_position())
            if inside.x0 <= x <= inside.x1 or inside.y0 <= y <= inside.y1:
                written.append(label)
    legends = [axes.get_legend() for axes in figure.axes]
    legends += [legend for part in parts for legend in part.legends]
    for legend in filter(None, legends):
        written += legend.get_texts()
    shown = [(text, text.get_window_extent(renderer)) for text in written if text.get_text()]
    shown = [(text, box) for text, box in shown if box.width]
    for text, box in shown:
        outside = box.x0 < 0 or box.y0 < 0 or box.x1 > figure.bbox.x1 or box.y1 > figure.bbox.y1
        assert not outside, f"{text.get_text()!r} leaves the picture"
    for (a, one), (b, two) in itertools.combinations(shown, 2):
        assert not one.overlaps(two), f"{a.get_text()!r} lies on {b.get_text()!r}"
