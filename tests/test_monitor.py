"""Rows on their way from the device to the sinks."""

from __future__ import annotations

import json
import math

import pytest
import torch

from ebmguard.retrofit.rows import Monitor
from tests.guard.parts import Memory


def number(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype)


def make(lag: int = 0, flush_every: int = 100) -> tuple[Monitor, Memory]:
    memory = Memory()
    return Monitor([memory], flush_every=flush_every, lag=lag), memory


def test_without_lag_the_row_is_read_at_once():
    monitor, _ = make()
    assert monitor.add({"a": number(1.5), "b": number(math.nan)}, {}) == (
        {"a": 1.5, "b": pytest.approx(math.nan, nan_ok=True)},
        [],
    )
    (finished,) = monitor.end_step(0)
    assert (finished.step, finished.row["a"], finished.samples) == (0, 1.5, {})


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_with_lag_the_row_of_step_t_is_read_at_the_end_of_step_t_plus_lag(lag):
    monitor, _ = make(lag)
    read = []
    for step in range(6):
        assert monitor.add({"a": number(step)}, {}) is None
        read.append([(row.step, row.row["a"]) for row in monitor.end_step(step)])
    assert read == [[(step - lag, step - lag)] if step >= lag else [] for step in range(6)]
    assert [row.step for row in monitor.drain()] == list(range(6 - lag, 6))
    assert monitor.drain() == []


@pytest.mark.parametrize("lag", [0, 2])
def test_numbers_of_one_step_are_averaged_by_name(lag):
    monitor, _ = make(lag)
    monitor.add({"a": number(1), "b": number(10)}, {})
    monitor.add({"a": number(2)}, {})
    monitor.add({"c": number(math.nan), "a": number(6)}, {})
    row = (monitor.end_step(0) + monitor.drain())[0].row
    assert row.pop("a") == pytest.approx(3.0)
    assert math.isnan(row.pop("c"))
    assert row == {"b": 10.0}


def test_of_noted_numbers_the_largest_counts():
    monitor, _ = make()
    monitor.note({"level": 0.0})
    monitor.note({"level": 2.0, "other": -3.0})
    monitor.note({"level": 1.0})
    (finished,) = monitor.end_step(4)
    assert finished.row == {"level": 2.0, "other": -3.0}
    assert finished.step == 4


def test_a_step_without_numbers_has_no_row():
    monitor, _ = make(lag=1)
    monitor.add({"a": number(0)}, {})
    assert monitor.end_step(0) == []
    assert [row.step for row in monitor.end_step(1)] == [0]
    assert monitor.end_step(2) == []


def test_double_precision_survives():
    monitor, _ = make()
    value = 1 / 3
    monitor.add({"a": number(value, torch.float64), "b": number(2)}, {})
    assert monitor.end_step(0)[0].row == {"a": value, "b": 2.0}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_other_dtypes(dtype):
    monitor, _ = make()
    assert monitor.add({"a": torch.ones((), dtype=dtype)}, {}) == ({"a": 1.0}, [])


def test_rows_do_not_hold_graphs():
    monitor, _ = make(lag=2)
    x = torch.ones((), requires_grad=True)
    monitor.add({"a": 2 * x}, {"f": 3 * torch.ones(2, requires_grad=True)})
    monitor.end_step(0)
    (pending,) = monitor._queue
    assert pending.numbers is not None
    assert not pending.numbers.requires_grad
    samples = pending.samples["f"]
    assert isinstance(samples, torch.Tensor)
    assert not samples.requires_grad


def test_values_are_those_of_the_step_even_if_the_tensors_change():
    monitor, _ = make(lag=2)
    x, f = torch.ones(()), torch.ones(2, 2)
    monitor.add({"a": x}, {"f": f})
    x.fill_(9.0)
    monitor.end_step(0)
    assert monitor.drain()[0].row == {"a": 1.0}


