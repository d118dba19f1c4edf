"""The published settings, and what cannot be one."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest

from ebmguard.reference_training.shortrun.config import CIFAR10, PRESETS, Preset


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
        ({"most_sgld_steps": 99}, "most_sgld_steps is 99, expected sgld_steps, 100, or more"),
        ({"activation": "relu"}, "activation is 'relu', expected leaky_relu or gelu"),
        ({"init": "data"}, "init is 'data', expected noise or persistent"),
        ({"optimizer": "lion"}, "optimizer is 'lion', expected adam or sgd"),
    ],
)
def test_what_cannot_be_meant_is_said_once(changes, says):
    assert replace(CIFAR10, **changes).problems() == [says]
