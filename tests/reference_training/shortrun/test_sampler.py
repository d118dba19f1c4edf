"""The short-run chain against plain loops and closed forms, in training and of opened runs."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from scipy import stats

from ebmguard import guard
from ebmguard.errors import ConfigError
from ebmguard.reference_training.engine.ranks import ONE_RANK, Ranks
from ebmguard.reference_training.shortrun import trained as trained_module
from ebmguard.reference_training.shortrun.config import CIFAR10
from ebmguard.reference_training.shortrun.network import EnergyNet
from ebmguard.reference_training.shortrun.sampler import Draws, chain, make_sampler, refined
from ebmguard.reference_training.shortrun.train import train
from ebmguard.reference_training.shortrun.trained import load_run
from ebmguard.sinks import read_jsonl
from tests.reference_training.parts import (
    CPU,
    SHORTRUN,
    Quadratic,
    rng,
    same,
    saved,
    tiny_run,
    trained_folder,
)
from tests.replay import Replay, capture_as_replays

config_for = SHORTRUN.config_for

SETTINGS = replace(CIFAR10, step_size=0.7, noise_std=0.05, sgld_steps=4, most_sgld_steps=4)
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: captures CUDA graphs"
)


@pytest.fixture(params=["stand-ins", pytest.param("cuda", marks=needs_gpu)])
def device(request, monkeypatch):
    """Where chains are graphs: a GPU, or its stand-in of replayed operations."""
    if request.param == "cuda":
        return torch.device("cuda")
    capture_as_replays(monkeypatch)
    return CPU


def network(device=CPU, **settings):
    torch.manual_seed(0)
    net = EnergyNet(**{"in_channels": 1, "image_size": 8, "nf": 4, **settings}).to(device)
    with torch.no_grad():
        net.head.weight.mul_(30)  # else its gradient is lost beside the noise
    return net


def draws(steps, n=5, seed=5, device=CPU, dtype=torch.float32):
    rng = torch.Generator().manual_seed(seed)
    x0 = torch.rand(n, 1, 8, 8, generator=rng, dtype=dtype) * 2 - 1
    return x0.to(device), torch.randn(steps, n, 1, 8, 8, generator=rng, dtype=dtype).to(device)


def by_hand(f, x, noise, step_size=0.7, noise_std=0.05):
    """The published loop: x += f'(x) + noise."""
    for z in noise:
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(f(x).sum(), x)
        # alpha=: a fused multiply-add rounds once, a product and a sum twice.
        moved = torch.add(x.detach(), gradient, alpha=step_size)
        x = torch.add(moved, z, alpha=noise_std)
    return x


@pytest.mark.parametrize("steps", [0, 1, 4, 9])
def test_a_chain_is_the_published_loop_bit_for_bit(steps):
    net, (x0, noise) = network(), draws(steps)
    x = chain(SETTINGS, net, x0, noise)
    assert torch.equal(x, by_hand(net, x0, noise))
    assert not x.requires_grad
    if steps == 9:  # nothing clamps it
        assert bool((x.abs() > 1).any())
        still = by_hand(net, x0, noise, step_size=0.0)
        assert (x - still).abs().max() > 0.1


@pytest.mark.parametrize("steps", [4, 9])
def test_a_random_number_of_steps_is_one_long_chain_bit_for_bit(steps):
    """All have the first four; those beyond are taken one by one."""
    net, (x0, noise) = network(), draws(steps)
    sampler = make_sampler(replace(SETTINGS, most_sgld_steps=9), CPU)
    assert torch.equal(sampler(net, x0, noise), by_hand(net, x0, noise))


def test_refined_steps_keep_the_diffusions_time_and_output_scale():
    for finer in (2, 4, 0.25):
        settings = refined(SETTINGS, finer)
        # α = noise_std², drift α o / 2: r steps of them last as long.
        assert finer * settings.step_size == pytest.approx(SETTINGS.step_size)
        assert finer * settings.noise_std**2 == pytest.approx(SETTINGS.noise_std**2)
        assert settings.output_scale == pytest.approx(SETTINGS.output_scale)
        others = {"step_size": 0.7, "noise_std": 0.05}
        assert replace(settings, **others) == SETTINGS


