"""Misuse: every case raises its own error, says what to do, and leaves everything as it was."""

from __future__ import annotations

import pytest
import torch

from ebmguard import errors, guard
from ebmguard.errors import SamplerError, ShapeError
from tests.guard.misuse_arguments import ARGUMENTS
from tests.guard.misuse_calls import CALLS
from tests.guard.misuse_world import NEG, POS, World, X
from tests.parts import Energy, gradient_at

CASES = [*ARGUMENTS, *CALLS]


def test_names_differ():
    assert len({case.name for case in CASES}) == len(CASES) >= 35


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_misuse(case, tmp_path):
    world = World(tmp_path)
    before = [dict(vars(module)) for module in (world.f, world.h)]
    rng = torch.get_rng_state()
    with pytest.raises(case.error, match=f"(?s){case.message}") as caught:
        case.mistake(world)
    assert isinstance(caught.value, errors.EbmguardError)
    assert type(caught.value) is case.error
    assert len(str(caught.value)) > 35  # what was wrong, and what to do
    # Nothing has changed.
    for g in world.guards:
        assert g.step == 0
        assert g.last == {}
        assert g.alerts == []
        assert g.trainer == type(g.trainer)()
        assert g.state_dict()["losses"] == g.state_dict()["sampler_calls"] == 0
        g.close()
    assert world.memory.rows == []
    assert world.memory.alerts == []
    assert [dict(vars(module)) for module in (world.f, world.h)] == before
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(torch.get_rng_state(), rng)


def test_a_sampler_that_returns_nan_is_no_misuse():
    """It is an alert at once: the run decides what becomes of it."""
    g = guard(None, lambda f, x: gradient_at(f, x) * torch.nan, beta_star=1.0, output_scale=10.0)
    f = Energy()
    x = g.sampler(f, X)
    g.loss_fn(f(X), f(x))
    assert g.last["nonfinite/samples"] == 1.0
    assert [(alert.rule, alert.step) for alert in g.alerts] == [("nonfinite", 0)]


def test_the_guard_works_after_a_mistake():
    f = Energy()
    g = guard(None, gradient_at, beta_star=1.0, output_scale=10.0)
    for mistake in (lambda: g.sampler(X), lambda: g.loss_fn(POS, NEG)):
        with pytest.raises(SamplerError):
            mistake()
    g.sampler(f, X)
    with pytest.raises(ShapeError):
        g.loss_fn(POS.mean(), NEG)
    assert g.step == 0
    assert g.loss_fn(POS, NEG).isfinite()
    g.sampler(f, X)
    assert g.step == 1
