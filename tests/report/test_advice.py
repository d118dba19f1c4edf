from __future__ import annotations

import json
import socket
import subprocess
import sys

from ebmguard.report.folder import RecordedRun, outcome
from ebmguard.report.problems import advice
from ebmguard.sinks import LOCK

from .folders import BACK_TO, write


def test_the_outcome_in_words(tmp_path):
    assert outcome(RecordedRun.read(write(tmp_path / "a"))) == "finished 300 steps after 1 rollback"
    assert outcome(RecordedRun.read(write(tmp_path / "b", rescued=False))) == "DIVERGED at step 180"
    running = RecordedRun.read(write(tmp_path / "c", rescued=False, finished=False))
    assert outcome(running) == "192 of 300 steps so far"


def test_a_run_whose_process_is_gone_has_ended(tmp_path):
    run = RecordedRun.read(write(tmp_path, rescued=False, finished=False))
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    holder = {"pid": process.pid, "host": socket.gethostname()}
    (tmp_path / LOCK).write_text(json.dumps(holder))
    assert outcome(run) == "192 of 300 steps so far"
    process.communicate()
    assert outcome(run) == "ended after 192 of 300 steps"
    for other in ({"host": "elsewhere"}, {"pid": -1}, {"pid": "1"}):
        (tmp_path / LOCK).write_text(json.dumps(holder | other))
        assert not run.is_over


def test_advice_is_of_the_alerts_that_no_rollback_has_answered(tmp_path):
    lost = RecordedRun.read(write(tmp_path / "lost", rescued=False))
    found = advice(lost)
    assert [entry.rule for entry in found] == ["energy_blowup", "nonfinite"]
    assert found[0].remedies == tuple(lost.alerts[0]["remedies"])
    rescued = RecordedRun.read(write(tmp_path / "rescued"))
    assert rescued.answered == len(rescued.alerts) == 2
    assert advice(rescued) == []
    # The same again at an earlier step of the next attempt is news.
    rescued.alerts.append(rescued.alerts[0] | {"value": 99.0, "step": BACK_TO + 9})
    rescued.alerts.append(rescued.alerts[0] | {"level": "WARN", "remedies": ["drink tea", "rest"]})
    (entry,) = advice(rescued)
    assert (entry.level, entry.count, entry.first) == ("ERROR", 2, BACK_TO + 9)
    assert entry.remedies[-2:] == ("drink tea", "rest")


def test_severe_rules_come_first(tmp_path):
    run = RecordedRun.read(write(tmp_path / "run", rescued=False))
    warn = run.alerts[0] | {"rule": "sampler_failing", "level": "WARN", "step": 3}
    info = run.alerts[0] | {"rule": "spare", "level": "INFO", "step": 1}
    run.alerts[:0] = [info, warn]
    assert [entry.rule for entry in advice(run)] == [
        "energy_blowup",
        "nonfinite",
        "sampler_failing",
        "spare",
    ]
