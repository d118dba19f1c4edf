"""`ebmguard train shortrun`: its settings, the published ones, and what the command says."""

from __future__ import annotations

import shlex
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from ebmguard.cli import main
from ebmguard.errors import ConfigError
from ebmguard.reference_training.engine import loop
from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.reference_training.shortrun.config import CIFAR10, PRESETS, Preset, ShortRunConfig
from ebmguard.reference_training.shortrun.train import told
from tests.reference_training.parts import SHORTRUN, Silent, newest, trained_folder


def at(out="x", **settings):
    return ShortRunConfig(**{"out": Path(out), **settings})


def test_data_and_settings_are_those_of_the_presets_with_what_is_overridden():
    data = at(train_images=100, test_images=9, image_size=4).load_data()
    assert [len(x) for x in (data.train_x, data.valid_x, data.test_x)] == [100, 0, 9]
    assert data.sample_shape == (1, 4, 4)
    whole = at().load_data()
    # None is put aside: the published script trains on every image.
    assert [len(x) for x in (whole.train_x, whole.valid_x, whole.test_x)] == [1437, 0, 360]
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


def test_a_stop_says_how_to_go_on_and_has_the_shells_status(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loop, "default_reporter", lambda every: Silent(interrupt_after=2))
    out = tmp_path / "a run"
    assert main(shlex.split(SHORTRUN.config_for(out).command())[1:]) == 130
    said = capsys.readouterr().out
    assert said.startswith("stopped; go on with: ebmguard train shortrun --out ")
    assert said.endswith("--resume\n")
    assert newest(out).name == "step-00000002.pt"
    monkeypatch.setattr(loop, "default_reporter", lambda every: Silent())
    # The very words that it said.
    assert main(shlex.split(said.removeprefix("stopped; go on with: "))[1:]) == 0
    assert "finished 6 steps" in capsys.readouterr().out


def test_the_ways_to_end(tmp_path):
    def words(**changes):
        nothing = dict.fromkeys(("ended", "diverged_at", "first_warn", "first_error"))
        return [*loop.course({**nothing, "steps": 7, "rollbacks": [], **changes}, tmp_path)][1:]

    same = {"message": "E b"}  # is said once
    assert words() == ["finished 7 steps without divergence"]
    lost = words(diverged_at=6, first_warn={"message": "WARN a"}, first_error=same)
    assert lost == ["DIVERGED at step 6", "first warn: WARN a", "first error: E b"]
    ended = words(ended="E b", diverged_at=6, first_warn=same, first_error=same)
    assert ended == ["ENDED by the guard after 7 steps: E b"]
    lost = words(diverged_at=6, first_warn=same, first_error=same)
    assert lost == ["DIVERGED at step 6", "first error: E b"]


def test_without_a_guard_weights_are_what_they_would_be():
    medians = {"energy_gap": 0.1234, "grad_scale": 0.5, "ess": None}
    medians |= {"ref/grad_scale": 0.75, "ref/ess": 0.25}
    for beta_star, said in ((0.02, "GradScale 0.5"), (0.0, "GradScale 0.75, ESS 0.25")):
        found = told({"median_last_100": medians, "beta_star": beta_star})
        assert found == f"medians of the last 100 updates: energy gap 0.123, {said}"
