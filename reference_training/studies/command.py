"""`ebmguard figure`: the one table of studies, and how any of them is drawn, told and written."""

from __future__ import annotations

import importlib
from typing import Any

import pandas as pd

from ..engine.interrupt import INTERRUPTED
from ..engine.run_folder import write_json
from ..plots.canvas import check_picture, new_figure, save_picture
from .config import RunsFigure, ToyFigure
from .study import Study, plain, text

MODULES = {
    **dict.fromkeys(("1d", "2", "5", "6", "7", "8", "9", "10", "11"), "toy_pictures"),
    **dict.fromkeys(("mixture", "broken"), "toy_pictures"),
    **dict.fromkeys(("3", "16", *map(str, range(20, 26))), "jem_progress"),
    **dict.fromkeys(("4", "17", "18", "19"), "jem_negatives"),
    "12": "shortrun_energies",
    "13": "shortrun_energies",
    "14": "shortrun_energies",
    "15": "shortrun_samples",
    "steps": "shortrun_chains",
    "interpolation": "shortrun_samples",
    "reconstruction": "shortrun_flows",
    "likelihood": "shortrun_flows",
    "long-run": "shortrun_chains",
    "bilevel": "bilevel",
}
"""Of each study, the module beside this one whose table STUDIES has it."""


def find(name: str) -> Study:
    """A study by its name. Its module brings what it alone needs, and others do not wait for it."""
    found: Study = importlib.import_module(f".{MODULES[name]}", __package__).STUDIES[name]
    return found


def run(config: RunsFigure | ToyFigure) -> int:
    """`ebmguard figure`: open or train the runs, draw the study, write and print its numbers.

    Returns:
        Exit status: 0, or 130 where Ctrl-C stopped a training.

    Raises:
        ConfigError: the settings cannot be meant, a folder holds no such run or another one, the
            runs lack what the figure shows, or a picture cannot be written.
        DiskError: the numbers cannot be written.
        ImportError: matplotlib or pandas is not installed.
    """
    # What draws is tried before anything slow is computed for it, not after that.
    new_figure(1, 1)
    if isinstance(config, RunsFigure):
        config.check()
        check_picture(config.file)
    study = find(config.name)
    runs = study.runs(config)
    if runs is None and isinstance(config, ToyFigure):
        print(f"stopped; go on with: {config.command()}")
        return INTERRUPTED
    frame = study.numbers(runs, config)
    words = told(study, frame)
    pictures = []
    for name, figure in study.drawn(frame).items():
        pictures.append(f"picture: {config.picture(name)}")
        save_picture(figure, config.picture(name))
    if isinstance(config, ToyFigure):
        page = f"# {study.title}\n\n{words}\n"
        (config.folder / "table.md").write_text(page, encoding="utf-8")
    write_json(config.numbers, numbers(study, frame))
    print(f"{words}\n", *pictures, f"numbers: {config.numbers}", sep="\n")
    return 0


def numbers(study: Study, frame: pd.DataFrame) -> dict[str, Any]:
    """A study's numbers as plain values."""
    head = {"study": study.title, "source": study.source, "verdict": study.verdict(frame)}
    return {**head, "rows": plain(frame)}


def told(study: Study, frame: pd.DataFrame) -> str:
    """A study's numbers as text: the table, what its columns are, and whether the claim holds."""
    parts = [text(frame), f"Source: {study.source}. {study.columns}", frame.attrs.get("note", "")]
    return "\n\n".join(filter(None, [*parts, study.verdict(frame)]))
