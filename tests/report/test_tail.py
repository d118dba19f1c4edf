from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebmguard.errors import ConfigError
from ebmguard.report.tail import Tail
from ebmguard.sinks import read_jsonl, to_json

RECORDS = st.lists(
    st.fixed_dictionaries({"step": st.integers(0, 99), "x": st.floats(width=32)}), max_size=30
)


def encoded(records: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(to_json(record)).encode() + b"\n" for record in records)


class Reader:
    """What a follower has of a file."""

    def __init__(self, path: Path) -> None:
        self.tail = Tail(path)
        self.records: list[dict[str, Any]] = []

    def catch_up(self) -> list[dict[str, Any]]:
        while True:
            anew, records = self.tail.read()
            if anew:
                self.records = []
            self.records += records
            if not records:
                return self.records


@given(RECORDS, st.lists(st.integers(1, 60), max_size=60))
def test_at_any_moment_it_has_what_a_full_read_has(records, sizes):
    data = encoded(records)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        reader = Reader(path)
        assert reader.catch_up() == []
        for size in [*sizes, len(data)]:
            with path.open("ab") as file:
                file.write(data[:size])
            data = data[size:]
            assert repr(reader.catch_up()) == repr(read_jsonl(path))
        assert repr(reader.records) == repr(records)


@given(RECORDS, RECORDS, st.data())
def test_what_a_resume_has_cut_off_is_forgotten(before, after, data):
    kept = data.draw(st.integers(0, len(before)))
    seen_cut = data.draw(st.booleans())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        path.write_bytes(encoded(before))
        reader = Reader(path)
        reader.catch_up()
        path.write_bytes(encoded(before[:kept]))
        if seen_cut:
            assert repr(reader.catch_up()) == repr(before[:kept])
        with path.open("ab") as file:
            file.write(encoded(after))
        # Also where the file has grown past its old end before anybody looked.
        assert repr(reader.catch_up()) == repr(before[:kept] + after)


def test_a_file_that_vanishes_is_forgotten(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(encoded([{"step": 0}]))
    tail = Tail(path)
    assert tail.read() == (False, [{"step": 0}])
    path.unlink()
    assert tail.read() == (True, [])
    assert tail.read() == (False, [])


def test_a_tick_reads_only_what_is_new(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": step, "x": math.nan} for step in range(50_000)]
    path.write_bytes(encoded(rows))
    reader = Reader(path)
    assert len(reader.catch_up()) == 50_000
    with path.open("r+b") as file:  # unreadable now, but nobody comes by again
        file.seek(100)
        file.write(b"?" * 1000)
    with path.open("ab") as file:
        file.write(encoded([{"step": 50_000}]))
    assert reader.tail.read() == (False, [{"step": 50_000}])


def test_a_line_longer_than_a_chunk_is_one_record(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(encoded([{"text": "x" * 3_000_000}, {"step": 1}]))
    reader = Reader(path)
    assert [set(record) for record in reader.catch_up()] == [{"text"}, {"step"}]


def test_a_whole_line_that_is_no_object_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\nnonsense\n{"step": 1}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl is not a JSON object: b'nonsense'"):
        Tail(path).read()
