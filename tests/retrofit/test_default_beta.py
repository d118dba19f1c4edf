"""No β* given: what it is, what is said of it, and that a run which is continued has the same."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ebmguard import Guard, guard
from tests.parts import Energy, Memory, gradient_at

STEPS = 7


def sampler(o: float, size: float = 0.02, few: Sequence[int] = ()) -> Any:
    """Langevin chains for exp(o f), without noise where o is infinite; ``few``: in 1 step then."""
    calls = iter(range(STEPS))

    def sample(f: Any, x: Tensor) -> Tensor:
        for _ in range(1 if next(calls) in few else 5):
            x = x + size * gradient_at(f, x) + (2 * size / o) ** 0.5 * torch.randn_like(x)
        return x

    return sample


def unseen(f: Any, x: Tensor) -> Tensor:
    rng = np.random.default_rng(int(torch.randint(9, ())))
    for _ in range(5):
        noise = torch.from_numpy(rng.normal(size=x.shape)).float()
        x = x + 0.02 * gradient_at(f, x) + 0.2 * noise
    return x


KNOWN = "none was given, and output_scale="
CASES: dict[str, tuple[Any, list[float], str]] = {  # how the sampler is made, β* by step, the log
    "true scale": (lambda: sampler(1), [0.5], KNOWN),
    "JEM": (lambda: sampler(20_000, 1.0), [2], KNOWN),
    "small scale": (lambda: sampler(0.1), [0.05], KNOWN),
    "no noise": (lambda: sampler(math.inf), [2], "none was given, and there is no noise"),
    "late": (lambda: sampler(3, few=[0, 1]), [0.5, 1.5], KNOWN),
    "unseen noise": (lambda: unseen, [0.5], "none was given, and the output scale is unknown"),
    "no gradient": (lambda: lambda f, x: x * f(x).mean(), [0.5], "output scale is unknown"),
}


def begin(make: Any) -> tuple[Guard, Energy, torch.optim.Optimizer, Memory]:
    torch.manual_seed(0)
    f, memory = Energy(), Memory()
    optimizer = torch.optim.SGD(f.parameters(), lr=0.1)
    return guard(None, make(), model=f, optimizer=optimizer, sinks=[memory]), f, optimizer, memory


def go_on(g: Guard, f: Energy, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Batches of eight, all of one class."""
    labels = torch.zeros(8, dtype=torch.long)
    for step in steps:
        torch.manual_seed(step)
        x = g.sampler(f, torch.randn(8, 2))
        optimizer.zero_grad()
        g.loss_fn(f(torch.randn(8, 2) + 1), f(x), groups=(labels, labels)).backward()
        optimizer.step()


@pytest.mark.parametrize(("make", "expected", "said"), CASES.values(), ids=CASES)
def test_beta_star_is_chosen_by_the_output_scale(
    make: Any, expected: list[float], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = expected + expected[-1:] * (STEPS - len(expected))
    with caplog.at_level(logging.INFO, "ebmguard"):
        g, f, optimizer, memory = begin(make)
        go_on(g, f, optimizer, range(STEPS))
    assert "beta_star=at most 2 (none was given)" in caplog.text
    assert f"beta_star={expected[-1]:g}: " in caplog.text
    assert said in caplog.text
    (found,) = (each for each in g.check() if each.name == "beta_star")
    assert said in found.what
    assert [row["beta_star"] for _, row in memory.rows] == pytest.approx(expected, rel=1e-4)

    if make is not CASES["late"][0]:  # whose calls begin anew
        for cut in (1, 4):
            first, second = begin(make), begin(make)
            go_on(*first[:3], range(cut))
            second[1].load_state_dict(first[1].state_dict())
            second[0].load_state_dict(json.loads(json.dumps(first[0].state_dict())))
            go_on(*second[:3], range(cut, STEPS))
            assert all(map(torch.equal, f.parameters(), second[1].parameters()))


def test_a_sampler_that_was_named_alone_is_tempered_from_its_second_call_on() -> None:
    g, f, optimizer, _ = begin(lambda: sampler(1))
    go_on(g, f, optimizer, range(1))
    x = torch.randn(8, 2)
    torch.manual_seed(0)
    found = g.sampler(f, x)
    torch.manual_seed(0)
    right = sampler(1)(lambda x: 0.5 * f(x), x)
    torch.testing.assert_close(found, right)
