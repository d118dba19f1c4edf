"""`optim/...`: what an optimizer made of the gradient, in the row of the network it has made."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import nn

from ebmguard import guard
from ebmguard.retrofit.optimizer import total_norm
from tests.parts import Memory, energies

TAGS = ("optim/grad_norm", "optim/update_norm", "optim/amplification")


class Run:
    """A network of a few numbers, whose gradients are given; its energies are fixed."""

    def __init__(self, make: Any, beta_star: Any = 1.0, groups: int = 1, **options: Any) -> None:
        self.parameters = [
            nn.Parameter(torch.randn(3, dtype=torch.float64) + 1) for _ in range(2 * groups)
        ]
        pairs = [self.parameters[i : i + 2] for i in range(0, 2 * groups, 2)]
        lrs = [0.1 / 4**i for i in range(groups)]
        self.optimizer = make(
            [{"params": own, "lr": lr} for own, lr in zip(pairs, lrs, strict=True)]
        )
        self.lrs, self.pairs = lrs, pairs
        self.scaler = options.pop("scaler", None)
        self.memory = Memory()
        self.guard = guard(None, None, beta_star=beta_star, sinks=[self.memory], **options)
        self.guard.attach(optimizer=self.optimizer, scaler=self.scaler)

    def step(self, scale: float | None = 1.0, apart: float = 0.0) -> None:
        """One step; positives lie ``apart`` above the negatives.

        Its gradient is the same in all steps, times ``scale``, or GradScale where that is None.
        """
        torch.manual_seed(0)
        pos, neg = energies(dtype=torch.float64)
        loss = self.guard.loss_fn(pos + apart, neg)
        if scale is None:
            scale = self.guard.last["grad_scale"]
        slopes = sum((torch.randn(3, dtype=torch.float64) * p).sum() for p in self.parameters)
        self.optimizer.zero_grad()
        if self.scaler is None:
            (scale * slopes + 0 * loss).backward()
            self.optimizer.step()
        else:
            self.scaler.scale(scale * slopes + 0 * loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

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


def sgd(groups):
    return torch.optim.SGD(groups)


def adam(groups):
    return torch.optim.Adam(groups, betas=(0.0, 0.5), eps=0)


@pytest.mark.parametrize("judge_in_loss", [True, False])
def test_descent_goes_as_far_as_the_gradient(judge_in_loss):
    run = Run(sgd, judge_in_loss=judge_in_loss)
    run.step(apart=2.0)
    norm = run.gradient()
    run.step()
    rows = run.rows()
    assert list(rows) == [1]
    grad_scale = run.memory.rows[0][1]["grad_scale"]
    assert 0.05 < grad_scale < 0.7
    assert rows[1]["optim/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert rows[1]["optim/update_norm"] == pytest.approx(0.1 * norm, rel=1e-5)
    assert rows[1]["optim/amplification"] == pytest.approx(norm / grad_scale, rel=1e-5)


def test_only_once_in_fifty_steps():
    run = Run(sgd)
    for _ in range(102):
        run.step()
    assert list(run.rows()) == [1, 51, 101]


@pytest.mark.parametrize(("make", "undoes"), [(sgd, False), (adam, True)])
def test_adam_undoes_what_grad_scale_has_done(make, undoes):
    """GradScale falls to a thousandth: SGD's amplification stays, Adam's rises a thousandfold."""
    run = Run(make)
    for step in range(102):
        run.step(scale=None, apart=0.0 if step < 60 else 11.0)
    rows, grad_scales = run.rows(), run.memory.column("grad_scale")
    fall = grad_scales[50] / grad_scales[100]
    assert 500 < fall < 10_000
    rise = rows[101]["optim/amplification"] / rows[51]["optim/amplification"]
    assert rise == pytest.approx(fall if undoes else 1.0, rel=1e-3)


@pytest.mark.parametrize("as_tensor", [True, False])
def test_every_group_has_its_own_learning_rate(as_tensor):
    run = Run(sgd, beta_star=0.0, groups=3)
    if as_tensor:
        for group in run.optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"])
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


@pytest.mark.parametrize(
    ("options", "scaled"),
    [
        ({"beta_star": 0.0}, False),
        ({"beta_star": torch.tensor(0.0)}, False),
        ({"variant": "no_pos"}, False),
        ({"variant": "batch"}, True),
        ({"beta_star": torch.tensor(1.0)}, True),
    ],
)
def test_grad_scale_counts_where_it_is_in_force(options, scaled):
    run = Run(sgd, **options)
    run.step(apart=2.0)
    norm = run.gradient()
    run.step()
    factor = run.memory.rows[0][1]["grad_scale"] if scaled else 1.0
    assert run.rows()[1]["optim/amplification"] == pytest.approx(norm / factor, rel=1e-5)


@pytest.mark.parametrize("fused", [True, False])
def test_amp_scale_is_taken_out_of_the_gradient(fused):
    def make(groups):
        return torch.optim.Adam(groups, fused=fused)

    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    plain, scaled = Run(make), Run(make, scaler=scaler)
    for run in (plain, scaled):
        for p, value in zip(run.parameters, (1.0, 2.0), strict=True):
            p.data.fill_(value)
        run.step()
        run.step()
    assert scaled.rows()[1] == pytest.approx(plain.rows()[1], rel=1e-5)


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_that_was_left_out_has_no_amplification(fused):
    run = Run(lambda groups: torch.optim.Adam(groups, fused=fused))
    run.step(scale=torch.nan)
    run.step()
    row = run.rows()[1]
    assert math.isnan(row["optim/grad_norm"])
    assert row["optim/update_norm"] == 0
    assert math.isnan(row["optim/amplification"])


def test_a_step_that_the_scaler_left_out_says_nothing():
    run = Run(sgd, scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    run.step(scale=torch.inf)
    run.step()
    assert run.guard.step == 2
    assert run.rows() == {}


def test_gradients_of_a_closure_that_is_called_first_of_all():
    run = Run(adam)
    run.guard.loss_fn(*energies())

    def closure():
        for p in run.parameters:
            p.grad = torch.full_like(p, 2.0)
        return torch.tensor(0.0)

    before = torch.cat([p.detach().clone() for p in run.parameters])
    run.optimizer.step(closure)
    moved = (torch.cat([p.detach() for p in run.parameters]) - before).norm().item()
    run.step()
    row = run.rows()[1]
    assert row["optim/grad_norm"] == pytest.approx(2 * math.sqrt(6))
    assert row["optim/update_norm"] == pytest.approx(moved, rel=1e-5)


def test_gradients_of_a_closure_that_is_called_often_are_not_known():
    run = Run(lambda groups: torch.optim.LBFGS(groups[0]["params"], lr=0.1, max_iter=2))

    def closure():
        run.optimizer.zero_grad()
        loss = run.guard.loss_fn(*energies()) * 0 + sum(p.square().sum() for p in run.parameters)
        loss.backward()
        return loss.detach()

    before = torch.cat([p.detach().clone() for p in run.parameters])
    run.optimizer.step(closure)
    moved = (torch.cat([p.detach() for p in run.parameters]) - before).norm().item()
    run.optimizer.step(closure)
    row = run.rows()[1]
    assert math.isnan(row["optim/grad_norm"])
    assert row["optim/update_norm"] == pytest.approx(moved, rel=1e-5)
    assert row["optim/amplification"] > 0


def test_of_an_ensemble_nothing_is_told():
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.1)
    g = guard(None, None, beta_star=torch.tensor([0.5, 1.0])).attach(optimizer=optimizer)
    for _ in range(2):
        g.loss_fn(torch.randn(2, 4), torch.randn(2, 5))
        p.grad = torch.ones(2)
        optimizer.step()
    assert not set(TAGS) & set(g.last)


def test_optimizers_without_a_learning_rate_or_parameters_that_are_trained():
    class Own(torch.optim.Optimizer):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p.data -= p.grad

    p, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
    p.grad = torch.tensor([3.0, 4.0])
    for optimizer in (Own([p, frozen], {}), torch.optim.SGD([frozen], lr=0.1)):
        g = guard(None, None, beta_star=1.0).attach(optimizer=optimizer)
        g.loss_fn(*energies())
        optimizer.step()
        g.loss_fn(*energies())
        if isinstance(optimizer, Own):
            expected = pytest.approx([5.0, 5.0, math.nan], nan_ok=True)
            assert [g.last[tag] for tag in TAGS] == expected
        else:
            assert not set(TAGS) & set(g.last)


def test_sparse_gradients():
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    g = guard(None, None, beta_star=0.0).attach(optimizer=optimizer)
    g.loss_fn(*energies())
    table(torch.tensor([1, 1])).sum().backward()  # a gradient of 2 in both entries of a row
    optimizer.step()
    g.loss_fn(*energies())
    assert g.last["optim/grad_norm"] == pytest.approx(math.sqrt(8))
    assert g.last["optim/amplification"] == pytest.approx(math.sqrt(8))


def test_what_waits_for_its_row_is_part_of_the_state():
    first, second = Run(sgd), Run(sgd)
    first.step()
    state = json.loads(json.dumps(first.guard.state_dict()))
    second.guard.load_state_dict(state)
    for run in (first, second):
        run.step()
    assert second.rows() == first.rows() != {}


def test_a_norm_of_several_types_is_that_of_everything_together():
    assert total_norm([torch.empty(3, device="meta")] * 2).shape == ()  # nothing is read
    wide = torch.full((2,), 1e150, dtype=torch.float64)
    half = torch.full((100,), 6e4, dtype=torch.float16)  # the sum of squares is infinite in float16
    assert total_norm([half]).item() == pytest.approx(6e5, rel=1e-3)
    assert total_norm([half]).dtype == torch.float32
    assert total_norm([torch.ones(3).bfloat16(), wide]).item() == pytest.approx(
        math.sqrt(2) * 1e150
    )
    assert total_norm([torch.tensor([3 + 4j])]).item() == pytest.approx(5.0)
