"""`ebmguard train shortrun`: its settings, the published ones, and what the command says."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from ebmguard.errors import ConfigError
from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.reference_training.shortrun.config import CIFAR10, PRESETS, Preset, ShortRunConfig
from ebmguard.reference_training.shortrun.train import told


def at(out="x", **settings):
    return ShortRunConfig(**{"out": Path(out), **settings})


def test_a_run_of_another_trainer_is_not_resumed_and_stays_as_it_is(tmp_path):
    JemConfig(out=tmp_path, device="cpu").open()
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(ConfigError, match="is not a run of `ebmguard train shortrun`"):
        at(tmp_path, resume=True, device="cpu").open()
    assert (tmp_path / "config.json").read_bytes() == before


def test_presets_sample_as_the_published_script_number_by_number():
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
    for name, preset in PRESETS.items():
        assert preset.problems() == [], name
        sampling = ("sgld_steps", "most_sgld_steps", "step_size", "noise_std", "init", "data_noise")
        assert all(getattr(preset, s) == getattr(CIFAR10, s) for s in sampling), name


def test_without_a_guard_weights_are_what_they_would_be():
    medians = {"energy_gap": 0.1234, "grad_scale": 0.5, "ess": None}
    medians |= {"ref/grad_scale": 0.75, "ref/ess": 0.25}
    for beta_star, said in ((0.02, "GradScale 0.5"), (0.0, "GradScale 0.75, ESS 0.25")):
        found = told({"median_last_100": medians, "beta_star": beta_star})
        assert found == f"medians of the last 100 updates: energy gap 0.123, {said}"
