"""The mutants of the core: which changes are tried, and that tests get the changed module."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from benchmarks import mutants

SOURCE = """
LIMIT: int = 8

def kept(values: list[int | None], least: float = 0.5) -> bool:
    if not values:
        raise ValueError(f"{1 + 1} values")
    own.size = max(values) - 3
    own.log("kept", True)
    return len(values) > LIMIT and \
        values[0] is not None
"""
CHANGED = [
    *("LIMIT: int = 9", "least: float = 0.75", "if values:", "max(values) + 3", "max(values) - 4"),
    *("min(values) - 3", "    pass", 'own.log("kept", False)', "    pass", "len(values) >= LIMIT"),
    *("LIMIT or", "values[1]", "values[0] is None"),
]


def test_each_operator_constant_and_statement_is_changed_once(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(SOURCE)
    found = [x for x in mutants.mutants_of(file) if mutants.is_another(x)]
    assert len({x.name for x in found}) == len(found)
    lines = [x.text()[1] for x in found]
    left = [" ".join(text.split()) for text in CHANGED]
    for line in lines:
        text = next(x for x in left if x in line)
        left.remove(text)
    assert left == []


def test_the_changed_module_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("mutated_part.py").write_text("LIMIT = 8\n")
    (mutant,) = mutants.mutants_of(Path("mutated_part.py"))
    monkeypatch.setattr(sys, "meta_path", [mutants.Loader(mutant), *sys.meta_path])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert importlib.import_module("mutated_part").LIMIT == 9
    assert (tmp_path / "mutated_part.py").read_text() == "LIMIT = 8\n"
