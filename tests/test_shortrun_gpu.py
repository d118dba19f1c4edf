"""The GPU benchmark of the short-run trainer, tried on the CPU: what it measures and writes."""

from __future__ import annotations

import json
import subprocess

import pytest
import torch

from benchmarks import shortrun_gpu, shortrun_loop, shortrun_parts
from benchmarks.gpu_document import UNFINISHED
from benchmarks.gpu_timing import Clock
from benchmarks.shortrun_loop import (
    SIZES,
    OurRun,
    PublishedLoop,
    RandomImages,
    config_of,
    published_network,
    step_flop,
)
from ebmguard.errors import ConfigError
from ebmguard.reference_training.shortrun.network import EnergyNet
from ebmguard.reference_training.shortrun.presets import CIFAR10
from ebmguard.reference_training.shortrun.train import train
from ebmguard.samplers import sgld
from ebmguard.sinks import read_jsonl

CPU = torch.device("cpu")
TOY = SIZES["toy"]
K, LAYERS = 2, 3
"""Langevin steps and convolutions of the toy."""


@pytest.fixture
def command(tmp_path):
    def run(part, *more, minutes="0"):
        words = ["--part", part, "--device", "cpu", "--size", "toy", "--minutes", minutes]
        out, runs = tmp_path / "results.md", tmp_path / "runs"
        status = shortrun_gpu.main([*words, "--out", str(out), "--runs", str(runs), *more])
        assert status == 0
        return out.read_text(encoding="utf-8") if out.exists() else ""

    return run


@pytest.fixture
def bench(tmp_path):
    return shortrun_parts.Bench(TOY, CPU, Clock(0), tmp_path / "runs", tmp_path / "scratch")


def rows(text: str, first: str) -> list[list[str]]:
    """Cells of the table rows that begin with `first`."""
    cells = ([x.strip() for x in line.split("|")[1:-1]] for line in text.splitlines())
    return [row for row in cells if row and row[0] == first]


def as_published(network: EnergyNet, shape, nf):
    """The published network with the parameters of ours."""
    twin = published_network(shape, nf).to(next(network.parameters()).dtype)
    values = zip(twin.state_dict(), network.state_dict().values(), strict=True)
    twin.load_state_dict(dict(values))
    return twin


# -- what is measured --------------------------------------------------------------------------


def test_operations_of_an_update():
    # Channels in and out, kernel, output resolution, at nf = 64.
    layers = [(3, 64, 3, 32), (64, 128, 4, 16), (128, 256, 4, 8), (256, 512, 4, 4), (512, 1, 4, 1)]
    macs = [i * o * k * k * r * r for i, o, k, r in layers]
    forward = 2 * sum(macs)
    langevin, learning = 2 * forward, 3 * forward - 2 * macs[0]  # images need no gradient
    assert step_flop(CIFAR10) == 64 * (100 * langevin + 2 * learning)


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 8, 8)])
def test_both_have_the_same_network(shape):
    channels, size, _ = shape
    ours = EnergyNet(in_channels=channels, image_size=size, nf=4).double()
    x = torch.rand(5, *shape, dtype=torch.float64) * 2 - 1
    expected = ours(x)
    assert expected.std() > 0
    torch.testing.assert_close(as_published(ours, shape, 4)(x), expected)


def test_the_loop_climbs_as_the_samplers_do(tmp_path):
    config = config_of(TOY, CPU, tmp_path, noise_std=1e-30, sgld_steps=3)
    loop = PublishedLoop(config, CPU)
    x = torch.rand(4, 1, 8, 8) * 2 - 1
    expected = sgld(loop.f, x, steps=3, step_size=loop.settings.step_size, noise_std=0.0)
    moved = loop.climb(x)
    assert not torch.equal(moved, x)
    torch.testing.assert_close(moved, expected, rtol=0, atol=0)


def test_the_loop_learns_the_difference_of_mean_energies(tmp_path, monkeypatch):
    loop = PublishedLoop(config_of(TOY, CPU, tmp_path), CPU)
    x_pos, x_neg = torch.rand(8, 1, 8, 8), -torch.rand(8, 1, 8, 8)
    parameters = list(loop.f.parameters())
    f = loop.f(torch.cat((x_pos, x_neg)))
    expected = torch.autograd.grad(f[8:].mean() - f[:8].mean(), parameters)
    start = [p.detach().clone() for p in parameters]
    monkeypatch.setattr(loop, "draw", lambda: x_pos)
    monkeypatch.setattr(loop, "sample", lambda: x_neg)
    loop.step()
    found = [p.grad for p in parameters]
    torch.testing.assert_close(found, list(expected), rtol=1e-4, atol=1e-6)
    moved = [not torch.equal(p, before) for p, before in zip(parameters, start, strict=True)]
    assert moved == [True] * (len(moved) - 1) + [False]  # a shift of f is no difference


def test_the_loop_draws_noisy_images_and_chains(tmp_path):
    loop = PublishedLoop(config_of(TOY, CPU, tmp_path, batch=2000, noise_std=0.5), CPU)
    x = loop.draw()
    # Of nearest images, the rest is the noise.
    apart = (x[:50, None] - loop.images).flatten(2).square().mean(2).min(1).values.sqrt()
    assert apart.mean() == pytest.approx(loop.settings.data_noise, rel=0.05)
    loop.f.zero_grad()
    for p in loop.f.parameters():
        p.data.zero_()
    chains = loop.sample()  # on a flat energy: U(-1, 1) and the noise of each step
    assert chains.var() == pytest.approx(1 / 3 + K * 0.5**2, rel=0.02)


