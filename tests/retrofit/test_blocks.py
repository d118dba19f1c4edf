"""Rows of a healthy run are read in blocks; what they say and when an ERROR acts stays the same."""

from __future__ import annotations

import gc
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from ebmguard import guard
from ebmguard.alerts import DEFAULT_RULES
from ebmguard.alerts.rule import CALM
from ebmguard.errors import DivergenceError
from tests.parts import Memory, gradient_at

BLOCK = 16
SETTLED = 60  # steps by which the scale of a run is known


class Reader:
    """A rule that keeps the step at which each row is read; it may wait."""

    name = "reader"

    def __init__(self, *, waits: bool = True) -> None:
        self.steps = list[int]()
        self.now: Any = None
        if waits:
            self.calm = lambda: (-math.inf, math.inf)

    def watcher(self) -> Any:
        return self

    def read(self, row: Any) -> Any:
        if self.now is not None:  # which it is where the guard tries it
            self.steps.append(self.now())
        return CALM

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


class Hill(nn.Module):
    """f = -w |x|², times a factor."""

    factor, forgives = 1.0, False

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        x = x.nan_to_num() if self.forgives else x
        return -self.factor * self.w * x.square().sum(-1)


END, AT = SETTLED + 90, SETTLED + 21
ONCE, LATER, FROM_THEN = range(AT, AT + 1), range(SETTLED, END), range(AT, END)
HEALTHY = {"factor": 1.0, "forgives": False, "shift": 0.0, "size": 0.01, "spoils": False}
# What is otherwise in which steps.
BREAKS: dict[str, dict[str, tuple[Any, range]]] = {
    "healthy": {},
    "blow-up": {"factor": (1e5, FROM_THEN)},
    "NaN": {"shift": (math.nan, ONCE)},
    "collapse": {"factor": (1e-6, LATER)},
    "samples away from data": {"shift": (2.0, LATER)},
    # They jump over the peak, and energies stay.
    "long steps": {"size": (0.95, LATER)},
    "NaN that the network does not see": {"shift": (math.nan, ONCE), "forgives": (True, ONCE)},
    "NaN gradient": {"spoils": (True, ONCE)},
    "blow-up of the samples": {"shift": (60.0, ONCE)},
}


class Run:
    """A guarded training on the hill whose samples are as good as data, until something breaks."""

    shift: float  # of the samples
    size: float  # of the sampler's steps
    spoils: bool  # the gradient, between the loss and the optimizer

    def __init__(self, folder: Path | None, *, name: str = "healthy", losses: int = 1, **more: Any):
        torch.manual_seed(0)
        self.hill, self.breaks, self.losses = Hill(), BREAKS[name], losses
        self.optimizer = torch.optim.SGD(self.hill.parameters(), lr=1e-4)
        self.gradients = list[float]()
        told: Any = {"model": self.hill, "optimizer": self.optimizer, "log_dir": folder}
        self.g = guard(None, self.sample, **told, **({"action": "warn"} | more))

    def sample(self, f: nn.Module, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.size * gradient_at(f, x) + 0.05 * torch.randn_like(x)
        return x + self.shift

    def go(self, steps: int) -> None:
        for _ in range(steps):
            step = self.g.step
            now = {k: value for k, (value, steps) in self.breaks.items() if step in steps}
            for part in (self, self.hill):
                vars(part).update(HEALTHY | now)
            self.optimizer.zero_grad()
            for _ in range(self.losses):
                negatives = self.g.sampler(self.hill, 0.7 * torch.randn(32, 4))
                energies = self.hill(0.7 * torch.randn(32, 4)), self.hill(negatives)
                self.g.loss_fn(*energies).backward()
            self.gradients.append(float(self.hill.w.grad or 0.0))
            if self.spoils and self.hill.w.grad is not None:
                self.hill.w.grad.fill_(math.nan)
            self.optimizer.step()


def rows_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "time"} for line in lines]


