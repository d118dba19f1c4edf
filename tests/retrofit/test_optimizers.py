"""Several optimizers of one energy, and other networks in one: skipped and taken back together."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Muon, SparseAdam
from torch.optim.lr_scheduler import ExponentialLR

from ebmguard import guard
from ebmguard.errors import ConfigError
from ebmguard.recovery import Recovery
from tests.parts import Energy, langevin

X = torch.ones(4, 2)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shifts = nn.Embedding(2, 2, sparse=True)
        self.rest = Energy()

    def forward(self, x: torch.Tensor) -> Any:
        return self.rest(x + self.shifts((x[:, 0] > 0).long()))


def split(one: Any, other: Any, **options: Any) -> Any:
    f = Energy()
    own = [[p for p in f.parameters() if (p.ndim > 1) is wide] for wide in (True, False)]
    return f, [one(own[0], lr=0.01, **options), other(own[1], lr=0.01, **options)]


def embedded() -> Any:
    f = Embedded()
    return f, [SparseAdam(f.shifts.parameters(), lr=0.1), Adam(f.rest.parameters(), lr=0.1)]


KINDS: dict[str, Any] = {
    "Muon and AdamW": lambda: split(Muon, AdamW),
    "fused": lambda: split(Adam, SGD, fused=True),
    "sparse and dense": embedded,
}


def step(g: Any, f: Any, optimizers: Any, *, spoil: Any = None) -> None:
    loss, sample = g
    value = loss(f(X + torch.randn(4, 2)), f(sample(f, torch.randn(4, 2))))
    for each in optimizers:
        each.zero_grad()
    value.backward()
    if spoil is not None:
        p = spoil.param_groups[0]["params"][-1]
        p.grad = p.grad * math.nan
    for each in optimizers:
        each.step()


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_they_skip_a_step_together_and_end_it_together(
    name: str, reverse: bool, which: int
) -> None:
    f, optimizers = KINDS[name]()
    g = guard(None, langevin, model=f, optimizer=optimizers, beta_star=0.5, output_scale=1)
    in_turn = optimizers[::-1] if reverse else optimizers
    for _ in range(3):
        step(g, f, in_turn)
    before = [p.detach().clone() for p in f.parameters()]
    step(g, f, in_turn, spoil=optimizers[which])
    assert all(map(torch.equal, before, f.parameters()))
    assert g.step == 4
    assert g.last["nonfinite/gradients"] == 1
    step(g, f, in_turn)
    # The loss does not change with the bias of the last layer.
    assert sum(map(torch.equal, before, f.parameters())) <= 1


def test_one_that_rests_does_not_hold_up_the_steps() -> None:
    f, (one, other) = split(Adam, SGD)
    g = guard(None, langevin, model=f, optimizer=(one, other), beta_star=0.5, output_scale=1)
    for i in range(6):
        step(g, f, [one] if i % 3 else [one, other])
    g.sampler(f, X)
    assert g.step == 6


def test_norms_are_those_of_all_together() -> None:
    """As of one optimizer that has all parameters, in the rows of the slow tier."""
    rows = []
    for several in (False, True):
        torch.manual_seed(0)
        f, optimizers = split(SGD, SGD)
        optimizers = optimizers if several else [SGD([*f.parameters()], lr=0.01)]
        told: dict[str, Any] = {"optimizer": optimizers, "beta_star": 0.5, "output_scale": 1}
        g = guard(None, langevin, model=f, **told)
        rows.append(dict[str, float]())
        for _ in range(60):
            step(g, f, optimizers)
            rows[-1] |= {x: y for x, y in g.last.items() if x.startswith("optim/")}
    assert rows[0].keys() == rows[1].keys() != set()
    for name, value in rows[0].items():
        assert rows[1][name] == pytest.approx(value, rel=1e-5)


def test_a_rollback_takes_all_of_them_back() -> None:
    """Parameters, moments and rates of both, and what else they train, to the bit."""
    f, optimizers = split(Adam, AdamW)
    other = nn.Linear(3, 3)
    optimizers[1].add_param_group({"params": other.parameters()})
    schedulers = [ExponentialLR(each, 0.99) for each in optimizers]
    recovery = Recovery(every=1000, certify_after=2, reseed=False)
    told: dict[str, Any] = {
        "optimizer": optimizers,
        "scheduler": schedulers,
        "buffer": torch.zeros(1, 2),
    }
    g = guard(None, langevin, model=f, action="rollback", recovery=recovery, output_scale=1, **told)
    parts = [f, other, *optimizers, *schedulers]

    def state() -> list[Any]:
        return torch.utils._pytree.tree_leaves([x.state_dict() for x in parts])

    before = [x.clone() if isinstance(x, torch.Tensor) else x for x in state()[:6]]
    g.loss_fn.guard.sampler(f, X)
    for i in range(60):
        if i == 50:
            with torch.no_grad():
                [p.mul_(1e4) for p in (*f.parameters(), *other.parameters())]
        loss = g.loss_fn(f(X + torch.randn(4, 2)), f(g.sampler(f, torch.randn(4, 2))))
        for each in optimizers:
            each.zero_grad()
        (loss + other(torch.ones(3)).square().sum()).backward()
        for each in (*optimizers, *schedulers):
            each.step()
        if g.rollbacks:
            break
    assert g.rollbacks[0].restored_step == 0
    assert all(map(torch.equal, before, state()[:6]))
    assert not optimizers[0].state_dict()["state"]
    assert not optimizers[1].state_dict()["state"]


def test_a_rollback_refuses_parameters_that_nobody_would_skip() -> None:
    f, (one, _) = split(Adam, AdamW)
    told: dict[str, Any] = {"model": f, "optimizer": one, "buffer": torch.zeros(1, 2)}
    g = guard(None, langevin, output_scale=1, beta_star=0.5, action="rollback", **told)
    q = g.sampler(f, X)
    with pytest.raises(ConfigError, match=r"net\.0\.bias, net\.2\.bias.*optimizer=\[a, b\]"):
        g.loss_fn(f(X), f(q))


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        ([], "a list; expected a torch Optimizer"),
        ([SGD, 1], "the class type; expected a torch|class SGD"),
    ],
)
def test_what_is_no_list_of_optimizers(optimizer: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        guard(None, langevin, optimizer=optimizer)
