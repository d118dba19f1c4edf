"""Every member of an ensemble is watched as if it were alone."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ebmguard import Alert, Guard, Level, errors, guard
from ebmguard.alerts import Verdict
from ebmguard.energies import Variant
from ebmguard.errors import ConfigError
from ebmguard.retrofit.step import stepped
from tests.parts import Bowls, Memory, gradient_at

N, M = 16, 14
STARS = [0.5, 0.0, 2.0]
VARIANTS: list[Variant] = ["default", "no_pos", "batch"]
OUTPUT_SCALE = 4.0
CURVATURES = [1.0, 2.0, 3.0]


def draws(step: int, bad: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Energies of three members, of which the last goes wrong at step 43, and samples."""
    rng = torch.Generator().manual_seed(step)
    pos, neg, x = (
        torch.randn(shape, generator=rng, dtype=torch.float64)
        for shape in ((3, N), (3, M), (3, M, 2))
    )
    if step >= 43:
        pos[2] += bad
    return pos, neg, x


def ensemble(**options: Any) -> Guard:
    star = torch.tensor(STARS, dtype=torch.float64)
    defaults: dict[str, Any] = {
        "beta_star": star,
        "variant": VARIANTS,
        "output_scale": OUTPUT_SCALE,
    }
    return guard(None, **(defaults | options))


def alone(i: int, **options: Any) -> Guard:
    return ensemble(beta_star=STARS[i], variant=VARIANTS[i], **options)


def attach(g: Guard, kind: str = "sgd") -> torch.optim.Optimizer:
    parameter = nn.Parameter(torch.ones(2))
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD([parameter], lr=0.1)
        if kind == "sgd"
        else torch.optim.Adam([parameter], lr=0.1, fused=True)
    )
    g.attach(optimizer=optimizer)
    return optimizer