def test_sinks_get_rows_and_are_flushed_every_so_many():
    monitor, memory = make(flush_every=3)
    for step in range(7):
        monitor.add({"a": number(step)}, {"f": torch.full((2,), float(step))} if step == 5 else {})
        for finished in monitor.end_step(step):
            monitor.write(finished)
    assert memory.rows == [(step, {"a": float(step)}) for step in range(7)]
    assert memory.histograms == [(5, {"f": [5.0, 5.0]})]
    assert memory.flushed_rows == [3, 6]
    monitor.alert({"rule": "r"})
    assert memory.alerts == [{"rule": "r"}]
    assert memory.flushed_rows == [3, 6, 7]
    monitor.recovery({"restored_step": 4})
    assert memory.recoveries == [{"restored_step": 4}]
    assert memory.flushed_rows == [3, 6, 7, 7]
    # The count starts again after any flush.
    for step in (8, 9, 10):
        monitor.note({"a": 1.0})
        for row in monitor.end_step(step):
            monitor.write(row)
    assert memory.flushed_rows == [3, 6, 7, 7, 10]


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("models", [(2,), (2, 1)])
def test_members_have_rows_of_their_own_and_the_row_is_their_mean(lag, models):
    monitor, _ = make(lag)
    own = torch.tensor([1.0, math.nan]).reshape(models)
    found = monitor.add({"a": own, "b": number(2)}, {}, torch.Size(models))
    assert (found is None) is bool(lag)
    (finished,) = monitor.end_step(0) + monitor.drain()
    assert repr(finished.members) == repr([{"a": 1.0, "b": 2.0}, {"a": math.nan, "b": 2.0}])
    assert repr(finished.row) == repr({"a": math.nan, "b": 2.0})


@pytest.mark.parametrize("lag", [0, 2])
def test_members_of_one_step_are_averaged_by_name_and_share_what_has_no_members(lag):
    monitor, _ = make(lag)
    monitor.add({"shared": number(1)}, {})
    monitor.add({"a": torch.tensor([1.0, 5.0])}, {}, torch.Size([2]))
    monitor.add({"b": number(7, torch.float64), "a": torch.tensor([2.0, 8.0])}, {}, torch.Size([2]))
    monitor.add({"shared": number(2)}, {})
    monitor.note({"noted": 4.0})
    # One tensor goes to the host, whatever it holds.
    assert monitor._open.on_device()[2] is None or lag
    (finished,) = monitor.end_step(0) + monitor.drain()
    assert finished.members == [{"a": 1.5, "b": 7.0}, {"a": 6.5, "b": 7.0}]
    assert finished.row == {"a": 4.0, "b": 7.0, "shared": 1.5, "noted": 4.0}


def test_several_sinks():
    first, second = Memory(), Memory()
    monitor = Monitor([first, second], flush_every=1, lag=0)
    monitor.note({"a": 1.0})
    monitor.write(monitor.end_step(0)[0])
    monitor.alert({})
    assert first.rows == second.rows == [(0, {"a": 1.0})]
    assert first.flushed_rows == second.flushed_rows == [1, 1]


def test_under_way_and_back_through_json():
    monitor, _ = make(lag=2)
    for step in range(3):
        monitor.add({"a": number(step)}, {"f": torch.tensor([0.5, step])} if step == 1 else {})
        monitor.end_step(step)
    monitor.add({"a": number(3)}, {})
    monitor.note({"n": 1.0})
    closed = monitor.under_way(with_open=False)
    with_open = monitor.under_way(with_open=True)
    assert [row[0] for row in closed] == [1, 2]
    assert with_open == [*closed, [3, {"a": 3.0, "n": 1.0}, {}, []]]
    assert monitor.under_way(with_open=True) == with_open  # looking changes nothing

    other, _ = make(lag=2)
    other.add({"old": number(0)}, {})
    other.put_back(json.loads(json.dumps(with_open)))
    other.step = 4
    assert other.under_way(with_open=False) == with_open
    other.note({"b": 4.0})
    assert [tuple(row) for row in other.end_step(4)] == [
        (1, {"a": 1.0}, {"f": [0.5, 1.0]}, []),
        (2, {"a": 2.0}, {}, []),
    ]
    assert [row.step for row in other.drain()] == [3, 4]


def test_draining_keeps_the_step_open():
    monitor, _ = make(lag=2)
    monitor.end_step(6)
    monitor.note({"a": 1.0})
    assert [row.step for row in monitor.drain()] == [7]
    monitor.note({"a": 2.0})
    assert [row.step for row in monitor.drain()] == [7]
