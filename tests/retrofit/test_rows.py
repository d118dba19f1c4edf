"""Rows on their way from the device to whoever judges and writes them."""

from __future__ import annotations

import json
import math

import pytest
import torch

from ebmguard.retrofit.parts import Part
from ebmguard.retrofit.rows import Rows, StepRow

NO_MODELS = torch.Size()


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


def test_without_lag_the_row_so_far_comes_with_every_measurement():
    rows = make()
    (first,) = add(rows, {"a": number(1.5), "b": number(math.nan)})
    assert repr(first.numbers) == repr({"a": 1.5, "b": math.nan})
    assert (first.step, first.is_over, first.is_news) == (0, False, True)
    rows.note({"n": 7.0})
    (second,) = add(rows, {"a": number(2.5)})
    assert repr(second.numbers) == repr({"a": 2.0, "b": math.nan, "n": 7.0})
    (whole,) = over(rows)
    assert repr(whole.numbers) == repr(second.numbers)
    assert (whole.step, whole.is_over, whole.is_news) == (0, True, False)


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_with_lag_the_row_of_step_t_is_read_at_the_end_of_step_t_plus_lag(lag):
    rows, read = make(lag), []
    for step in range(6):
        assert add(rows, {"a": number(step)}) == []
        read.append([(x.step, x.numbers["a"], x.is_over, x.is_news) for x in over(rows)])
    due = [[(step - lag, step - lag, True, True)] if step >= lag else [] for step in range(6)]
    assert read == due
    assert [row.step for row in rows.drain()] == list(range(6 - lag, 6))
    assert list(rows.drain()) == []


@pytest.mark.parametrize("lag", [0, 2])
def test_numbers_of_one_step_are_averaged_by_name(lag):
    rows = make(lag)
    add(rows, {"a": number(1), "b": number(10)})
    add(rows, {"a": number(2)})
    add(rows, {"c": number(math.nan), "a": number(6)})
    row = (over(rows) + list(rows.drain()))[0].numbers
    assert row.pop("a") == pytest.approx(3.0)
    assert math.isnan(row.pop("c"))
    assert row == {"b": 10.0}


def test_of_noted_numbers_the_largest_counts():
    rows = make()
    rows.step = 4
    rows.note({"level": 0.0})
    rows.note({"level": 2.0, "other": -3.0})
    rows.note({"level": 1.0})
    (row,) = over(rows)
    assert (row.step, row.numbers, row.is_news) == (4, {"level": 2.0, "other": -3.0}, True)


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize(("value", "models"), [(0.0, ()), (1.0, ()), (0.0, (2,))])
def test_what_is_to_be_judged_at_the_end_of_a_step(lag, as_tensor, value, models):
    """On a CPU the row has been judged in the loss: only what is not 0 makes it worth another."""
    rows = make(lag, models)
    add(rows, {"a": number(1)})
    rows.note_news("n", number(value) if as_tensor else value)
    (row,) = over(rows) + list(rows.drain())
    assert row.numbers == {"a": 1.0, "n": value}
    assert row.is_news is (bool(lag) or bool(value) or bool(models))
    assert all("n" not in member for member in row.members)  # it is of the ensemble as a whole


def test_a_step_without_numbers_has_no_row():
    rows = make(lag=1)
    add(rows, {"a": number(0)})
    assert over(rows) == []
    assert [row.step for row in over(rows)] == [0]
    assert over(rows) == []


def test_a_zero_has_no_sign():
    (row,) = add(make(), {"a": number(-0.0)})
    assert repr(row.numbers) == repr({"a": 0.0})


def test_double_precision_survives():
    rows, value = make(), 1 / 3
    add(rows, {"a": number(value, torch.float64), "b": number(2)})
    assert over(rows)[0].numbers == {"a": value, "b": 2.0}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_other_dtypes(dtype):
    (row,) = add(make(), {"a": torch.ones((), dtype=dtype)})
    assert (row.numbers, row.members) == ({"a": 1.0}, [])


