from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
import tyro

from ebmguard.errors import ConfigError
from ebmguard.reference_training.jem.sweep.config import SweepConfig

# The settings of every run are checked before a sweep begins, and those of the paper need CIFAR-10.
pytestmark = pytest.mark.skipif(
    "EBMGUARD_DATA" not in os.environ, reason="EBMGUARD_DATA names no folder of data sets"
)

WORDS = "--scenarios 1 2 6 --beta-stars 0 0.5 2 --seeds 0 1 2 --out runs/jem"


def parse(words):
    return tyro.cli(SweepConfig, args=shlex.split(words))


def test_what_follows_two_dashes_goes_to_every_run():
    cells = parse(f"{WORDS} -- --variant batch --depth 16 --iterations 300").cells()
    assert len(cells) == 27
    for cell in cells:
        settings = cell.config.settings
        assert (cell.config.variant, settings.depth, settings.iterations) == ("batch", 16, 300)


def test_cells_are_named_after_their_place_in_the_grid():
    cells = parse(f"{WORDS} --seeds 0 5").cells()
    for cell in cells:
        config = cell.config
        assert config.out == Path(
            f"runs/jem/s{config.scenario}_b{config.beta_star:g}_seed{config.seed}"
        )
    assert len({cell.config.out for cell in cells}) == len(cells)
    (digits,) = parse("--scenarios digits --beta-stars 1.5 --out a").cells()
    assert digits.config.out == Path("a/digits_b1.5_seed0")
    assert digits.log == Path("a/digits_b1.5_seed0.log")


def test_a_grid_that_is_half_done_has_all_scenarios_and_exponents():
    cells = parse(WORDS).cells()
    first = {(cell.config.scenario, cell.config.beta_star) for cell in cells[:9]}
    assert first == {(scenario, beta) for scenario in "126" for beta in (0, 0.5, 2)}
    assert [cell.config.beta_star for cell in cells[:3]] == [0, 0.5, 2]


@pytest.mark.parametrize(
    "words", [WORDS, f"{WORDS} --workers 3", f"{WORDS} -- --data cifar10 --data-root 'a b'"]
)
def test_the_command_makes_the_grid_again(words):
    config = parse(words)
    again = shlex.split(config.command())
    assert again[:3] == ["ebmguard", "sweep", "jem"]
    assert tyro.cli(SweepConfig, args=again[3:]) == config


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--scenarios --beta-stars 0 --out a", "scenarios is empty"),
        ("--scenarios 1 --beta-stars --out a", "beta_stars is empty"),
        ("--scenarios 1 --beta-stars 0 --seeds --out a", "seeds is empty"),
        ("--scenarios 1 2 1 --beta-stars 0 --out a", "scenarios has 1 twice"),
        ("--scenarios 1 --beta-stars 2 2.0 --out a", "beta_stars has 2.0 twice"),
        ("--scenarios 1 --beta-stars 0 --workers 0 --out a", "workers is 0"),
        ("--scenarios 1 --beta-stars 0 --out a -- --seed 3", "--seed after --"),
        ("--scenarios 1 --beta-stars 0 --out a -- --beta_star=1", "--beta-star after --"),
        ("--scenarios 1 --beta-stars 0 --out a -- --resume", "--resume after --"),
        ("--scenarios 1 --beta-stars 0 nan --out a", "beta_star is nan"),
        ("--scenarios 1 --beta-stars 0 --out a -- --depth 11", "depth is 11"),
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
