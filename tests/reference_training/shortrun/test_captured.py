"""Short-run training on a GPU, whose chains are CUDA graphs: the same training as eager code.

On a CPU the graphs are stand-ins that replay recorded operations on the same storages
(`tests/replay.py`): they show what is captured, and what a replay reads and overwrites.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ebmguard.reference_training.shortrun.config import ShortRunConfig
from ebmguard.reference_training.shortrun.presets import PRESETS
from ebmguard.reference_training.shortrun.sampler import chain, make_sampler
from ebmguard.reference_training.shortrun.train import train
from ebmguard.reference_training.shortrun.trained import load_run
from ebmguard.sinks import read_jsonl
from tests.reference_training.shortrun.parts import Quadratic, config_for
from tests.replay import Replay, capture_as_replays

CPU = torch.device("cpu")


@pytest.fixture
def captures(monkeypatch):
    """Counts the graphs that are captured on the stand-in of a GPU."""
    capture_as_replays(monkeypatch)
    found: list[Replay] = []

    def made() -> Replay:
        found.append(Replay())
        return found[-1]

    monkeypatch.setattr("torch.cuda.CUDAGraph", made)
    return found


@pytest.mark.parametrize(("most_steps", "lengths"), [(3, [3, 3, 3]), (6, [3, 4, 6, 3])])
def test_chains_of_any_number_of_steps_are_at_most_two_graphs(captures, most_steps, lengths):
    settings = replace(PRESETS["digits"], sgld_steps=3, most_sgld_steps=most_steps)
    sampler, network = make_sampler(settings, CPU), Quadratic(0.3)
    for steps in lengths:
        x0, noise = torch.randn(5, 1, 4, 4), torch.randn(steps, 5, 1, 4, 4)
        x = sampler(network, x0, noise)
        torch.testing.assert_close(x, chain(settings, network, x0, noise))
    assert len(captures) == (1 if most_steps == 3 else 2)


def test_a_random_number_of_steps_may_begin_at_one(captures):
    settings = replace(PRESETS["digits"], sgld_steps=1, most_sgld_steps=3)
    sampler, network = make_sampler(settings, CPU), Quadratic(0.3)
    for steps in (1, 3, 2):
        x0, noise = torch.randn(5, 1, 4, 4), torch.randn(steps, 5, 1, 4, 4)
        x = sampler(network, x0, noise)
        torch.testing.assert_close(x, chain(settings, network, x0, noise))
    assert len(captures) == 1


def test_samples_are_not_overwritten_by_the_next_call(captures):
    settings = replace(PRESETS["digits"], sgld_steps=3, most_sgld_steps=3)
    sampler, network = make_sampler(settings, CPU), Quadratic(0.3)
    noise = torch.randn(3, 5, 1, 4, 4)
    first = sampler(network, torch.zeros(5, 1, 4, 4), noise)
    kept = first.clone()
    sampler(network, torch.ones(5, 1, 4, 4), noise)
    assert captures
    assert torch.equal(first, kept)


def trained(config: ShortRunConfig) -> list[torch.Tensor]:
    assert train(*config.open()) is not None
    network = load_run(config.out, CPU).network
    return [p.detach() for p in network.parameters()]


@pytest.mark.parametrize(
    "settings",
    [
        {"beta_star": 0.0},
        {"beta_star": 200.0, "most_sgld_steps": 5},
        {"beta_star": 200.0, "init": "persistent", "buffer_size": 16, "precision": "bfloat16"},
    ],
    ids=["plain", "tempered, of random length", "persistent, bfloat16"],
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
