"""Settings of a run, and the folder that holds it: what is written, resumed and refused."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from pathlib import Path

import pytest
import tyro

from ebmguard.errors import ConfigError, DiskError
from ebmguard.reference_training.engine.run_config import RESTARTS
from ebmguard.reference_training.engine.run_folder import (
    RunFolder,
    read_config,
    read_json,
    series,
)
from ebmguard.reference_training.toy.config import ToyConfig
from ebmguard.sinks import read_jsonl
from tests.sinks.test_lock import HOLDS, another


def files_of(path):
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def at(out, **values):
    return ToyConfig(out=Path(out), **values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"betas": ("0", "0.5")}, "--scenario gmm-default --betas 0 0.5 --seeds 3"),
        (
            {"betas": ("-0.2", "0:0.9"), "seed": 3, "noise_std": 0.1, "resume": True},
            "--seed 3 --scenario gmm-default --betas -0.2 0:0.9 --seeds 3 --noise-std 0.1",
        ),
    ],
)
def test_the_command_names_what_is_not_a_default_and_what_is_always_shown(values, words):
    config = at("runs/a b", **values)
    assert config.command() == f"ebmguard train toy --out 'runs/a b' {words}"
    typed = shlex.split(config.command())[3:]
    assert tyro.cli(ToyConfig, args=typed) == dataclasses.replace(config, resume=False)


def test_a_resumed_run_has_its_settings_but_for_length_device_and_threads():
    run = at("x", betas=("0.1", "0.9"), noise_std=0.3, iterations=50, seed=2, resume=True)
    assert run.to_json().keys().isdisjoint({"out", "resume"})
    # What was derived from the settings, or is of another version, is no setting.
    stored = json.loads(json.dumps(run.to_json())) | {"optimizer": "adam"}
    del stored["evaluations"]  # what is not stored keeps its default
    assert at("y", resume=True).resumed(stored) == dataclasses.replace(run, out=Path("y"))
    stored = at("x", iterations=50, device="cuda", threads=4).to_json()
    asked = {"iterations": 80, "device": "cpu", "threads": 2}
    assert at("x", **asked).resumed(stored) == at("x", **asked)


@pytest.mark.parametrize(
    ("there", "asked", "says"),
    [
        ({}, {"noise_std": 0.1}, r"noise_std is 0\.1, the run has None"),
        ({}, {"betas": ("0.3",)}, r"betas is \['0\.3'\], the run has \['0', '0\.1', "),
        (
            {"noise_std": 0.5},
            {"seed": 1, "evaluations": 3, "noise_std": 0.5},
            r"  seed is 1, the run has 0\n  evaluations is 3, the run has 20$",
        ),
    ],
)
def test_other_settings_are_refused(there, asked, says):
    with pytest.raises(ConfigError, match=says) as caught:
        at("runs/x", **asked).resumed(at("x", **there).to_json())
    assert "runs/x cannot be resumed with other settings" in str(caught.value)


def test_opens_a_folder_and_opens_it_again(tmp_path):
    out = tmp_path / "deep" / "run"
    out.mkdir(parents=True)
    (out / "config.json.partial").write_text('{"lr": 0')  # killed before it had its name
    config = at(out, betas=("0.3",), iterations=40, device="cpu")
    opened, folder = config.open()
    assert opened == config
    stored = {**config.to_json(), "device_kind": "cpu"}
    assert json.loads((out / "config.json").read_text()) == stored
    folder.write_config({**folder.config, "version": 7})
    with pytest.raises(ConfigError, match=r"already holds a run.*--resume"):
        config.open()
    resumed, folder = at(out, resume=True, iterations=60).open()
    assert resumed == dataclasses.replace(config, resume=True, iterations=60)
    # What the folder says of the run is what the run now is; what else it says stays.
    assert folder.config == {**resumed.to_json(), "device_kind": "cpu", "version": 7}
    assert json.loads((out / "config.json").read_text()) == folder.config


@pytest.mark.parametrize("variable", RESTARTS)
def test_a_command_that_is_repeated_begins_its_run_or_goes_on_with_it(
    tmp_path, monkeypatch, variable
):
    config = at(tmp_path / "run", seed=1, device="cpu")
    monkeypatch.setenv(variable, "1")
    opened, _ = config.open()  # killed before there was a run
    assert opened == config
    monkeypatch.setenv(variable, "2")
    opened, folder = config.open()
    assert opened == dataclasses.replace(config, resume=True)
    before = (folder.path / "config.json").read_bytes()
    # Of another run, which was refused the first time, not even a default is taken.
    with pytest.raises(ConfigError, match="seed is 0"):
        at(tmp_path / "run").open()
    monkeypatch.setenv(variable, "0")
    with pytest.raises(ConfigError, match="already holds a run"):
        config.open()
    assert (folder.path / "config.json").read_bytes() == before


def test_cuts_back_what_a_resumed_run_writes_again(tmp_path):
    folder = RunFolder.create(tmp_path / "run", {})
    folder.append_rows("metrics.jsonl", [{"step": 0}, {"step": 1}])
    sizes = folder.row_sizes()
    assert set(sizes) == {"metrics.jsonl"}
    folder.append_rows("metrics.jsonl", [{"step": 2}])
    folder.append_rows("alerts.jsonl", [{"step": 2}])
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "to')  # killed while writing
    folder.cut_rows(sizes)
    assert read_jsonl(folder.path / "metrics.jsonl") == [{"step": 0}, {"step": 1}]
    assert read_jsonl(folder.path / "alerts.jsonl") == []
    folder.cut_rows({"metrics.jsonl": 1000})  # lost with power, but not with the checkpoint
    assert folder.row_sizes() == {**sizes, "alerts.jsonl": 0}
    folder.cut_rows({})
    assert read_jsonl(folder.path / "metrics.jsonl") == []


def test_a_run_that_another_process_writes_is_refused_and_left_alone(tmp_path):
    folder = RunFolder.create(tmp_path / "run", {"lr": 0.1})
    folder.append_rows("metrics.jsonl", [{"step": 0}])
    del folder
    for out, make in ((tmp_path / "run", RunFolder.resume), (tmp_path / "new", new)):
        with another(HOLDS, out) as process:
            before = files_of(out)
            with pytest.raises(ConfigError, match=f"in use by process {process.pid} on "):
                make(out)
            assert files_of(out) == before
        assert make(out).config == {"lr": 0.1}


def new(out):
    return RunFolder.create(out, {"lr": 0.1})


def test_nothing_is_read_or_written_through_a_link_that_leads_out(tmp_path):
    new(tmp_path / "run")
    (tmp_path / "secret").write_text('{"step": 1, "energy_gap": 2.0}')
    for name, read in (
        ("metrics.jsonl", lambda: series(tmp_path / "run", ["energy_gap"])),
        ("config.json", lambda: read_config(tmp_path / "run")),
        ("results.json", lambda: read_json(tmp_path / "run" / "results.json")),
    ):
        (tmp_path / "run" / name).unlink(missing_ok=True)
        (tmp_path / "run" / name).symlink_to(tmp_path / "secret")
        with pytest.raises(ConfigError, match=rf"{name} cannot be read: it leads out of"):
            read()
    folder = new(tmp_path / "other")
    (tmp_path / "precious").write_text("precious")
    for name in ("results.json.partial", "checkpoints/best.partial"):
        (folder.path / name).symlink_to(tmp_path / "precious")
    folder.write_results({"steps": 1})
    folder.save("checkpoints/best.pt", {"step": 1})
    assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_rows_that_a_full_disk_does_not_take_are_an_error_that_says_so(tmp_path):
    folder = new(tmp_path / "run")
    with pytest.raises(
        DiskError, match=r"/dev/full could not be written: the disk is full \(No sp"
    ):
        folder.append_rows("/dev/full", [{"step": 0}])
