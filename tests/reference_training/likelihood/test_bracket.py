"""The verdict: what it says of estimates that are made up, and of models that are known."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from ebmguard.errors import ConfigError
from ebmguard.reference_training.likelihood import Bracket, Estimate, bracket_log_z
from tests.reference_training.likelihood.parts import WIDE, modes, rng

NONE = torch.zeros(0, dtype=WIDE)


def side(
    log_z: float, *, spread: float = 0.1, f: float = 0.0, is_reverse: bool = False
) -> Estimate:
    """Of 100 chains whose log weights are `spread` above or below log Z."""
    signs = torch.tensor([1.0, -1.0], dtype=WIDE).repeat(50)
    log_weights = (-log_z if is_reverse else log_z) + spread * signs
    return Estimate(log_weights, NONE, f + signs, NONE, NONE, is_reverse)


def judged(
    low: float = 3.0, high: float = 3.1, *, starts="exact", within=1.0, **reverse
) -> Bracket:
    return Bracket(side(low), side(high, is_reverse=True, **reverse), starts, within)


def carried_by_one() -> Bracket:
    found = judged()
    heavy = found.reverse.log_weights.clone()
    heavy[0] += 50
    return replace(found, reverse=replace(found.reverse, log_weights=heavy))


def test_numbers_are_those_of_the_weights():
    found = side(2.0, spread=0.3)
    assert found.log_z == pytest.approx(2 + math.log(math.cosh(0.3)))
    ratio = torch.tensor([math.exp(0.3), math.exp(-0.3)]) / math.cosh(0.3)
    assert found.ess == pytest.approx(100 / float(ratio.square().mean()))
    error = float(ratio.std(correction=0)) / 10
    assert found.standard_error == pytest.approx(error)
    both = judged(2.0, 2.2)
    assert both.lower == pytest.approx(both.forward.log_z - 2 * both.forward.standard_error)
    assert both.upper == pytest.approx(both.reverse.log_z + 2 * both.reverse.standard_error)


@pytest.mark.parametrize(
    ("starts", "said"),
    [("exact", "3.125"), ("long-run", "have forgotten where they"), ("data", "is no bound")],
)
def test_two_that_agree_bracket(starts, said):
    found = judged(starts=starts)
    assert found.problems == []
    assert found.verdict.startswith("these two bracket log Z within 0.13 nats, 2.985..3.1")
    assert said in found.verdict or starts == "exact"


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (judged(3, 5), "apart"),
        (judged(3, 3.2, within=0.1), "bracket log Z within 0.1 nats: they are"),
        (judged(3, 2), "below the forward one"),
        (carried_by_one(), "reverse has 1.0 effective chains of 100"),
        (judged(f=5.0), "mean f is 5, the model's"),
        (judged(math.inf), "the forward estimate is inf"),
        (judged(high=math.nan), "the reverse estimate is nan"),
    ],
)
def test_the_reason_is_said_where_they_do_not(found, said):
    assert found.verdict.startswith("they do not bracket log Z within")
    assert said in found.verdict


def test_data_that_are_not_the_models_are_found_out():
    known = modes()
    options = {"temperatures": 100, "chains": 200}
    x = known.samples(400)
    exact = bracket_log_z(known.path, x[:200], starts="exact", **options, generator=rng(1))
    assert exact.problems == []
    assert exact.lower < known.log_z < exact.upper
    wrong = x[x[:, 0] < 0][:150]
    data = bracket_log_z(known.path, wrong, starts="data", **options, generator=rng(1))
    assert "not like samples of the model" in data.verdict


@pytest.mark.parametrize("wrong", [{"starts": "long"}, {"within": 0.0}, {"within": math.nan}])
def test_what_cannot_be_meant_is_refused(wrong):
    with pytest.raises(ConfigError, match="expected one of exact, long-run, data"):
        judged(**wrong)
