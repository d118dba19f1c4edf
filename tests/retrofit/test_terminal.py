"""What a guarded run says where its program has not set up logging, and where it has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ebmguard.retrofit.arguments import announce
from ebmguard.retrofit.strength import Strength
from tests import forks

RUN = """
import torch
from ebmguard import guard

def langevin(f, x):
    return x + 0 * f(x).detach()

f = torch.nn.Linear(1, 1)
g = guard(None, langevin, model=f, beta_star=0.5, output_scale=2.0, log_dir={folder!r})
loss, sample = g
for step in range(3):
    x = sample(f, torch.zeros(4, 1))
    loss(f(x), f(x) / (step - 1))
"""
BEGINS = (
    "The loss and langevin are guarded. The loss weights the negatives "
    "(beta_star=0.5, substeps=auto, output_scale=2). To watch it: ebmguard watch runs/a"
)

CALM, OFF, WEIGHS = "Nothing changes", "beta_star=0, substeps", "The loss weights the negatives"


def said(code: str, folder: object, path: Path) -> list[str]:
    """Lines on stderr."""
    done = forks.run("-c", code + RUN.format(folder=folder), cwd=path)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


def test_every_line_begins_with_the_name(tmp_path):
    first, *alerts = said("", "runs/a", tmp_path)
    assert first == f"ebmguard: {BEGINS}"
    assert alerts
    assert all(line.startswith("ebmguard: ") for line in alerts), alerts
    assert "nonfinite" in alerts[0]


@pytest.mark.parametrize(("level", "opens"), [("INFO", True), ("WARNING", False)])
def test_a_program_with_logging_of_its_own_keeps_its_format_and_level(tmp_path, level, opens):
    setting = (
        f"import logging; logging.basicConfig(level='{level}', format='[%(name)s] %(message)s')"
    )
    lines = said(setting, "runs/a", tmp_path)
    assert (f"[ebmguard] {BEGINS}" in lines) == opens
    assert all(line.startswith("[ebmguard] ") for line in lines)
    assert "nonfinite" in lines[-1]


def test_a_silenced_log_stays_silent(tmp_path):
    setting = "import logging; logging.getLogger('ebmguard').addHandler(logging.NullHandler())"
    assert said(setting, "runs/a", tmp_path) == []


def test_says_what_is_missing_to_watch_it(tmp_path):
    assert said("", None, tmp_path)[0].endswith("Pass log_dir= to watch it")


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"times": "auto"}, f"{CALM} until the sampler's steps are too long ({OFF}=auto)"),
        ({"times": 1}, f"{CALM} ({OFF}=1)"),
        ({}, f"The sampler's steps are taken 4 times finer ({OFF}=4)"),
        (
            {"beta": 0.0025, "step_size": 1.0, "noise_std": 0.1},
            f"{WEIGHS} (beta=0.0025, substeps=4, output_scale=200)",
        ),
        (
            {"beta_star": torch.tensor([0.0, 100.0]), "output_scale": 2e4},
            f"{WEIGHS} (beta_star=[0, 100], substeps=4, output_scale=20000)",
        ),
        (
            {"beta_star": torch.tensor(0.5)},
            f"{WEIGHS} (beta_star=0.5, substeps=4, output_scale=unknown)",
        ),
        (
            {"beta_star": lambda _: 1.0, "sampler_scale": 1.0, "has_sampler": True},
            f"{WEIGHS} (beta_star=a schedule, substeps=4, output_scale=to be measured)",
        ),
    ],
)
def test_numbers_are_short_and_a_nested_function_has_its_own_name(given, shown, caplog):
    def nested() -> None:
        """A sampler."""

    caplog.set_level("INFO", "ebmguard")
    times = given.get("times", 4)
    strength = Strength.of(**{name: value for name, value in given.items() if name != "times"})
    announce(nested, strength, times, None)
    first = f"The loss and nested are guarded. {shown}. Pass log_dir= to watch it"
    assert caplog.messages == [first]
