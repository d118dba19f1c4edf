"""`optim/...`: what an optimizer made of the gradient, in the row of the network it has made.

Under a GradScaler the scaler skips, which the guard counts and reports as INFO.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from ebmguard import Level, guard
from ebmguard.errors import ConfigError
from ebmguard.retrofit.optimizer import total_norm
from tests.parts import Memory, energies, take

TAGS = ("optim/grad_norm", "optim/update_norm", "optim/amplification")


class Run:
    """A network of a few numbers, whose gradients are given; its energies are fixed."""

    def __init__(self, make: Any, beta_star: Any = 1.0, groups: int = 1, **options: Any) -> None:
        self.parameters = [
            nn.Parameter(torch.randn(3, dtype=torch.float64) + 1) for _ in range(2 * groups)
        ]
        self.pairs = [self.parameters[i : i + 2] for i in range(0, 2 * groups, 2)]
        self.lrs = [0.1 / 4**i for i in range(groups)]
        self.optimizer = make(
            [{"params": own, "lr": lr} for own, lr in zip(self.pairs, self.lrs, strict=True)]
        )
        self.scaler = options.pop("scaler", None)
        self.memory = Memory()
        self.guard = guard(None, None, beta_star=beta_star, sinks=[self.memory], **options)
        self.guard.attach(optimizer=self.optimizer, scaler=self.scaler)

    def step(self, scale: float = 1.0, apart: float = 0.0) -> None:
        """One step; its gradient is the same in all, times ``scale``.

        Positives lie ``apart`` above the negatives.
        """
        torch.manual_seed(0)
        pos, neg = energies(dtype=torch.float64)
        loss = self.guard.loss_fn(pos + apart, neg)
        slopes = sum((torch.randn(3, dtype=torch.float64) * p).sum() for p in self.parameters)
        self.optimizer.zero_grad()
        take(scale * slopes + 0 * loss, self.optimizer, self.scaler)

    def gradient(self) -> float:
        grads = [p.grad for p in self.parameters if p.grad is not None]
        return float(torch.cat(grads).norm())

    def rows(self) -> dict[int, dict[str, float]]:
        self.guard.close()
        return {
            step: {tag: row[tag] for tag in TAGS}
            for step, row in self.memory.rows
            if TAGS[0] in row
        }


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups)


def adam(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, betas=(0.0, 0.5), eps=0)


@pytest.mark.parametrize("make", [sgd, adam])
def test_amplification_is_of_what_the_optimizer_made_of_the_gradient(make):
    """Descent goes as far as the gradient; Adam's first step goes as far whatever it is."""
    run = Run(make, judge_in_loss=False)
    run.step(apart=2.0)
    norm, step = run.gradient(), run.gradient() if make is sgd else math.sqrt(6)
    run.step()
    rows = run.rows()
    assert list(rows) == [1]
    grad_scale = run.memory.rows[0][1]["grad_scale"]
    assert 0.05 < grad_scale < 0.7
    expected = dict(zip(TAGS, (norm, 0.1 * step, step / grad_scale), strict=True))
    assert rows[1] == pytest.approx(expected, rel=1e-5)


def test_every_group_has_its_own_learning_rate():
    run = Run(sgd, beta_star=0.0, groups=3)
    run.optimizer.param_groups[1]["lr"] = torch.tensor(run.lrs[1])
    run.step()
    norm = run.gradient()
    moved = [
        lr * torch.cat([p.grad for p in own if p.grad is not None]).norm().item()
        for lr, own in zip(run.lrs, run.pairs, strict=True)
    ]
    run.step()
    row = run.rows()[1]
    assert row["optim/update_norm"] == pytest.approx(math.hypot(*moved), rel=1e-5)
    # At β* = 0 nothing scales the gradient.
    assert row["optim/amplification"] == pytest.approx(norm, rel=1e-5)


def test_grad_scale_counts_where_it_is_in_force():
    one, zero = torch.tensor(1.0), torch.tensor(0.0)
    for options, scaled in (
        ({"beta_star": zero}, False),
        ({"variant": "no_pos"}, False),
        ({"beta_star": one, "variant": "batch"}, True),
    ):
        run = Run(sgd, **options)
        run.step(apart=2.0)
        norm = run.gradient()
        run.step()
        factor = run.memory.rows[0][1]["grad_scale"] if scaled else 1.0
        assert run.rows()[1]["optim/amplification"] == pytest.approx(norm / factor, rel=1e-5)


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_that_was_left_out_has_no_amplification(fused):
    run = Run(lambda groups: torch.optim.Adam(groups, fused=fused))
    run.step(scale=torch.nan)
    run.step()
    expected = dict(zip(TAGS, (math.nan, 0.0, math.nan), strict=True))
    assert run.rows()[1] == pytest.approx(expected, nan_ok=True)


def test_gradients_of_a_closure_that_is_called_often_are_not_known():
    run = Run(lambda groups: torch.optim.LBFGS(groups[0]["params"], lr=0.1, max_iter=2))
    p = run.parameters[0]
    p.grad = torch.full_like(p, torch.nan)  # stale: the closure computes new ones

    def closure():
        run.optimizer.zero_grad()
        loss = run.guard.loss_fn(*energies()) * 0 + sum(p.square().sum() for p in run.parameters)
        loss.backward()
        return loss.detach()

    before = torch.cat([*run.parameters]).detach().clone()
    run.optimizer.step(closure)
    moved = float((torch.cat([*run.parameters]).detach() - before).norm())
    run.optimizer.step(closure=closure)
    assert run.guard.step == 2
    assert not run.guard.alerts
    row = run.rows()[1]
    assert math.isnan(row["optim/grad_norm"])
    assert row["optim/update_norm"] == pytest.approx(moved, rel=1e-5)
    assert row["optim/amplification"] > 0


