"""Files of run folders: what is no file of the folder is refused by whoever reads or writes it."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import pytest

from ebmguard.check import show
from ebmguard.errors import ConfigError
from ebmguard.report import RecordedRun
from ebmguard.report.page import CompareConfig, compare, page
from ebmguard.report.problems import problems_of_run
from ebmguard.report.watch import WatchConfig, watch
from ebmguard.runs import load
from ebmguard.sinks import JsonlSink, Writer, read_jsonl
from tests.report.folders import write
from tests.sinks.parts import scalars

SECRET = "TOPSECRET123"


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """Whoever waits for a pipe fails, and does not hang."""

    def late(signum: int, frame: FrameType | None) -> NoReturn:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def linked(path: Path) -> None:
    outside = path.parents[path.parts[::-1].index("run") + 1] / "secret"
    outside.write_text(f'{{"step": 0, "test_accuracy": 0.5, "auths": "{SECRET}"}}\n')
    path.symlink_to(outside)


def socketed(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # such names must be short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)  # it has no blocks


KINDS: dict[str, Callable[[Path], Any]] = {
    "a link out of the folder": linked,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a socket": socketed,
    "a file of a terabyte": huge,
}


def _page(run: Path) -> str:
    return page([run])


def _watch(run: Path) -> object:
    return watch(WatchConfig(run, once=True))


def _check(run: Path) -> object:
    return show(problems_of_run(run))


def _frames(run: Path) -> str:
    return str([getattr(load(run), name) for name in ("runs", "rows", "evaluations", "alerts")])


def _compare(run: Path) -> str:
    out = run.parent / "compare.html"
    compare(CompareConfig((run, write(run.parent / "other")), out))
    return out.read_text()


PAGES = _page, _compare
TERMINAL = _watch, _check
# A file, and who reads it.
READ: dict[str, tuple[Callable[[Path], object], ...]] = {
    "metrics.jsonl": (*PAGES, *TERMINAL, _frames),
    "alerts.jsonl": (*PAGES, *TERMINAL, _frames),
    "recovery.jsonl": (*PAGES, *TERMINAL, _frames),
    "accuracy.jsonl": (*PAGES, *TERMINAL, _frames),
    "config.json": (*PAGES, *TERMINAL, _frames),
    "results.json": (*PAGES, *TERMINAL, _frames),
    ".lock": (*PAGES, _watch),  # whether the process of a run is over
    "figures/samples_1.png": PAGES,
    "evaluations.jsonl": (_frames,),
    "members.jsonl": (_frames,),
}


# Of each way to read the files of a folder one, with every kind; of the others two kinds.
OF_EACH_WAY = ("metrics.jsonl", "config.json", ".lock", "figures/samples_1.png")
PLACES = [
    (name, kind)
    for name in READ
    for kind in (KINDS if name in OF_EACH_WAY else ("a link out of the folder", "a pipe"))
    if (name, kind) != ("figures/samples_1.png", "a file of a terabyte")  # no picture: left out
]


@pytest.mark.parametrize(("name", "kind"), PLACES)
def test_readers_refuse(name: str, kind: str, tmp_path: Path, capsys: Any) -> None:
    run = write(tmp_path / "run", finished=name != ".lock")
    path = run / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    KINDS[kind](path)
    readers: tuple[Callable[[Path], object], ...] = (*PAGES, *TERMINAL, _frames)
    for reader in readers:
        said = ""
        if reader in READ[name]:
            with pytest.raises(ConfigError) as caught:
                reader(run)
            said = str(caught.value)
            assert path.name in said
            assert len(said) < 700
        else:
            said = str(reader(run))
        assert SECRET not in said + "".join(capsys.readouterr())


def test_links_within_the_folder_are_followed_and_the_folder_may_be_one(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    (run / "config.json").rename(run / "settings.json")
    (run / "config.json").symlink_to("settings.json")
    (tmp_path / "latest").symlink_to(run)
    assert RecordedRun.read(tmp_path / "latest").setting("sgld_steps") == 5


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, kind) for name in ("metrics.jsonl", ".lock") for kind in [*KINDS][:-1]),
        *((name, "a pipe") for name in ("alerts.jsonl", "recovery.jsonl")),
    ],
)
def test_nothing_is_written_into_what_is_no_file(name: str, kind: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    KINDS[kind](run / name)
    with pytest.raises(ConfigError):
        Writer([], flush_every=1, folder=run)
    assert [entry.name for entry in run.iterdir()] == [name]
    (run / name).rmdir() if kind == "a folder" else (run / name).unlink()
    Writer([], flush_every=1, folder=run).close()


def test_what_comes_after_the_close_is_on_the_disk_at_once(tmp_path: Path) -> None:
    writer = Writer([], flush_every=50, folder=tmp_path)
    writer.write(0, {"energy_gap": 0.5}, {})
    writer.close()
    writer.write(1, {"energy_gap": 0.25}, {})
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1]


@pytest.mark.parametrize("jump", [-1e8, 1e8])
def test_a_clock_that_jumps_changes_no_row_nor_verdict(
    jump: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    now = time.time()
    writer = Writer([], flush_every=1, folder=tmp_path / "run")
    for step in range(20):
        at = now + jump * (step > 9)
        monkeypatch.setattr(time, "time", lambda at=at: at)
        writer.write(step, {"energy_gap": step / 2, "alert_level": 0.0}, {})
    expected = [(step, step / 2) for step in range(20)]
    _watch(tmp_path / "run")  # while it is written
    writer.close()
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [(row["step"], row["energy_gap"]) for row in rows] == expected
    assert scalars(tmp_path / "run", "guard/energy_gap") == expected
    assert str(RecordedRun.read(tmp_path / "run").verdict) == "healthy"
    assert "step 20" in " ".join(capsys.readouterr().out.split())  # a long path breaks the line


def test_a_check_of_many_rows_keeps_few_and_counts_what_is_not_finite(tmp_path: Path) -> None:
    sink, bad = JsonlSink(tmp_path / "run"), {5, 123, 17_001, 59_999}
    for step in range(60_000):
        row = {"energy_gap": 0.5, "nonfinite/energies": float(step in bad), "grad_scale": 0.9}
        sink.write_row(step, row | ({"ess": 0.01} if step % 50 == 0 else {}), {})
    sink.flush()
    run = RecordedRun.read(tmp_path / "run", whole=["ess", "grad_scale", "nonfinite/energies"])
    (attempt,) = run.attempts
    assert max(len([*own.pairs()]) for own in attempt.whole.values()) < 40_000
    assert [step for step, value in run.series("nonfinite/energies") if value] == sorted(bad)
    assert [step for step, _ in run.series("ess")][-100:] == [*range(55_000, 60_000, 50)]
    said = {problem.name: problem.what for problem in problems_of_run(tmp_path / "run")}
    assert "in 4 steps" in said["nonfinite"]
    assert "the last 50 values" in said["weights_degenerate"]
