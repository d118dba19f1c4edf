"""The first mutations of tests/report/fuzz.py; `make fuzz` runs 10,000."""

from __future__ import annotations

from collections import Counter

from .fuzz import READERS, run


def test_damaged_folders_are_read_or_refused_in_one_line(tmp_path):
    found = list(run(range(1, 21), tmp_path))
    assert [entry for entry in found if entry[3]] == []
    kinds = Counter(kind for _, _, kind, _ in found)
    assert kinds["read"] >= len(READERS)
    assert kinds["refused"] >= len(READERS)
