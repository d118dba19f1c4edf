"""`g.check()`: what a guard tells the checks of itself and of what was attached; and its print."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from ebmguard import Level, Recovery, guard
from ebmguard.check import Problem, show
from ebmguard.check.problem import to_text
from ebmguard.recovery import Change
from ebmguard.samplers import ReplayBuffer
from tests.parts import Energy, Memory, langevin, unit_langevin

X = torch.linspace(-1, 1, 16).reshape(8, 2)


def make(f: nn.Module | None = None, **options: Any) -> tuple[Any, nn.Module]:
    f = Energy() if f is None else f
    given: dict[str, Any] = {"beta_star": 0.5, "output_scale": 20_000.0, "sinks": [Memory()]}
    g = guard(None, lambda f: langevin(f, torch.zeros(4, 2)), **(given | options))
    g.attach(
        model=f,
        optimizer=torch.optim.Adam(f.parameters()),
        buffer=ReplayBuffer(10, (2,), reinit_rate=0.05, generator=torch.Generator()),
        step_size=1.0,
        noise_std=0.01,
    )
    return g, f


def names(g: Any, **options: Any) -> set[str]:
    return {problem.name for problem in g.check(**options)}


def test_all_at_once_and_nothing_raised():
    class Poor(Energy):
        def forward(self, x):
            return self.net(x).mean()

    f = Poor()
    f.net.insert(1, nn.BatchNorm1d(8))
    g, _ = make(f, output_scale=100.0, sinks=[])
    problems = g.check(X)
    assert [problem.severity for problem in problems] == [
        Level.ERROR,
        Level.ERROR,
        Level.WARN,
        Level.INFO,
    ]
    assert {problem.name for problem in problems} == {
        "mean",
        "output_scale",
        "batch_norm",
        "no_sinks",
    }


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"beta_star": 20_000.0}, "sampler_factor"),
        ({"beta_star": torch.tensor([0.5, 20_000.0])}, "sampler_factor"),
        ({"beta_star": lambda step: 19_900.0}, "sampler_factor"),
        ({"output_scale": None}, None),  # it is to be measured
        ({"judge_in_loss": True}, None),
    ],
)
def test_strength(options, name):
    g, _ = make(**options)
    assert names(g) == ({name} if name else set())


STEPS = {"sgld_steps": 20}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (STEPS, []),
        ({}, ["SGLD steps x 2 (their number is unknown)"]),
        (STEPS | {"output_scale": 1.0}, ["beta_star -> 2 (to 0.5 at most)"]),
        (STEPS | {"output_scale": 1.0, "sampler_scale": 1.0}, ["beta_star -> 2 (to 0.5 at most)"]),
        (STEPS | {"beta_star": -0.5}, ["beta_star -> 2 (never over to the other side of 0)"]),
        ({"recovery": Recovery(ladder=(Change(lr=0.5),))}, []),
        (
            {"recovery": Recovery(ladder=(Change(beta_star=2e4), Change(sgld_steps=3.0)))},
            ["beta_star -> 20000 (to 10000 at most)", "SGLD steps x 3"],
        ),
    ],
)
def test_changes_of_a_rollback_that_cannot_be_followed(options, said):
    g, _ = make(action="rollback", **options)
    found = [problem for problem in g.check() if problem.name == "recovery_changes"]
    assert len(found) == bool(said)
    assert all(part in found[0].what for part in said)
    assert all(problem.severity is Level.INFO for problem in found)


def test_the_energy_convention_turns_the_sign():
    class Steep(Energy):
        """One sample of the batch is far from all the others, on the low side."""

        def forward(self, x):
            return self.net(x).squeeze(-1) * 0 - 1000 * (x[:, 0] > 0.9).float() * x[:, 0]

    x = torch.linspace(-1, 1, 40).reshape(20, 2)
    low, _ = make(Steep(), convention="energy")
    high, _ = make(Steep(), convention="log_density")
    assert "weights_collapse" in names(low, example=x)
    assert "weights_collapse" not in names(high, example=x)


def test_a_check_is_no_step():
    g, f = make()
    g.check(X)
    assert g.step == 0
    assert g.last == {}
    g.loss_fn(f(X), f(g.sampler(f))).backward()
    g.trainer.optimizer.step()
    assert g.step == 1
    assert g.check(X) == []


@pytest.mark.parametrize(
    ("caches", "is_new", "is_stuck"),
    [(True, False, True), (False, False, False), (True, True, False)],
    ids=["one leaf", "no cache", "a leaf for each step"],
)
def test_a_leaf_whose_cast_autocast_keeps(caplog, caches, is_new, is_stuck):
    f = Energy()
    optimizer = torch.optim.Adam(f.parameters())

    def in_bfloat16(x):
        x = x.detach().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=caches):
            for _ in range(4):
                (slope,) = torch.autograd.grad(f(x).sum(), x)
                if is_new:
                    x = (x + slope + 0.1 * torch.randn_like(x)).detach().requires_grad_()
                else:
                    x.data += slope + 0.1 * torch.randn_like(x)
        return x.detach()

    loss_fn, sample = g = guard(None, in_bfloat16, model=f, optimizer=optimizer)
    for _ in range(4):
        loss_fn(f(X), f(sample(torch.randn_like(X)))).backward()
        optimizer.step()
    assert ("stuck" in names(g)) == is_stuck
    assert caplog.text.count("cache_enabled=False") == is_stuck


def test_a_linear_energy_is_not_taken_for_a_stuck_chain():
    f = torch.nn.Linear(X.shape[1], 1)
    optimizer = torch.optim.Adam(f.parameters())

    sampler = partial(unit_langevin, f, steps=4)
    loss_fn, sample = g = guard(None, sampler, model=f, optimizer=optimizer)
    for _ in range(4):
        loss_fn(f(X), f(sample(torch.randn_like(X)))).backward()
        optimizer.step()
    assert g.last["sampler/sharpness"] == 0
    assert "stuck" not in names(g)


# -- problems for people ---------------------------------------------------------------------------

PROBLEMS = [
    Problem(Level.INFO, "small", "train.py:3", "A thing to know.", "nothing."),
    Problem(Level.ERROR, "large", "train.py:9", "word " * 40 + "end.", "replace `f(x).mean()`."),
]


@pytest.mark.parametrize("with_rich", [True, False])
def test_prints_plain_text_where_there_is_no_terminal(with_rich, capsys, monkeypatch):
    if not with_rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    show(PROBLEMS)
    assert capsys.readouterr().out == to_text(PROBLEMS) + "\n"


def test_prints_in_colour_on_a_terminal(capsys, monkeypatch):
    pytest.importorskip("rich")
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    show(PROBLEMS)
    out = capsys.readouterr().out
    assert "\x1b[1;31m" in out
    assert "train.py:9" in out
    show([])
    assert "no problems found" in capsys.readouterr().out
