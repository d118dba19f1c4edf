"""Settings of the JEM trainer: what is refused, the command line, and what a resumed run keeps."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

import pytest
import torch
import tyro

from ebmguard.errors import ConfigError
from ebmguard.reference_training.engine.ranks import Ranks
from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.reference_training.jem.options import GROUPS, from_words
from tests.parts import save_script


def at(out="x", **settings):
    return JemConfig(**{"out": Path(out), **settings})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"scenario": "8"}, r"scenario is '8', expected one of digits, 1, .* 7"),
        ({"data": "imagenet"}, r"data is 'imagenet', expected one of digits, mnist, cifar10"),
        ({"variant": "best"}, r"variant is 'best', expected one of default, no_pos, batch, true"),
        ({"precision": "float8"}, r"precision is 'float8', expected one of float32, tf32, bf"),
        ({"p_x_weight": 0.0, "p_y_x_weight": 0.0}, "all three weights are 0"),
        (
            {"p_x_y_weight": float("inf")},
            "p_x_y_weight is inf, expected a finite number, 0 or more",
        ),
        ({"p_x_y_weight": 1.0, "variant": "true"}, r"variant is 'true' with p_x_y_weight"),
        ({"class_conditional": True, "p_x_weight": 0.0}, "class_conditional needs the term of p"),
        ({"class_conditional": True, "buffer_size": 33}, "buffer_size is 33, expected a multiple"),
        ({"p_x_y_weight": 1.0, "buffer_size": 33}, "buffer_size is 33, expected a multiple of 10"),
        ({"energy_l2": 0.1, "p_x_weight": 0.0}, r"energy_l2 belongs to the terms of p\(x\) and p"),
        ({"clip_norm": float("nan")}, "clip_norm is nan, expected a positive number"),
        ({"action": "stop"}, "action is 'stop', expected one of warn, raise, rollback"),
        ({"action": "raise", "p_x_weight": 0.0}, "action is 'raise' without samples"),
        (
            {"action": "rollback", "p_x_y_weight": 1.0},
            "action is 'rollback' with p_x_y_weight, who",
        ),
        ({"activation": "relu"}, "activation is 'relu', expected one of leaky_relu, silu"),
        ({"norm": "instance", "image_size": 4}, "norm is 'instance', which needs images of 5x5"),
        ({"dropout": 1.0}, "dropout is 1.0, expected a share from 0 to less than 1"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0, expected a finite number, 0 or more"),
        ({"labels_per_class": 0}, "labels_per_class is 0, expected 1 or more"),
        ({"labels_per_class": 4}, "n_labelled is 0 with labels_per_class 4: expected a batch of 1"),
        ({"labels_per_class": 4, "n_labelled": 41}, "n_labelled is 41 .* 1 to 40 of the labelled"),
        ({"unconditional": True, "p_x_y_weight": 1.0}, "unconditional .* has no f"),
        ({"unconditional": True, "class_conditional": True}, "unconditional .* has no f"),
        ({"unconditional": True, "p_x_weight": 0.0}, "unconditional needs the term of p"),
        ({"features": "no such thing", "quality_samples": 9}, "features is 'no such thing'"),
        ({"finer_steps": True, "compile": "yes"}, "finer_steps needs samples, and a network that"),
        ({"finer_steps": True, "p_x_weight": 0.0}, "finer_steps needs samples"),
        ({"device": "quantum"}, "device is 'quantum'"),
        ({"sgld_steps": 0}, "sgld_steps is 0, expected 1 or more"),
        ({"n_pos": 64, "train_images": 63}, "a batch of 64 images was asked for, digits has 63"),
        ({"n_labelled": 9, "n_pos": 1, "train_images": 8}, "a batch of 9 images was asked for"),
        ({"image_size": 3}, "image_size is 3, and the images have 8x8 pixels"),
        ({"train_images": 10**6}, "train_images is 1000000, expected at most 1437"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_there_is_a_folder(tmp_path, settings, says):
    with pytest.raises(ConfigError, match=says):
        at(tmp_path / "run", **{"device": "cpu", **settings}).open()
    assert not (tmp_path / "run").exists()


def test_data_that_are_not_there_are_missed_before_there_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("EBMGUARD_DATA", raising=False)
    with pytest.raises(ConfigError, match=r"--data-root or the environment variable EBMGUARD_DATA"):
        at(tmp_path / "run", data="cifar10").open()
    with pytest.raises(ConfigError, match=f"{tmp_path}.*not a folder"):
        at(tmp_path / "run", data="cifar10", data_root=str(tmp_path / "no")).open()
    with pytest.raises(ConfigError, match=str(tmp_path)):
        at(tmp_path / "run", data="cifar10", data_root=str(tmp_path)).open()
    assert not (tmp_path / "run").exists()


def test_data_are_those_of_the_settings():
    data = at(train_images=100, valid_images=7, test_images=9, image_size=4).load_data()
    assert [len(x) for x in (data.train_x, data.valid_x, data.test_x)] == [100, 7, 9]
    assert data.sample_shape == (1, 4, 4)


@pytest.mark.parametrize(
    "settings",
    [
        {"beta_star": 0.5, "lr": 1e-3, "sgld_steps": 7},
        {"data": "cifar10", "data_root": "/data sets", "scenario": "3", "precision": "bfloat16"},
        {"class_conditional": True, "p_x_y_weight": 0.5, "n_labelled": 0, "compile": "yes"},
        {"data": "mnist", "image_size": 14},
        {"action": "rollback", "finer_steps": True},
        {"energy_l2": 0.1, "clip_norm": 1.0, "activation": "silu", "norm": "layer"},
        {"optimizer": "sgd", "weight_decay": 5e-4, "dropout": 0.3, "unconditional": True},
        {"labels_per_class": 4, "n_labelled": 64},
        {"features": "runs/other", "seed": 3},
    ],
)
def test_command_line_makes_the_same_settings(settings):
    config = at("runs/a b", **settings)
    words = shlex.split(config.command())
    assert words[:3] == ["ebmguard", "train", "jem"]
    assert tyro.cli(from_words, args=words[3:]) == config


def test_every_setting_is_in_one_group_of_the_help():
    names = " ".join(GROUPS.values()).split()
    assert sorted(names) == sorted(field.name for field in dataclasses.fields(JemConfig))


def test_the_help_says_the_defaults_that_count(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        tyro.cli(from_words, args=["--help"])
    shown = capsys.readouterr().out
    assert "None" not in shown
    for group in GROUPS:
        assert f"{group} options" in shown
    settings = [at("x").settings, at("x", scenario="1").settings]
    assert f"default: {settings[0].lr} on digits, {settings[1].lr} in scenario 1" in shown
    assert f"default: {at('x').beta_star}" in shown


def test_data_may_lie_elsewhere_when_a_run_is_resumed():
    stored = at(data="cifar10", data_root="/old").to_json()
    assert at(data_root="/new", resume=True).resumed(stored).data_root == "/new"
    assert at(resume=True).resumed(stored).data_root == "/old"


def test_a_run_folder_cannot_name_code_that_resuming_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_script(torch.nn.Identity(), "features.pt")
    opened: list[str] = []
    load = torch.jit.load

    def noted(file, **options):
        opened.append(file)
        return load(file, **options)

    monkeypatch.setattr(torch.jit, "load", noted)
    stored = at(features="features.pt", quality_samples=8).to_json()
    with pytest.raises(ConfigError, match=r"features .*features\.pt.*these --features if"):
        at(resume=True).resumed(stored).check()
    assert not opened
    at(resume=True, features="features.pt").resumed(stored).check()
    assert opened == ["features.pt"]


def test_features_that_run_no_code_come_with_the_folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for spec in ("own", "inception:weights.pth", str(tmp_path)):
        assert at(resume=True).resumed(at(features=spec).to_json()).features == spec


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"p_x_y_weight": 1.0, "buffer_size": 30}, "p_x_y_weight weighs samples within their cl"),
        ({"beta_star": 0.0}, "n_pos is 7, expected a multiple of the 2 processes"),
        ({"n_neg": 1}, "1 images or samples a step, of all processes together: expected one for e"),
        ({"norm": "batch"}, "norm is 'batch', whose statistics are of one process"),
        (
            {"class_conditional": True, "buffer_size": 30},
            "buffer_size is 30, expected a multiple of 20",
        ),
    ],
)
def test_what_two_ranks_cannot_do_is_refused(settings, says):
    with pytest.raises(ConfigError, match=f"do not make a run of 2 processes:\n(.|\n)*{says}"):
        at(**{"n_pos": 7, "n_neg": 5, **settings}).check(Ranks(1, 2))
