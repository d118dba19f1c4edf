from __future__ import annotations

import itertools
import json
import os
import shlex
from pathlib import Path

import pytest
import torch
import tyro

from ebmguard import cli
from ebmguard.errors import ConfigError
from ebmguard.reference_training.sweep import command
from ebmguard.reference_training.sweep.cell import Run, outcome
from ebmguard.reference_training.sweep.grids import BismGrid, JemGrid, ShortRunGrid, ToyGrid
from ebmguard.reference_training.toy.config import ToyConfig

needs_data = pytest.mark.skipif(
    "EBMGUARD_DATA" not in os.environ, reason="EBMGUARD_DATA names no folder of data sets"
)

WORDS = "--scenarios 1 2 6 --beta-stars 0 0.5 2 --seeds 0 1 2 --out runs/jem"
TOYS = "--scenarios gmm-default circles-default --seeds 0 3 --out runs/toy"
DIGITS = "--scenarios digits --beta-stars 0 0.5 2 --seeds 0 1 --out"


def parse(words, grid=JemGrid):
    return tyro.cli(grid, args=shlex.split(words))


@needs_data
def test_cells_are_named_after_their_place_in_the_grid():
    cells = parse(f"{WORDS} --seeds 0 5 -- --variant batch --depth 16 --iterations 300").cells()
    assert len(cells) == 18
    for cell in cells:
        config, settings = cell.config, cell.config.settings
        assert config.out == Path(
            f"runs/jem/s{config.scenario}_b{config.beta_star:g}_seed{config.seed}"
        )
        assert (config.variant, settings.depth, settings.iterations) == ("batch", 16, 300)
    # A grid that is half done has all scenarios and exponents.
    places = [(c.config.seed, c.config.scenario, c.config.beta_star) for c in cells]
    assert places == list(itertools.product((0, 5), "126", (0, 0.5, 2)))


def test_each_trainer_has_its_axes():
    (digits,) = parse("--scenarios digits --beta-stars 1.5 --out a").cells()
    assert digits.config.out == Path("a/digits_b1.5_seed0")
    assert digits.log == Path("a/digits_b1.5_seed0.log")
    short = parse("--beta-stars 0 0.02 --seeds 4 --out a -- --iterations 7", ShortRunGrid).cells()
    assert [cell.config.out.name for cell in short] == ["digits_b0_seed4", "digits_b0.02_seed4"]
    assert {cell.config.total_steps for cell in short} == {7}
    latent = parse("--methods bidsm cd1 --seeds 4 --out a -- --iterations 30", BismGrid).cells()
    assert [cell.config.out.name for cell in latent] == ["bidsm_seed4", "cd1_seed4"]
    # One thread, unless there are to be more.
    assert {cell.config.threads for cell in (digits, *short, *latent)} == {1}
    toys = parse(f"{TOYS} -- --betas 0 0.5 --seeds 3 --threads 3", ToyGrid).cells()
    assert {cell.config.threads for cell in toys} == {3}
    assert [(cell.config.scenario, cell.config.seed) for cell in toys] == [
        ("gmm-default", 0),
        ("circles-default", 0),
        ("gmm-default", 3),
        ("circles-default", 3),
    ]
    assert {(cell.config.seeds, cell.config.betas) for cell in toys} == {(3, ("0", "0.5"))}
    assert toys[0].config.out == Path("runs/toy/gmm-default_seed0")


@pytest.mark.parametrize(
    ("words", "grid"),
    [
        (WORDS, JemGrid),
        (f"{WORDS} --workers 3 --print", JemGrid),
        (f"{WORDS} -- --data cifar10 --data-root 'a b'", JemGrid),
        (TOYS, ToyGrid),
        ("--out a --data digits mnist --beta-stars 0.02", ShortRunGrid),
    ],
)
def test_the_command_makes_the_grid_again(words, grid):
    config = parse(words, grid)
    again = shlex.split(config.command())
    assert again[:2] == ["ebmguard", "sweep"]
    assert cli.load(cli.COMMANDS["sweep", again[2]].config) is grid
    assert tyro.cli(grid, args=again[3:]) == config


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


def test_printed_commands_make_what_is_not_finished(tmp_path, capsys):
    grid = parse(f"{DIGITS} '{tmp_path}/a b' --print -- --iterations 9")
    first, second, *others = grid.cells()
    written(first, {"iterations": 9, "diverged_at": None})
    written(second, None)
    assert command.run(grid) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    for line, cell in zip(lines, [second, *others], strict=True):
        words = shlex.split(line)
        assert words[:3] == ["ebmguard", "train", "jem"]
        config = tyro.cli(type(cell.config), args=words[3:])
        assert config.resume == (cell is second)
        assert config.out == cell.config.out


def test_finished_runs_are_those_with_the_steps_that_are_asked_for(tmp_path):
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


def test_an_ensemble_goes_on_when_a_member_diverges(tmp_path):
    config = ToyConfig(out=tmp_path / "toy", iterations=20, evaluations=2)
    run = Run(config.out, (), config)
    members = [{"diverged_at": 4}, {"diverged_at": None}]
    results = {"iterations": 10, "diverged_at": 4, "members": members}
    written(run, results)
    assert run.over() is None
    assert outcome(results) == "finished, 1 of 2 members diverged"


def test_torchrun_does_not_start_sweeps(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="without torchrun"):
        command.run(parse(f"{DIGITS} {tmp_path}/a"))


@pytest.mark.parametrize(
    ("device", "count", "visible", "workers", "places"),
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
    device, count, visible, workers, places, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert command.places(device, workers) == places
    if device == "auto" and not count:
        assert len(command.places(device, None)) >= 1
        with pytest.raises(ConfigError, match="there is none; give `-- --device cpu`"):
            command.places("cuda", workers)
