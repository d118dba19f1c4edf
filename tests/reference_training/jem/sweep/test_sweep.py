from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import tyro

from ebmguard.reference_training.jem.sweep import attempt, command, sweep
from ebmguard.reference_training.jem.sweep.config import SweepConfig
from ebmguard.reference_training.jem.table import command as table_command
from ebmguard.reference_training.jem.table.config import TableConfig
from tests.parts import PATIENCE
from tests.reference_training.jem.sweep.parts import (
    TRAINER,
    calls,
    names,
    plan,
    start,
    until,
)

# The settings of every run are checked before a sweep begins, and those of the paper need CIFAR-10.
pytestmark = pytest.mark.skipif(
    "EBMGUARD_DATA" not in os.environ, reason="EBMGUARD_DATA names no folder of data sets"
)

FOUR = ["s1_b0_seed0", "s1_b0.5_seed0", "s6_b0_seed0", "s6_b0.5_seed0"]


@pytest.fixture
def grid(tmp_path, monkeypatch):
    monkeypatch.setattr(attempt, "trainer", lambda: TRAINER)
    monkeypatch.setattr(sweep, "page", lambda runs: " ".join(run.path.name for run in runs))
    monkeypatch.setattr(sweep, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "grid"


def config(grid, **changes):
    values = {"scenarios": ("1", "6"), "beta_stars": (0.0, 0.5), "seeds": (0,), "workers": 1}
    return SweepConfig(**{"out": grid, "training": ("--iterations", "100"), **values, **changes})


def test_every_cell_is_trained_once_in_order(grid, capsys):
    assert command.run(config(grid, seeds=(3, 1))) == 0
    expected = [
        f"s{scenario}_b{beta}_seed{seed}"
        for seed, scenario, beta in itertools.product((3, 1), (1, 6), ("0", "0.5"))
    ]
    assert names(grid) == expected == names(grid, "end")
    said = capsys.readouterr().out
    assert "scenario 6, beta* 0.5, seed 1: started" in said
    assert re.search(
        r"scenario 6, beta\* 0\.5, seed 1: finished, accuracy 25\.0%, \d+ s$", said, re.M
    )
    assert said.count("left, about") == 7


def test_each_run_has_its_settings_a_folder_and_a_log(grid):
    command.run(config(grid, scenarios=("6",), beta_stars=(0.5,), seeds=(4,)))
    (call,) = calls(grid)
    folder = grid / "s6_b0.5_seed4"
    words = ["--threads", "1", "--iterations", "100", "--out", str(folder), "--scenario", "6"]
    assert call["words"] == [*words, "--beta-star", "0.5", "--seed", "4"]
    assert (folder / "results.json").is_file()
    assert (grid / "s6_b0.5_seed4.log").read_text().startswith(f"$ {sys.executable} ")


def test_finished_runs_are_kept_and_unfinished_ones_resumed(grid, capsys):
    command.run(config(grid))
    (grid / FOUR[1] / "results.json").unlink()
    plan(grid, **{FOUR[2]: "diverge"})
    (grid / FOUR[2] / "results.json").unlink()
    (grid / "calls.jsonl").unlink()
    capsys.readouterr()
    assert command.run(config(grid)) == 0
    assert names(grid) == FOUR[1:3]
    assert all(call["words"][-1] == "--resume" for call in calls(grid))
    said = capsys.readouterr().out
    assert "scenario 1, beta* 0, seed 0: kept, finished, accuracy 25.0%" in said
    assert "scenario 1, beta* 0.5, seed 0: resumed" in said
    assert "scenario 6, beta* 0, seed 0: diverged at 7, accuracy 25.0%" in said


def test_more_iterations_go_on_with_what_has_not_diverged(grid):
    plan(grid, **{FOUR[0]: "diverge"})
    command.run(config(grid))
    (grid / "calls.jsonl").unlink()
    assert command.run(config(grid, training=("--iterations", "300"))) == 0
    assert names(grid) == FOUR[1:]
    assert json.loads((grid / FOUR[3] / "results.json").read_text())["iterations"] == 300


def test_a_finished_run_with_other_settings_is_not_taken_for_this_one(grid, capsys):
    command.run(config(grid))
    file = grid / FOUR[1] / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"depth": 16}))
    assert command.run(config(grid, training=("--depth", "10", "--iterations", "100"))) == 1
    said = capsys.readouterr().out
    assert "FAILED scenario 1, beta* 0.5, seed 0" in said
    assert "depth is 10, the run has 16" in said
    assert len(calls(grid)) == 4


