"""Finer steps: the rule that asks for them, and runs that get them once their steps are too long.

Of a bowl of height h a step of size A has the sharpness A h, and the variance of chains is known.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ebmguard import Guard, Level, Recovery, guard
from ebmguard.retrofit.finer_steps import FinerSteps
from ebmguard.sampling import SamplerUpdate
from tests.parts import Bowl, Memory, gradient_at
from tests.ranks import be_rank, rank_fixtures
from tests.runs import frozen, randomness

A, C, STEPS, CHAINS = 0.1, 0.05, 6, 1000
# Sharpness of whole steps: over 1 from row 16 on, the median of five from row 18 on. In four finer
# ones it is over 1 from row 25 on, their median from row 27 on, and in sixteen no more.
HEIGHTS = [2.2 + t / 2 for t in range(25)] + [45.0] * 6
FINENESS = [1] * 19 + [4] * 9 + [16] * 3
started, folder, seen = rank_fixtures("tests.retrofit.test_finer_steps", 2)


# -- the rule ------------------------------------------------------------------------------------

NAN, CALM, SHARP = math.nan, 0.12, 2.0  # CALM is so in steps four times longer, too
# The first row's step; the sharpness of each row, or that and its N; the N that follows a row.
RULE: dict[str, tuple[int, Sequence[Any], dict[int, int]]] = {
    "not in the first ten rows": (0, [SHARP] * 11, {10: 4}),
    "not before five rows": (10, [SHARP] * 4, {}),
    "of five rows": (10, [0.0] * 9 + [1.01] * 3, {11: 4}),
    "not while the median is 1": (10, [0.9, 1.0, 1.0, 1.0, 5.0, 5.0], {}),
    "the first row of finer steps is enough": (10, [SHARP] * 5 + [1.01], {4: 4, 5: 16}),
    "later it is the median": (10, [SHARP] * 5 + [0.2] * 9 + [1.01] * 3, {4: 4, 16: 16}),
    "16 at most": (10, [SHARP] * 20, {4: 4, 5: 16}),
    "falls when it has long been calm": (
        10,
        [SHARP] * 6 + [CALM] * 200,
        {4: 4, 5: 16, 105: 4, 205: 1},
    ),
    "a row that is not begins anew": (
        10,
        [SHARP] * 5 + [CALM] * 99 + [0.13] + [CALM] * 100,
        {4: 4, 204: 1},
    ),
    "waits twice as long after a fall that was wrong": (
        10,
        [SHARP] * 5 + [CALM] * 100 + [SHARP] * 5 + [CALM] * 200,
        {4: 4, 104: 1, 109: 4, 309: 1},
    ),
    "what is unknown is not counted": (10, [SHARP, NAN] * 4 + [math.inf, SHARP], {9: 4}),
    "nor a row that is read late": (10, [SHARP] * 5 + [(SHARP, 1)] * 9 + [SHARP], {4: 4, 14: 16}),
}


@pytest.mark.parametrize(
    ("name", "asked"), [*((x, "auto") for x in RULE), ("16 at most", 4), ("of five rows", 4)]
)
def test_the_rule(name: str, asked: Any) -> None:
    start, rows, expected = RULE[name]
    fineness = FinerSteps(asked, guard()._loop.settings)
    fineness.moves = SamplerUpdate([[A, C]], [[0, -1]])
    found, alerts, before = {}, [], fineness.in_force
    for i, row in enumerate(rows):
        sharpness, n = row if isinstance(row, tuple) else (row, before)
        row = {"sampler/sharpness": sharpness, "sampler/substeps": float(n)}
        alerts += fineness.read(start + i, row)
        if fineness.in_force != before:
            found[i] = before = fineness.in_force
    assert found == (expected if asked == "auto" else {})
    assert [alert.step - start for alert in alerts] == [*found][:1]


def test_a_lost_run_begins_no_finer_steps_and_goes_on_with_those_that_it_has() -> None:
    loop = guard()._loop
    fineness = FinerSteps("auto", loop.settings)
    assert fineness.known(loop.situation, 0).most_substeps == 16  # before any call was looked at
    fineness.moves = SamplerUpdate([[A, C]], [[0, -1]])
    for step, (is_lost, expected) in enumerate([(True, 1)] * 5 + [(False, 4), (True, 16)], 20):
        row = {"sampler/sharpness": SHARP, "sampler/substeps": float(fineness.in_force)}
        fineness.read(step, row, is_lost=is_lost)
        assert fineness.in_force == expected


def test_a_late_row_of_what_was_seen_before_is_not_looked_at_again() -> None:
    fineness = FinerSteps(4, guard()._loop.settings)
    looking, moves = fineness.of_call(5, 0, ()), SamplerUpdate([[A, C]], [[0, -1]])
    assert looking is not None
    assert looking.moves is None
    fineness.moves = moves
    for step, is_kept in ((4, True), (5, True), (6, False)):
        fineness.read(step, {"sampler/substeps_missed": 1.0})
        assert (fineness.moves is moves) == is_kept


# -- runs ----------------------------------------------------------------------------------------


def langevin(f: Any, x: Tensor, size: float = A) -> Tensor:
    for _ in range(STEPS):
        x = x + size * gradient_at(f, x) + C * torch.randn_like(x)
    return x


def check_variance(x: Tensor, height: float, n: int, size: float = A) -> None:
    """Whether it is that of chains which start at 1, after steps that are n times finer."""
    kept = (1 - size * height / n) ** 2
    right = kept ** (n * STEPS) + C**2 / n * (1 - kept ** (n * STEPS)) / (1 - kept)
    assert float(x.var()) == pytest.approx(right, rel=6 * (2 / x.numel()) ** 0.5)


class Run:
    """A guarded run on a bowl of these heights, or one without a guard."""

    def __init__(
        self,
        sampler: Any = langevin,
        *,
        heights: Sequence[float] = HEIGHTS,
        is_guarded: bool = True,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.f, self.heights, self.memory = Bowl(), heights, Memory() if is_guarded else None
        self.optimizer = torch.optim.SGD(self.f.parameters(), lr=0.0)
        self.sampler, self.loss_fn = sampler, lambda pos, neg: neg.mean() - pos.mean()
        self.samples, self.rows = list[Tensor](), list[dict[str, float]]()
        if self.memory is not None:
            told: Any = {"model": self.f, "optimizer": self.optimizer, "sinks": [self.memory]}
            self.g: Guard = guard(None, sampler, rules=[], **told, **options)
            self.loss_fn, self.sampler = self.g

    def go(self, start: int = 0, end: int | None = None) -> Run:
        for height in self.heights[start:end]:
            self.f.height.data.fill_(height)
            x = self.sampler(self.f, torch.randn(CHAINS, 3, dtype=torch.float64))
            self.samples.append(x.detach())
            self.optimizer.zero_grad()
            self.loss_fn(self.f(torch.randn(8, 3, dtype=torch.float64)), self.f(x)).backward()
            self.optimizer.step()
            if self.memory is not None:
                self.rows.append(dict(self.g.last))
        return self

    def equals(self, other: Run, rows: slice = slice(None)) -> bool:
        return bool(frozen(self.samples[rows]) == frozen(other.samples[rows]))

    def column(self, name: str) -> list[float]:
        return [row.get(f"sampler/{name}", 0.0) for row in self.rows]

    def check_samples(self, fineness: Sequence[int]) -> None:
        assert self.column("substeps") == [*fineness]
        for x, height, n in zip(self.samples, self.heights, fineness, strict=True):
            check_variance(x, height, n)


def plain(sampler: Any = langevin, **options: Any) -> Run:
    return Run(sampler, is_guarded=False, **options).go()


def test_steps_become_finer_once_they_are_too_long(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ebmguard")
    unguarded = plain()
    left = randomness()
    run = Run().go()
    assert randomness() == left
    assert run.equals(unguarded, slice(19))
    assert not any(map(torch.equal, run.samples[19:], unguarded.samples[19:]))
    run.check_samples(FINENESS)
    sharpness = [A * h / n for h, n in zip(HEIGHTS, FINENESS, strict=True)]
    assert run.column("sharpness") == pytest.approx(sharpness, abs=0.01)
    assert max(run.column("substeps_missed")) == 0
    (alert,) = run.g.alerts
    assert (alert.rule, alert.level, alert.step) == ("substeps", Level.INFO, 18)
    assert alert.value == pytest.approx(A * HEIGHTS[16], abs=0.01)
    assert run.memory is not None
    assert [x["rule"] for x in run.memory.alerts] == ["substeps"]
    said = [x.partition("; from now on ")[2] for x in caplog.messages if "from now on" in x]
    assert said == ["each is taken as 4 finer ones.", "each is taken as 16 finer ones."]


def test_a_number_holds_from_the_second_call_on_and_1_never_acts() -> None:
    heights = [11.0] * 22
    unguarded, never = plain(heights=heights), Run(substeps=1, heights=heights).go()
    assert never.equals(unguarded)
    always = Run(substeps=4, heights=heights).go()
    assert always.equals(unguarded, slice(1))
    always.check_samples([1] + [4] * 21)
    assert never.g.alerts == always.g.alerts == []
    assert min(never.column("sharpness")) > 1


@pytest.fixture(scope="module")
def whole() -> Run:
    return Run().go()


@pytest.mark.parametrize(("way", "end"), [("folder", 18), ("state", 19), ("state", 29)])
def test_a_run_that_is_resumed_has_the_same_bits(
    whole: Run, way: str, end: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {}
    if way == "folder":
        often = Recovery(folder=tmp_path, every=1, certify_after=1, folder_every=1, keep=9)
        options = {"action": "rollback", "recovery": often}
    first = Run(**options).go(end=end)
    state, generator = json.loads(json.dumps(first.g.state_dict())), torch.get_rng_state()
    first.g.close()
    second, start = Run(**options), end
    if way == "folder":
        resumed = second.g.resume()
        assert resumed is not None
        start = resumed
        assert 0 < end - start < 4
    else:
        second.g.load_state_dict(state)
        torch.set_rng_state(generator)
    second.go(start)
    assert frozen(second.samples) == frozen(whole.samples[start:])
    assert second.column("substeps") == FINENESS[start:]


def momentum(f: Any, x: Tensor) -> Tensor:
    v = torch.zeros_like(x)
    for _ in range(STEPS):
        v = 0.5 * v + A * gradient_at(f, x) + C * torch.randn_like(x)
        x = x + v
    return x


def compiled(f: Any, x: Tensor) -> Tensor:
    return langevin(f, x)


compiled._torchdynamo_orig_callable = langevin  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("sampler", "why", "height"),
    [
        (momentum, "it has momentum", 14.0),
        (momentum, "", 3.0),
        (compiled, "torch.compile", 14.0),
    ],
)
def test_what_cannot_be_divided_says_so_once_when_it_is_needed(
    sampler: Callable[..., Tensor], why: str, height: float, caplog: pytest.LogCaptureFixture
) -> None:
    heights = [height] * 16
    run = Run(sampler, heights=heights).go()
    assert run.equals(plain(sampler, heights=heights))
    assert run.column("substeps") == [1] * 16
    assert (min(run.column("sharpness")) > 1) == (max(run.column("sharpness")) > 1) == bool(why)
    said = [x for x in caplog.messages if "cannot be made finer from outside: " in x]
    assert len(said) == len(run.g.alerts) == bool(why)
    assert all(why in x for x in said)


def test_a_size_that_the_trainer_changes_is_looked_at_anew() -> None:
    sizes = [A] * 16 + [0.6 * A] * 6
    calls = iter(sizes)
    run = Run(lambda f, x: langevin(f, x, next(calls)), heights=[11.0] * 22).go()
    missed = run.column("substeps_missed")
    assert [i for i, x in enumerate(missed) if x] == [16]
    assert missed[16] > 0.9
    # It acts from row 11 on; row 16 is of the old size, and row 17 shows the new one.
    fineness = [1] * 11 + [4] * 6 + [1] + [4] * 4
    assert run.column("substeps") == fineness
    for x, n in zip(run.samples[17:], fineness[17:], strict=True):
        check_variance(x, 11.0, n, 0.6 * A)


# -- two ranks -----------------------------------------------------------------------------------


def test_ranks_stay_in_step(seen: list[Any]) -> None:
    """Their chains differ in sharpness, of which the mean counts."""
    first, second = seen
    assert first["rows"] == second["rows"]
    assert [n for n, _ in first["rows"]] == first["expected"]
    # Of one height, start and noise: only the numbers of the finer steps are each one's own.
    assert not torch.equal(first["last"], second["last"])


def of_rank(ranks: Any, folder: Path) -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    heights = [h * (0.8 + 0.4 * rank) for h in HEIGHTS[:-1]] + HEIGHTS[-1:]
    run = Run(heights=heights, process_group=torch.distributed.group.WORLD).go()
    rows = [*zip(run.column("substeps"), run.column("sharpness"), strict=True)]
    return {"rows": rows, "last": run.samples[-1], "expected": FINENESS}


if __name__ == "__main__":
    be_rank(of_rank)