def same_row(actual: dict[str, float], expected: dict[str, float]) -> None:
    # The level is of the row as a whole, and is known only when it has been judged.
    actual, expected = (
        {tag: value for tag, value in row.items() if tag != "alert_level"}
        for row in (actual, expected)
    )
    assert actual == pytest.approx(expected, rel=1e-9, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize(("judge_in_loss", "output_scale"), [(True, OUTPUT_SCALE), (False, None)])
def test_rows_of_members_are_those_of_guards_of_single_models(judge_in_loss, output_scale):
    memory = Memory()
    options: dict[str, Any] = {
        "sampler": gradient_at,
        "judge_in_loss": judge_in_loss,
        "output_scale": output_scale,
    }
    together = ensemble(**options, sinks=[memory])
    singles = [alone(i, **options) for i in range(3)]
    assert together.members == []
    shapes: list[float] = []
    for step in range(54):
        pos, neg, x = draws(step)
        together.sampler(Bowls(torch.tensor(CURVATURES)), x)
        together.loss_fn(pos, neg)
        for i, single in enumerate(singles):
            single.sampler(Bowls(torch.tensor(CURVATURES[i])), x[i])
            single.loss_fn(pos[i], neg[i])
        assert len(together.members) == (3 if judge_in_loss or step > 2 else 0)
        for row, single in zip(together.members, singles, strict=False):
            same_row(row, single.last)
        shapes += [row["ref/pareto_k"] for row in together.members if "ref/pareto_k" in row]
    assert [math.isfinite(k) for k in shapes] == [False] * 3 + [True] * 3
    # What is kept as the row, and what sinks get, are the means.
    together.close()
    rows = [row for _, row in memory.rows]
    same_row(together.last, rows[-1])
    for tag in together.members[0]:
        mean = sum(row[tag] for row in together.members) / 3
        assert rows[-1][tag] == pytest.approx(mean, rel=1e-9, nan_ok=True)


def test_one_members_nan_is_its_own_but_stays_in_the_mean():
    g = ensemble(sampler=None)
    pos, neg, _ = draws(0)
    pos[1, 3] = torch.nan
    g.loss_fn(pos, neg)
    assert [row["nonfinite/pos"] for row in g.members] == [0, 1, 0]
    assert [math.isnan(row["f_pos/mean"]) for row in g.members] == [False, True, False]
    assert math.isnan(g.last["f_pos/mean"])
    assert [(alert.rule, alert.member) for alert in g.alerts] == [("nonfinite", 1)]


def test_samples_of_each_member_and_samples_that_all_share():
    x = draws(0)[2]
    x[1, :7] = torch.inf
    returned = iter([x, x[1]])
    g = ensemble(sampler=lambda: next(returned), output_scale=None)
    g.sampler()
    pos, neg, _ = draws(0)
    g.loss_fn(pos, neg)
    assert [row["nonfinite/samples"] for row in g.members] == [0.0, 0.5, 0.0]
    g.sampler()
    g.loss_fn(pos, neg)
    assert [row["nonfinite/samples"] for row in g.members] == [0.5, 0.5, 0.5]


def test_samplers_of_one_step_are_pooled_for_each_member():
    x = draws(0)[2]
    x[1, :7] = torch.inf
    returned = iter([x, torch.zeros(4, 2)])
    g = ensemble(sampler=lambda: next(returned), output_scale=None)
    g.sampler()
    g.sampler()
    g.loss_fn(*draws(0)[:2])
    assert [row["nonfinite/samples"] for row in g.members] == [0.0, 0.25, 0.0]


def test_members_are_counted_along_the_flattened_model_dimensions():
    g = guard(None, None, beta_star=torch.arange(6.0).reshape(2, 3))
    pos, neg = torch.randn(2, 3, 5), torch.randn(2, 3, 4)
    neg[1, 1, 0] = torch.nan
    g.loss_fn(pos, neg)
    assert [row["beta_star"] for row in g.members] == [0, 1, 2, 3, 4, 5]
    assert [alert.member for alert in g.alerts] == [4]


@pytest.mark.parametrize(
    ("bad", "judge_in_loss", "optimizer"),
    [
        (100.0, True, None),
        (100.0, False, "sgd"),
        (100.0, False, "fused adam"),
        (torch.nan, True, "sgd"),
        (torch.nan, False, None),
        (torch.nan, True, "fused adam"),
    ],
)
def test_alerts_are_those_of_the_failing_member_alone(judge_in_loss, optimizer, bad):
    memory, told = Memory(), list[Alert]()
    together = ensemble(
        sampler=None, judge_in_loss=judge_in_loss, sinks=[memory], on_alert=told.append
    )
    singles = [alone(i, sampler=None, judge_in_loss=judge_in_loss) for i in range(3)]
    optimizers = [attach(g, optimizer) for g in (together, *singles) if optimizer]
    for step in range(60):
        pos, neg, _ = draws(step, bad)
        together.loss_fn(pos, neg)
        for i, single in enumerate(singles):
            single.loss_fn(pos[i], neg[i])
        for each in optimizers:
            each.step()
    for g in (together, *singles):
        g.close()
    assert [single.alerts for single in singles[:2]] == [[], []]
    expected = [replace(alert, member=2) for alert in singles[2].alerts]
    assert [alert.rule for alert in expected][:1] == [
        "energy_blowup" if bad == 100 else "nonfinite"
    ]
    # An ensemble cannot roll back, and is not told to.
    advised = [repr(alert).replace('; action="rollback" next time', "") for alert in expected]
    assert [repr(alert) for alert in together.alerts] == advised
    assert told == together.alerts
    assert [record["member"] for record in memory.alerts] == [2] * len(expected)
    # A member that is lost stays so, whatever the others do.
    first = next(alert.step for alert in expected if alert.level is Level.ERROR)
    lost = [step for step, row in memory.rows if row["alert_level"] == Level.ERROR]
    assert lost == list(range(first, 60))
    assert together.verdict == Verdict("lost", first, expected[0].rule)


@pytest.mark.parametrize("judge_in_loss", [True, False])
def test_any_members_error_raises_and_withholds_the_loss(judge_in_loss):
    g = ensemble(sampler=None, judge_in_loss=judge_in_loss, action="raise")
    optimizer = attach(g)

    def go(first: int, last: int) -> None:
        for step in range(first, last):
            pos, neg, _ = draws(step, torch.nan)
            loss = g.loss_fn(pos.requires_grad_(), neg.requires_grad_())
            (slope,) = torch.autograd.grad(loss, pos)
            assert bool(slope.any()) is not (judge_in_loss and step == 43)
            assert loss != 0
            optimizer.step()

    decided = 43 if judge_in_loss else 45
    go(40, decided)
    with pytest.raises(errors.NonFiniteError, match=r"at step 3, member 2: nonfinite/energies"):
        go(decided, decided + 1)


@pytest.mark.parametrize("kind", ["sgd", "fused adam"])
@pytest.mark.parametrize("judge_in_loss", [True, False])
def test_skipped_steps_are_of_the_whole_ensemble(judge_in_loss, kind):
    memory = Memory()
    together, single = (
        ensemble(sampler=None, judge_in_loss=judge_in_loss, sinks=[memory]),
        alone(0, sampler=None),
    )
    optimizers = [attach(together, kind), attach(single, kind)]
    for step in range(60):
        pos, neg, _ = draws(step)
        together.loss_fn(pos, neg)
        single.loss_fn(pos[0], neg[0])
        for optimizer in optimizers:
            (parameter,) = optimizer.param_groups[0]["params"]
            # The second one opens an episode of its own, after so long a calm.
            parameter.grad = torch.full((2,), torch.nan if step in (3, 4, 55) else 0.1)
            optimizer.step()
    together.close()
    assert [(alert.step, alert.tag) for alert in together.alerts] == [
        (alert.step, alert.tag) for alert in single.alerts
    ]
    assert [alert.step for alert in together.alerts] == [3, 55]
    assert {alert.member for alert in together.alerts} == {None}
    assert [step for step, row in memory.rows if row["nonfinite/gradients"]] == [3, 4, 55]
    assert "nonfinite/gradients" not in together.members[0]
    assert memory.steps == list(range(60))


def test_skips_by_the_scaler_are_no_members():
    g = ensemble(sampler=None, judge_in_loss=True)
    pos, neg, _ = draws(0)
    g.loss_fn(pos, neg)
    stepped(g._loop, 1.0, True)
    assert [(alert.rule, alert.level, alert.member) for alert in g.alerts] == [
        ("amp_skip", Level.INFO, None)
    ]


@pytest.mark.parametrize("judge_in_loss", [True, False])
def test_losses_of_one_step_are_pooled_for_each_member(judge_in_loss):
    g = ensemble(sampler=None, judge_in_loss=judge_in_loss)
    optimizer = attach(g, "fused adam")
    first, second = draws(0)[:2], draws(1)[:2]
    g.loss_fn(*first)
    g.loss_fn(*second)
    (row,) = g._loop.rows.state_dict(is_over=True)["rows"]
    optimizer.step()
    g.close()
    for i, member in enumerate(row[3]):
        expected = (first[0][i].mean() + second[0][i].mean()) / 2
        assert member["f_pos/mean"] == pytest.approx(expected.item())
    assert row[1]["f_pos/mean"] == pytest.approx((first[0].mean() + second[0].mean()).item() / 2)


class Run:
    """An ensemble on given energies, of which one member's blow up late."""

    def __init__(self, *, judge_in_loss: bool, optimizer: bool) -> None:
        self.memory = Memory()
        self.guard = ensemble(sampler=None, judge_in_loss=judge_in_loss, sinks=[self.memory])
        self.optimizer = attach(self.guard) if optimizer else None

    def go(self, first: int, last: int) -> None:
        for step in range(first, last):
            pos, neg, _ = draws(step, 100.0)
            self.guard.loss_fn(pos, neg)
            if self.optimizer is not None:
                self.optimizer.step()

    def rows(self) -> list[tuple[int, str]]:
        return [(step, repr(sorted(row.items()))) for step, row in self.memory.rows]


@pytest.mark.parametrize(
    ("saved_after", "judge_in_loss", "optimizer"),
    [(30, True, True), (45, True, False), (45, False, True), (30, False, False)],
)
def test_continued_run_is_the_uninterrupted_one(judge_in_loss, optimizer, saved_after):
    whole, first, second = (Run(judge_in_loss=judge_in_loss, optimizer=optimizer) for _ in range(3))
    whole.go(0, 60)
    first.go(0, saved_after)
    state = json.loads(json.dumps(first.guard.state_dict()))
    rows, alerts = first.rows(), list(first.memory.alerts)
    second.guard.load_state_dict(state)
    assert repr(second.guard.state_dict()) == repr(first.guard.state_dict())
    second.go(saved_after, 60)
    for run in (whole, second):
        run.guard.close()
    assert rows + second.rows() == whole.rows()
    assert alerts + second.memory.alerts == whole.memory.alerts
    assert {record["member"] for record in whole.memory.alerts} == {2}
    assert repr(second.guard.members) == repr(whole.guard.members)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda judge: judge | {"members": []}, "of 0 ensemble members, but this one has 3"),
        (lambda judge: judge | {"members": judge["members"][:2]}, "of 2 ensemble members, but"),
        (lambda judge: judge | {"members": [{}, {}, {}]}, "damaged"),
        (lambda judge: judge | {"rules": {}}, "is of a judge with the rules"),
    ],
)
def test_foreign_states_are_refused_and_change_nothing(change, message):
    run, other = (Run(judge_in_loss=True, optimizer=True) for _ in range(2))
    run.go(0, 5)
    other.go(0, 50)
    before = repr(run.guard.state_dict())
    state = other.guard.state_dict()
    with pytest.raises(ConfigError, match=message):
        run.guard.load_state_dict(state | {"judge": change(state["judge"])})
    assert repr(run.guard.state_dict()) == before


def test_state_of_an_ensemble_is_not_that_of_a_single_model():
    run, single = Run(judge_in_loss=True, optimizer=False), alone(0, sampler=None)
    with pytest.raises(ConfigError, match=r"3 ensemble members, but this one has 0 \(0 for a sin"):
        single.load_state_dict(run.guard.state_dict())
