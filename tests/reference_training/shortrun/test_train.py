"""A short run: its settings, that the loop is the published one, and what is written."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from ebmguard.errors import ConfigError
from ebmguard.reference_training.shortrun.config import CIFAR10, PRESETS, Preset, ShortRunConfig
from ebmguard.reference_training.shortrun.train import ShortRun
from ebmguard.sinks import read_jsonl
from tests.reference_training.parts import (
    SHORTRUN,
    in_float64,
    published_layers,
    pulled,
    same,
    saved,
    trained_folder,
)


def at(out="x", **settings):
    return ShortRunConfig(**{"out": Path(out), **settings})


def test_data_and_settings_are_those_of_the_presets_with_what_is_overridden():
    whole = at().load_data()
    # None is put aside: the published script trains on every image.
    assert [len(x) for x in (whole.train_x, whole.valid_x, whole.test_x)] == [1437, 0, 360]
    changed = at(data="cifar10", nf=32, lr=0.5, init="persistent").settings
    assert changed == replace(PRESETS["cifar10"], nf=32, lr=0.5, init="persistent")
    assert at(iterations=7).total_steps == 7


@pytest.mark.parametrize(
    ("given", "ends"),
    [({"sgld_steps": 20}, (20, 20)), ({"most_sgld_steps": 120}, (100, 120))],
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


def test_a_network_to_start_from_is_looked_at_before_there_is_a_folder(tmp_path):
    run = str(trained_folder(tmp_path / "a"))
    settings = {"device": "cpu", "train_images": 64, "start_from": run}
    for own, says in (
        ({"nf": 8}, "its parameters have other shapes; give the same data, image_size and nf"),
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


config_for, go = SHORTRUN.config_for, SHORTRUN.go


def plain_loop(config, steps_run, loss, update):
    """The published loop, written without anything of the trainer's.

    Args:
        steps_run: Langevin steps of each update.
        loss: of f (B,) of the images and of the samples.
        update: a function of x, its gradient and noise.
    """
    settings, data = config.settings, config.load_data()
    count, shape = settings.batch, data.sample_shape
    torch.manual_seed(config.seed)
    net = published_layers(settings.nf)
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images, chains, counts = (torch.Generator().manual_seed(3 * config.seed + i) for i in range(3))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=settings.lr)
    if settings.optimizer == "adam":
        optimizer = torch.optim.Adam(net.parameters(), lr=settings.lr, fused=True)
    buffer = None
    if settings.init == "persistent":
        buffer = torch.rand(settings.buffer_size, *shape, generator=chains) * 2 - 1
    for steps in steps_run:
        index = torch.randint(len(data.train_x), (count,), generator=images)
        x_pos = data.scale(data.train_x[index])
        x_pos = x_pos + settings.data_noise * torch.randn(count, *shape, generator=images)
        k = settings.sgld_steps
        if settings.most_sgld_steps > k:
            k = int(torch.randint(k, settings.most_sgld_steps + 1, (), generator=counts))
        assert steps == k
        if buffer is not None:
            rows = torch.randint(len(buffer), (count,), generator=chains)
            torch.rand(count, generator=chains)  # none begins afresh
            torch.rand(count, *shape, generator=chains)
            x = buffer[rows]
        else:
            x = torch.rand(count, *shape, generator=chains) * 2 - 1
        for z in torch.randn(steps, count, *shape, generator=chains):
            x.requires_grad_()
            (gradient,) = torch.autograd.grad(net(x).sum(), x)
            x = update(x.detach(), gradient, z)
        if buffer is not None:
            for row, value in zip(rows.tolist(), x, strict=True):
                buffer[row] = value
        value = loss(net, x_pos, x)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return net


def test_unguarded_loop_written_by_hand_gives_the_same_bits(tmp_path):
    """At beta* = 0 the run is that of Nijkamp et al., to the last bit."""
    config = config_for(tmp_path, beta_star=0.0, seed=1)
    go(config)

    def published(net, x_pos, x_neg):
        f = net(torch.cat((x_pos, x_neg)))
        return f[8:].mean() - f[:8].mean()

    def update(x, gradient, z):
        # alpha=, not 0.01 * z: a fused multiply-add rounds once, a product and a sum twice.
        return torch.add(torch.add(x, gradient), z, alpha=0.01)

    net = plain_loop(config, [3] * 6, published, update)
    state = saved(tmp_path)
    for own, plain in zip(state["network"].values(), net.state_dict().values(), strict=True):
        assert torch.equal(own, plain)


LOOPS: dict[str, dict[str, Any]] = {
    "guarded": {"beta_star": 2000.0},  # a tenth of the drift
    "random K": {"beta_star": 500.0, "most_sgld_steps": 6},
    "persistent": {
        "beta_star": 50.0,
        "init": "persistent",
        "buffer_size": 12,
        "optimizer": "sgd",
        "lr": 0.05,
        "data_noise": 0.2,
        "noise_std": 0.05,
    },
}


@pytest.mark.parametrize("case", LOOPS)
def test_the_trainer_is_the_published_loop_under_eq_8(tmp_path, case):
    with in_float64():
        config = config_for(tmp_path, **{"seed": 2, "iterations": 8, "lr": 3e-3, **LOOPS[case]})
        go(config)
        settings, beta_star = config.settings, config.beta_star
        steps = [int(row["sgld_steps"]) for row in read_jsonl(tmp_path / "metrics.jsonl")]
        assert len(steps) == config.settings.iterations
        if case == "random K":
            assert len(set(steps)) > 2
        drift = 1 - beta_star / (2 * settings.step_size / settings.noise_std**2)

        def update(x, gradient, z):
            return x + settings.step_size * drift * gradient + settings.noise_std * z

        def loss(net, x_pos, x_neg):
            return pulled(net(x_pos), net(x_neg), beta_star)

        net = plain_loop(config, steps, loss, update)
        torch.manual_seed(2)
        start = published_layers(settings.nf)
    own = list(saved(tmp_path)["network"].values())
    for mine, plain in zip(own, net.state_dict().values(), strict=True):
        assert mine.dtype == torch.float64
        torch.testing.assert_close(mine, plain, rtol=0, atol=1e-9)
    # All but the last bias, which f has no use for, have been trained.
    for mine, first in zip(own[:-1], start.state_dict().values(), strict=False):
        assert (mine - first).abs().max() > 1e-4


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A run of eight updates, its negatives, and what it returned."""
    out, negatives = tmp_path_factory.mktemp("runs") / "run", []
    keep = ShortRun.keep

    def kept(self, step, samples):
        negatives.append(samples)
        keep(self, step, samples)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ShortRun, "keep", kept)
        results = go(config_for(out, iterations=8, noise_std=0.1, batch=70, train_images=80))
    return out, negatives, results


