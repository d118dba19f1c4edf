"""A step whose gradients are not finite changes nothing, whatever the optimizer or optimizers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Muon, Optimizer, SparseAdam
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils._python_dispatch import TorchDispatchMode

from ebmguard import Level, guard
from ebmguard.errors import ConfigError
from ebmguard.recovery import Recovery
from ebmguard.retrofit.optimizer import OptimizerHooks
from tests.parts import Energy, Memory, langevin

BAD = [torch.nan, torch.inf, -torch.inf]
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda ps: SGD(ps, lr=0.1),
    "sgd with momentum": lambda ps: SGD(ps, lr=0.1, momentum=0.9),
    "fused sgd": lambda ps: SGD(ps, lr=0.1, fused=True),
    "fused momentum": lambda ps: SGD(ps, lr=0.1, momentum=0.9, dampening=0.5, fused=True),
    "fused adagrad": lambda ps: Adagrad(ps, lr=0.1, fused=True),
    "adam": lambda ps: Adam(ps, lr=0.1, foreach=False),
    "adam, foreach": lambda ps: Adam(ps, lr=0.1, foreach=True),
    "adam, amsgrad": lambda ps: Adam(ps, lr=0.1, amsgrad=True),
    "fused adam": lambda ps: Adam(ps, lr=0.1, fused=True),
    "adamw": lambda ps: AdamW(ps, lr=0.1, weight_decay=0.1),
    "fused adamw": lambda ps: AdamW(ps, lr=0.1, weight_decay=0.1, fused=True),
    "two groups": lambda ps: Adam([{"params": ps[:1]}, {"params": ps[1:]}], lr=0.1),
}


def make(optimizer: Any) -> Any:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    parameters.append(nn.Parameter(torch.ones(1)))  # which never gets a gradient
    memory, opt = Memory(), optimizer(parameters)
    g = guard(None, None, beta_star=1.0, sinks=[memory], flush_every=1, optimizer=opt)
    return g, opt, parameters, memory


def set_gradients(parameters: Sequence[nn.Parameter], bad: float | None = None) -> None:
    for p in parameters[:2]:
        p.grad = torch.randn_like(p)
        if bad is not None and p.ndim > 1:
            p.grad[0, 1] = bad


def same(parameters, opt, twins, twin):
    """Whether two optimizers have made the same of the same parameters."""
    for p, q in zip(parameters, twins, strict=True):
        assert torch.equal(p, q)
        ours, theirs = opt.state[p], twin.state[q]
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert torch.equal(torch.as_tensor(ours[key]), torch.as_tensor(value)), key


@pytest.fixture
def _memory_that_is_not_written_is_nan():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# Each optimizer with each order, and each of these with each kind of number.
ORDERS = [(name, *x) for name in OPTIMIZERS for x in (("gbg", False), ("gbg", True), ("bg", False))]


@pytest.mark.usefixtures("_memory_that_is_not_written_is_nan")
@pytest.mark.parametrize(
    ("name", "order", "in_closure", "bad"),
    [(*x, bad) for x, bad in zip(ORDERS, cycle([*BAD, *BAD[1:], BAD[0], *BAD[2:], *BAD[:2]]))],
)
def test_skipped_step_changes_nothing(name, order, in_closure, bad):
    """Steps good, bad, good give what the two good ones give without a guard.

    Lightning calls backward inside the step.
    """
    g, opt, parameters, memory = make(OPTIMIZERS[name])
    twins = [nn.Parameter(p.detach().clone()) for p in parameters]
    twin = OPTIMIZERS[name](twins)
    for kind in order:
        given: list[Any] = []

        def compute(kind=kind, given=given):
            set_gradients(parameters, bad if kind == "b" else None)
            given += [p.grad for p in parameters]
            for q, value in zip(twins, given, strict=True):
                q.grad = None if value is None else value.clone()
            return torch.tensor(3.0)

        if in_closure:
            assert opt.step(compute) == 3.0
        else:
            compute()
            opt.step()
        # The gradients are where they were, for the trainer's own eyes.
        assert all(p.grad is x for p, x in zip(parameters, given, strict=True))
        if kind == "g":
            twin.step()
            same(parameters, opt, twins, twin)
        assert all(map(torch.equal, parameters, twins))
    assert g.step == len(order)
    assert memory.column("nonfinite/gradients") == [float(kind == "b") for kind in order]
    at = order.index("b")
    assert memory.column("alert_level")[at] == Level.ERROR
    (alert,) = g.alerts
    assert (alert.rule, alert.tag, alert.step) == ("nonfinite", "nonfinite/gradients", at)
    assert "found_inf" not in vars(opt)


class CountReads(TorchDispatchMode):
    """Counts the values that the host reads."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_only_fused_optimizers_decide_on_the_device(name):
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    opt, told = OPTIMIZERS[name](parameters), list[Any]()
    OptimizerHooks(
        opt, None, lambda skipped, _: told.append(skipped), lambda: False, lambda *_: None
    )
    reads, seen = CountReads(), []

    def inside_the_step(optimizer, args, kwargs):
        seen.append((reads.count, parameters[0].grad is not None))

    opt.register_step_pre_hook(inside_the_step)
    for bad in (None, torch.nan, None):
        set_gradients(parameters, bad)
        with reads:
            opt.step()
        assert reads.count == seen[-1][0] or not name.startswith("fused")
        reads.count = 0
    assert [float(skipped) for skipped in told] == [0.0, 1.0, 0.0]
    on_device = [(0, True)] * 3
    if name == "fused momentum":  # which has no memory of its own before its first step
        on_device[0] = (1, True)
    by_host = [(1, True), (1, False), (1, True)]
    assert seen == (on_device if name.startswith("fused") else by_host)