class Own(torch.optim.Optimizer):
    """Without a learning rate."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.data -= p.grad


P, FROZEN = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
TABLE = nn.Parameter(torch.ones(4, 2))
SPARSE = torch.sparse_coo_tensor(
    torch.tensor([[1, 1]]), torch.ones(2, 2), (4, 2), check_invariants=True
)


@pytest.mark.parametrize(
    ("make", "gradient", "expected"),
    [
        (lambda: Own([P, FROZEN], {}), (P, torch.tensor([3.0, 4.0])), (5.0, 5.0, math.nan)),
        (lambda: torch.optim.SGD([FROZEN], lr=0.1), None, None),
        # A gradient of 2 in both entries of a row.
        (
            lambda: torch.optim.SGD([TABLE], lr=0.1),
            (TABLE, SPARSE),
            (8**0.5, 0.1 * 8**0.5, 8**0.5),
        ),
    ],
    ids=["no learning rate", "no parameter that is trained", "sparse"],
)
def test_other_optimizers_and_gradients(make, gradient, expected):
    optimizer = make()
    g = guard(None, None, beta_star=0.0, optimizer=optimizer)
    if gradient is not None:
        gradient[0].grad = gradient[1]
    g.loss_fn(*energies())
    optimizer.step()
    g.loss_fn(*energies())
    found = [g.last[tag] for tag in TAGS if tag in g.last]
    assert found == pytest.approx([*(expected or ())], nan_ok=True)


def test_a_norm_of_several_types_is_that_of_everything_together():
    assert total_norm([torch.empty(3, device="meta")] * 2).shape == ()  # nothing is read
    wide = torch.full((2,), 1e150, dtype=torch.float64)
    half = torch.full((100,), 6e4, dtype=torch.float16)  # the sum of squares is infinite in float16
    assert total_norm([half]).item() == pytest.approx(6e5, rel=1e-3)
    assert total_norm([half]).dtype == torch.float32
    found = total_norm([torch.ones(3).bfloat16(), wide]).item()
    assert found == pytest.approx(math.sqrt(2) * 1e150)
    assert total_norm([torch.tensor([3 + 4j])]).item() == pytest.approx(5.0)


# -- under a GradScaler ----------------------------------------------------------------------------


def new_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=10_000)


KINDS: dict[str, Any] = {
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.1),
    "fused adam": lambda ps: torch.optim.Adam(ps, lr=0.1, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "fused sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, fused=True),
}


@pytest.mark.parametrize(
    ("name", "judge_in_loss"), [*((name, True) for name in KINDS), ("fused adam", False)]
)
def test_skip_is_counted_and_is_no_alarm(name, judge_in_loss):
    run = Run(KINDS[name], scaler=new_scaler(), judge_in_loss=judge_in_loss, action="raise")
    for factor in (1.0, torch.inf, 1.0, 1.0):
        before = run.parameters[0].detach().clone()
        run.step(factor)
        assert torch.equal(run.parameters[0], before) == (factor == torch.inf)
    assert run.guard.step == 4
    assert run.scaler.get_scale() == 4.0  # the scaler has done its own work
    run.guard.close()
    memory = run.memory
    assert memory.steps == [0, 1, 2, 3]
    assert memory.column("scaler/skipped") == [0.0, 1.0, 0.0, 0.0]
    assert "nonfinite/gradients" not in memory.rows[1][1]
    (alert,) = run.guard.alerts
    assert (alert.rule, alert.level, alert.step) == ("amp_skip", Level.INFO, 1)
    assert memory.alerts == [alert.record()]
    assert memory.column("alert_level") == [0.0] * 4
    assert not {"found_inf", "grad_scale"} & set(vars(run.optimizer))


@pytest.mark.parametrize("name", KINDS)
def test_bit_identical_to_the_scaler_alone_and_other_optimizers_of_it_do_not_count(name):
    scalers, ps = (new_scaler(), new_scaler()), [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizers = [KINDS[name]([p]) for p in ps]
    g = guard(None, None, beta_star=1.0, optimizer=optimizers[0], scaler=scalers[0])
    for factor in (1.0, torch.inf, 0.3, torch.nan, 0.7):
        g.loss_fn(*energies())
        for p, optimizer, scaler in zip(ps, optimizers, scalers, strict=True):
            optimizer.zero_grad()
            take(factor * p.sum(), optimizer, scaler)
    assert torch.equal(*ps)
    assert scalers[0].state_dict() == scalers[1].state_dict()
    q, alerts = nn.Parameter(torch.ones(1)), len(g.alerts)
    take(torch.inf * q.sum(), torch.optim.SGD([q], lr=0.1), scalers[0])
    assert g.step == 5
    assert len(g.alerts) == alerts


def test_amp_scale_is_taken_out_of_the_gradient():
    rows = []
    for scaler in (None, new_scaler()):
        torch.manual_seed(0)
        run = Run(lambda groups: torch.optim.Adam(groups, fused=True), scaler=scaler)
        run.step()
        run.step()
        rows.append(run.rows()[1])
    assert rows[1] == pytest.approx(rows[0], rel=1e-5)


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
    take(torch.inf * p.sum(), second, scaler)
    assert g.step == 1
