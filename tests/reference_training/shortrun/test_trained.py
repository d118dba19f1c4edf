"""Runs that are opened to be studied: network, chains, energies, and what is no run."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from ebmguard import guard
from ebmguard.errors import ConfigError
from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.reference_training.shortrun import trained as trained_module
from ebmguard.reference_training.shortrun.sampler import chain, make_sampler
from ebmguard.reference_training.shortrun.trained import load_run
from tests.reference_training.jem.parts import newest, same, saved
from tests.reference_training.shortrun.parts import (
    Quadratic,
    config_for,
    tiny_run,
    trained_folder,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of six updates at a beta of one tenth."""
    return trained_folder(tmp_path_factory.mktemp("runs") / "tenth", beta_star=2000.0, seed=3)


def generator(seed=4):
    return torch.Generator().manual_seed(seed)


def test_the_network_is_that_of_the_newest_checkpoint(folder):
    run = load_run(folder, CPU)
    assert run.step == 6
    assert same(dict(run.network.state_dict()), saved(folder)["network"])
    assert not run.network.training
    assert not any(p.requires_grad for p in run.network.parameters())
    assert run.settings == config_for(folder, beta_star=2000.0).settings
    assert (run.config.beta_star, run.config.seed, run.path) == (2000.0, 3, folder)
    assert run.name == "tenth"
    assert run.drift == pytest.approx(0.9)
    assert run.device == CPU
    assert len(run.data.train_x) == 64
    assert len(run.data.test_x) == 32


def test_what_is_no_run_is_refused(tmp_path, folder):
    with pytest.raises(ConfigError, match=f"{tmp_path}/no holds no run"):
        load_run(tmp_path / "no", CPU)
    JemConfig(out=tmp_path / "jem", device="cpu").open()
    with pytest.raises(ConfigError, match="jem is not a run of `ebmguard train shortrun`"):
        load_run(tmp_path / "jem", CPU)
    config_for(tmp_path / "new").open()
    with pytest.raises(ConfigError, match="new has no checkpoint yet"):
        load_run(tmp_path / "new", CPU)
    newest(trained_folder(tmp_path / "torn")).write_bytes(b"torn")
    with pytest.raises(ConfigError, match="step-00000006"):
        load_run(tmp_path / "torn", CPU)


def test_data_may_lie_elsewhere(tmp_path, monkeypatch):
    """Elsewhere than in the training: another folder is named, and looked into."""
    monkeypatch.delenv("EBMGUARD_DATA", raising=False)
    out = trained_folder(tmp_path / "run")
    stored = json.loads((out / "config.json").read_text())
    stored["data"] = "mnist"
    (out / "config.json").write_text(json.dumps(stored | {"data_root": "/gone"}))
    with pytest.raises(ConfigError, match="/gone, which is not a folder"):
        load_run(out, CPU)
    with pytest.raises(ConfigError, match=f"{tmp_path}/here, which is not a folder"):
        load_run(out, CPU, data_root=str(tmp_path / "here"))


@pytest.mark.parametrize("beta_star", [0.0, 2000.0])
def test_chains_are_those_of_the_training_under_its_guard(beta_star):
    run = tiny_run(beta_star=beta_star, sgld_steps=7)
    with torch.no_grad():
        run.network.head.weight.mul_(30)
    x0 = run.starts(5, generator())
    noise = torch.randn(7, 5, 1, 8, 8, generator=generator(9))
    g = guard(
        None,
        make_sampler(run.settings, CPU),
        beta_star=beta_star,
        output_scale=run.settings.output_scale,
    )
    expected = g.sampler(run.network, x0, noise)
    x = run.chains(x0, 7, generator(9))
    torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-6)
    assert not x.requires_grad
    if beta_star:  # the drift is large enough to tell the factor
        plain = tiny_run(beta_star=0.0).chains(x0, 7, generator(9))
        assert (plain - x).abs().max() > 1e-4


def test_a_step_four_times_as_large_has_four_times_the_drift_and_twice_the_noise():
    """One step of a quadratic: x + 4 s (1 - β) f' + 2 n z; and any factor keeps o."""
    f = Quadratic(0.05, mean=0.3)
    run = tiny_run(network=f, beta_star=2000.0)
    x0 = run.starts(6, generator())
    z = torch.randn(1, 6, 1, 8, 8, generator=generator(9))[0]
    gradient = -0.05 * (x0 - 0.3)
    for factor, drift, noise in ((1.0, 0.9, 0.01), (4.0, 3.6, 0.02), (0.25, 0.225, 0.005)):
        x = run.chains(x0, 1, generator(9), step_factor=factor)
        torch.testing.assert_close(x, x0 + drift * gradient + noise * z)


def test_noise_in_parts_makes_one_chain(monkeypatch):
    run = tiny_run(noise_std=0.1)
    x0, rng = run.starts(5, generator()), generator(9)
    noise = torch.cat([torch.randn(k, *x0.shape, generator=rng) for k in (3, 3, 2)])
    settings = replace(run.settings, step_size=run.step_size)
    monkeypatch.setattr(trained_module, "CHUNK", 3)
    x = run.chains(x0, 8, generator(9))
    torch.testing.assert_close(x, chain(settings, run.network, x0, noise))
    assert torch.equal(run.chains(x0, 0, generator()), x0)
