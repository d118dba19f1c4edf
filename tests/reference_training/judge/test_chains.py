"""Fresh chains: where they start, that they go on, and in batches."""

from __future__ import annotations

from functools import partial

import torch

from ebmguard.reference_training.judge import chains
from ebmguard.reference_training.judge.chains import fresh_chains
from ebmguard.reference_training.networks import WideResNet
from ebmguard.samplers import sgld
from tests.reference_training.judge.parts import CPU


def test_fresh_chains_start_in_the_box_and_climb():
    network = WideResNet(width=1)

    def walk(x0, steps, generator):
        return sgld(network, x0, steps=steps, step_size=1.0, noise_std=0.0, generator=generator)

    start, end = (fresh_chains(walk, (300, 1, 8, 8), (k, k), CPU) for k in (0, 5))
    assert -1 <= float(start.min()) < -0.98
    assert 0.98 < float(start.max()) <= 1
    with torch.no_grad():
        assert bool((network(end) > network(start)).all())


def test_each_batch_draws_its_steps_and_its_starts(monkeypatch):
    monkeypatch.setattr(chains, "BATCH", 4)
    steps: list[int] = []
    sizes: list[int] = []

    def walk(x0, k, generator):
        steps.append(k)
        sizes.append(len(x0))
        return x0

    draw = partial(fresh_chains, walk, (202, 1, 2, 3))
    found = draw((4, 6), CPU)
    assert set(steps) == {4, 5, 6}
    assert sizes == [4] * 50 + [2]
    assert found.shape == (202, 1, 2, 3)
    assert len({tuple(image.flatten().tolist()) for image in found}) == 202
    assert torch.equal(draw((4, 4), CPU), found)
    assert steps[51:] == [4] * 51
