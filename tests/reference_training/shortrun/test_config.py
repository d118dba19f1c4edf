"""Settings of the short-run trainer: what is refused, resumed runs, and the published ones."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from ebmguard.errors import ConfigError
from ebmguard.reference_training.engine.ranks import Ranks
from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.reference_training.shortrun.config import CIFAR10, PRESETS, Preset, ShortRunConfig
from tests.reference_training.shortrun.parts import trained_folder


def at(out="x", **settings):
    return ShortRunConfig(**{"out": Path(out), **settings})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"beta_star": float("inf")}, "beta_star is inf, expected a finite number"),
        (
            {"beta_star": 20_000.0},
            "beta_star is 20000.0, expected less than the output scale, 20000",
        ),
        ({"beta_star": 3.0, "noise_std": 1.0}, "expected less than the output scale, 2: f is"),
        ({"init": "persistent", "buffer_size": 63}, "buffer_size is 63, expected the batch, 64"),
        ({"activation": "relu"}, "activation is 'relu', expected one of leaky_relu, gelu"),
        ({"optimizer": "lion"}, "optimizer is 'lion', expected one of adam, sgd"),
        ({"most_sgld_steps": 99}, "most_sgld_steps is 99, expected sgld_steps, 100, or more"),
        ({"train_images": 1438}, "train_images is 1438, expected at most 1437"),
        ({"image_size": 5}, "image_size is 5, and the images have 8x8 pixels"),
        ({"device": "abacus"}, "device is 'abacus'"),
        ({"start_from": "no/run"}, "no/run holds no run"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_there_is_a_folder(tmp_path, settings, says):
    with pytest.raises(ConfigError, match=says):
        at(tmp_path / "run", **{"device": "cpu", **settings}).open()
    assert not (tmp_path / "run").exists()


def test_a_batch_is_divided_among_the_ranks():
    at(batch=6).check(Ranks(0, 3))
    with pytest.raises(ConfigError, match="batch is 64, expected a multiple of the 3 processes"):
        at().check(Ranks(0, 3))


def test_data_are_those_of_the_settings():
    data = at(train_images=100, test_images=9, image_size=4).load_data()
    assert [len(x) for x in (data.train_x, data.valid_x, data.test_x)] == [100, 0, 9]
    assert data.sample_shape == (1, 4, 4)
    whole = at().load_data()
    # None is put aside: the published script trains on every image.
    assert [len(x) for x in (whole.train_x, whole.valid_x, whole.test_x)] == [1437, 0, 360]


def test_settings_are_the_presets_with_what_is_overridden():
    assert at(data="cifar10").settings == PRESETS["cifar10"]
    changed = at(data="cifar10", nf=32, lr=0.5, init="persistent").settings
    assert changed == replace(PRESETS["cifar10"], nf=32, lr=0.5, init="persistent")
    assert at(iterations=7).total_steps == 7


@pytest.mark.parametrize(
    ("given", "ends"),
    [
        ({}, (100, 100)),
        ({"sgld_steps": 20}, (20, 20)),  # fixed, also above the preset's
        ({"sgld_steps": 200}, (200, 200)),
        ({"most_sgld_steps": 120}, (100, 120)),
        ({"sgld_steps": 5, "most_sgld_steps": 9}, (5, 9)),
    ],
)
def test_k_is_random_where_both_ends_say_so(given, ends):
    settings = at(**given).settings
    assert (settings.sgld_steps, settings.most_sgld_steps) == ends


def test_a_run_keeps_what_its_preset_was_when_it_began(monkeypatch):
    """A network trained with LeakyReLU is none with GELU, whatever the preset has become."""
    changed = replace(PRESETS["digits"], activation="leaky_relu", lr=0.5, iterations=7, nf=6)
    with monkeypatch.context() as earlier:
        earlier.setitem(PRESETS, "digits", changed)
        stored = at(sgld_steps=3, nf=5).to_json()
    resumed = at(resume=True).resumed(stored)
    expected = replace(changed, sgld_steps=3, most_sgld_steps=3, nf=5)
    assert resumed.settings == expected
    assert at(resume=True, iterations=9).resumed(stored).settings == replace(expected, iterations=9)
    assert resumed.resumed(resumed.to_json()) == resumed


def test_a_run_of_another_trainer_is_not_resumed_and_stays_as_it_is(tmp_path):
    JemConfig(out=tmp_path, device="cpu").open()
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(ConfigError, match="is not a run of `ebmguard train shortrun`"):
        at(tmp_path, resume=True, device="cpu").open()
    assert (tmp_path / "config.json").read_bytes() == before


def test_a_network_to_start_from_is_looked_at_before_there_is_a_folder(tmp_path):
    run = str(trained_folder(tmp_path / "a"))
    settings = {"device": "cpu", "train_images": 64, "start_from": run}
    for own, says in (
        ({"nf": 8}, "its parameters have other shapes; give the same data, image_size and nf"),
        ({"nf": 4, "image_size": 4}, "its parameters have other shapes"),
        ({"nf": 4, "activation": "leaky_relu"}, "its activation is gelu, here it is leaky_relu"),
    ):
        with pytest.raises(ConfigError, match=f"start_from is {run}, .*another.*{says}"):
            at(tmp_path / "b", **settings, **own).open()
    assert not (tmp_path / "b").exists()
    state = torch.random.get_rng_state()
    at(tmp_path / "b", **settings, nf=4).check()
    assert torch.equal(torch.random.get_rng_state(), state)
    # A run that is resumed has its own checkpoint.
    replace(at(tmp_path / "b", **settings, nf=4), start_from="gone", resume=True).check()


def test_the_published_script_number_by_number():
    """train_cifar10_minimal.py of Nijkamp et al. (2019)."""
    published = {
        "image_size": None,
        "train_images": None,  # all 50,000
        "nf": 64,
        "activation": "leaky_relu",
        "iterations": 100_000,
        "optimizer": "adam",
        "lr": 1e-4,
        "batch": 64,
        "data_noise": 0.03,
        "init": "noise",
        "sgld_steps": 100,
        "most_sgld_steps": 100,
        "step_size": 1.0,
        "noise_std": 0.01,
    }
    assert PRESETS["cifar10"] is CIFAR10
    assert {name: getattr(CIFAR10, name) for name in published} == published
    ours = {"test_images", "buffer_size", "sample_every"}
    assert {field.name for field in fields(Preset)} == published.keys() | ours
    assert CIFAR10.output_scale == pytest.approx(20_000)


def test_every_preset_samples_as_published_and_can_be_meant():
    for name, preset in PRESETS.items():
        assert preset.problems() == [], name
        sampling = ("sgld_steps", "most_sgld_steps", "step_size", "noise_std", "init", "data_noise")
        assert all(getattr(preset, s) == getattr(CIFAR10, s) for s in sampling), name


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        *(
            ({name: value}, f"{name} is {value}, expected a positive number")
            for name in ("lr", "step_size", "noise_std")
            for value in (0, math.nan)
        ),
        ({"nf": 0}, "nf is 0, expected 1 or more"),
        ({"train_images": 0}, "train_images is 0, expected 1 or more"),
        ({"data_noise": -0.1}, "data_noise is -0.1, expected a finite number, 0 or more"),
        ({"data_noise": math.nan}, "data_noise is nan, expected a finite number, 0 or more"),
    ],
)
def test_what_cannot_be_meant_is_said_once(changes, says):
    assert replace(CIFAR10, **changes).problems() == [says]