def test_rows_do_not_hold_graphs_and_keep_the_values_of_their_step():
    rows = make(lag=2)
    x, f = torch.ones((), requires_grad=True), torch.ones(2, requires_grad=True)
    add(rows, {"a": 2 * x}, {"f": 3 * f})
    over(rows)
    pending, _ = rows._queue
    samples = pending.samples["f"]
    ((part,),) = pending.calls
    assert isinstance(samples, torch.Tensor)
    assert isinstance(part, Part)
    assert not part.values.requires_grad
    assert not samples.requires_grad
    plain = torch.ones(())
    add(rows, {"a": plain})
    plain.fill_(9.0)
    over(rows)
    assert list(rows.drain())[-1].numbers == {"a": 1.0}


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("models", [(2,), (2, 1)])
def test_members_have_rows_of_their_own_and_the_row_is_their_mean(lag, models):
    rows = make(lag, models)
    own = torch.tensor([1.0, math.nan]).reshape(models)
    assert bool(add(rows, {"a": own, "b": number(2)})) is not bool(lag)
    (row,) = over(rows) + list(rows.drain())
    assert repr(row.members) == repr([{"a": 1.0, "b": 2.0}, {"a": math.nan, "b": 2.0}])
    assert repr(row.numbers) == repr({"a": math.nan, "b": 2.0})


@pytest.mark.parametrize("lag", [0, 2])
def test_members_of_one_step_are_averaged_by_name(lag):
    rows = make(lag, (2,))
    add(rows, {"a": torch.tensor([1.0, 5.0])})
    add(rows, {"b": number(7, torch.float64), "a": torch.tensor([2.0, 8.0])})
    rows.note_news("shared", number(2))
    rows.note({"noted": 4.0})
    (row,) = over(rows) + list(rows.drain())
    assert row.members == [{"a": 1.5, "b": 7.0}, {"a": 6.5, "b": 7.0}]
    assert row.numbers == {"a": 4.0, "b": 7.0, "shared": 2.0, "noted": 4.0}


def test_rows_under_way_come_back_through_json():
    rows = make(lag=2)
    for step in range(3):
        add(rows, {"a": number(step)}, {"f": torch.tensor([0.5, step])} if step == 1 else {})
        over(rows)
    add(rows, {"a": number(3)})
    rows.note({"n": 1.0})
    between, saved = rows.state_dict(is_over=False), rows.state_dict(is_over=True)
    assert (between["step"], [row[0] for row in between["rows"]]) == (3, [1, 2])
    assert saved["step"] == 4
    assert saved["rows"] == [*between["rows"], [3, {"a": 3.0, "n": 1.0}, {}, [], True, {}]]
    assert rows.state_dict(is_over=True) == saved  # looking changes nothing

    other = Rows(NO_MODELS, in_loss=None)
    add(other, {"old": number(0)})
    other.load_state_dict(json.loads(json.dumps(saved)))
    assert other.state_dict(is_over=False) == saved
    other.note({"b": 4.0})
    assert [(x.step, x.numbers, x.samples) for x in over(other)] == [
        (1, {"a": 1.0}, {"f": [0.5, 1.0]}),
        (2, {"a": 2.0}, {}),
    ]
    assert [row.step for row in other.drain()] == [3, 4]


def test_draining_keeps_the_step_open():
    rows = make(lag=2)
    rows.step = 7
    for value in (1.0, 2.0):
        rows.note({"a": value})
        assert [row.step for row in rows.drain()] == [7]


def test_rows_that_were_not_taken_stay_due_in_their_order():
    rows = make(lag=1)
    for value in range(3):
        add(rows, {"a": number(value)})
        rows.end_step()  # whoever follows the rows was interrupted
    assert [row.step for row in over(rows)] == [0, 1, 2]
