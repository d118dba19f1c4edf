from __future__ import annotations

import fcntl
import json
import os
import re
import signal

import pytest

from tests.reference_training.sweep.parts import calls, end, names, plan, start, until

pytest.importorskip("ray", reason="Ray is not installed")

# Six runs of the digits, whose settings need no other data to be checked.
DIGITS = ("--scenarios", "digits", "--beta-stars", "0", "0.5", "2", "--seeds", "0", "1")
SIX = [f"digits_b{beta}_seed{seed}" for seed in (0, 1) for beta in ("0", "0.5", "2")]
LENGTH = ("--", "--iterations", "100")


def test_a_grid_of_everything_that_can_happen(tmp_path):
    """One start of Ray for all: it takes seconds."""
    grid = tmp_path / "grid"
    plan(grid, **{SIX[0]: "fail", SIX[1]: "die", SIX[2]: "diverge"})
    # A finished run, one with other settings, and one that another process is training.
    for name, iterations in ((SIX[3], 100), (SIX[4], 50)):
        (grid / name).mkdir()
        config = {"data": "digits", "scenario": "digits", "iterations": iterations, "seed": 1}
        config |= {"beta_star": 0.0 if name == SIX[3] else 0.25}
        (grid / name / "config.json").write_text(json.dumps(config))
        results = {"iterations": 100, "steps": 100, "diverged_at": None, "accuracy": 0.5}
        (grid / name / "results.json").write_text(json.dumps(results))
    with (grid / f"{SIX[5]}.log").open("ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        sweep = start(grid, *DIGITS, *LENGTH)
        said = end(sweep)
    assert sweep.returncode == 1, said
    assert f"6 runs in {grid}, one core each" in said
    assert "scenario digits, beta* 0, seed 0: FAILED, exit status 3" in said
    told = said.split("\nFAILED scenario digits, beta* 0, seed 0: ")[1]
    log_file = grid / f"{SIX[0]}.log"
    assert told.startswith(f"exit status 3, see {log_file}\n    line 20\n")
    assert "line 29\nFAILED scenario digits, beta* 0.5, seed 1: " in told
    assert "beta_star is 0.5, the run has 0.25" in told

    assert "scenario digits, beta* 0.5, seed 0: started\n" in said
    assert "scenario digits, beta* 0.5, seed 0: finished, accuracy 25.0%, " in said
    assert "scenario digits, beta* 2, seed 0: diverged at 7, accuracy 25.0%, " in said
    assert "scenario digits, beta* 0, seed 1: kept, finished, accuracy 50.0%" in said
    assert "beta* 2, seed 1: skipped, another sweep is training it" in said
    assert re.search(r"; \d left, about ", said)

    assert sorted(names(grid)) == sorted([*SIX[:3], SIX[1]])
    assert sorted(names(grid, "end")) == SIX[1:3]
    (call,) = (call for call in calls(grid) if call["name"] == SIX[2])
    words = ["--threads", "1", "--iterations", "100", "--out", str(grid / SIX[2])]
    assert call["words"][1:] == [*words, "--scenario", "digits", "--beta-star", "2", "--seed", "0"]
    assert call["env"]["OMP_NUM_THREADS"] == "1"
    assert call["env"]["RAY_USAGE_STATS_ENABLED"] == "0"
    assert [line.endswith("--resume") for line in commands(grid / f"{SIX[1]}.log")] == [False, True]
    assert (grid / "table.md").read_text() == "table"
    assert not list(grid.glob(".table*"))


def commands(log):
    return [line for line in log.read_text().splitlines() if line.startswith("$ ")]


@pytest.mark.slow
def test_ctrl_c_in_the_terminal_stops_every_run_once(tmp_path):
    grid = tmp_path / "grid"
    plan(grid, **{"*": "wait"})
    sweep = start(grid, *DIGITS, "--workers", "2", *LENGTH)
    until(lambda: len(calls(grid)) == min(2, len(os.sched_getaffinity(0))))
    begun = names(grid)
    os.killpg(sweep.pid, signal.SIGINT)  # as the terminal does: to all of its group
    said = end(sweep)
    assert sweep.returncode == 130, said
    assert sorted(names(grid, "stop")) == sorted(begun) == sorted(names(grid))
    assert {call["interrupts"] for call in calls(grid, "stop")} == {1}
    again = said.split("stopped; go on with: ebmguard sweep jem ")[1].strip().split()
    (grid / "release").touch()
    sweep = start(grid, *again[again.index("--seeds") :])
    said = end(sweep)
    assert sweep.returncode == 0, said
    assert sorted(names(grid, "end")) == sorted(SIX)
    assert sum(call["words"][-1] == "--resume" for call in calls(grid)) == len(begun)


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait_and_sigterm_never_insists(tmp_path):
    grid = tmp_path / "grid"
    plan(grid, **{"*": "stubborn"})
    sweep = start(grid, "--scenarios", "digits", "--beta-stars", "0")
    until(lambda: calls(grid))
    sweep.send_signal(signal.SIGTERM)
    assert "stopping" in next(line for line in sweep.stdout if "stopping" in line)
    sweep.send_signal(signal.SIGTERM)
    with pytest.raises(Exception, match="timed out"):
        sweep.wait(timeout=3)
    sweep.send_signal(signal.SIGINT)
    said = end(sweep)
    assert sweep.returncode == 130, said
    assert not names(grid, "end")
    with (grid / f"{SIX[0]}.log").open("ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody is left


@pytest.mark.slow
def test_a_sweep_that_is_killed_takes_its_runs_with_it(tmp_path):
    grid = tmp_path / "grid"
    plan(grid, **{"*": "wait"})
    words = ("--scenarios", "digits", "--beta-stars", "0", *LENGTH)
    sweep = start(grid, *words)
    until(lambda: calls(grid))
    sweep.kill()
    end(sweep)
    with (grid / f"{SIX[0]}.log").open("ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX)  # waits for the end of the run
    assert not names(grid, "end")
    (grid / "release").touch()
    sweep = start(grid, *words)
    said = end(sweep)
    assert sweep.returncode == 0, said
    assert "seed 0: resumed\n" in said
    assert names(grid, "end") == [SIX[0]]
