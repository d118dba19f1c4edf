"""The factor on the learning rate is there inside a step, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from ebmguard.recovery.changes import LearningRate
from ebmguard.retrofit.optimizer import OptimizerHooks


class Broken(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("out of memory")


def parameter() -> torch.nn.Parameter:
    p = torch.nn.Parameter(torch.zeros(1))
    p.grad = torch.ones(1)
    return p


def watch(optimizer: torch.optim.Optimizer) -> None:
    rate = LearningRate()
    rate.factor = 0.5
    OptimizerHooks(optimizer, None, lambda *_: None, lambda: False, lambda *_: None, None, rate)


def test_each_group_takes_its_own_rate_times_the_factor() -> None:
    p, q = parameter(), parameter()
    optimizer = torch.optim.SGD([{"params": [p], "lr": 0.1}, {"params": [q], "lr": 1.0}])
    watch(optimizer)
    optimizer.step()
    assert p.item() == pytest.approx(-0.05)
    assert q.item() == pytest.approx(-0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 1.0]


def test_a_step_that_raises_does_not_add_up() -> None:
    optimizer = Broken([parameter()], lr=0.01)
    watch(optimizer)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="memory"):
            optimizer.step()
        assert optimizer.param_groups[0]["lr"] == 0.005
    optimizer.param_groups[0]["lr"] = 0.3  # the trainer's next assignment
    with pytest.raises(RuntimeError, match="memory"):
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.15


def test_an_optimizer_without_a_rate_of_its_own() -> None:
    optimizer = torch.optim.SGD([parameter()], lr=0.1)
    optimizer.param_groups[0]["lr"] = None
    rate = LearningRate()
    rate.factor = 0.5
    rate.scale(optimizer)
    assert optimizer.param_groups[0]["lr"] is None
