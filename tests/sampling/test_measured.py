"""What is measured is true, or refused for the right reason; and nothing of the sampler changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ebmguard.sampling import Measured, Recording
from ebmguard.sampling.recording import Draw
from ebmguard.sampling.regression import solve
from tests.adapters.cases import CODEBASES
from tests.parts import Bowl, gradient_at
from tests.runs import Run, Trial, frozen, randomness
from tests.sampling.loops import (
    LOOPS,
    STEP,
    Loop,
    agrees,
    measure,
    network,
    noise,
    plain,
    short,
    starts,
    stepping,
)

# Codebase, its options, and what is true of its sampler; IGEBM's, which is written inline, is
# recorded instead of guarded.
OF_CODEBASES: list[tuple[str, Mapping[str, Any], Loop]] = [
    ("jem", {}, Loop.of(1, 0.01)),
    ("jem", {"class_cond_p_x_sample": True}, Loop.of(1, 0.01)),
    ("jem", {"sgld_std": 0.0}, Loop.refused("gradient steps without noise")),
    ("jempp", {"plc": "alltrain1"}, Loop.refused("gradient steps without noise")),
    ("jempp", {"sgld_lr": 0.5, "sgld_std": 1e-2}, Loop.of(1.3, 0.01)),
    ("sadajem", {"sgld_std": 1e-2}, Loop.of(1, 0.01)),
    ("hdge", {}, Loop.of(1, 0.01)),
    ("vera", {}, Loop.of(5e-5, 0.01)),
    ("ebm_anatomy", {}, Loop.of(-1, 0.01)),
    ("improved_cd", {}, Loop.of(-0.5, 1e-3)),
    ("igebm", {"clip": 1e3}, Loop.of(-10, 5e-3)),
]


def measure_codebase(name: str, options: Mapping[str, Any]) -> tuple[Measured, Run]:
    """A codebase's own loop, guarded at β* = 0."""
    if name == "igebm":
        with Recording() as seen:
            run = CODEBASES[name].train(Trial(n=1), **options)
        return Measured.of(seen.evaluations[:3], seen.draws.log), run
    run = CODEBASES[name].train(Trial(beta_star=0.0, n=1), **options)
    found = run.guards[0].measured
    assert found is not None
    return found, run


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_is_what_it_is(name: str) -> None:
    found = measure(LOOPS[name])
    assert agrees(LOOPS[name], found), found


@pytest.mark.parametrize(("name", "options", "loop"), OF_CODEBASES)
def test_a_codebase_is_what_it_is(
    name: str, options: Mapping[str, Any], loop: Loop, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)  # trainers log there
    found, run = measure_codebase(name, options)
    assert agrees(loop, found), found
    assert not any(alert.rule == "output_scale" for g in run.guards for alert in g.alerts)


def test_recording_changes_nothing() -> None:
    loop = LOOPS["optimizer SGD"]
    assert loop.sample is not None
    ends = []
    for records in (False, True):
        torch.manual_seed(0)
        f, x = network(loop), starts(loop)
        called = nn.Module.__call__
        if records:
            with Recording():
                end = loop.sample(f, x)
        else:
            end = loop.sample(f, x)
        assert nn.Module.__call__ is called
        ends.append((frozen(end), randomness()))
    assert ends[0] == ends[1]


def test_a_short_recording_has_both_ends_of_a_long_chain() -> None:
    loop, noises = LOOPS["in place, autograd.grad"], []

    def sample(f: Any, x: torch.Tensor) -> torch.Tensor:
        for t in range(30):
            x = x.detach().requires_grad_()
            (g,) = torch.autograd.grad(f(x).sum(), x)
            noises.append(0.05 if t < 20 else 0.01)
            x = x.detach() + 0.5 * g + noises[-1] * torch.randn_like(x)
        return x

    torch.manual_seed(0)
    f, x = network(loop), starts(loop)
    with Recording(ends=4) as seen:
        sample(f, x)
    assert len(seen.evaluations) == 8
    assert sum(draw is not None for draw in seen.draws.log) <= 9
    assert "sizes change along the chain" in Measured.of(seen.evaluations, seen.draws.log).verdict
    assert measure(replace(loop, sample=sample)).verdict.startswith("sizes change")


FEW = [
    *("in place, autograd.grad", "backward(), low energy", "backward() of -f", "clamped"),
    *("most entries at the clamp", "clipped by value", "mean over the batch", "heads summed"),
    *("all noise at once", "MALA, rows rejected", "optimizer SGD", "in the logit of x"),
    *("no noise", "noise of size 0", "a square of the output", "two step sizes"),
]
# What one step tells of these, or two: the rest of it comes before what is seen, or never.
ONE_STEP = {
    "noise first, in one buffer, clipped and clamped": Loop.refused("may have come before it"),
    "momentum": Loop(),
}


