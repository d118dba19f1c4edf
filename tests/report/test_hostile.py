"""Run folders that nobody wrote: refused in one line, and nothing of them controls a terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ebmguard.alerts import Bands
from ebmguard.check import show
from ebmguard.errors import ConfigError
from ebmguard.report.folder import RecordedRun
from ebmguard.report.page import page
from ebmguard.report.problems import problems_of_run
from ebmguard.report.watch import WatchConfig, watch

from .folders import record, rows, write

TITLE = "\x1b]0;owned\x07\x9b31m\x7f\u202e"  # names a window, colours, turns the text round


def _replace(name: str, data: bytes):
    return lambda path: (path / name).write_bytes(data)


def _set(name: str, key: str, value: object):
    def change(path: Path) -> None:
        first, *rest = (path / name).read_text().splitlines(keepends=True)
        (path / name).write_text(
            json.dumps(json.loads(first) | {key: value}) + "\n" + "".join(rest)
        )

    return change


DEEP = b'{"step":' * 100_000
CASES = {
    "deep rows": (_replace("metrics.jsonl", DEEP + b"\n"), "not a JSON object"),
    "deep settings": (_replace("config.json", DEEP + b"}" * 100_000), "not a JSON object"),
    "settings 50 deep": (_replace("config.json", DEEP[:400] + b"1" + b"}" * 50), "40 deep"),
    "settings of bytes": (_replace("config.json", b"{\xff\xfe}"), "not a JSON object"),
    "a list of results": (_replace("results.json", b"[]"), "not a JSON object"),
    "nulls": (_replace("metrics.jsonl", b"\0" * 100 + b"\n"), "not a JSON object"),
    "a line without end": (_replace("metrics.jsonl", b"\0" * (9 << 20)), "longer than"),
    "a step that is none": (_set("metrics.jsonl", "step", -1), "expected a step"),
    "a step beyond all": (_set("metrics.jsonl", "step", 10**400), "expected a step"),
    "text in a row": (_set("metrics.jsonl", "energy_gap", "x"), "expected a number"),
    "an attempt that is none": (_set("metrics.jsonl", "recovery/attempt", []), "a count"),
    "an unknown level": (_set("alerts.jsonl", "level", "LOUD"), "one of INFO, WARN, ERROR"),
    "remedies of numbers": (_set("alerts.jsonl", "remedies", [1]), "expected texts"),
    "changes that are none": (_set("recovery.jsonl", "changes", {"lr": 1}), "pairs of numbers"),
    "half an attempt": (_set("recovery.jsonl", "attempt", 1.5), "expected a whole number"),
    "an attempt beyond all": (_set("recovery.jsonl", "attempt", 10**400), "a whole number"),
    "a time in words": (_set("results.json", "wall_seconds", "long"), "a number or null"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_nobody_wrote_is_refused_in_one_line(case, tmp_path):
    change, said = CASES[case]
    path = write(tmp_path / "run")
    if case == "a time in words":
        (path / "results.json").write_text("{}")
    change(path)
    for read in (
        lambda: page([path]),
        lambda: problems_of_run(path),
        lambda: watch(WatchConfig(path, once=True)),
    ):
        with pytest.raises(ConfigError, match=said) as caught:
            read()
        assert len(str(caught.value).splitlines()) == 1
        assert str(path) in str(caught.value)


def test_messages_and_names_of_folders_control_no_terminal(tmp_path, capsys):
    path = write(tmp_path / f"run{TITLE}", rescued=False)
    for name, key in (("alerts.jsonl", "message"), ("alerts.jsonl", "rule")):
        _set(name, key, f"said {TITLE}")(path)
    watch(WatchConfig(path, once=True))
    show(problems_of_run(path))
    shown = capsys.readouterr().out + page([path])
    assert "said \ufffd" in shown
    assert "run\ufffd" in shown
    assert not set(TITLE) & set(shown) - {";", "0", "1", "3", *"ownedm]"}


def test_a_long_run_is_thinned_and_keeps_what_matters(tmp_path):
    spike, bad, steps = 23_456, 27_001, 30_000
    wanted: dict[int, dict[str, float]] = dict(rows(range(steps), seed=5, beta_star=0.5))
    wanted[spike]["energy_gap"] = 77.0
    wanted[bad]["energy_gap"] = float("nan")
    path = record(tmp_path / "run", wanted.items())
    run = RecordedRun.read(path, ["energy_gap", "ess"])
    bins = run.surviving("energy_gap")
    assert len(bins) <= 600
    assert (spike, 77.0) in [point for own in bins for point in own.points()]
    assert [own.bad_at for own in bins if own.bad_at is not None] == [bad]
    finite = [
        row["energy_gap"] for row in wanted.values() if row["energy_gap"] == row["energy_gap"]
    ]
    assert (min(own.low for own in bins), max(own.high for own in bins)) == (min(finite), 77.0)
    assert sum(own.count for own in bins) == len(finite)
    assert run.latest == {"step": steps - 1, **wanted[steps - 1]}
    # The moving limits at the end are those of a reader that took every row.
    every = Bands()
    for row in wanted.values():
        every.read(row)
    assert run.bands.limits == every.limits
