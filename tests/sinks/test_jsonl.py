"""JSON lines: strict, buffered, and safe against kills and full disks."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebmguard.errors import ConfigError
from ebmguard.sinks import JsonlSink, read_jsonl
from tests.sinks.parts import ALERT, RECOVERY


def same(left: Any, right: Any) -> bool:
    """Equality in which NaN equals NaN."""
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left):
        return math.isnan(right)
    return bool(left == right) and type(left) is type(right)


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def test_one_line_per_step_per_alert_and_per_rollback(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "made" / "run")
    sink.write_row(3, {"ess": 0.5, "f_pos/median": -1.25}, {"f_pos": [1.0, 2.0]})
    sink.write_row(4, {"ess": 0.25, "f_pos/median": 1e-30}, {})
    sink.write_alert(ALERT)
    sink.write_recovery(RECOVERY)
    sink.flush()
    folder = tmp_path / "made" / "run"
    assert read_jsonl(folder / "metrics.jsonl") == [
        {"step": 3, "ess": 0.5, "f_pos/median": -1.25},
        {"step": 4, "ess": 0.25, "f_pos/median": 1e-30},
    ]
    assert read_jsonl(folder / "alerts.jsonl") == [ALERT]
    assert read_jsonl(folder / "recovery.jsonl") == [RECOVERY]


def test_non_finite_numbers_inside_a_record_come_back(tmp_path: Path) -> None:
    changes = {"lr_factor": [1.0, math.inf], "deep": {"list": [-math.inf]}}
    sink = JsonlSink(tmp_path)
    sink.write_recovery({"changes": changes})
    sink.flush()
    for line in (tmp_path / "recovery.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    assert read_jsonl(tmp_path / "recovery.jsonl") == [{"changes": changes}]


@given(value=st.floats(allow_nan=True, allow_infinity=True))
def test_every_number_survives_and_every_line_is_strict_json(
    tmp_path_factory: pytest.TempPathFactory, value: float
) -> None:
    folder = tmp_path_factory.mktemp("run")
    sink = JsonlSink(folder)
    sink.write_row(0, {"energy_gap": value}, {})
    sink.flush()
    (line,) = (folder / "metrics.jsonl").read_text().splitlines()
    json.loads(line, parse_constant=refuse)
    (row,) = read_jsonl(folder / "metrics.jsonl")
    assert same(row["energy_gap"], value)


def test_non_finite_numbers_are_the_strings_of_the_proto3_mapping(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    sink.write_row(0, {"a": math.nan, "b": math.inf, "c": -math.inf}, {})
    sink.flush()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "step": 0,
        "a": "NaN",
        "b": "Infinity",
        "c": "-Infinity",
    }


def test_nothing_is_written_before_a_flush_and_nothing_twice(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    sink.write_row(0, {"a": 1.0}, {})
    assert read_jsonl(tmp_path / "metrics.jsonl") == []
    sink.flush()
    sink.flush()
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 1


def test_a_row_changed_later_by_its_owner_is_written_as_it_was(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    row = {"a": 1.0}
    sink.write_row(0, row, {})
    row["a"] = 2.0
    sink.flush()
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 0, "a": 1.0}]


def test_a_killed_process_loses_only_what_came_after_its_last_flush(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from ebmguard.sinks import JsonlSink\n"
        "sink = JsonlSink(sys.argv[1])\n"
        "for step in range(25):\n"
        "    sink.write_row(step, {'a': float(step)}, {})\n"
        "    if step % 10 == 9:\n"
        "        sink.flush()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == list(range(20))


@pytest.mark.parametrize("cut", range(1, 20))
def test_a_torn_last_line_is_skipped_by_the_reader_and_cut_off_on_reopening(
    tmp_path: Path, cut: int
) -> None:
    whole = b'{"step": 0, "a": 1.0}\n'
    torn = b'{"step": 1, "a": 2.0}'[:cut]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(whole + torn)
    assert read_jsonl(path) == [{"step": 0, "a": 1.0}]
    sink = JsonlSink(tmp_path)
    assert path.read_bytes() == whole
    sink.write_row(2, {"a": 3.0}, {})
    sink.flush()
    assert [row["step"] for row in read_jsonl(path)] == [0, 2]


def test_a_file_of_nothing_but_a_torn_line_is_emptied(tmp_path: Path) -> None:
    (tmp_path / "alerts.jsonl").write_bytes(b'{"rule": "non')
    JsonlSink(tmp_path)
    assert (tmp_path / "alerts.jsonl").read_bytes() == b""


def test_a_complete_last_line_without_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}')
    assert read_jsonl(path) == [{"step": 0}]
    sink = JsonlSink(tmp_path)
    sink.write_row(1, {}, {})
    sink.flush()
    assert [row["step"] for row in read_jsonl(path)] == [0, 1]


@pytest.mark.parametrize("bad", [b"{oops", b"[1, 2]", b"\xff\xfe"])
def test_damage_before_the_last_line_is_reported_with_its_place(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + bad + b'\n{"step": 2}\n')
    with pytest.raises(ConfigError, match=r"Line 2 of .*metrics\.jsonl.*not a JSON object"):
        read_jsonl(path)


def test_a_missing_file_is_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_jsonl(tmp_path / "metrics.jsonl")


def test_after_a_full_disk_the_next_flush_continues_at_the_very_byte(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    for step in range(10):
        sink.write_row(step, {"a": 0.5}, {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Room for two lines and a half.
    resource.setrlimit(resource.RLIMIT_FSIZE, (55, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            sink.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 2
    sink.write_row(10, {"a": 0.5}, {})
    sink.flush()
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == list(range(11))


def test_a_folder_under_a_file_is_refused_at_construction(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(ConfigError, match=r"log folder .*file/run.* cannot be written") as caught:
        JsonlSink(blocker / "run")
    assert "Pass another log_dir" in str(caught.value)


def test_a_target_that_cannot_be_opened_is_refused_at_construction(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        JsonlSink(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_a_read_only_folder_is_refused_at_construction(tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o555)
    with pytest.raises(ConfigError, match="Permission denied"):
        JsonlSink(folder)