@pytest.mark.parametrize(("steps", "dtype"), [(1, torch.float64), (2, torch.float32)], ids=str)
@pytest.mark.parametrize("name", [*FEW, *ONE_STEP])
def test_a_step_or_two_a_call_are_what_they_are(name: str, steps: int, dtype: Any) -> None:
    loop = replace(LOOPS[name], dtype=dtype)
    if steps == 1 and name in ONE_STEP:
        loop = replace(ONE_STEP[name], sample=loop.sample, dtype=dtype)
    found = measure(short(steps, loop))
    tolerance = 1e-8 if dtype == torch.float64 else 1e-4
    assert agrees(replace(loop, tolerance=tolerance), found), found


def test_one_step_a_call_is_no_constant_size_until_a_second_call_has_it() -> None:
    clipped, plain = LOOPS["clipped by the batch's norm"], LOOPS["backward(), low energy"]
    for loop in (clipped, plain):
        found = measure(short(1, loop))
        assert found.is_exact == (loop is plain)
        assert ("no other call has the same scale" in found.verdict) == (loop is clipped)
    two = measure(short(2, replace(clipped, dtype=torch.float64)))
    assert "norm of the batch" in two.verdict


RETURNED: dict[str, Any] = {
    "the last input and the samples": lambda x, end: (x, end),
    "half of them": lambda x, end: end[::2],
    "in another order": lambda x, end: end.flip(0),
    "clamped": lambda x, end: end.clamp(0.2, 0.8),
    "nothing": lambda x, end: None,
}


@pytest.mark.parametrize("name", RETURNED)
def test_two_steps_are_measured_whatever_is_returned(name: str) -> None:
    """Where that is not the end of the second step, by the first step of two calls."""

    def sample(f: Any, x: torch.Tensor) -> Any:
        x = plain(x, gradient_at(f, x))
        return RETURNED[name](x, plain(x, gradient_at(f, x)))

    loop = Loop(sample)
    assert agrees(loop, found := measure(loop)), found


def test_two_steps_without_the_last_noise_are_those_of_the_first() -> None:
    def sample(f: Any, x: torch.Tensor) -> torch.Tensor:
        x = plain(x, gradient_at(f, x))
        return x + STEP * gradient_at(f, x)

    assert agrees(Loop(), found := measure(Loop(sample))), found


@pytest.mark.parametrize(
    ("energy", "multiple"),
    [
        (lambda f, x: f(x).mean(), 1.0),  # each sample's share of it is a sampler's own business
        (lambda f, x: -2.0 * f(x), -2.0),
    ],
)
def test_the_multiple_of_the_energy_that_is_differentiated(energy: Any, multiple: float) -> None:
    found = measure(Loop(stepping(plain, energy)))
    assert found.is_exact, found
    assert found.multiple == pytest.approx(multiple, rel=1e-6)


@pytest.mark.parametrize(("others", "is_exact"), [(1, True), (2, False)])
def test_most_steps_must_be_of_the_kind(others: int, is_exact: bool) -> None:
    """Of the few that are recorded, one may be something else."""

    def sample(f: Any, x: torch.Tensor) -> torch.Tensor:
        for step in range(10):
            x = plain(x, gradient_at(f, x))
            x = x + 0.3 * torch.sin(7 * x) if step < others else x
        return x

    assert measure(Loop(sample)).is_exact is is_exact


def test_chains_that_begin_where_their_first_noise_is_are_no_fault() -> None:
    """As where a seed is set twice. In a bowl a step is then along x, noise and all."""
    points = []
    for _ in range(2):
        torch.manual_seed(0)
        points.append(torch.randn(1000, 3, dtype=torch.float64))
    torch.manual_seed(0)
    bowl = Bowl()
    with Recording() as seen:
        for _ in range(2):
            x = points[-1]
            points.append(x + STEP * gradient_at(bowl, x) + noise(x))
    found = Measured.of(seen.evaluations, seen.draws.log, points[-1])
    assert found.verdict.startswith("sizes change along the chain (from no noise to ")


def test_an_entry_that_alone_has_a_gradient_tells_no_direction_within_its_rounding() -> None:
    """The rounding of the others, which are smaller, is no measure of its own."""
    told = []
    for seed in range(100):
        torch.manual_seed(seed)
        x, g, n = 0.1 * torch.randn(16, 2), 1e-10 * torch.randn(16, 2), torch.randn(16, 2)
        x[0, 0], g[0, 0] = 3 + x[0, 0], 1e-7
        found = solve(x, g, x + 0.1 * g + 0.2 * n, [Draw(n, 1.0)])
        told += [found.step] if abs(found.step) > 4 * found.step_error else []
    assert not told
