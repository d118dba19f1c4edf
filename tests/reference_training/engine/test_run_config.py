"""Settings of a run: their command line, what a resumed run takes over, and whose folder it is."""

from __future__ import annotations

import dataclasses
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tyro

from ebmguard.errors import ConfigError
from ebmguard.reference_training.engine.ranks import ONE_RANK, Ranks
from ebmguard.reference_training.engine.run_config import RESTARTS, RunConfig


@dataclass(frozen=True)
class Settings(RunConfig):  # type: ignore[misc]  # mypy cannot follow the mapped package
    """A trainer's, with every kind of value that settings have."""

    iterations: int | None = None
    """Updates."""
    betas: tuple[str, ...] = ("0", "0.5")
    """Several."""
    noise_std: float | None = None
    """One or none."""
    sgld_steps: int = 20
    """A number."""
    threads: int = 0
    """CPU threads."""
    compiled: bool = False
    """A switch."""

    words: ClassVar[tuple[str, ...]] = ("ebmguard", "train", "it")
    shown: ClassVar[tuple[str, ...]] = ("out", "sgld_steps")

    @property
    def total_steps(self) -> int:
        return 100

    def check(self, ranks: Ranks = ONE_RANK) -> None:
        if self.sgld_steps < 0:
            raise ConfigError(f"sgld_steps is {self.sgld_steps}, expected 0 or more")

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "derived": [self.sgld_steps] * 2}


def settings_at(out, **values):
    return Settings(out=Path(out), **values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "--sgld-steps 20"),
        ({"betas": ("-0.2", "0:0.9")}, "--betas -0.2 0:0.9 --sgld-steps 20"),
        ({"iterations": 7, "seed": 3}, "--seed 3 --iterations 7 --sgld-steps 20"),
        ({"noise_std": 0.1, "device": "cpu"}, "--device cpu --noise-std 0.1 --sgld-steps 20"),
        ({"resume": True}, "--sgld-steps 20"),
        ({"compiled": True}, "--sgld-steps 20 --compiled"),
    ],
)
def test_the_command_names_what_is_not_a_default_and_what_is_always_shown(values, words):
    config = settings_at("runs/a b", **values)
    assert config.command() == f"ebmguard train it --out 'runs/a b' {words}"
    typed = shlex.split(config.command())[3:]
    assert tyro.cli(Settings, args=typed) == dataclasses.replace(config, resume=False)


def test_a_resumed_run_has_its_settings_again():
    run = settings_at("x", betas=("0.1", "0.9"), noise_std=0.3, iterations=50, seed=2, resume=True)
    assert run.to_json().keys().isdisjoint({"out", "resume"})
    # What was derived from the settings, or is of another version, is no setting.
    stored = json.loads(json.dumps(run.to_json())) | {"optimizer": "adam"}
    del stored["sgld_steps"]  # what is not stored keeps its default
    again = settings_at("y", resume=True).resumed(stored)
    assert again == dataclasses.replace(run, out=Path("y"), sgld_steps=20)


def test_length_device_and_threads_may_change():
    stored = settings_at("x", iterations=50, device="cuda", threads=4).to_json()
    asked = {"iterations": 80, "device": "cpu", "threads": 2}
    assert settings_at("x", **asked).resumed(stored) == settings_at("x", **asked)


@pytest.mark.parametrize(
    ("there", "asked", "says"),
    [
        ({}, {"noise_std": 0.1}, r"noise_std is 0\.1, the run has None"),
        ({"noise_std": 0.2}, {"noise_std": 0.1}, r"noise_std is 0\.1, the run has 0\.2"),
        ({}, {"betas": ("0.3",)}, r"betas is \['0\.3'\], the run has \['0', '0\.5'\]"),
        ({"seed": 1}, {"seed": 2}, "seed is 2, the run has 1"),
        (
            {"noise_std": 0.5},
            {"seed": 1, "sgld_steps": 3, "noise_std": 0.5},
            r"  seed is 1, the run has 0\n  sgld_steps is 3, the run has 20$",
        ),
    ],
)
def test_other_settings_are_refused(there, asked, says):
    with pytest.raises(ConfigError, match=says) as caught:
        settings_at("runs/x", **asked).resumed(settings_at("x", **there).to_json())
    assert "runs/x cannot be resumed with other settings" in str(caught.value)


def test_opens_a_folder_and_opens_it_again(tmp_path):
    out = tmp_path / "run"
    config = settings_at(out, betas=("0.3",), iterations=10, device="cpu")
    opened, folder = config.open()
    assert opened == config
    stored = {**config.to_json(), "device_kind": "cpu"}
    assert json.loads((out / "config.json").read_text()) == stored
    folder.write_config({**folder.config, "version": 7})
    with pytest.raises(ConfigError, match="already holds a run"):
        config.open()
    longer = settings_at(out, resume=True, iterations=20)
    resumed, folder = longer.open()
    assert resumed == dataclasses.replace(config, resume=True, iterations=20)
    # What the folder says of the run is what the run now is; what else it says stays.
    assert folder.config == {**resumed.to_json(), "device_kind": "cpu", "version": 7}
    assert json.loads((out / "config.json").read_text()) == folder.config


def test_what_cannot_be_meant_leaves_no_folder(tmp_path):
    for values, says in (
        ({"sgld_steps": -1}, "sgld_steps is -1"),
        ({"device": "abacus"}, "device is 'abacus'"),
        ({"resume": True}, "no run to resume"),
    ):
        with pytest.raises(ConfigError, match=says):
            settings_at(tmp_path / "run", **values).open()
        assert not (tmp_path / "run").exists()


def test_a_refused_resume_leaves_the_folder_as_it_was(tmp_path):
    def refused(says, **asked):
        before = (tmp_path / "config.json").read_bytes()
        with pytest.raises(ConfigError, match=says):
            settings_at(tmp_path, resume=True, **asked).open()
        assert (tmp_path / "config.json").read_bytes() == before

    _, folder = settings_at(tmp_path, seed=1, device="cpu").open()
    refused("seed is 2", seed=2)
    refused("device is 'abacus'", device="abacus")
    folder.checkpoints.save(100, {"step": 100})
    settings_at(tmp_path, resume=True).open()
    folder.checkpoints.save(101, {"step": 101})
    refused("has 101 steps already, iterations is 100")
    # Random numbers of a GPU are not those of a CPU.
    folder.write_config({**folder.config, "device_kind": "cuda"})
    refused(r"began on a device of the kind 'cuda'.*--device cuda")


@pytest.mark.parametrize("variable", RESTARTS)
def test_a_command_that_is_repeated_begins_its_run_or_goes_on_with_it(
    tmp_path, monkeypatch, variable
):
    config = settings_at(tmp_path / "run", seed=1, device="cpu")
    monkeypatch.setenv(variable, "1")
    opened, _ = config.open()  # killed before there was a run
    assert opened == config
    monkeypatch.setenv(variable, "2")
    opened, folder = config.open()
    assert opened == dataclasses.replace(config, resume=True)
    # Of another run, which was refused the first time, not even a default is taken.
    for other, says in (
        (settings_at(tmp_path / "run"), "seed is 0"),
        (None, "already holds a run"),
    ):
        before = (folder.path / "config.json").read_bytes()
        if other is None:
            monkeypatch.setenv(variable, "0")
        with pytest.raises(ConfigError, match=says):
            (other or config).open()
        assert (folder.path / "config.json").read_bytes() == before
