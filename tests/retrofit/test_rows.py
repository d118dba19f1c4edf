"""Rows on their way from samples and energies on the device to whoever judges and writes them.

And a run that is saved, loaded and continued: the uninterrupted one, with the same rows and alerts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ebmguard import guard
from ebmguard.errors import ConfigError
from ebmguard.retrofit.parts import Part, joined_ranks
from ebmguard.retrofit.rows import Rows, StepRow
from tests.parts import Bowl, Memory, energies, gradient_at


def number(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype)


def make(lag: int = 0, models: tuple[int, ...] = ()) -> Rows:
    rows = Rows(torch.Size(models), in_loss=not lag)
    rows.begin_loss(is_on_host=True)
    rows.lag = lag
    return rows


def add(
    rows: Rows, numbers: dict[str, torch.Tensor], samples: dict[str, torch.Tensor] | None = None
) -> list[StepRow]:
    rows.add([Part.of(numbers, rows._models)], samples)
    return list(rows.so_far())


def over(rows: Rows) -> list[StepRow]:
    """The rows due at the end of the present step."""
    return list(rows.end_step())


def all_of(rows: Rows) -> list[StepRow]:
    return over(rows) + list(rows.drain())


def test_without_lag_the_row_so_far_comes_with_every_measurement():
    rows = make()
    (first,) = add(rows, {"a": number(1.5), "b": number(math.nan)})
    assert repr(first.numbers) == repr({"a": 1.5, "b": math.nan})
    assert (first.step, first.is_over, first.is_news) == (0, False, True)
    for noted in ({"n": 7.0}, {"n": 9.0}, {"n": 8.0}):  # of which the largest counts
        rows.note(noted)
    (second,) = add(rows, {"a": number(2.5)})
    assert repr(second.numbers) == repr({"a": 2.0, "b": math.nan, "n": 9.0})
    (whole,) = over(rows)
    assert repr(whole.numbers) == repr(second.numbers)
    assert (whole.step, whole.is_over, whole.is_news) == (0, True, False)


@pytest.mark.parametrize("lag", [0, 2])
def test_numbers_of_one_step_are_averaged_by_name_also_those_of_members(lag):
    rows = make(lag)
    add(rows, {"a": number(1), "b": number(10)})
    add(rows, {"a": number(2)})
    add(rows, {"c": number(math.nan), "a": number(6)})
    assert all_of(rows)[0].numbers == pytest.approx({"a": 3, "b": 10, "c": math.nan}, nan_ok=True)
    rows = make(lag, (2,))
    add(rows, {"a": torch.tensor([1.0, 5.0])})
    add(rows, {"b": number(7, torch.float64), "a": torch.tensor([2.0, 8.0])})
    rows.note_news("shared", number(2))
    rows.note({"noted": 4.0})
    (row,) = all_of(rows)
    assert row.members == [{"a": 1.5, "b": 7.0}, {"a": 6.5, "b": 7.0}]
    assert row.numbers == {"a": 4.0, "b": 7.0, "shared": 2.0, "noted": 4.0}


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize(("value", "models"), [(0.0, ()), (1.0, ()), (0.0, (2,))])
def test_what_is_to_be_judged_at_the_end_of_a_step(lag, value, models):
    """On a CPU the row has been judged in the loss: only what is not 0 makes it worth another."""
    rows = make(lag, models)
    add(rows, {"a": number(1)})
    rows.note_news("n", number(value))
    (row,) = all_of(rows)
    assert row.numbers == {"a": 1.0, "n": value}
    assert row.is_news is (bool(lag) or bool(value) or bool(models))
    assert all("n" not in member for member in row.members)  # it is of the ensemble as a whole


def test_values_of_every_dtype():
    values = {"zero": number(-0.0), "third": number(1 / 3, torch.float64)}
    short = torch.float16, torch.bfloat16, torch.int64, torch.bool
    values |= {str(dtype): torch.ones((), dtype=dtype) for dtype in short}
    (row,) = add(make(), values)
    assert repr([*row.numbers.values()]) == repr([0.0, 1 / 3, *[1.0] * 4])  # 0 has no sign


def test_rows_do_not_hold_graphs_and_keep_the_values_of_their_step():
    rows = make(lag=2)
    plain = torch.ones(())
    add(rows, {"a": plain, "b": 2 * torch.ones((), requires_grad=True)})
    ((part,),) = rows._open.calls
    assert isinstance(part, Part)
    assert not part.values.requires_grad
    plain.fill_(9.0)
    over(rows)
    assert list(rows.drain())[-1].numbers == {"a": 1.0, "b": 2.0}


def test_rows_that_were_not_taken_stay_due_in_their_order():
    rows = make(lag=1)
    for value in range(3):
        add(rows, {"a": number(value)})
        rows.end_step()  # whoever follows the rows was interrupted
    assert [row.step for row in over(rows)] == [0, 1, 2]


# -- what a row takes from samples, and from the energies of several steps -------------------------

BAD = torch.tensor([[1.0, 2.0], [torch.nan, 0.0], [0.0, torch.inf], [0.0, -torch.inf]])
GOOD, LABELS = torch.zeros(4, 2), torch.arange(4)


@pytest.mark.parametrize(
    ("returned", "fraction"),
    [
        # The first floating-point tensor is looked at.
        *(([x], 0.75) for x in (BAD.half(), BAD.double(), BAD.reshape(4, 1, 2, 1))),
        *(([x], 0.75) for x in ((BAD, GOOD), (LABELS, (None, [BAD])), ("status", {"x": BAD}))),
        ([torch.tensor([0.0, torch.nan])], 0.5),
        ([torch.tensor(torch.nan)], 1.0),
        # Unknown where there is none.
        *(([x], math.nan) for x in (None, (), (LABELS, None), torch.zeros(0, 2))),
        # A mean over the samplers that tell.
        ([BAD, GOOD], 0.375),
        ([None, BAD, (LABELS,)], 0.75),
    ],
)
def test_bad_samples_are_counted_for_one_loss(returned, fraction):
    results = iter(returned)
    g = guard(None, lambda: next(results), beta_star=1.0, action="warn")
    for _ in returned:
        g.sampler()
    for _ in range(2):  # of the one loss that has used them, not half of it
        g.loss_fn(*energies())
    found = g.last.get("nonfinite/samples", math.nan)
    assert found == pytest.approx(fraction, nan_ok=True)


def test_histograms_are_of_energies_high_on_data_and_are_copies():
    memory = Memory()
    g = guard(None, None, beta_star=1.0, convention="energy", sinks=[memory], judge_in_loss=False)
    g.attach(optimizer=torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
    pos, neg = torch.randn(4), torch.randn(5)
    g.loss_fn(pos, neg)
    expected = {"f_pos": (-pos).tolist(), "f_neg": (-neg).tolist()}
    pos.zero_()
    neg.zero_()
    g.loss_fn(pos, neg)  # of the same step
    g.close()
    assert memory.histograms == [(0, expected)]


# -- rows of several ranks as one ------------------------------------------------------------------

SIZES = [4, 1, 7], [10, 3, 3]  # of three ranks


@pytest.mark.parametrize(
    ("name", "values", "joined"),
    [
        ("f_neg/q05", [1.0, 2.0, 6.0], 3.0),
        # Of the whole batch, however uneven its parts.
        ("f_pos/mean", [1.0, 2.0, 6.0], 4.0),
        ("sampler/acceptance", [1.0, 2.0, 6.0], 2.125),
        ("buffer/own", [1.0, 2.0, 6.0], 3.0),  # a number that no line is about
        ("nonfinite/pos", [1.0, 0.0, 2.0], 3.0),
        ("f_neg/min", [1.0, -2.0, 6.0], -2.0),
        ("f_pos/max", [1.0, -2.0, 6.0], 6.0),
        ("sampler/grad_norm_max", [1.0, math.nan, 6.0], math.nan),
        ("f_neg/mean", [math.inf, -math.inf, 1.0], math.nan),
    ],
)
def test_how_each_kind_of_number_joins(name, values, joined):
    column = torch.tensor(values, dtype=torch.float64)[:, None]
    assert joined_ranks(column, (name,), *SIZES)[name].item() == pytest.approx(joined, nan_ok=True)


# -- the state of a run that is saved, loaded and continued ----------------------------------------

STEPS, SAVED_AFTER = 60, 45


class Run:
    """A loop on given energies that blow up late: alerts, a schedule, histograms, all of it.

    Args:
        models: dimensions of an ensemble, of which the last member's energies blow up.
    """

    def __init__(
        self,
        *,
        judge_in_loss: bool = True,
        optimizer: bool = False,
        sampler: bool = True,
        models: tuple[int, ...] = (),
    ) -> None:
        self.memory, self.sampling, self.models = Memory(), sampler, models
        self.alerts: list[dict[str, object]] = []
        stars: Any = torch.tensor([0.5, 0.0, 2.0]) if models else lambda step: 0.5 + 0.01 * step
        self.guard = guard(
            None,
            gradient_at if sampler else None,
            beta_star=stars,
            variant=["default", "no_pos", "batch"] if models else "default",
            output_scale=100.0,
            sinks=[self.memory],
            flush_every=7,
            judge_in_loss=judge_in_loss,
            on_alert=lambda alert: self.alerts.append(alert.record()),
        )
        self.optimizer = None
        if optimizer:
            self.optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
            self.guard.attach(optimizer=self.optimizer)
        self.f = Bowl()

    def go(self, first: int, last: int) -> None:
        for step in range(first, last):
            rng = torch.Generator().manual_seed(step)
            pos, neg = (torch.randn(*self.models, n, generator=rng) for n in (16, 12))
            if self.sampling:
                self.guard.sampler(self.f, torch.randn(12, 2, generator=rng))
            pos.view(-1, 16)[-1] += 100.0 if step >= 43 else 0.0
            self.guard.loss_fn(pos, neg)
            if self.optimizer is not None:
                self.optimizer.step()

    def rows(self) -> list[tuple[int, str]]:
        # NaN is not equal to itself, but its text is.
        return [(step, repr(sorted(row.items()))) for step, row in self.memory.rows]


def copied(state: Any, via: str, folder: Path) -> Any:
    if via == "json":
        return json.loads(json.dumps(state))
    torch.save(state, folder / "state.pt")
    return torch.load(folder / "state.pt", weights_only=True)


ENSEMBLE: dict[str, Any] = {"models": (3,), "sampler": False}


@pytest.mark.parametrize(
    ("options", "saved_after", "via"),
    [
        ({"optimizer": True}, SAVED_AFTER, "torch"),
        ({"judge_in_loss": False, "optimizer": True}, SAVED_AFTER, "json"),
        ({"sampler": False}, SAVED_AFTER, "torch"),
        # A step whose row is under way has its histogram.
        ({"judge_in_loss": False, "optimizer": True}, 1, "json"),
        (ENSEMBLE, SAVED_AFTER, "torch"),
        ({**ENSEMBLE, "judge_in_loss": False, "optimizer": True}, 30, "json"),
    ],
)
def test_continued_run_is_the_uninterrupted_one(options, saved_after, via, tmp_path):
    whole, first, second = (Run(**options) for _ in range(3))
    whole.go(0, STEPS)
    whole.guard.close()
    assert whole.memory.steps == list(range(STEPS))
    assert any(record["level"] == "ERROR" for record in whole.alerts)
    assert {record.get("member") for record in whole.alerts} == {2 if "models" in options else None}
    assert [step for step, _ in whole.memory.histograms] == [0, 50]

    first.go(0, saved_after)
    state = first.guard.state_dict()
    rows, alerts = first.rows(), list(first.alerts)
    histograms = list(first.memory.histograms)
    second.guard.load_state_dict(copied(state, via, tmp_path))
    assert second.guard.step == saved_after
    assert repr(second.guard.state_dict()) == repr(state)
    second.go(saved_after, STEPS)
    second.guard.close()
    assert rows + second.rows() == whole.rows()
    assert alerts + second.alerts == whole.alerts
    assert histograms + second.memory.histograms == whole.memory.histograms
    assert repr(second.guard.members) == repr(whole.guard.members)

    # Saving changes nothing for who goes on.
    first.go(saved_after, STEPS)
    first.guard.close()
    assert first.rows() == whole.rows()
    assert first.alerts == whole.alerts


@pytest.mark.parametrize("optimizer", [True, False])
def test_loading_in_place_rewinds(optimizer):
    run = Run(optimizer=optimizer)
    run.go(0, 5)
    state = run.guard.state_dict()
    run.go(5, 9)
    run.guard.load_state_dict(state)
    assert run.guard.step == 5
    run.go(5, 7)
    run.guard.close()
    again = run.memory.steps
    assert again[-2:] == [5, 6]
    # Without an optimizer step 4 was open when it was saved, and 8 when it was forgotten.
    assert again[:-2] == ([*range(9)] if optimizer else [*range(8), 4])


def judged(**change: Any) -> Callable[[Any], Any]:
    """A change of what the judge has."""
    return lambda state: state | {"judge": state["judge"] | change}


OTHER = "Not a guard's state of version"
OF_MEMBERS = "ensemble members, but this one has"


@pytest.mark.parametrize(
    ("options", "change", "message"),
    [
        ({}, lambda state: state | {"version": 99}, OTHER),
        # Its pooled energies had no log q beside them.
        ({}, lambda state: state | {"version": 3}, OTHER),
        ({}, lambda state: {k: v for k, v in state.items() if k != "rows"}, OTHER),
        *(
            ({}, lambda state, x=x: state | {"step": x}, "step=.*; expected a whole number")
            for x in (2.5, -1, 2**53 + 1)
        ),
        ({}, judged(rules={}), "is of a judge with the rules"),
        ({}, judged(members=[{}, {}, {}]), rf"of 3 {OF_MEMBERS} 0 \(0 for a sin"),
        (ENSEMBLE, judged(members=[{}, {}]), f"of 2 {OF_MEMBERS} 3"),
        (ENSEMBLE, judged(members=[{}, {}, {}]), "damaged"),
    ],
)
def test_foreign_states_are_refused_and_change_nothing(options, change, message):
    run, other = Run(**options), Run(**options)
    run.go(0, 5)
    other.go(0, 20)
    before = repr(run.guard.state_dict())
    with pytest.raises(ConfigError, match=message):
        run.guard.load_state_dict(change(other.guard.state_dict()))
    assert repr(run.guard.state_dict()) == before