def test_large_gradients_are_not_mistaken_for_infinite_ones_nor_none_at_all():
    # Their squares are infinite in float32, and the sum of two of them nearly is.
    _, opt, parameters, memory = make(OPTIMIZERS["sgd"])
    opt.step()
    for p in parameters[:2]:
        p.grad = torch.full_like(p, 3e38)
    opt.step()
    assert torch.all(parameters[0] == 1 - 0.1 * torch.tensor(3e38))
    assert memory.column("nonfinite/gradients") == [0.0, 0.0]


def test_gradients_of_several_dtypes():
    ps = [nn.Parameter(torch.ones(2, dtype=x)) for x in (torch.float64, torch.bfloat16)]
    opt = SGD(ps, lr=1e-300)
    g = guard(None, None, beta_star=1.0, optimizer=opt)
    ps[0].grad = torch.full((2,), 1e300, dtype=torch.float64)  # not finite in float32
    ps[1].grad = torch.ones(2, dtype=torch.bfloat16)
    opt.step()
    moved = ps[0].detach().clone()
    torch.testing.assert_close(moved, torch.zeros_like(moved))
    ps[1].grad[0] = torch.nan
    opt.step()
    assert torch.equal(ps[0], moved)
    assert len(g.alerts) == 1


def test_sparse_and_empty_gradients():
    table, empty = nn.Embedding(4, 2, sparse=True), nn.Parameter(torch.ones(0))
    opt = SGD([*table.parameters(), empty], lr=0.1)
    g = guard(None, None, beta_star=1.0, optimizer=opt)
    empty.grad = torch.ones(0)
    for factor, expected in ((1.0, [0.0, 0.2, 0.0, 0.0]), (torch.nan, [0.0] * 4)):
        before = table.weight.detach().clone()
        table.zero_grad()
        (table(torch.tensor([1, 1])) * factor).sum().backward()
        opt.step()
        taken = (before - table.weight).detach()[:, 0]
        torch.testing.assert_close(taken, torch.tensor(expected))
    assert len(g.alerts) == 1


