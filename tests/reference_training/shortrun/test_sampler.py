"""The short-run chain against plain loops and closed forms, in training and of opened runs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from ebmguard import guard
from ebmguard.reference_training.engine.ranks import ONE_RANK, Ranks
from ebmguard.reference_training.shortrun.config import CIFAR10
from ebmguard.reference_training.shortrun.sampler import Draws, chain, make_sampler
from ebmguard.reference_training.shortrun.trained import load_run
from ebmguard.sinks import read_jsonl
from tests.reference_training.parts import (
    CPU,
    SHORTRUN,
    Quadratic,
    energy_net,
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
DEVICES = ["stand-ins", pytest.param("cuda", marks=needs_gpu)]
"""Where chains are graphs: a GPU, or its stand-in of replayed operations."""


@pytest.fixture
def captured(monkeypatch):
    """Stands in for a GPU; lists the graphs that are captured."""
    capture_as_replays(monkeypatch)
    found: list[Replay] = []

    def made() -> Replay:
        found.append(Replay())
        return found[-1]

    monkeypatch.setattr("torch.cuda.CUDAGraph", made)
    return found


def draws(steps, n=5, seed=5, device=CPU, dtype=torch.float32):
    rng = torch.Generator().manual_seed(seed)
    x0 = torch.rand(n, 1, 8, 8, generator=rng, dtype=dtype) * 2 - 1
    return x0.to(device), torch.randn(steps, n, 1, 8, 8, generator=rng, dtype=dtype).to(device)


def test_the_network_is_frozen_within_a_chain_alone_and_starts_are_the_callers():
    net, (x0, noise) = energy_net(), draws(4)
    before, seen = x0.clone(), []
    net.register_forward_pre_hook(
        lambda module, args: seen.append(any(p.requires_grad for p in module.parameters()))
    )
    make_sampler(SETTINGS, CPU)(net, x0, noise)
    assert seen == [False] * 4  # a compiled network computes what requires a gradient
    assert torch.equal(x0, before)
    assert all(p.requires_grad and p.grad is None for p in net.parameters())


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize(
    ("lengths", "graphs"), [((4, 4, 4), 1), ((4, 6, 4, 5, 9, 4), 2)], ids=["fixed", "random"]
)
def test_chains_of_any_number_of_steps_are_few_graphs(request, kind, lengths, graphs):
    """Under a guard, whose factor on f changes from step to step, and with training between."""
    captures = request.getfixturevalue("captured") if kind == "stand-ins" else []
    device = torch.device("cuda" if kind == "cuda" else "cpu")
    settings = replace(SETTINGS, most_sgld_steps=max(lengths))
    found = []
    for sampler in (make_sampler(settings, device), partial(chain, SETTINGS)):
        net = energy_net(30).double().to(device)  # else its gradient is lost beside the noise
        g = guard(None, sampler, beta_star=lambda step: 20.0 * step, output_scale=560.0)
        samples = []  # which no later call overwrites
        for step, steps in enumerate(lengths):
            x0, noise = draws(steps, seed=step, device=device, dtype=torch.float64)
            samples.append(g.sampler(net, x0, noise))
            g.loss_fn(net(x0), net(samples[-1]))
            with torch.no_grad():
                net.head.weight.mul_(1.1)
        found.append(samples)
    assert kind == "cuda" or len(captures) == graphs
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "settings",
    [
        {"most_sgld_steps": 5},
        {"init": "persistent", "buffer_size": 16, "precision": "bfloat16"},
    ],
    ids=["of random length", "persistent, bfloat16"],
)
def test_a_run_with_captured_chains_is_the_eager_run(settings, tmp_path, request):
    """Beta* of 200 takes a hundredth of the drift away: a replay has to read the factor."""
    settings = {**settings, "beta_star": 200.0, "step_size": 1.0, "sgld_steps": 3}
    SHORTRUN.run(tmp_path / "eager", **settings)
    captures = request.getfixturevalue("captured")
    SHORTRUN.run(tmp_path / "captured", **settings)
    assert captures
    networks, rows = [], []
    for name in ("eager", "captured"):
        networks.append(saved(tmp_path / name)["network"])
        rows.append(read_jsonl(tmp_path / name / "metrics.jsonl"))
    assert same(*networks)
    for own, other in zip(*rows, strict=True):
        for tag in ("energy_gap", "sampler/grad_norm"):  # the norm is read from a graph's memory
            assert own[tag] == pytest.approx(other[tag], rel=1e-6)


def test_ranks_have_chains_of_their_own():
    data, settings = config_for("x").load_data(), replace(CIFAR10, batch=8)
    one, *parts = (
        Draws(data, settings, 3, ranks) for ranks in (ONE_RANK, Ranks(0, 2), Ranks(1, 2))
    )
    starts = [part.starts(4) for part in parts]
    assert torch.equal(starts[0], one.starts(4))
    # Of independent uniform numbers: 2/3.
    assert float((starts[0] - starts[1]).abs().mean()) > 0.4


def test_the_network_is_that_of_the_newest_checkpoint(tmp_path):
    run = load_run(trained_folder(tmp_path / "tenth", beta_star=2000.0, seed=3), CPU)
    assert same(dict(run.network.state_dict()), saved(run.path)["network"])
    assert not run.network.training
    assert (run.step, run.config.seed, run.name) == (6, 3, "tenth")
    assert run.drift == pytest.approx(0.9)
    assert len(run.data.train_x) == 64


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
