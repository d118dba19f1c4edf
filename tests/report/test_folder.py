"""The reader of run folders: its files as they grow, and which of their rows count."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebmguard.errors import ConfigError
from ebmguard.report.files import GrowingFile
from ebmguard.report.folder import RecordedRun
from ebmguard.report.plots import CHARTS, MORE_CHARTS
from ebmguard.sinks import read_jsonl, to_json

from .folders import record, rows, write

TAGS = [chart.name for chart in (*CHARTS, *MORE_CHARTS)]
RECORDS = st.lists(
    st.fixed_dictionaries({"step": st.integers(0, 99), "x": st.floats(width=32)}), max_size=30
)


def encoded(records: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(to_json(record)).encode() + b"\n" for record in records)


class Reader:
    """What a follower has of a file."""

    def __init__(self, path: Path) -> None:
        self.file = GrowingFile(path)
        self.records: list[dict[str, Any]] = []

    def catch_up(self) -> list[dict[str, Any]]:
        while True:
            anew, records = self.file.read()
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
    assert reader.file.read() == (False, [{"step": 50_000}])


def test_a_line_longer_than_a_chunk_is_one_record(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(encoded([{"text": "x" * 3_000_000}, {"step": 1}]))
    reader = Reader(path)
    assert [set(record) for record in reader.catch_up()] == [{"text"}, {"step"}]


def test_a_whole_line_that_is_no_object_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\nnonsense\n{"step": 1}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl is not a JSON object: b'nonsense'"):
        GrowingFile(path).read()


@given(st.lists(st.integers(0, 12), min_size=1, max_size=60), st.booleans())
def test_a_step_that_came_again_counts_once_the_last_time(steps, by_attempt):
    counts: dict[int, int] = {}
    records: list[dict[str, Any]] = []
    evaluations: list[dict[str, Any]] = []
    attempt = 0
    for i, step in enumerate(steps):
        attempt += bool(records) and step <= records[-1]["step"]
        records.append(
            {"step": step, "x": i} | ({"recovery/attempt": attempt} if by_attempt else {})
        )
        evaluations.append({"step": step, "test_accuracy": i, "attempt": attempt})
        counts = {at: old for at, old in counts.items() if at < step} | {step: i}
    with tempfile.TemporaryDirectory() as folder:
        for name, lines in (("metrics", records), ("accuracy", evaluations)):
            (Path(folder) / f"{name}.jsonl").write_bytes(encoded(lines))
        whole = RecordedRun.read(Path(folder), whole=["x"])
        binned = RecordedRun.read(Path(folder), ["x"])
        assert whole.series("x") == list(counts.items())
        for run in (whole, binned):
            assert run.row_count == len(steps)
            if by_attempt:
                assert run.accuracy == list(counts.items())
        assert [(own.step, own.low) for own in binned.surviving("x")] == list(counts.items())


def is_over(run: RecordedRun) -> bool:
    return run.is_over


def test_it_follows_a_run_from_before_it_begins_to_its_end(tmp_path):
    path = tmp_path / "run"
    run = RecordedRun(path, TAGS)
    assert not run.update()
    assert not run.attempts
    first = list(rows(range(60), seed=3))
    record(path, first[:50])
    assert run.update()
    assert (run.step, run.row_count) == (49, 50)
    assert not run.update()
    with (path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 50, "energy_g')
    assert not run.update()
    # A trainer that resumes cuts its rows back to its checkpoint, and writes them again.
    lines = (path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    os.truncate(path / "metrics.jsonl", sum(map(len, lines[:40])))
    assert run.update()
    assert (run.step, run.row_count, len(run.attempts)) == (39, 40, 1)
    record(path, first[40:])
    assert run.update()
    assert (run.step, run.row_count, len(run.attempts)) == (59, 60, 1)
    assert not is_over(run)
    (path / "results.json").write_text('{"steps": ')
    assert RecordedRun.read(path, TAGS).results == {}  # half written
    (path / "results.json").write_text('{"steps": 60}')
    assert run.update()
    assert is_over(run)
    # It goes on: the results are those of an earlier end.
    old = (path / "results.json").stat().st_mtime - 10
    os.utime(path / "results.json", (old, old))
    assert not is_over(run)


def test_damaged_files_are_named(tmp_path):
    path = write(tmp_path / "run")
    (path / "config.json").write_text("{broken}")
    for text in ("{broken}", "[1]"):
        (path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=r"config\.json is not a JSON object"):
            RecordedRun.read(path, TAGS)
    (path / "config.json").unlink()
    (path / "accuracy.jsonl").write_text('{"step": 3}\n')
    with pytest.raises(ConfigError, match=r"accuracy\.jsonl has no 'test_accuracy'"):
        RecordedRun.read(path, TAGS)


def test_a_folder_without_rows_is_no_run(tmp_path):
    for why in (r"holds no metrics\.jsonl with rows", r"holds a metrics\.jsonl without rows"):
        with pytest.raises(ConfigError, match=why):
            RecordedRun.read(tmp_path)
        (tmp_path / "metrics.jsonl").touch()


def test_the_weights_of_a_run_whose_exponent_leaves_zero(tmp_path):
    """In one batch of rows: at the reference exponent before, at the run's own after."""
    own = [(t, row | {"grad_scale": 0.25, "ref/grad_scale": 0.75}) for t, row in rows(range(6), 0)]
    moved = [(t, row | {"beta_star": 0.0 if t < 3 else 2.0}) for t, row in own]
    run = RecordedRun.read(record(tmp_path / "run", moved), tags=("grad_scale",))
    assert [each.last for each in run.surviving("grad_scale")] == [0.75] * 3 + [0.25] * 3


@pytest.mark.parametrize(
    ("levels", "again", "name", "step"),
    [
        ([0, 0, 1, 1, 2, 2], {}, "lost", 4),
        ([0, 0, 1, 1, 2, 2], {3: [1, 1]}, "look", None),  # the lost steps come again
        ([0, 2, 2, 0, 0, 0], {1: [0, 0, 0, 0, 0]}, "healthy", None),
    ],
)
def test_the_verdict_is_that_of_the_rows_that_count(tmp_path, levels, again, name, step):
    passes = {0: levels} | again
    numbered = [(t, level) for first, own in passes.items() for t, level in enumerate(own, first)]
    (_, row), *_ = rows(range(1), 0)
    taken = [(t, row | {"alert_level": float(level)}) for t, level in numbered]
    verdict = RecordedRun.read(record(tmp_path / "run", taken)).verdict
    assert verdict.name == name
    assert step is None or verdict.step == step
