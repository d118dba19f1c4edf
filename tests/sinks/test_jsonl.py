"""JSON lines: strict, buffered, safe against kills and full disks; what is read of a run folder."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebmguard.errors import ConfigError
from ebmguard.sinks import JsonlSink, jsonl, read_jsonl
from ebmguard.sinks.safe_files import safe_open


def same(left: Any, right: Any) -> bool:
    """Equality in which NaN equals NaN."""
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left):
        return math.isnan(right)
    return bool(left == right) and type(left) is type(right)


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


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


ODD = {
    "%s, 100%": 1e-07,
    "\ud800 β": 10**30,
    "numpy": np.float64(0.1),
    "text": 'a, "b"',
    "none": None,
    "yes": True,
    "list": [1, math.nan],
}


@pytest.mark.parametrize("with_orjson", [True, False])
@pytest.mark.parametrize("row", [{name: ODD[name]} for name in ODD] + [ODD, {}])
def test_lines_read_and_look_as_those_of_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: dict[str, Any], with_orjson: bool
) -> None:
    if not with_orjson:
        monkeypatch.setattr(jsonl, "_orjson_dumps", lambda: None)
    sink = JsonlSink(tmp_path)
    sink.write_row(1, row, {})
    sink.flush()
    line = (tmp_path / "metrics.jsonl").read_text()
    expected = json.dumps({"step": 1, **row}).replace("NaN", '"NaN"') + "\n"
    assert line == expected or line == expected.replace("1e-07", "1e-7")
    assert json.loads(line) == json.loads(expected)


def test_non_finite_numbers_are_the_strings_of_the_proto3_mapping_at_any_depth(
    tmp_path: Path,
) -> None:
    record = {"a": math.inf, "changes": {"lr_factor": [1.0, -math.inf], "deep": {"list": [1]}}}
    sink = JsonlSink(tmp_path)
    sink.write_row(0, {"a": math.nan}, {})
    sink.write_recovery(record)
    sink.flush()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 0, "a": "NaN"}
    assert json.loads((tmp_path / "recovery.jsonl").read_text(), parse_constant=refuse) == {
        "a": "Infinity",
        "changes": {"lr_factor": [1.0, "-Infinity"], "deep": {"list": [1]}},
    }
    assert read_jsonl(tmp_path / "recovery.jsonl") == [record]


LINE = b'{"step": 0, "a": 1.0}'
TORN = [b'{"step": 1, "a": 2.0}'[:cut] for cut in range(20)]


@pytest.mark.parametrize(
    ("data", "kept"),
    [
        *((LINE + b"\n" + torn, LINE + b"\n") for torn in TORN),
        # What a loss of power leaves where nothing had been written.
        *((LINE + b"\n" + torn + bytes(5000), LINE + b"\n") for torn in TORN[::5]),
        (b'{"rule": "non', b""),
        (LINE, LINE),
    ],
)
def test_a_torn_last_line_is_skipped_by_the_reader_and_cut_off_on_reopening(
    tmp_path: Path, data: bytes, kept: bytes
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(data)
    rows = [json.loads(line) for line in kept.splitlines()]
    assert read_jsonl(path) == rows
    sink = JsonlSink(tmp_path)
    assert path.read_bytes() == kept
    sink.write_row(2, {"a": 3.0}, {})
    sink.flush()
    assert read_jsonl(path) == [*rows, {"step": 2, "a": 3.0}]


NOT_OURS = [b"my notes", b"12", b"[1, 2", b'"step"', b"}", b"\xff\xfe", b"x" * (3 << 20)]


@pytest.mark.parametrize("whole", [b"", b'{"step": 0}\n', b"notes\n"])
@pytest.mark.parametrize("last", NOT_OURS, ids=lambda last: repr(last[:9]))
def test_what_this_sink_cannot_have_written_is_refused_and_not_cut(
    tmp_path: Path, whole: bytes, last: bytes
) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0}\n{"st')
    (tmp_path / "recovery.jsonl").write_bytes(whole + last)
    with pytest.raises(ConfigError, match=r"recovery\.jsonl.* ends in a line that is no row"):
        JsonlSink(tmp_path)
    assert (tmp_path / "recovery.jsonl").read_bytes() == whole + last
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step": 0}\n{"st'


def test_rows_go_into_a_folder_behind_links_but_not_through_a_link_in_it(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    (tmp_path / "disk" / "run").mkdir(parents=True)
    (tmp_path / "parent").symlink_to("disk")
    (tmp_path / "latest").symlink_to("parent/run")
    sink = JsonlSink(tmp_path / "latest")
    sink.write_row(0, {}, {})
    sink.flush()
    rows = tmp_path / "disk" / "run" / "metrics.jsonl"
    assert read_jsonl(rows) == [{"step": 0}]
    rows.unlink()
    rows.symlink_to(target)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl' is a link to .*target"):
        JsonlSink(tmp_path / "latest")
    sink.write_row(1, {}, {})
    with pytest.raises(OSError, match="symbolic links"):  # it came while the run went on
        sink.flush()
    assert target.read_bytes() == b"precious"


@pytest.mark.parametrize("bad", [b"{oops", b"[1, 2]", b"\xff\xfe"])
def test_damage_before_the_last_line_is_reported_with_its_place(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + bad + b'\n{"step": 2}\n')
    with pytest.raises(ConfigError, match=r"Line 2 of .*metrics\.jsonl.*not a JSON object"):
        read_jsonl(path)


@pytest.mark.parametrize("taken", [0, 7, None])
def test_a_flush_that_ends_in_its_midst_goes_on_at_the_right_byte(
    taken: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal's handler that raises, after the system has taken some bytes, all, or none."""

    def interrupted(*args: Any, **options: Any) -> Any:
        class File:
            def __init__(self) -> None:
                self.file = open(*args, **options)  # noqa: SIM115

            def __enter__(self) -> File:
                return self

            def __exit__(self, *error: object) -> None:
                self.file.close()

            def tell(self) -> int:
                return int(self.file.tell())

            def write(self, data: bytes) -> int:
                self.file.write(data[:taken])
                raise KeyboardInterrupt

        return File()

    sink = JsonlSink(tmp_path)
    sink.write_row(0, {"a": 1.0}, {})
    sink.flush()
    sink.write_row(1, {"a": 2.0}, {})
    with monkeypatch.context() as patch:
        patch.setattr(jsonl, "open", interrupted, raising=False)
        with pytest.raises(KeyboardInterrupt):
            sink.flush()
    sink.write_row(2, {"a": 3.0}, {})
    sink.flush()
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1, 2]


