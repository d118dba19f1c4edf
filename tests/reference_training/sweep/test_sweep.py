"""Sweeps: the runs of a grid, and processes of fakes that do as told and of real runs."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import signal
import time
from pathlib import Path

import pytest
import torch
import tyro

from ebmguard.errors import ConfigError
from ebmguard.reference_training.sweep.cell import Run
from ebmguard.reference_training.sweep.grid import run as run_sweep
from ebmguard.reference_training.sweep.grids import BismGrid, JemGrid, ToyGrid
from ebmguard.reference_training.sweep.sweep import places
from ebmguard.reference_training.toy.config import ToyConfig
from tests import forks
from tests.parts import PATIENCE
from tests.reference_training.parts import assert_same_run

GRID = "--scenarios digits --beta-stars 0 0.5 2 --seeds 0 1 --out"


def parse(words, grid=JemGrid):
    return tyro.cli(grid, args=shlex.split(words))


@pytest.mark.parametrize(
    ("grid", "words", "names", "settings"),
    [
        (
            JemGrid,  # seeds are outermost: half of a grid compares all else
            "--scenarios digits --beta-stars 0 1.5 --seeds 0 4 -- --variant batch --depth 16",
            ["digits_b0_seed0", "digits_b1.5_seed0", "digits_b0_seed4", "digits_b1.5_seed4"],
            {"threads": 1, "variant": "batch", "depth": 16},
        ),
        (
            BismGrid,
            "--methods bidsm cd1 --seeds 4 -- --iterations 30",
            ["bidsm_seed4", "cd1_seed4"],
            {"threads": 1},
        ),
        (
            ToyGrid,
            "--scenarios gmm-default circles-default -- --betas 0 0.5 --seeds 3 --threads 3",
            ["gmm-default_seed0", "circles-default_seed0"],
            {"threads": 3, "seeds": 3, "betas": ("0", "0.5")},
        ),
    ],
)
def test_each_trainer_has_its_axes(grid, words, names, settings):
    runs = parse(f"--out a {words}", grid).cells()
    assert [run.config.out for run in runs] == [Path("a") / name for name in names]
    for run in runs:
        assert {name: getattr(run.config, name) for name in settings} == settings
        assert run.log == Path("a") / f"{run.config.out.name}.log"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--scenarios --beta-stars 0 --out a", "scenarios is empty"),
        ("--scenarios digits --beta-stars 0 --workers 0 --out a", "workers is 0"),
        ("--scenarios digits --beta-stars 0 --out a -- --seed 3", "--seed after --"),
        ("--scenarios digits --beta-stars 0 --out a -- --beta_star=1", "--beta-star after --"),
        ("--scenarios digits --beta-stars 0 --out a -- --no-resume", "--no-resume after --"),
        ("--scenarios digits --beta-stars 0 --out a -- --depth 11", "depth is 11"),
        ("--scenarios digits --beta-stars 0 --out a -- --device cuda:1", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_what_makes_no_grid_is_refused_before_anything_runs(words, problem):
    with pytest.raises(ConfigError, match=problem):
        parse(words).cells()


def store(cell, results, **changes):
    cell.config.out.mkdir(parents=True)
    (cell.config.out / "config.json").write_text(json.dumps(cell.config.to_json() | changes))
    if results is not None:
        (cell.config.out / "results.json").write_text(json.dumps(results))


def test_printed_commands_make_what_is_not_finished(tmp_path, capsys):
    grid = parse(f"{GRID} '{tmp_path}/a b' --print -- --iterations 9")
    first, second, *others = grid.cells()
    store(first, {"iterations": 9, "diverged_at": None})
    store(second, None)
    assert run_sweep(grid) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    for line, cell in zip(lines, [second, *others], strict=True):
        words = shlex.split(line)
        assert words[:3] == ["ebmguard", "train", "jem"]
        config = tyro.cli(type(cell.config), args=words[3:])
        assert config.resume == (cell is second)
        assert config.out == cell.config.out


def test_finished_runs_have_the_steps_that_are_asked_for_and_ensembles_go_on(tmp_path):
    def cell(name, iterations):
        words = f"{GRID} {tmp_path}/{name} -- --iterations {iterations}"
        return parse(words).cells()[0]

    whole = {"iterations": 9, "steps": 9, "diverged_at": None}
    store(cell("whole", 9), whole, depth=10)
    assert cell("whole", 9).over() == "finished"
    assert cell("whole", 12).over() is None
    for name, end, how in (
        ("lost", {"diverged_at": 3}, "diverged at 3"),
        ("ended", {"ended": "why"}, "ended by its guard after 9"),
    ):
        store(cell(name, 9), whole | end)
        assert cell(name, 12).over() == how
    with pytest.raises(ConfigError, match="depth is 16, the run has 10"):
        parse(f"{GRID} {tmp_path}/whole -- --depth 16").cells()[0].over()
    (cell("whole", 9).out / "results.json").write_text("{")
    with pytest.raises(ConfigError, match="is damaged"):
        cell("whole", 9).over()
    config = ToyConfig(out=tmp_path / "toy", iterations=20, evaluations=2)
    run = Run(config.out, (), config)
    members = [{"diverged_at": 4}, {"diverged_at": None}]
    results = {"iterations": 10, "diverged_at": 4, "members": members}
    store(run, results)
    assert run.over() is None
    (run.out / "results.json").write_text(json.dumps(results | {"iterations": 20}))
    assert run.over() == "finished, 1 of 2 members diverged"


@pytest.mark.parametrize(
    ("device", "count", "visible", "workers", "expected"),
    [
        ("cpu", 2, None, 1, [""]),
        ("auto", 2, None, None, ["0", "1"]),
        ("auto", 2, "5,MIG-1", None, ["5", "MIG-1"]),
        ("auto", 2, "3,1,-1,0", 9, ["3", "1"]),  # CUDA takes none that stands after -1
        ("auto", 0, "", 1, [""]),
    ],
)
def test_each_run_has_a_gpu_where_there_is_one(
    device, count, visible, workers, expected, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert places(device, workers) == expected
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # as on macOS
    assert places(device, workers) == expected
    if device == "auto" and not count:
        assert places(device, None) == [""] * (os.cpu_count() or 1)
        with pytest.raises(ConfigError, match="there is none; give `-- --device cpu`"):
            places("cuda", workers)


HERE = Path(__file__).parent
SWEEP = """
import sys
import torch
import tyro
from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.reference_training.sweep.grid import run
from ebmguard.reference_training.sweep.grids import JemGrid
JemConfig.words = ("fake_trainer", "jem")
JemGrid.page = lambda self: "table"
torch.cuda.device_count = lambda: GPUS
BEGIN
sys.exit(run(tyro.cli(JemGrid)))
"""
BETA_STARS = ("0", "0.5", "2", "5")
# Runs of the digits, whose settings need no other data to be checked.
DIGITS = ("--scenarios", "digits", "--beta-stars", *BETA_STARS, "--seeds", "0", "1")
NAMES = [f"digits_b{beta}_seed{seed}" for seed in (0, 1) for beta in BETA_STARS]
LENGTH = ("--", "--iterations", "100")


class Started:
    """A sweep of fakes in a folder, whose plan says by their names what they do."""

    def __init__(self, grid, *words, gpus=0, plan=None, begin="", **environment):
        grid.mkdir(exist_ok=True)
        if plan is not None:
            (grid / "plan.json").write_text(json.dumps(plan))
        self.file = grid.with_name(f"said{time.monotonic_ns()}")
        code, own = SWEEP.replace("GPUS", str(gpus)), {"PYTHONPATH": str(HERE)} | environment
        code = code.replace("BEGIN", begin)
        words = ("-c", code, "--out", str(grid), *words)
        self.process = forks.start(*words, stdout=self.file, **own)

    def end(self, status):
        assert forks.statuses(self.process) == [status], self.said()
        return self.said()

    def said(self):
        return self.file.read_text()

    def send(self, signal):
        assert self.process.pid
        os.kill(self.process.pid, signal)


def calls(grid, event="begin"):
    file = grid / "calls.jsonl"
    written = file.read_text() if file.is_file() else ""
    lines = written[: written.rfind("\n") + 1].splitlines()  # a run may be in the middle of a line
    return [call for call in map(json.loads, lines) if call["event"] == event]


def names(grid, event="begin"):
    return sorted(call["name"] for call in calls(grid, event))


def until(happened):
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def wait_for_lock(grid, name):
    with (grid / f"{name}.log").open("ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX)


def commands(grid, name):
    log = grid / f"{name}.log"
    lines = log.read_text().splitlines() if log.is_file() else []
    return [line for line in lines if line.startswith("$ ")]


def test_a_grid_of_everything_that_can_happen(tmp_path):
    grid = tmp_path / "grid"
    does = ("fail", "die once", "diverge", "finish", "", "", "", "die")
    grid.mkdir()
    # A finished run, one with other settings, and one that another process is training.
    for name, beta_star in ((NAMES[4], 0.0), (NAMES[5], 0.25)):
        (grid / name).mkdir()
        config = {"data": "digits", "scenario": "digits", "iterations": 100, "seed": 1}
        (grid / name / "config.json").write_text(json.dumps(config | {"beta_star": beta_star}))
        results = {"iterations": 100, "steps": 100, "diverged_at": None, "accuracy": 0.5}
        (grid / name / "results.json").write_text(json.dumps(results))
    with (grid / f"{NAMES[6]}.log").open("ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        plan, own = dict(zip(NAMES, does, strict=True)), {"CUDA_VISIBLE_DEVICES": "3,MIG-5"}
        said = Started(grid, *DIGITS, *LENGTH, gpus=2, plan=plan, **own).end(1)
    assert f"8 runs in {grid}, one GPU each" in said
    for number, text in enumerate(
        (
            "FAILED, exit status 3, see ",
            "finished, accuracy 25.0%, ",
            "diverged at 7, accuracy 25.0%, ",
            "finished, accuracy 25.0%, ",
            "kept, finished, accuracy 50.0%",
            f"FAILED, {grid / NAMES[5]} cannot be resumed with other settings",
            "skipped, another sweep is training it",
            f"FAILED, killed by SIGKILL, see {grid / NAMES[7]}.log",
        )
    ):
        assert f"\n{NAMES[number]}: {text}" in said
    assert re.search(r"; \d left, about ", said)
    told = said.split(f"\nFAILED {NAMES[0]}: ")[1]
    assert told.startswith(f"exit status 3, see {grid / NAMES[0]}.log\n    line 20\n")
    assert f"line 29\nFAILED {NAMES[5]}: " in told
    assert "beta_star is 0.5, the run has 0.25" in told

    assert names(grid) == sorted([*NAMES[:4], NAMES[1], *[NAMES[7]] * 4])
    assert names(grid, "end") == sorted(NAMES[1:4])
    (call,) = (call for call in calls(grid) if call["name"] == NAMES[2])
    words = ["--threads", "1", "--iterations", "100", "--out", str(grid / NAMES[2])]
    assert call["words"][1:] == [*words, "--scenario", "digits", "--beta-star", "2", "--seed", "0"]
    assert call["env"]["OMP_NUM_THREADS"] == "1"
    assert {call["env"]["CUDA_VISIBLE_DEVICES"] for call in calls(grid)} == {"3", "MIG-5"}
    assert [line.endswith("--resume") for line in commands(grid, NAMES[1])] == [False, True]
    assert (grid / "table.md").read_text() == "table"
    assert not list(grid.glob(".table*"))


def test_ctrl_c_stops_every_run_once(tmp_path):
    grid = tmp_path / "grid"
    words = (*DIGITS, "--workers", "2", *LENGTH)
    sweep = Started(grid, *words, plan={"*": "wait"})
    until(lambda: len(calls(grid)) == 2)
    begun = names(grid)
    sweep.send(signal.SIGINT)
    said = sweep.end(130)
    assert names(grid, "stop") == begun == names(grid)
    assert {call["interrupts"] for call in calls(grid, "stop")} == {1}
    # Each leads a group of its own, which Ctrl-C in the terminal does not reach.
    assert all(call["leads"] for call in calls(grid))
    assert said.endswith("stopped; the same command goes on\n")
    (grid / "release").touch()
    Started(grid, *words).end(0)
    assert names(grid, "end") == sorted(NAMES)
    assert sum(call["words"][-1] == "--resume" for call in calls(grid)) == len(begun)


def test_a_second_ctrl_c_does_not_wait_and_sigterm_never_insists(tmp_path):
    grid = tmp_path / "grid"
    sweep = Started(grid, *DIGITS, "--workers", "1", plan={"*": "stubborn"})
    until(lambda: calls(grid))
    sweep.send(signal.SIGTERM)
    until(lambda: "stopping" in sweep.said())
    sweep.send(signal.SIGTERM)
    sweep.process.join(2)
    assert sweep.process.is_alive()
    sweep.send(signal.SIGINT)
    sweep.end(130)
    assert not names(grid, "end")
    assert len(commands(grid, NAMES[0])) == 1
    with (grid / f"{NAMES[0]}.log").open("ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody is left


def test_a_sweep_that_is_killed_takes_its_runs_with_it(tmp_path):
    grid = tmp_path / "grid"
    words = (*DIGITS, "--workers", "2", *LENGTH)
    sweep = Started(grid, *words, plan={"*": "wait"})
    until(lambda: len(calls(grid)) == 2)
    sweep.process.kill()
    sweep.end(-signal.SIGKILL)
    for name in NAMES[:2]:
        wait_for_lock(grid, name)
    assert names(grid, "stop") == sorted(NAMES[:2])
    (grid / "release").touch()
    assert f"{NAMES[0]}: resumed\n" in Started(grid, *words).end(0)
    assert names(grid, "end") == sorted(NAMES)


def test_a_sweep_that_fails_stops_its_runs(tmp_path):
    grid = tmp_path / "grid"
    # Without the kernel, which tells them on Linux; and with a page that cannot be made.
    begin = "from ebmguard.reference_training.sweep import sweep; sweep.DIE_WITH_SWEEP = None"
    plan = {"*": "wait", NAMES[0]: "fail"}
    sweep = Started(grid, *DIGITS, "--workers", "2", plan=plan, begin=f"{begin}; JemGrid.page = 0")
    assert "TypeError" in sweep.end(1)
    wait_for_lock(grid, NAMES[1])
    assert names(grid, "end") == []


@pytest.mark.slow
def test_real_runs_are_single_runs_to_the_bit_however_they_are_killed(tmp_path):
    single, grid = tmp_path / "single", tmp_path / "grid"
    two = ("digits_b0_seed0", "digits_b2_seed0")
    ours = ("-m", "ebmguard", "sweep", "jem", "--scenarios", "digits", "--beta-stars", "0", "2")
    small = (
        *("--workers", "2", "--", "--iterations", "30", "--depth", "10", "--width", "1"),
        *("--checkpoint-every", "1", "--eval-every", "30", "--sgld-steps", "2", "--n-pos", "8"),
        *("--n-neg", "8", "--n-labelled", "8", "--train-images", "100", "--valid-images", "50"),
    )
    printed = forks.run(*ours, "--out", str(single), "--print", *small).stdout.splitlines()
    assert len(printed) == 2
    for line in printed:
        assert forks.run("-m", *shlex.split(line)).returncode == 0

    sweep = forks.start(*ours, "--out", str(grid), *small, stdout=tmp_path / "said")
    until(lambda: all(list((grid / name / "checkpoints").glob("step-*.pt")) for name in two))
    os.kill(json.loads((grid / two[0] / ".lock").read_text())["pid"], signal.SIGKILL)
    until(lambda: len(commands(grid, two[0])) == 2)
    sweep.kill()
    assert forks.statuses(sweep) == [-signal.SIGKILL]
    for name in two:
        wait_for_lock(grid, name)
    again = forks.run(*ours, "--out", str(grid), *small)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count(": finished, accuracy ") == 2

    for name in two:
        assert_same_run(single / name, grid / name)
