"""A step whose gradients are not finite changes nothing, whatever the optimizer."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ebmguard import Level, errors, guard
from ebmguard.retrofit.optimizer import OptimizerHooks
from tests.parts import Memory, energies

BAD = [torch.nan, torch.inf, -torch.inf]


def make(optimizer: Any, **options: Any):
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    parameters.append(nn.Parameter(torch.ones(1)))  # which never gets a gradient
    memory = Memory()
    opt = optimizer(parameters)
    g = guard(None, None, beta_star=1.0, sinks=[memory], flush_every=1, **options)
    g.attach(optimizer=opt)
    return g, opt, parameters, memory


def set_gradients(parameters, *, bad: float | None = None):
    for p in parameters[:2]:
        p.grad = torch.randn_like(p)
    if bad is not None:
        parameters[1].grad[0, 1] = bad


OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "sgd with momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "fused sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, fused=True),
    "fused momentum": lambda ps: torch.optim.SGD(
        ps, lr=0.1, momentum=0.9, dampening=0.5, fused=True
    ),
    "fused adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1, fused=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.1, foreach=False),
    "adam, foreach": lambda ps: torch.optim.Adam(ps, lr=0.1, foreach=True),
    "adam, amsgrad": lambda ps: torch.optim.Adam(ps, lr=0.1, amsgrad=True),
    "fused adam": lambda ps: torch.optim.Adam(ps, lr=0.1, fused=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.1),
    "fused adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.1, fused=True),
    "two groups": lambda ps: torch.optim.Adam([{"params": ps[:1]}, {"params": ps[1:]}], lr=0.1),
}


def same(parameters, opt, twins, twin):
    """Whether two optimizers have made the same of the same parameters."""
    for p, q in zip(parameters, twins, strict=True):
        assert torch.equal(p, q)
        ours, theirs = opt.state[p], twin.state[q]
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert torch.equal(torch.as_tensor(ours[key]), torch.as_tensor(value)), key


@pytest.mark.parametrize("in_closure", [False, True])  # Lightning calls backward inside the step
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_skipped_step_changes_nothing(name, bad, in_closure):
    """Steps good, bad, good give what the two good ones give without a guard."""
    g, opt, parameters, memory = make(OPTIMIZERS[name])
    twins = [nn.Parameter(p.detach().clone()) for p in parameters]
    twin = OPTIMIZERS[name](twins)
    for kind in (None, bad, None):
        given: list[Any] = []

        def compute(kind=kind, given=given):
            set_gradients(parameters, bad=kind)
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
        if kind is None:
            twin.step()
    same(parameters, opt, twins, twin)
    assert g.step == 3
    assert memory.column("nonfinite/gradients") == [0.0, 1.0, 0.0]
    assert memory.column("alert_level")[1] == Level.ERROR
    (alert,) = g.alerts
    assert (alert.rule, alert.tag, alert.step) == ("nonfinite", "nonfinite/gradients", 1)
    assert "found_inf" not in vars(opt)


@pytest.fixture
def _memory_that_is_not_written_is_nan():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_memory_that_is_not_written_is_nan")
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_skipped_first_step_leaves_no_state_that_matters(name):
    _held, opt, parameters, _ = make(OPTIMIZERS[name])
    twins = [nn.Parameter(p.detach().clone()) for p in parameters]
    twin = OPTIMIZERS[name](twins)
    set_gradients(parameters, bad=torch.nan)
    opt.step()
    assert all(torch.equal(p, q) for p, q in zip(parameters, twins, strict=True))
    set_gradients(parameters)
    for p, q in zip(parameters, twins, strict=True):
        q.grad = p.grad
    opt.step()
    twin.step()
    same(parameters, opt, twins, twin)


class CountReads(TorchDispatchMode):
    """Counts the values that the host reads."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", list(OPTIMIZERS))
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
        set_gradients(parameters, bad=bad)
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