def test_a_failure_stops_no_other_run_and_is_told_at_the_end(grid, capsys):
    plan(grid, **{FOUR[0]: "fail", FOUR[2]: "refuse"})
    assert command.run(config(grid)) == 1
    assert names(grid, "end") == [FOUR[1], FOUR[3]]
    end = capsys.readouterr().out.split("FAILED scenario 1, beta* 0, seed 0: ")[1]
    assert end.startswith(f"exit status 3, see {grid / FOUR[0]}.log\n    line 20\n")
    assert "line 29\nFAILED scenario 6, beta* 0, seed 0: exit status 2" in end
    # What the log already held is not what this attempt said.
    plan(grid, **{FOUR[0]: "refuse", FOUR[2]: "refuse"})
    assert command.run(config(grid)) == 1
    assert "line 29" not in capsys.readouterr().out
    assert "line 29" in (grid / f"{FOUR[0]}.log").read_text()


def test_the_table_is_there_as_soon_as_one_run_is(grid, monkeypatch):
    plan(grid, **{FOUR[2]: "fail"})
    tables = []
    replace = os.replace

    def seen(source, target):
        replace(source, target)
        tables.append((Path(target), Path(target).read_text()))

    monkeypatch.setattr(sweep.os, "replace", seen)
    command.run(config(grid))
    assert {target for target, _ in tables} == {grid / "table.md"}
    shown = [text.split() for _, text in tables]
    assert shown == [FOUR[:1], FOUR[:2], FOUR[:3], FOUR, FOUR]
    assert not list(grid.glob(".table*"))


def test_a_grid_with_nothing_to_do_still_writes_its_table(grid):
    command.run(config(grid))
    (grid / "table.md").unlink()
    assert command.run(config(grid)) == 0
    assert len(calls(grid)) == 4
    assert (grid / "table.md").read_text().split() == FOUR


def test_the_table_is_that_of_the_table_command(grid, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "page", table_command.page)
    command.run(config(grid))
    capsys.readouterr()
    assert table_command.run(TableConfig(runs=(grid,))) == 0
    assert (grid / "table.md").read_text() == capsys.readouterr().out


def test_without_any_run_there_is_no_table(grid, monkeypatch, capsys):
    monkeypatch.setattr(attempt, "trainer", lambda: (sys.executable, "-c", "raise SystemExit(2)"))
    assert command.run(config(grid)) == 1
    assert "no table.md yet" in capsys.readouterr().out
    assert not (grid / "table.md").exists()


