"""The benchmark of the guard's cost runs, on its smallest step, against another checkout."""

from __future__ import annotations

import shutil

import pytest

from benchmarks import overhead


@pytest.fixture
def other(tmp_path):
    """A checkout of the same package, which says when it is imported."""
    for room in ("ebmguard", "reference_training"):
        shutil.copytree(overhead.HERE / room, tmp_path / room)
    with (tmp_path / "ebmguard" / "__init__.py").open("a") as file:
        file.write(f"\nopen({str(tmp_path / 'imported')!r}, 'a').write(__file__ + '\\n')\n")
    return tmp_path


@pytest.mark.slow
def test_two_checkouts_are_measured_in_turns(other, capsys):
    overhead.main(["--only", "mlp", "--rounds", "2", "--steps", "1", "--against", str(other)])
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.split("|")] for line in lines if line[:2] == "| "][2:]
    assert [row[1] for row in rows] == ["before", "now"]
    for row in rows:
        assert float(row[2]) > 0
        assert float(row[3].split()[0]) > 1  # with everything attached no step is free
    assert lines[-1].startswith("before / now: plain ")
    # A process for each round had the other checkout, and all of its package; the rest did not.
    imported = (other / "imported").read_text().splitlines()
    assert imported == 2 * [str(other / "ebmguard" / "__init__.py")]