# -- what may be read of a run folder: regular files inside it, of a size --------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder beside a secret, both reached through links too."""
    run = tmp_path / "run"
    (run / "inner").mkdir(parents=True)
    (run / "rows").write_bytes(b"12345")
    (tmp_path / "secret").write_bytes(b"TOPSECRET")
    (tmp_path / "link").symlink_to(run)
    return run


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda run: run / "rows", {}),
        (lambda run: run / "rows", {"most": 5}),
        (lambda run: run / "inner/../rows", {"inside": "."}),
        (lambda run: run.parent / "link/rows", {}),
        (lambda run: linked(run, run / "rows"), {}),
        (lambda run: linked(run, "../rows", "inner/rows"), {"inside": "."}),
    ],
)
def test_a_file_is_read(make: Callable[[Path], Path], options: dict[str, object], run: Path):
    if "inside" in options:
        options = options | {"inside": run}
    file = safe_open(make(run), **options)  # type: ignore[arg-type]
    assert file is not None
    with file:
        assert file.read() == b"12345"


def linked(run: Path, to: str | Path, name: str = "config.json") -> Path:
    (run / name).symlink_to(to)
    return run / name


def pipe(run: Path) -> Path:
    os.mkfifo(run / "pipe")
    return run / "pipe"


@pytest.mark.parametrize(
    ("make", "most", "why"),
    [
        (lambda run: linked(run, run.parent / "secret"), 9, "it leads out of"),
        (lambda run: linked(run, "../secret"), 9, "it leads out of"),
        (lambda run: linked(run, "/dev/zero"), 9, "it leads out of"),
        (lambda run: linked(run, "../rows", "inner/rows"), 9, "it leads out of"),
        (lambda run: linked(run, "config.json"), 9, "symbolic links"),
        (pipe, 9, "it is not a file"),
        (lambda run: run / "inner", 9, "it is not a file"),
        (lambda run: run / "rows", 4, "it has 5 bytes, more than 4"),
        (lambda run: run / "ro\0ws", 9, "null"),
        (lambda run: run / ("x" * 300), 9, "name too long"),
    ],
)
def test_all_else_is_refused(make: Callable[[Path], Path], most: int, why: str, run: Path):
    path, handles = make(run), Path("/proc/self/fd")
    before = len(os.listdir(handles)) if handles.exists() else 0
    with pytest.raises(ConfigError, match=f"cannot be read: .*(?i:{why}).*Remove it"):
        safe_open(path, most=most)
    assert not before or len(os.listdir(handles)) == before