def test_the_network_keeps_its_gradients_and_its_parameters():
    net, (x0, noise) = network(), draws(4)
    net(x0).sum().backward()
    net.head.bias.requires_grad_(False)
    required = [p.requires_grad for p in net.parameters()]
    values = [p.detach().clone() for p in net.parameters()]
    gradients = [p.grad.clone() for p in net.parameters()]
    seen = []
    net.register_forward_pre_hook(
        lambda module, args: seen.append(any(p.requires_grad for p in module.parameters()))
    )
    before = x0.clone()
    make_sampler(SETTINGS, CPU)(net, x0, noise)
    assert seen == [False] * 4  # a compiled network computes what requires a gradient
    assert torch.equal(x0, before)
    assert [p.requires_grad for p in net.parameters()] == required
    for p, value, gradient in zip(net.parameters(), values, gradients, strict=True):
        assert torch.equal(p, value)
        assert torch.equal(p.grad, gradient)


def test_graphs_of_every_length_are_the_eager_chains(device):
    """Under a guard, whose factor on f changes from step to step, and with training between."""
    lengths = [4, 6, 4, 5, 9, 4]
    found = []
    for graphs in (True, False):
        net = network(device).double()
        settings = replace(SETTINGS, most_sgld_steps=9)
        sampler = make_sampler(settings, device) if graphs else partial(chain, SETTINGS)
        g = guard(None, sampler, beta_star=lambda step: 20.0 * step, output_scale=560.0)
        rows = []
        for step, steps in enumerate(lengths):
            x0, noise = draws(steps, seed=step, device=device, dtype=torch.float64)
            x = g.sampler(net, x0, noise)
            g.loss_fn(net(x0), net(x))
            rows.append(x)
            with torch.no_grad():
                net.head.weight.mul_(1.1)
        found.append(rows)
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10)


@pytest.fixture
def captures(monkeypatch):
    """The graphs that are captured on the stand-in of a GPU."""
    capture_as_replays(monkeypatch)
    found: list[Replay] = []

    def made() -> Replay:
        found.append(Replay())
        return found[-1]

    monkeypatch.setattr("torch.cuda.CUDAGraph", made)
    return found


@pytest.mark.parametrize(
    ("most_steps", "lengths", "graphs"), [(4, [4, 4, 4], 1), (9, [4, 6, 9, 4], 2)]
)
def test_chains_of_any_number_of_steps_are_few_graphs(captures, most_steps, lengths, graphs):
    """One, or two where K is random."""
    settings = replace(SETTINGS, most_sgld_steps=most_steps)
    net, sampler, found = network(), make_sampler(settings, CPU), []
    for seed, steps in enumerate(lengths):
        x0, noise = draws(steps, seed=seed)
        expected = chain(settings, net, x0, noise)
        found.append((sampler(net, x0, noise), expected))
    assert len(captures) == graphs
    # None is overwritten by a later call.
    for x, expected in found:
        torch.testing.assert_close(x, expected)


def trained(config):
    assert train(*config.open()) is not None
    return [p.detach() for p in load_run(config.out, CPU).network.parameters()]


@pytest.mark.parametrize(
    "settings",
    [
        {"beta_star": 200.0, "most_sgld_steps": 5},
        {"beta_star": 200.0, "init": "persistent", "buffer_size": 16, "precision": "bfloat16"},
    ],
    ids=["of random length", "persistent, bfloat16"],
)
def test_a_run_with_captured_chains_is_the_eager_run(settings, tmp_path, request):
    """Beta* of 200 takes a hundredth of the drift away: a replay has to read the factor."""
    settings = {**settings, "step_size": 1.0, "sgld_steps": 3}
    eager = trained(config_for(tmp_path / "eager", **settings))
    captures = request.getfixturevalue("captures")
    captured = trained(config_for(tmp_path / "captured", **settings))
    assert captures
    torch.testing.assert_close(captured, eager, rtol=0, atol=0)
    rows = [list(read_jsonl(tmp_path / name / "metrics.jsonl")) for name in ("eager", "captured")]
    for own, other in zip(*rows, strict=True):
        for tag in ("energy_gap", "sampler/grad_norm"):  # the norm is read from a graph's memory
            assert own[tag] == pytest.approx(other[tag], rel=1e-6)


# -- what is random in an update; that the bits are the published loop's is in test_train.py --

SMALL = replace(CIFAR10, batch=8, data_noise=0.0, sgld_steps=3, most_sgld_steps=6)


