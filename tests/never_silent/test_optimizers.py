"""Scalers and optimizers of others work as without a guard, or are refused with the right one."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from ebmguard import errors, guard
from tests.parts import Energy, Memory, difference, unit_langevin

FUSED: dict[str, Callable[[Any], Optimizer]] = {
    "Adam": lambda ps: Adam(ps, lr=0.01, fused=True),
    "SGD": lambda ps: SGD(ps, lr=0.01, momentum=0.9, fused=True),
    "not fused": lambda ps: Adam(ps, lr=0.01),
}


@pytest.mark.parametrize("name", FUSED)
def test_a_scaler_that_was_not_told_works_as_without_a_guard(name):
    found = []
    for is_guarded in (True, False):
        torch.manual_seed(0)
        net, loss_fn = Energy(), difference
        opt, scaler = FUSED[name](net.parameters()), torch.amp.GradScaler("cpu")
        if is_guarded:
            loss_fn = guard(None, None, optimizer=opt, beta_star=0.5).loss_fn
        for step in range(4):
            opt.zero_grad()
            x = torch.randn(8, 2) * (math.inf if step == 1 else 1)
            # The same gradients for both, since at beta* > 0 the losses differ.
            loss = 0 * loss_fn(net(x), net(x + 1)) + net(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            assert not {"found_inf", "grad_scale"} & vars(opt).keys()
        found.append([*net.parameters()])
    assert all(map(torch.equal, *found))
    assert all(bool(p.isfinite().all()) for p in found[0])


def scaled() -> tuple[Any, Any, Any]:
    f, scaler = Energy(), torch.amp.GradScaler("cpu")
    opt = SGD(f.parameters(), lr=0.1)
    return scaler, opt, f


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_a_scaler_is_its_own(copied):
    scaler, opt, _ = scaled()
    guard(None, None, optimizer=opt, scaler=scaler, beta_star=0.5)
    twin = copied(scaler)
    assert twin.step.__self__ is twin


def test_a_step_of_a_removed_hook_that_others_kept_tells_nothing():
    scaler, opt, f = scaled()
    g = guard(None, None, optimizer=opt, scaler=scaler, beta_star=0.5)
    kept = scaler.step
    scaler.step = lambda optimizer: kept(optimizer)  # another library's, around it
    g.attach(step_size=1.0)  # hooks are made anew
    scaler.scale(f(torch.full((1, 2), math.inf)).sum()).backward()
    scaler.step(opt)  # left out
    assert g.step == 1


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_raised_leaves_nothing_behind(fused):
    p = nn.Parameter(torch.ones(2))
    opt = Adam([p], lr=0.1, fused=fused)
    guard(None, None, optimizer=opt, beta_star=0.5)

    def fail(*_: Any) -> None:
        raise OSError("no device")

    handle = opt.register_step_pre_hook(fail)
    p.grad = torch.full((2,), math.nan)
    with pytest.raises(OSError, match="no device"):
        opt.step()
    handle.remove()
    p.grad = good = torch.ones(2)
    opt.step()
    assert p.grad is good
    assert bool(p.isfinite().all())
    assert bool((p != 1).all())
    assert "found_inf" not in vars(opt)


class Derived(SGD):
    """Whose step is its parent's."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_calls_its_parents_is_one_step(fused):
    p = nn.Parameter(torch.ones(2))
    SGD([p], lr=0.1)  # whose class has hooks from now on
    opt, memory = Derived([p], lr=0.1, fused=fused), Memory()
    g = guard(None, None, optimizer=opt, beta_star=0.5, sinks=[memory], flush_every=1)
    for value in (1.0, math.nan, 1.0):
        p.grad = given = torch.full((2,), value)
        opt.step()
        assert p.grad is given
    assert g.step == 3
    assert memory.column("nonfinite/gradients") == [0.0, 1.0, 0.0]
    torch.testing.assert_close(p.detach(), torch.full((2,), 0.8))


# -- optimizers without hooks --------------------------------------------------------------------


class Lookahead(Optimizer):
    """Without ``super().__init__()``, as in the wild; accelerate's prepared ones are so, too."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state
        self.defaults = optimizer.defaults


class Prepared:
    """No Optimizer at all, as apex's and DeepSpeed's."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.inner = optimizer


class Alone(Optimizer):
    def __init__(self, optimizer: Optimizer) -> None:
        self.param_groups = optimizer.param_groups


@pytest.mark.parametrize(
    ("wrapper", "fix"),
    [
        (Lookahead, "optimizer=wrapper.optimizer"),
        (Prepared, "optimizer=wrapper.inner"),
        (Alone, "Optimizer.__init__"),
    ],
)
def test_an_optimizer_without_hooks_is_refused_with_the_inner_one(wrapper, fix):
    inner = SGD(Energy().parameters(), lr=0.1)
    with pytest.raises(errors.ConfigError, match=wrapper.__name__) as error:
        guard(None, unit_langevin, optimizer=wrapper(inner), beta_star=0.5)
    assert fix in str(error.value)
    assert not inner._optimizer_step_pre_hooks
