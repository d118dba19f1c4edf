from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import tyro

from ebmguard.errors import ConfigError
from ebmguard.reference_training.jem.config import JemConfig


def test_all_problems_are_in_one_error():
    config = JemConfig(
        out=Path("x"),
        lr=0.0,
        depth=11,
        n_neg=0,
        sgld_steps=-1,
        noise_std=-1.0,
        reinit_rate=2.0,
        beta_star=float("nan"),
    )
    with pytest.raises(ConfigError) as caught:
        config.check()
    text = str(caught.value)
    names = ("lr", "depth", "n_neg", "sgld_steps", "noise_std", "reinit_rate", "beta_star")
    assert all(f"{name} is " in text for name in names)
    assert text.count("expected") == len(names)
    JemConfig(out=Path("x")).check()


def test_output_scale_is_that_of_jem():
    assert JemConfig(out=Path("x")).output_scale == pytest.approx(20_000)
    assert JemConfig(out=Path("x"), noise_std=0.0).output_scale is None


def test_command_line_makes_the_same_settings():
    config = JemConfig(out=Path("runs/a b"), beta_star=0.5, lr=1e-3, sgld_steps=7)
    words = shlex.split(config.command())
    assert words[:3] == ["ebmguard", "train", "jem"]
    assert tyro.cli(JemConfig, args=words[3:]) == config


def test_settings_are_plain_json_values():
    stored = JemConfig(out=Path("x"), resume=True).to_json()
    assert json.loads(json.dumps(stored)) == stored
    assert "out" not in stored
    assert "resume" not in stored


def test_resume_takes_the_settings_of_the_run():
    stored = JemConfig(out=Path("x"), lr=1e-3, seed=4).to_json()
    asked = JemConfig(out=Path("y"), resume=True, iterations=9000)
    assert asked.resumed(stored) == JemConfig(
        out=Path("y"), resume=True, iterations=9000, lr=1e-3, seed=4
    )
    assert JemConfig(out=Path("y"), lr=1e-3).resumed(stored).seed == 4


def test_resume_refuses_other_settings():
    stored = JemConfig(out=Path("x"), lr=1e-3).to_json()
    with pytest.raises(ConfigError, match=r"lr is 0\.1, the run has 0\.001"):
        JemConfig(out=Path("x"), lr=0.1).resumed(stored)