def test_one_update_at_a_time_is_the_whole_training(tmp_path):
    whole, stepped = (config_of(TOY, CPU, tmp_path / name, iterations=3) for name in "ab")
    assert train(*whole.open()) is not None
    run = OurRun(stepped)
    for done in range(1, 4):
        run.step()
        if done < 3:
            assert not (stepped.out / "results.json").exists()
    with pytest.raises(RuntimeError, match="the training is over"):
        run.step()
    run.close()
    found = [list(read_jsonl(each.out / "training.jsonl")) for each in (whole, stepped)]
    assert len(found[0]) == 3
    assert found[0] == found[1]


def test_a_training_that_is_left_has_closed_its_files(tmp_path):
    run = OurRun(config_of(TOY, CPU, tmp_path / "run"))
    run.step()
    run.step()
    run.close()
    run.close()
    assert len(list(read_jsonl(tmp_path / "run" / "training.jsonl"))) == 2
    assert len(list(read_jsonl(tmp_path / "run" / "metrics.jsonl"))) == 2


def test_what_the_training_raises_is_raised_by_its_step(tmp_path, monkeypatch):
    def broken(*_):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(shortrun_loop, "train", broken)
    run = OurRun(config_of(TOY, CPU, tmp_path / "run"))
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        run.step()
    run.close()


def test_random_images_stand_in_for_cifar10(monkeypatch, tmp_path):
    monkeypatch.delenv("EBMGUARD_DATA", raising=False)
    options = {"train_images": 20, "test_images": 10}
    config = config_of(SIZES["full"], CPU, tmp_path, **options)
    assert isinstance(config, RandomImages)
    data = config.load_data()
    assert (len(data.train_x), len(data.test_x), data.sample_shape) == (20, 10, (3, 32, 32))
    bench = shortrun_parts.Bench(SIZES["full"], CPU, Clock(0), tmp_path, tmp_path)
    assert "random bytes instead of CIFAR-10" in bench.words()
    assert "nf = 64, batch 64, K = 100" in bench.words()
    assert "".join(shortrun_parts.train_part(bench)).startswith("Left out: EBMGUARD_DATA")


# -- what is written ---------------------------------------------------------------------------


def test_time_of_an_update(command):
    text = command("step")
    assert UNFINISHED not in text
    assert "do not use it" not in text
    for name in (shortrun_parts.OURS, *shortrun_parts.LOOPS):
        seconds, cells = rows(text, name)
        assert float(seconds[1]) >= 0
        assert len(cells) == 5
    assert rows(text, "loop, TF32")[1][3] == "1.00 (1.00 to 1.00)"
    assert rows(text, "ours, TF32") == [["ours, TF32", "left out: no time"]]


@pytest.mark.parametrize(("name", "passes"), [("loop, TF32", 2), (shortrun_parts.OURS, 1)])
def test_operations_are_counted_as_the_profiler_sees_them(bench, name, passes):
    """Of a convolution each: K calls by the sampler; the loop passes data and negatives apart."""
    counts, seconds = shortrun_parts.profiled(bench, name)
    assert counts["aten::convolution"] == (K + passes) * LAYERS
    assert seconds["aten::convolution"] > 0


def test_where_the_time_goes(command):
    text = command("kernels")
    assert f"{shortrun_parts.OURS}: " in text
    assert "`aten::" in text
    assert "loop, TF32: left out, no time." in text


def test_waiting(command):
    text = command("sync")
    assert "Not on a GPU" in text
    assert "Found: none." in text


def test_peak_memory(command, monkeypatch):
    asked = []

    def run(words, **_):
        if "--memory-of" in words:
            asked.append(words)
        return subprocess.CompletedProcess(words, 0, stdout='noise\n{"first": 1.0, "later": 2.5}\n')

    monkeypatch.setattr(subprocess, "run", run)
    text = command("memory")
    assert asked[0][-2:] == ["--memory-of", shortrun_parts.OURS]
    assert rows(text, shortrun_parts.OURS) == [[shortrun_parts.OURS, "1.00", "2.50"]]
    assert "loop, TF32: left out" in text


def test_memory_of_a_variant(command, capsys):
    command("memory", "--memory-of", "loop, float32")
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    first, later = found.values()
    assert 0 < first <= later


def test_a_training_is_judged_and_a_second_command_goes_on(command, tmp_path):
    text = command("train")
    assert "1 of 40 updates, 1 of them by this command" in text
    assert len(rows(text, "0")) == 1
    for judged in ("samples, 2 steps from noise", "held-out images", "uniform noise"):
        assert float(rows(text, judged)[0][-1]) >= 0
    assert "classifier" in text
    text = command("train", "--features", str(tmp_path / "runs" / "classifier"), minutes="5")
    assert "40 of 40 updates, 39 of them by this command" in text
    assert len(rows(text, "0")) == 1
    assert len(rows(text, "30")) == 1
    assert "Nothing was left" in command("train", minutes="5")


def test_features_that_are_none_are_refused_before_the_training(command, tmp_path):
    with pytest.raises(ConfigError, match="features"):
        command("train", "--features", "nothing")
    assert not (tmp_path / "runs").exists()


def test_without_a_gpu_the_command_says_how_to_try_it(capsys, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert shortrun_gpu.main(["--part", "step", "--out", str(tmp_path / "x.md")]) == 2
    assert "--device cpu --size toy" in capsys.readouterr().out
    assert not (tmp_path / "x.md").exists()
