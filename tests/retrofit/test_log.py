"""A trainer's own numbers in the guard's row."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from ebmguard import guard
from ebmguard.errors import ConfigError
from ebmguard.retrofit.parts import Part
from ebmguard.retrofit.rows import Rows
from tests.parts import Memory


def train(steps, own, **options):
    """A guarded linear energy whose trainer logs ``own(step)`` before each optimizer step."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    g = guard(None, None, beta_star=0.5, model=model, optimizer=optimizer, **options)
    for step in range(steps):
        loss = g.loss_fn(model(torch.randn(8, 2) + 1), model(torch.randn(8, 2)))
        optimizer.zero_grad()
        loss.backward()
        g.log(own(step))
        optimizer.step()
    return g


def test_own_numbers_stand_in_the_row_of_their_step(tmp_path):
    sink = Memory()
    total = torch.zeros(())

    def own(step):
        total.add_(1)  # an accumulator that goes on counting
        return {
            "accuracy": 0.1 * step,
            "loss/classification": total,
            "steps": step,
            "bad": math.nan,
        }

    g = train(3, own, sinks=[sink], log_dir=tmp_path / "run")
    g.close()
    assert [step for step, _ in sink.rows] == [0, 1, 2]
    for step, row in sink.rows:
        found = row["accuracy"], row["loss/classification"], row["steps"], math.isnan(row["bad"])
        assert found == (0.1 * step, step + 1.0, float(step), True)
        assert "grad_scale" in row
    assert g.last["accuracy"] == 0.2
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["accuracy"] for line in lines] == [0.0, 0.1, 0.2]


def test_what_is_logged_after_a_step_is_the_next_ones_and_the_last_of_a_name_counts():
    sink = Memory()
    g = train(1, lambda _: {"x": 1.0}, sinks=[sink])
    g.log({"x": 2.0, "y": True})
    g.log({"x": torch.tensor([3.0])})
    with g.paused():
        g.log({"x": 4.0})
    g.close()
    assert [(step, row["x"]) for step, row in sink.rows] == [(0, 1.0), (1, 3.0)]
    assert sink.rows[-1][1] == {"x": 3.0, "y": 1.0}


def test_no_rule_sees_them_and_alerts_are_those_of_the_same_run_without():
    numbers = [train(60, own).alerts for own in (lambda _: {}, lambda _: {"x": math.nan})]
    assert numbers[0] == numbers[1]


def test_they_travel_with_the_state():
    rows = Rows(torch.Size(), in_loss=False)
    rows.begin_loss(is_on_host=False)
    rows.add([Part.of({"loss": torch.tensor(1.0)})])
    rows.log({"x": 5.0})
    list(rows.end_step())
    again = Rows(torch.Size(), in_loss=False)
    again.load_state_dict(rows.state_dict(is_over=False))
    assert [row.logged for row in again.drain()] == [{"x": 5.0}]


def test_what_a_device_has_is_not_read_before_its_row_is():
    rows = Rows(torch.Size(), in_loss=False)
    rows.log({"x": torch.ones((), device="meta"), "y": 2.0})  # reading it would raise
    with pytest.raises(NotImplementedError):
        list(rows.end_step())


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"energy_gap": 1.0}, "the guard writes it itself"),
        ({"sampler/grad_norm": 1.0}, "the guard writes it itself"),
        ({"ref/ess": 1.0}, "the guard writes it itself"),
        ({"step": 1.0}, "the guard writes it itself"),
        ({"guard/x": 1.0}, "the guard writes it itself"),
        ({"sampler/mine": 1.0}, "the guard writes it itself"),
        ({"": 1.0}, "empty"),
        ({"a\nb": 1.0}, "no text"),
        ({"\ud800": 1.0}, "no text"),
        ({1: 1.0}, "no text"),
        ({"x": "0.93"}, "is a str"),
        ({"x": torch.zeros(3)}, "a mean"),
        ({"x": torch.zeros((), dtype=torch.complex64)}, "complex64"),
        ([("x", 1.0)], "by name"),
    ],
)
def test_what_is_no_number_of_the_trainers_is_refused_before_anything_is_kept(numbers, words):
    sink = Memory()
    g = guard(None, None, beta_star=0.5, sinks=[sink])
    with pytest.raises(ConfigError, match=words):
        g.log({"good": 1.0} | numbers if isinstance(numbers, dict) else numbers)
    g.close()
    assert not sink.rows
