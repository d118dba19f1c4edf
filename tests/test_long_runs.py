"""The benchmarks of long runs work, on the smallest of them."""

from __future__ import annotations

from benchmarks import long_run
from ebmguard.report import RecordedRun


def test_a_folder_to_read_has_the_rows_that_are_asked_for(tmp_path):
    lines = ['"energy_gap": 0.5, "recovery/attempt": 0.0}']
    run = long_run.write_run(tmp_path / "run", 200, lines)
    found = RecordedRun.read(run, ["energy_gap"])
    assert (found.row_count, found.step, len(found.attempts)) == (200, 189, 2)
    assert min(long_run.taken(["watch", str(run), "--once"]).values()) > 0


def test_a_long_run_leaves_nothing_open_and_counts_its_bytes(tmp_path):
    training = long_run.Training(tmp_path)
    for _ in range(5):
        training.step()
    held = training.held()
    training.end()
    training.begin()
    training.blow_up()
    training.step()
    assert training.held() == held
    training.end()
    sizes = long_run.sizes(tmp_path)
    assert min(sizes[name] for name in ("metrics.jsonl", "event files")) > 0
