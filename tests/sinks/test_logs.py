"""Logs of long runs: which rows are written, and that readers know which are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ebmguard.report import RecordedRun
from ebmguard.report.page import page
from ebmguard.report.watch import WatchConfig, watch
from ebmguard.runs import load
from ebmguard.sinks import Writer, read_jsonl
from tests.sinks.parts import ALERT, RECOVERY, scalars

WHOLE, MILLION = 20_000, 1_000_000


class Taken(list[int]):
    """A sink of one's own: the steps that it got."""

    def write_row(self, step: int, scalars: Any, histograms: Any) -> None:
        self.append(step)

    def write_alert(self, record: Any) -> None:
        pass

    write_recovery = write_alert

    def flush(self) -> None:
        pass


def written(
    folder: Path,
    steps: range,
    *,
    alerts: tuple[int, ...] = (),
    levels: dict[int, float] | None = None,
    extra: tuple[int, ...] = (),
    flush: tuple[int, ...] = (),
    ends: bool = True,
    **options: Any,
) -> list[int]:
    """The steps in metrics.jsonl once rows of these went through a guard's writer."""
    sink, level = Taken(), 0.0
    writer = Writer([sink], flush_every=50, folder=folder, **options)
    for step in steps:
        if step in alerts:
            writer.write_alerts([ALERT | {"step": step, "value": 9.0}])
        level = (levels or {}).get(step, level)
        row = {"energy_gap": step / 7, "alert_level": level}
        writer.write(step, row | ({"accuracy": 0.5} if step in extra else {}), {})
        if step in flush:
            writer.flush()
    writer.close() if ends else writer.release()
    assert sink == [*steps]
    return [row["step"] for row in read_jsonl(folder / "metrics.jsonl")]


def tens(first: int, last: int, every: int = 10) -> list[int]:
    return [step for step in range(first, last) if step % every == 0]


END, BEGIN = 22_000, 19_900
LAST = [*range(END - 100, END)]  # at the end of a run all that waits
# What comes, and which rows of those from BEGIN to END are written.
CASES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "nothing": ({}, [*range(BEGIN, WHOLE), *tens(WHOLE, END - 100), *LAST]),
    "an alert": (
        {"alerts": (21_005,)},
        [
            *range(BEGIN, WHOLE),
            *tens(WHOLE, 20905),
            *range(20905, 21055),
            *tens(21055, END - 100),
            *LAST,
        ],
    ),
    "a number that is rare": (
        {"extra": (21_003, 21_447)},
        sorted({*range(BEGIN, WHOLE), *tens(WHOLE, END - 100), 21_003, 21_447, *LAST}),
    ),
    "another level": (
        {"levels": {21_003: 1.0, 21_447: 0.0}},
        sorted({*range(BEGIN, WHOLE), *tens(WHOLE, END - 100), 21_003, 21_447, *LAST}),
    ),
    "a flush, which loses nothing that is due": (
        {"flush": (21_503,)},
        [*range(BEGIN, WHOLE), *tens(WHOLE, END - 100), *LAST],
    ),
    "a kill, which loses what waits": (
        {"ends": False},
        [*range(BEGIN, WHOLE), *tens(WHOLE, END - 100)],
    ),
    "thinning is off": ({"thins": False}, [*range(BEGIN, END)]),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_are_thinned_as_they_are_written(case: str, tmp_path: Path) -> None:
    options, expected = CASES[case]
    assert written(tmp_path, range(BEGIN, END), **options) == expected
    # TensorBoard's file has the same.
    assert [step for step, _ in scalars(tmp_path, "guard/energy_gap")] == expected
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    said = {row["step"]: row.get("log_every") for row in rows}
    is_on = options.get("thins", True)
    for step, every in said.items():
        assert every == (10.0 if is_on and step >= WHOLE else None)


def test_rows_after_a_rollback_are_whole_and_in_order(tmp_path: Path) -> None:
    writer = Writer([], flush_every=50, folder=tmp_path)
    for step in range(20_000, 21_500):
        writer.write(step, {"energy_gap": 0.5, "recovery/attempt": 0.0}, {})
    writer.write_recovery(RECOVERY | {"step": 21_500, "restored_step": 21_300})
    for step in range(21_300, 22_000):
        writer.write(step, {"energy_gap": 0.5, "recovery/attempt": 1.0}, {})
    writer.close()
    run = RecordedRun.read(tmp_path, whole=["energy_gap"])
    first, second = (dict(own.whole["energy_gap"].pairs()) for own in run.attempts)
    assert [*first] == [*tens(20_000, 21_400), *range(21_400, 21_500)]
    assert [*second] == [
        *range(21_300, 21_350),
        *tens(21_350, 21_900),
        *range(21_900, 22_000),
    ]


def test_the_verdict_and_the_pages_are_those_of_the_whole_log(tmp_path: Path, capsys: Any) -> None:
    levels = {20_503: 2.0, 20_777: 0.0, 21_111: 1.0, 21_333: 0.0}
    for name, thins in (("all", False), ("thin", True)):
        course: dict[str, Any] = {"alerts": (20_503, 21_111), "levels": levels, "thins": thins}
        written(tmp_path / name, range(BEGIN, END), **course)
    whole, thin = RecordedRun.read(tmp_path / "all"), RecordedRun.read(tmp_path / "thin")
    assert thin.row_count < whole.row_count / 2
    assert str(thin.verdict) == str(whole.verdict) == "recovered at step 20,777 (energy_blowup)"
    assert (whole.thinning, thin.step) == ("", whole.step)
    said = "rows written: one in 10 from step 20,000 on, and all around alerts"
    assert said == thin.thinning
    assert said in page([tmp_path / "thin"])
    assert said not in page([tmp_path / "all"])
    watch(WatchConfig(tmp_path / "thin", once=True))
    assert "one in 10" in capsys.readouterr().out
    rows = load(tmp_path / "thin").rows
    assert rows.log_every.dropna().unique().tolist() == [10.0]