def streams(settings=SMALL, seed=3, ranks=ONE_RANK):
    return Draws(config_for("x").load_data(), settings, seed, ranks)


def test_streams_do_not_disturb_each_other():
    """Runs that differ in K, or in what their chains draw, see the same images."""
    one, other = streams(), streams(replace(SMALL, sgld_steps=9, most_sgld_steps=9))
    for _ in range(5):
        a = one.positives()
        one.starts(7)
        one.noise(2, 5)
        one.sgld_steps()
        b = other.positives()
        assert torch.equal(a, b)
    quiet, busy = streams(), streams()
    for _ in range(5):
        busy.positives()
        assert torch.equal(quiet.starts(2), busy.starts(2))
    counts = [quiet.sgld_steps() for _ in range(40)]
    assert counts == [busy.sgld_steps() for _ in range(40)]


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_images_and_steps_and_have_chains_of_their_own(world):
    settings = replace(SMALL, data_noise=0.1)
    one = streams(settings)
    parts = [streams(settings, ranks=Ranks(rank, world)) for rank in range(world)]
    for _ in range(5):
        whole = one.positives()
        own = [part.positives() for part in parts]
        assert torch.equal(torch.cat(own), whole)
        assert {len(x) for x in own} == {8 // world}
        assert len({part.sgld_steps() for part in parts} | {one.sgld_steps()}) == 1
    starts = [part.starts(4) for part in parts]
    assert torch.equal(starts[0], one.starts(4))
    for i, x in enumerate(starts):
        for y in starts[:i]:
            assert float((x - y).abs().mean()) > 0.4  # of independent uniform numbers: 2/3


def test_k_is_uniform_on_its_range():
    found = streams()
    counts = Counter(found.sgld_steps() for _ in range(4000))
    assert set(counts) == {3, 4, 5, 6}
    assert stats.chisquare([counts[k] for k in range(3, 7)]).pvalue > 1e-3
    fixed = streams(replace(SMALL, most_sgld_steps=3))
    before = fixed.state_dict()["counts"]
    assert {fixed.sgld_steps() for _ in range(10)} == {3}
    assert torch.equal(before, fixed.state_dict()["counts"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of six updates at a beta of one tenth."""
    return trained_folder(tmp_path_factory.mktemp("runs") / "tenth", beta_star=2000.0, seed=3)


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
    x0 = run.starts(5, rng(4))
    noise = torch.randn(7, 5, 1, 8, 8, generator=rng(9))
    g = guard(
        None,
        make_sampler(run.settings, CPU),
        beta_star=beta_star,
        output_scale=run.settings.output_scale,
    )
    expected = g.sampler(run.network, x0, noise)
    x = run.chains(x0, 7, rng(9))
    torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-6)
    assert not x.requires_grad
    if beta_star:  # the drift is large enough to tell the factor
        plain = tiny_run(beta_star=0.0).chains(x0, 7, rng(9))
        assert (plain - x).abs().max() > 1e-4


def test_a_step_four_times_as_large_has_four_times_the_drift_and_twice_the_noise():
    """One step of a quadratic: x + 4 s (1 - β) f' + 2 n z; and any factor keeps o."""
    f = Quadratic(0.05, mean=0.3)
    run = tiny_run(network=f, beta_star=2000.0)
    x0 = run.starts(6, rng(4))
    z = torch.randn(1, 6, 1, 8, 8, generator=rng(9))[0]
    gradient = -0.05 * (x0 - 0.3)
    for factor, drift, noise in ((1.0, 0.9, 0.01), (4.0, 3.6, 0.02), (0.25, 0.225, 0.005)):
        x = run.chains(x0, 1, rng(9), step_factor=factor)
        torch.testing.assert_close(x, x0 + drift * gradient + noise * z)


def test_noise_in_parts_makes_one_chain(monkeypatch):
    run = tiny_run(noise_std=0.1)
    x0, generator = run.starts(5, rng(4)), rng(9)
    noise = torch.cat([torch.randn(k, *x0.shape, generator=generator) for k in (3, 3, 2)])
    settings = replace(run.settings, step_size=run.step_size)
    monkeypatch.setattr(trained_module, "CHUNK", 3)
    x = run.chains(x0, 8, rng(9))
    torch.testing.assert_close(x, chain(settings, run.network, x0, noise))
    assert torch.equal(run.chains(x0, 0, rng(4)), x0)