# With two losses a step, a WARN may rest on the numbers of the first alone.
@pytest.mark.parametrize(
    ("name", "losses"), [*((x, 1) for x in BREAKS), ("blow-up", 2), ("long steps", 2)]
)
def test_rows_alerts_and_verdict_are_those_of_every_row_at_its_step(name, losses, tmp_path):
    runs = []
    for every in (1, 50):
        folder = tmp_path / str(every)
        run = Run(folder, name=name, losses=losses, flush_every=every)
        run.go(END)
        run.g.close()
        # With two losses, the row of the first one may be an alert already, of its numbers.
        told = [replace(x, value=0.0) if losses > 1 else x for x in run.g.alerts]
        runs.append((rows_of(folder), told, run.g.verdict, repr(run.gradients)))
    assert runs[0] == runs[1]
    assert bool(runs[0][1]) == (name != "healthy")


@pytest.mark.parametrize("name", [x for x in BREAKS if x.startswith(("NaN", "blow", "coll"))])
def test_an_error_ends_the_run_at_its_own_step(name):
    run = Run(None, name=name, action="raise")
    with pytest.raises(DivergenceError) as caught:
        run.go(END)
    assert len(run.gradients) == caught.value.alert.step + 1
    assert name == "collapse" or caught.value.alert.step == AT
    # NaN samples make NaN of any gradient.
    assert name.startswith("NaN") or run.gradients[-1] == 0.0


def read_by(reader: Reader, **options: Any) -> tuple[Run, Reader]:
    run = Run(None, rules=[*DEFAULT_RULES, reader], **options)
    reader.now = lambda: run.g.step
    return run, reader


def test_rows_wait_for_a_block_and_come_when_they_are_asked_for():
    run, reader = read_by(Reader())
    run.go(SETTLED + 4 * BLOCK)
    late = [step - row for row, step in enumerate(reader.steps)]
    assert max(late[:30]) == 0
    assert max(late) == BLOCK  # it is read once the last step of the block is over
    waiting = run.g.step - len(reader.steps)
    assert 0 < waiting < BLOCK
    assert run.g.last["sampler/evaluations"] == 2.0
    assert len(reader.steps) == run.g.step


@pytest.mark.parametrize("asks", ["alerts", "members", "verdict", "flush", "state_dict"])
def test_whatever_tells_of_the_run_reads_all_rows_first(asks):
    run, reader = read_by(Reader())
    run.go(SETTLED + BLOCK + 5)
    assert len(reader.steps) < run.g.step
    told = getattr(run.g, asks)
    if callable(told):
        told()
    assert len(reader.steps) == run.g.step


@pytest.mark.parametrize("why", ["a rule that cannot wait", "a sink", "flush_every=1"])
def test_where_every_row_counts_it_is_read_at_its_step(why):
    sink = Memory()
    options: dict[str, Any] = {"sinks": [sink]} if why == "a sink" else {}
    options |= {"flush_every": 1} if why == "flush_every=1" else {}
    run, reader = read_by(Reader(waits=why != "a rule that cannot wait"), **options)
    for step in range(SETTLED + 2 * BLOCK):
        run.go(1)
        assert max(reader.steps) == step
        assert why != "a sink" or sink.rows[-1][0] == step


def test_a_killed_run_has_lost_less_than_flush_every_rows(tmp_path):
    run = Run(tmp_path, flush_every=50)
    run.go(SETTLED)
    for _ in range(60):
        run.go(1)
        assert run.g.step - len(rows_of(tmp_path)) < 50


def test_a_guard_that_is_collected_while_a_network_is_compiled_writes_its_rows(tmp_path):
    run = Run(tmp_path)
    run.go(SETTLED + BLOCK + 5)
    assert len(rows_of(tmp_path)) < SETTLED + BLOCK + 5
    with FakeTensorMode():
        run.hill, run.optimizer, run.g = None, None, None  # type: ignore[assignment]
        gc.collect()
    assert [row["step"] for row in rows_of(tmp_path)] == [*range(SETTLED + BLOCK + 5)]