@pytest.mark.parametrize("judge_in_loss", [True, False])
@pytest.mark.parametrize("name", ["adam", "fused adam"])
def test_skips_obey_the_lag_and_the_action(name, judge_in_loss):
    g, opt, parameters, _ = make(OPTIMIZERS[name], judge_in_loss=judge_in_loss, action="raise")

    def step(*, bad=None):
        g.loss_fn(*energies())
        set_gradients(parameters, bad=bad)
        opt.step()

    step()
    if not judge_in_loss:
        step(bad=torch.inf)
        step()
    with pytest.raises(errors.NonFiniteError, match="step 1: nonfinite/gradients"):
        step(bad=torch.inf if judge_in_loss else None)


def test_large_gradients_are_not_mistaken_for_infinite_ones_nor_none_at_all():
    # Their squares are infinite in float32, and the sum of two of them nearly is.
    g, opt, parameters, memory = make(OPTIMIZERS["sgd"])
    opt.step()
    for p in parameters[:2]:
        p.grad = torch.full_like(p, 3e38)
    opt.step()
    assert torch.all(parameters[0] == 1 - 0.1 * torch.tensor(3e38))
    assert memory.column("nonfinite/gradients") == [0.0, 0.0]
    assert g.step == 2
    assert not g.alerts


def test_gradients_of_several_dtypes():
    parameters = [
        nn.Parameter(torch.ones(2, dtype=torch.float64)),
        nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
    ]
    opt = torch.optim.SGD(parameters, lr=1e-300)
    g = guard(None, None, beta_star=1.0).attach(optimizer=opt)
    parameters[0].grad = torch.full((2,), 1e300, dtype=torch.float64)  # not finite in float32
    parameters[1].grad = torch.ones(2, dtype=torch.bfloat16)
    opt.step()
    moved = parameters[0].detach().clone()
    torch.testing.assert_close(moved, torch.zeros_like(moved))
    parameters[1].grad[0] = torch.nan
    opt.step()
    assert torch.equal(parameters[0], moved)
    assert len(g.alerts) == 1


def test_sparse_and_empty_gradients():
    table, empty = nn.Embedding(4, 2, sparse=True), nn.Parameter(torch.ones(0))
    opt = torch.optim.SGD([*table.parameters(), empty], lr=0.1)
    g = guard(None, None, beta_star=1.0).attach(optimizer=opt)
    empty.grad = torch.ones(0)
    before = table.weight.detach().clone()
    table(torch.tensor([1, 1])).sum().backward()
    opt.step()
    taken = (before - table.weight).detach()[:, 0]
    torch.testing.assert_close(taken, torch.tensor([0.0, 0.2, 0.0, 0.0]))
    before = table.weight.detach().clone()
    opt.zero_grad()
    (table(torch.tensor([1])) * torch.nan).sum().backward()
    opt.step()
    assert torch.equal(table.weight, before)
    assert len(g.alerts) == 1


def test_closure_that_is_called_often_is_left_alone():
    g, opt, parameters, _ = make(lambda ps: torch.optim.LBFGS(ps, max_iter=2))
    parameters[0].grad = torch.full((3,), torch.nan)  # stale: the closure computes new ones

    def closure():
        opt.zero_grad()
        loss = sum(p.square().sum() for p in parameters)
        loss.backward()
        return loss.detach()

    for keyword in (False, True):
        loss = opt.step(closure=closure) if keyword else opt.step(closure)
        assert math.isfinite(loss)
    assert g.step == 2
    assert parameters[0].abs().max() < 1
    assert not g.alerts


def test_nan_that_comes_through_a_withheld_loss():
    """A weight of 0 does not stop 0 * inf inside the network; the skipped step does."""
    f = nn.Linear(1, 1)
    opt = torch.optim.Adam(f.parameters(), lr=0.1)
    g = guard(None, None, beta_star=1.0).attach(model=f, optimizer=opt)
    before = copy.deepcopy(f.state_dict())
    x_neg = torch.tensor([[torch.inf], [1.0]])
    loss = g.loss_fn(f(torch.ones(2, 1)).squeeze(1), f(x_neg).squeeze(1))
    loss.backward()
    assert f.weight.grad is not None
    assert torch.isnan(f.weight.grad).any()
    opt.step()
    assert all(torch.equal(value, before[key]) for key, value in f.state_dict().items())
    assert {alert.tag for alert in g.alerts} == {"nonfinite/energies"}