def test_a_locked_run_is_left_to_who_has_it(grid, capsys):
    grid.mkdir()
    with (grid / f"{FOUR[1]}.log").open("ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        assert command.run(config(grid)) == 0
        assert names(grid) == [FOUR[0], *FOUR[2:]]
        said = capsys.readouterr().out
        assert "scenario 1, beta* 0.5, seed 0: skipped, another sweep is training it" in said
        assert "1 left to another sweep: scenario 1, beta* 0.5, seed 0" in said
    assert command.run(config(grid)) == 0
    assert names(grid)[3:] == [FOUR[1]]


def test_a_folder_that_cannot_be_locked_is_a_failure(grid, capsys):
    (grid / f"{FOUR[1]}.log").mkdir(parents=True)
    assert command.run(config(grid)) == 1
    assert names(grid) == [FOUR[0], *FOUR[2:]]
    assert "cannot be written and locked" in capsys.readouterr().out


def test_a_run_that_outlives_its_sweep_keeps_its_lock(grid, capsys):
    plan(grid, **{FOUR[0]: "wait"})
    outlived = start(grid, "--scenarios", "1", "--beta-stars", "0")
    until(lambda: calls(grid))
    outlived.kill()
    outlived.communicate(timeout=PATIENCE)
    one = config(grid, scenarios=("1",), beta_stars=(0.0,))
    assert command.run(one) == 0
    assert "skipped" in capsys.readouterr().out
    assert len(calls(grid)) == 1
    (grid / "release").touch()
    until(lambda: names(grid, "end"))
    with (grid / f"{FOUR[0]}.log").open("ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX)  # waits for its end
    command.run(one)
    assert "kept" in capsys.readouterr().out


def test_one_run_at_a_time_on_each_gpu(grid, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-ab")
    plan(grid, **{"*": "wait"})
    out = config(grid, workers=None, seeds=(0, 1))

    def release(seconds):
        # Both GPUs are taken before anything ends.
        if len(calls(grid)) >= 2:
            (grid / "release").touch()

    monkeypatch.setattr(sweep.time, "sleep", release)
    assert command.run(out) == 0
    taken: dict[str, str] = {}
    events = [json.loads(line) for line in (grid / "calls.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events[:2]] == ["begin", "begin"]
    for event in events:
        if event["event"] == "begin":
            gpu = event["env"]["CUDA_VISIBLE_DEVICES"]
            assert gpu not in taken.values()
            taken[event["name"]] = gpu
        else:
            del taken[event["name"]]
    assert {call["env"]["CUDA_VISIBLE_DEVICES"] for call in calls(grid)} == {"5", "GPU-ab"}
    assert "--threads" not in calls(grid)[0]["words"]


def test_without_gpus_each_run_has_one_thread(grid, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    command.run(config(grid, training=("--threads", "3")))
    call = calls(grid)[0]
    assert call["env"]["OMP_NUM_THREADS"] == "1"
    # The grid's own options come after, and the last one counts.
    assert call["words"][:4] == ["--threads", "1", "--threads", "3"]
    assert (
        config(grid, training=("--threads", "1", "--threads", "3")).cells()[0].config.threads == 3
    )


@pytest.mark.parametrize("world", [1, 3, 5])
def test_ranks_share_the_grid(grid, monkeypatch, world):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    shares: list[list[str]] = []
    for rank in range(world):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", "0")
        assert command.run(config(grid, workers=None)) == 0
        shares.append(names(grid)[sum(map(len, shares)) :])
    assert sorted(itertools.chain(*shares)) == sorted(FOUR)
    assert [share[0] for share in shares if share] == FOUR[:world]
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} & set(calls(grid)[0]["env"])


def test_something_unforeseen_leaves_no_run_behind(grid, monkeypatch):
    plan(grid, **{FOUR[0]: "wait", FOUR[1]: "finish"})

    def broken(runs):
        until(lambda: FOUR[0] in names(grid))
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(sweep, "find_runs", broken)
    with pytest.raises(RuntimeError, match="unforeseen"):
        command.run(config(grid, workers=2))
    assert names(grid, "stop") == [FOUR[0]]


def test_ctrl_c_in_the_terminal_stops_every_run_once(grid):
    plan(grid, **{"*": "wait"})
    words = ("--scenarios", "1", "6", "--beta-stars", "0", "0.5", "--workers", "2")
    running = start(grid, *words, "--", "--iterations", "100")
    until(lambda: len(calls(grid)) == 2)
    os.killpg(running.pid, signal.SIGINT)  # as the terminal does: to all of its group
    said, _ = running.communicate(timeout=PATIENCE)
    assert running.returncode == 130, said
    assert [call["interrupts"] for call in calls(grid, "stop")] == [1, 1]
    assert sorted(names(grid)) == sorted(FOUR[:2])
    again = said.split("stopped; go on with: ebmguard sweep jem ")[1].strip().split()
    (grid / "release").touch()
    assert command.run(tyro.cli(SweepConfig, args=again)) == 0
    assert sorted(names(grid, "end")) == sorted(FOUR)
    assert sum(call["words"][-1] == "--resume" for call in calls(grid)) == 2


def test_a_second_ctrl_c_does_not_wait(grid):
    plan(grid, **{"*": "stubborn"})
    running = start(grid, "--scenarios", "1", "--beta-stars", "0")
    until(lambda: calls(grid))
    running.send_signal(signal.SIGINT)
    assert "stopping" in next(line for line in running.stdout if "stopping" in line)
    assert running.poll() is None
    running.send_signal(signal.SIGINT)
    said, _ = running.communicate(timeout=PATIENCE)
    assert running.returncode == 130, said
    assert not names(grid, "end")
    with (grid / f"{FOUR[0]}.log").open("ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody is left


def test_sigterm_asks_however_often_it_comes(grid):
    plan(grid, **{"*": "wait"})
    running = start(grid, "--scenarios", "1", "--beta-stars", "0")
    until(lambda: calls(grid))
    running.send_signal(signal.SIGTERM)
    assert "stopping" in next(line for line in running.stdout if "stopping" in line)
    running.send_signal(signal.SIGTERM)
    said, _ = running.communicate(timeout=PATIENCE)
    assert running.returncode == 130, said
    assert [call["interrupts"] for call in calls(grid, "stop")] == [1]


def test_under_torchrun_a_failure_waits_for_the_other_ranks(grid):
    # torchrun ends all ranks as soon as one of them fails.
    plan(grid, **{FOUR[0]: "fail", FOUR[1]: "wait", FOUR[2]: "finish", FOUR[3]: "finish"})
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    words = ("--scenarios", "1", "6", "--beta-stars", "0", "0.5", "--", "--iterations", "100")
    running = start(grid, *words, launcher=(*torchrun, "--nproc-per-node", "2"))
    failed = "[rank 0] FAILED scenario 1, beta* 0, seed 0: exit status 3"
    assert any(line.startswith(failed) for line in running.stdout)
    until(lambda: FOUR[1] in names(grid))
    time.sleep(2)  # torchrun looks at its ranks ten times a second
    (grid / "release").touch()
    said, _ = running.communicate(timeout=PATIENCE)
    assert running.returncode == 1, said
    assert sorted(names(grid, "end")) == sorted(FOUR[1:]), said
    assert not names(grid, "stop")
    env = calls(grid)[0]["env"]
    assert not [name for name in env if "RANK" in name or "WORLD" in name or "ELASTIC" in name]
    assert not {"MASTER_ADDR", "MASTER_PORT", "ROLE_NAME"} & set(env)
