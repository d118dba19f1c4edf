"""`ebmguard figure`: the one table of studies, and how any of them is drawn, told and written."""

from __future__ import annotations

import importlib
from typing import Any

import pandas as pd

from ebmguard.errors import DiskError

from ..engine.interrupt import INTERRUPTED
from ..engine.run_folder import write_json
from ..plots.canvas import check_picture, new_figure
from .config import RunsFigure, ToyFigure
from .study import Study, plain, text

STUDIES_OF = {
    "toy_pictures": "1d 2 5 6 7 8 9 10 11 mixture broken",
    "jem_figures": "3 4 16 17 18 19 20 21 22 23 24 25",
    "shortrun_energies": "12 13 14",
    "shortrun_samples": "15 interpolation",
    "shortrun_chains": "steps long-run",
    "shortrun_flows": "reconstruction likelihood",
    "bilevel": "bilevel",
}
"""The studies of each module beside this one, which its table STUDIES has."""
MODULES = {name: module for module, names in STUDIES_OF.items() for name in names.split()}


def find(name: str) -> Study:
    """A study by its name. Its module brings what it alone needs, and others do not wait for it."""
    found: Study = importlib.import_module(f".{MODULES[name]}", __package__).STUDIES[name]
    return found


def run(config: RunsFigure | ToyFigure) -> int:
    """`ebmguard figure`: open or train the runs, draw the study, write and print its numbers.

    Returns:
        Exit status: 0, or 130 where Ctrl-C stopped a training.
    """
    # What draws is tried before anything slow is computed for it, not after that.
    new_figure(1, 1)
    if isinstance(config, RunsFigure):
        config.check()
        check_picture(config.picture(""))
    study = find(config.name)
    runs = study.runs(config)
    if runs is None and isinstance(config, ToyFigure):
        print(f"stopped; go on with: {config.command()}")
        return INTERRUPTED
    frame = study.numbers(runs, config)
    words = told(study, frame)
    pictures = {config.picture(name): figure for name, figure in study.drawn(frame).items()}
    try:
        for file, figure in pictures.items():
            figure.savefig(file)
        if isinstance(config, ToyFigure):
            page = f"# {study.title}\n\n{words}\n"
            (config.folder / "table.md").write_text(page, encoding="utf-8")
    except OSError as error:
        raise DiskError.of(config.numbers.parent, error) from error
    write_json(config.numbers, numbers(study, frame))
    told_files = (f"picture: {file}" for file in pictures)
    print(f"{words}\n", *told_files, f"numbers: {config.numbers}", sep="\n")
    return 0


def numbers(study: Study, frame: pd.DataFrame) -> dict[str, Any]:
    """A study's numbers as plain values."""
    head = {"study": study.title, "source": study.source, "verdict": study.verdict(frame)}
    return {**head, "rows": plain(frame)}


def told(study: Study, frame: pd.DataFrame) -> str:
    """A study's numbers as text: the table, what its columns are, and whether the claim holds."""
    parts = [text(frame), f"Source: {study.source}. {study.columns}", frame.attrs.get("note", "")]
    return "\n\n".join(filter(None, [*parts, study.verdict(frame)]))
