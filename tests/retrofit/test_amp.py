"""Under a GradScaler the scaler skips, and the guard counts and reports it as INFO."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ebmguard import Level, errors, guard
from ebmguard.errors import ConfigError
from tests.parts import Memory, energies

OPTIMIZERS = {
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.1),
    "fused adam": lambda ps: torch.optim.Adam(ps, lr=0.1, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "fused sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, fused=True),
}


class Amp:
    def __init__(self, optimizer, **options):
        self.p = nn.Parameter(torch.ones(3))
        self.optimizer = OPTIMIZERS[optimizer]([self.p])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=10_000)
        self.memory = Memory()
        self.guard = guard(None, None, beta_star=1.0, sinks=[self.memory], **options)
        self.guard.attach(optimizer=self.optimizer, scaler=self.scaler)

    def step(self, factor=1.0):
        self.optimizer.zero_grad()
        loss = self.guard.loss_fn(*energies()) + factor * self.p.sum()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


@pytest.mark.parametrize("judge_in_loss", [True, False])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_skip_is_counted_and_is_no_alarm(name, judge_in_loss):
    amp = Amp(name, judge_in_loss=judge_in_loss, action="raise")
    for factor in (1.0, torch.inf, 1.0, 1.0):
        before = amp.p.detach().clone()
        amp.step(factor)
        assert torch.equal(amp.p, before) == (factor == torch.inf)
    assert amp.guard.step == 4
    assert amp.scaler.get_scale() == 4.0  # the scaler has done its own work
    amp.guard.close()
    assert amp.memory.steps == [0, 1, 2, 3]
    assert amp.memory.column("scaler/skipped") == [0.0, 1.0, 0.0, 0.0]
    assert "nonfinite/gradients" not in amp.memory.rows[1][1]
    (alert,) = amp.guard.alerts
    assert (alert.rule, alert.level, alert.step) == ("amp_skip", Level.INFO, 1)
    assert amp.memory.alerts == [alert.record()]
    assert amp.memory.column("alert_level") == [0.0] * 4
    assert not {"found_inf", "grad_scale"} & set(vars(amp.optimizer))


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_bit_identical_to_the_scaler_alone_and_other_optimizers_of_it_do_not_count(name):
    amp = Amp(name)
    p = nn.Parameter(torch.ones(3))
    optimizer = OPTIMIZERS[name]([p])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=10_000)
    for factor in (1.0, torch.inf, 0.3, torch.nan, 0.7):
        amp.step(factor)
        optimizer.zero_grad()
        scaler.scale(factor * p.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert torch.equal(amp.p, p)
    assert amp.scaler.state_dict() == scaler.state_dict()
    q, alerts = nn.Parameter(torch.ones(1)), len(amp.guard.alerts)
    amp.scaler.scale(torch.inf * q.sum()).backward()
    amp.scaler.step(torch.optim.SGD([q], lr=0.1))
    assert amp.guard.step == 5
    assert len(amp.guard.alerts) == alerts


def test_a_scaler_that_is_switched_off_leaves_the_check_to_the_guard():
    p = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([p], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    g = guard(None, None, beta_star=1.0, action="raise")
    g.attach(optimizer=optimizer, scaler=scaler)
    scaler.scale(torch.nan * p.sum()).backward()
    with pytest.raises(errors.NonFiniteError):
        scaler.step(optimizer)
    assert torch.equal(p, torch.ones(3))
    assert g.step == 1


def test_scaler_may_come_later_and_is_let_go():
    p = nn.Parameter(torch.ones(3))
    first, second = (torch.optim.SGD([p], lr=0.1) for _ in range(2))
    scaler = torch.amp.GradScaler("cpu")
    step = scaler.step
    g = guard(None, None, beta_star=1.0)
    with pytest.raises(ConfigError, match="scaler= needs the optimizer"):
        g.attach(scaler=scaler)
    g.attach(optimizer=first).attach(scaler=scaler)
    assert g.trainer.optimizer is first
    assert scaler.step != step
    g.attach(optimizer=second)
    assert g.trainer.scaler is scaler
    scaler.scale(torch.inf * p.sum()).backward()
    scaler.step(second)
    assert g.step == 1
    with pytest.raises(ConfigError, match="GradScaler"):
        g.attach(scaler=object())  # type: ignore[arg-type]
