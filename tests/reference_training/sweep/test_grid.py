from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest
import torch
import tyro

from ebmguard.errors import ConfigError
from ebmguard.reference_training.sweep.cell import Run
from ebmguard.reference_training.sweep.grid import run as sweep
from ebmguard.reference_training.sweep.grids import BismGrid, JemGrid, ShortRunGrid, ToyGrid
from ebmguard.reference_training.sweep.sweep import places
from ebmguard.reference_training.toy.config import ToyConfig

DIGITS = "--scenarios digits --beta-stars 0 0.5 2 --seeds 0 1 --out"


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
            ShortRunGrid,
            "--beta-stars 0 0.02 --seeds 4 -- --iterations 7",
            ["digits_b0_seed4", "digits_b0.02_seed4"],
            {"threads": 1, "total_steps": 7},
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
        ("--scenarios digits --beta-stars --out a", "beta_stars is empty"),
        ("--scenarios digits --beta-stars 0 --seeds --out a", "seeds is empty"),
        ("--scenarios digits --beta-stars 0 --workers 0 --out a", "workers is 0"),
        ("--scenarios digits --beta-stars 0 --out a -- --seed 3", "--seed after --"),
        ("--scenarios digits --beta-stars 0 --out a -- --beta_star=1", "--beta-star after --"),
        ("--scenarios digits --beta-stars 0 --out a -- --resume", "--resume after --"),
        ("--scenarios digits --beta-stars 0 --out a -- --no-resume", "--no-resume after --"),
        ("--scenarios digits --beta-stars 0 nan --out a", "beta_star is nan"),
        ("--scenarios digits --beta-stars 0 --out a -- --depth 11", "depth is 11"),
        ("--scenarios digits --beta-stars 0 --out a -- --device cuda:1", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_what_makes_no_grid_is_refused_before_anything_runs(words, problem):
    with pytest.raises(ConfigError, match=problem):
        parse(words).cells()


@pytest.mark.parametrize("words", ["--scenarios 8", "--scenarios 1 -- --detph 10"])
def test_options_that_the_trainer_does_not_have_are_refused_as_it_does(words, capsys):
    with pytest.raises(SystemExit) as error:
        parse(f"--out a --beta-stars 0 {words}").cells()
    assert error.value.code == 2
    assert "ebmguard train jem" in capsys.readouterr().err


def written(cell, results, **changes):
    cell.config.out.mkdir(parents=True)
    (cell.config.out / "config.json").write_text(json.dumps(cell.config.to_json() | changes))
    if results is not None:
        (cell.config.out / "results.json").write_text(json.dumps(results))


def test_finished_runs_have_the_steps_that_are_asked_for_and_ensembles_go_on(tmp_path):
    def cell(name, iterations):
        words = f"{DIGITS} {tmp_path}/{name} -- --iterations {iterations}"
        return parse(words).cells()[0]

    whole = {"iterations": 9, "steps": 9, "diverged_at": None}
    written(cell("whole", 9), whole, depth=10)
    assert cell("whole", 9).over() == "finished"
    assert cell("whole", 12).over() is None
    for name, end, how in (
        ("lost", {"diverged_at": 3}, "diverged at 3"),
        ("ended", {"ended": "why"}, "ended by its guard after 9"),
    ):
        written(cell(name, 9), whole | end)
        assert cell(name, 12).over() == how
    with pytest.raises(ConfigError, match="depth is 16, the run has 10"):
        parse(f"{DIGITS} {tmp_path}/whole -- --depth 16").cells()[0].over()
    (cell("whole", 9).out / "results.json").write_text("{")
    with pytest.raises(ConfigError, match="is damaged"):
        cell("whole", 9).over()
    config = ToyConfig(out=tmp_path / "toy", iterations=20, evaluations=2)
    run = Run(config.out, (), config)
    members = [{"diverged_at": 4}, {"diverged_at": None}]
    results = {"iterations": 10, "diverged_at": 4, "members": members}
    written(run, results)
    assert run.over() is None
    (run.out / "results.json").write_text(json.dumps(results | {"iterations": 20}))
    assert run.over() == "finished, 1 of 2 members diverged"


def test_torchrun_does_not_start_sweeps(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="without torchrun"):
        sweep(parse(f"{DIGITS} {tmp_path}/a"))


@pytest.mark.parametrize(
    ("device", "count", "visible", "workers", "expected"),
    [
        ("auto", 0, None, 3, ["", "", ""]),
        ("cpu", 2, None, 1, [""]),
        ("auto", 2, None, None, ["0", "1"]),
        ("cuda", 3, None, 2, ["0", "1"]),
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