def test_a_row_for_each_update_and_samples_as_bytes(written):
    out, negatives, _ = written
    rows = read_jsonl(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(8))
    for row, x in zip(rows, negatives, strict=True):
        assert row["sgld_steps"] == 3
        values = x.numpy().ravel()
        assert row["outside"] == pytest.approx(np.mean(np.abs(values) > 1))
        assert row["contrast"] == pytest.approx(np.std(values, ddof=1), rel=1e-5)
    assert 0 < rows[0]["outside"] < 0.5
    names = sorted(path.name for path in (out / "samples").iterdir())
    assert names == ["00000001.npy", "00000003.npy", "00000006.npy"]
    for name in names:
        array = np.load(out / "samples" / name)
        assert array.dtype == np.uint8
        assert array.shape == (64, 1, 8, 8)
        shown = (negatives[int(name[:8]) - 1][:64].clamp(-1, 1) + 1) * 127.5
        assert np.abs(array - shown.numpy()).max() <= 0.5
    with np.load(out / "figures" / "samples.npz") as samples:
        assert np.array_equal(samples["end"], negatives[-1][:64])
    assert imread(out / "figures" / "samples_end.png").shape[0] > 8 * 8


# -- where it starts --------------------------------------------------------------------------


def test_a_run_starts_from_anothers_parameters(tmp_path):
    go(config_for(tmp_path / "a", seed=1))
    first = saved(tmp_path / "a")["network"]
    # A learning rate that changes no bit shows what it started from.
    still = {"lr": 1e-30, "beta_star": 0.0, "sgld_steps": 2, "start_from": str(tmp_path / "a")}
    go(config_for(tmp_path / "b", **still, seed=2, iterations=2))
    assert same(saved(tmp_path / "b")["network"], first)
    assert not same(saved(tmp_path / "b")["draws"], saved(tmp_path / "a")["draws"])
    # It goes on from its own checkpoint where the other run is gone, or has been trained on.
    os.rename(tmp_path / "a", tmp_path / "away")
    go(config_for(tmp_path / "b", **still, seed=2, iterations=3, resume=True))
    assert same(saved(tmp_path / "b")["network"], first)
