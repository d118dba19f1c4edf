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
from tests.runs import frozen, randomness
from tests.sampling.loops import LOOPS, Loop, network, starts
from tests.sampling.table import OF_CODEBASES, agrees, measure, measure_codebase


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


@pytest.mark.parametrize(
    "name", ["in place, autograd.grad", "optimizer SGD", "MALA, rows rejected"]
)
def test_recording_changes_nothing(name: str) -> None:
    loop = LOOPS[name]
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
