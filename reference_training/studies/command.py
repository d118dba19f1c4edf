"""`ebmguard figure`: the one table of studies, and how any of them is drawn, told and written."""

from __future__ import annotations

import importlib
from typing import Any

from ..engine.run_folder import write_json
from ..plots.canvas import check_picture, save_picture
from . import study
from .config import ShortRunFigure

MODULES = {
    "12": "shortrun_energies",
    "13": "shortrun_histograms",
    "14": "shortrun_histograms",
    "15": "shortrun_samples",
    "steps": "shortrun_samples",
    "interpolation": "shortrun_paths",
    "reconstruction": "shortrun_inverses",
    "likelihood": "shortrun_bits",
    "long-run": "shortrun_long",
}
"""Of each study, the module beside this one whose table STUDIES has it."""


def find(name: str) -> study.Study:
    """A study by its name. Its module brings what it alone needs, and others do not wait for it."""
    found: study.Study = importlib.import_module(f".{MODULES[name]}", __package__).STUDIES[name]
    return found


def run(config: ShortRunFigure) -> int:
    """`ebmguard figure`: open the runs, draw the study, print its numbers and write them.

    Returns:
        Exit status 0.

    Raises:
        ConfigError: the settings cannot be meant, a folder holds no such run, the runs lack what
            the figure shows, or the picture cannot be written.
        DiskError: the numbers cannot be written.
        ImportError: matplotlib or pandas is not installed.
    """
    config.check()
    # What draws is tried before anything slow is computed for it, not after that.
    check_picture(config.file)
    from .shortrun import opened

    own = find(config.name)
    frame = own.numbers(opened(config), config)
    (figure,) = own.drawn(frame).values()
    save_picture(figure, config.file)
    file = config.file.with_suffix(".json")
    write_json(file, numbers(own, frame))
    print(told(own, frame), f"picture: {config.file}\nnumbers: {file}", sep="\n\n")
    return 0


def told(own: study.Study, frame: Any) -> str:
    """A study's numbers as text: the table, what its columns are, and whether the claim holds."""
    parts = [study.text(frame), own.columns, frame.attrs.get("note", ""), own.verdict(frame)]
    return "\n\n".join(filter(None, parts))


def numbers(own: study.Study, frame: Any) -> dict[str, Any]:
    """A study's numbers as plain values."""
    head = {"study": own.title, "source": own.source}
    return {**head, "rows": study.plain(frame), "verdict": own.verdict(frame)}