# -- several optimizers ----------------------------------------------------------------------------

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


def several(f: Any, optimizers: Sequence[Optimizer] | Optimizer, **options: Any) -> Any:
    told = {"beta_star": 0.5, "output_scale": 1, **options}
    return guard(None, langevin, model=f, optimizer=optimizers, **told)


def step(
    g: Any,
    f: Any,
    optimizers: Any,
    spoiled: Any = None,
    more: Any = lambda: 0.0,
    schedulers: Sequence[Any] = (),
) -> None:
    loss, sample = g
    value = loss(f(X + torch.randn(4, 2)), f(sample(f, torch.randn(4, 2)))) + more()
    for each in optimizers:
        each.zero_grad()
    value.backward()
    if spoiled is not None:
        p = spoiled.param_groups[0]["params"][-1]
        p.grad = p.grad * math.nan
    for each in (*optimizers, *schedulers):
        each.step()


@pytest.mark.parametrize(("which", "reverse"), [(0, False), (1, True)])
@pytest.mark.parametrize(
    "kind", [lambda: split(Muon, AdamW), lambda: split(Adam, SGD, fused=True), embedded]
)
def test_they_skip_a_step_together_and_end_it_together(kind: Any, reverse: bool, which: int):
    f, optimizers = kind()
    g = several(f, optimizers)
    in_turn = optimizers[::-1] if reverse else optimizers
    for _ in range(3):
        step(g, f, in_turn)
    before = [p.detach().clone() for p in f.parameters()]
    step(g, f, in_turn, optimizers[which])
    assert all(map(torch.equal, before, f.parameters()))
    assert g.step == 4
    assert g.last["nonfinite/gradients"] == 1
    step(g, f, in_turn)
    # The loss does not change with the bias of the last layer.
    assert sum(map(torch.equal, before, f.parameters())) <= 1


def test_one_that_rests_does_not_hold_up_the_steps() -> None:
    f, (one, other) = split(Adam, SGD)
    g = several(f, (one, other))
    for i in range(6):
        step(g, f, [one] if i % 3 else [one, other])
    g.sampler(f, X)
    assert g.step == 6


def test_norms_are_those_of_all_together() -> None:
    """As of one optimizer that has all parameters, in the rows of the slow tier."""
    rows = []
    for has_several in (False, True):
        torch.manual_seed(0)
        f, optimizers = split(SGD, SGD)
        optimizers = optimizers if has_several else [SGD([*f.parameters()], lr=0.01)]
        g = several(f, optimizers)
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
    told: Any = {"scheduler": schedulers, "buffer": torch.zeros(1, 2), "recovery": recovery}
    g = several(f, optimizers, action="rollback", beta_star=0, **told)
    parts = [f, other, *optimizers, *schedulers]

    def state() -> list[Any]:
        return torch.utils._pytree.tree_leaves([x.state_dict() for x in parts])

    before = [x.clone() if isinstance(x, torch.Tensor) else x for x in state()[:6]]
    g.sampler(f, X)
    for i in range(20):
        if i == 10:
            other.weight.data.fill_(math.nan)
        more: Any = {"more": lambda: other(torch.ones(3)).square().sum(), "schedulers": schedulers}
        step(g, f, optimizers, **more)
        if g.rollbacks:
            break
    assert g.rollbacks[0].restored_step == 0
    assert all(map(torch.equal, before, state()[:6]))
    assert not any(each.state_dict()["state"] for each in optimizers)


def test_a_rollback_refuses_parameters_that_nobody_would_skip() -> None:
    f, (one, _) = split(Adam, AdamW)
    g = several(f, one, action="rollback", buffer=torch.zeros(1, 2))
    q = g.sampler(f, X)
    with pytest.raises(ConfigError, match=r"net\.0\.bias, net\.2\.bias.*optimizer=\[a, b\]"):
        g.loss_fn(f(X), f(q))
