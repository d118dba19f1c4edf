"""Pauses, nested calls and several modules: what is tempered then, and what is refused."""

from __future__ import annotations

import pytest

from ebmguard import guard
from ebmguard.errors import SamplerError
from tests.guard.parts import QUARTER, Bowl, X, gradient_at, is_plain, is_tempered


def test_pause_gives_plain_samples():
    f = Bowl()
    g = guard(None, gradient_at, **QUARTER)
    with g.paused():
        assert is_plain(g.sampler(f, X))
        with g.paused():
            pass
        assert is_plain(g.sampler(f, X))
    assert is_tempered(g.sampler(f, X))
    with pytest.raises(RuntimeError, match="stop"), g.paused():
        raise RuntimeError("stop")
    assert is_tempered(g.sampler(f, X))


def test_nested_calls_do_not_square_the_factor():
    f = Bowl()

    def recursive(f, x, depth=2):
        return g.sampler(f, x, depth - 1) if depth else gradient_at(f, x)

    g = guard(None, recursive, **QUARTER)
    assert is_tempered(g.sampler(f, X))
    assert is_plain(gradient_at(f, X))
    assert g.state_dict()["sampler_calls"] == 1


def test_two_guards_at_once_are_refused_and_leave_nothing_behind():
    f = Bowl()
    inner = guard(None, gradient_at, **QUARTER)
    outer = guard(None, lambda f, x: inner.sampler(f, x), **QUARTER)
    with pytest.raises(SamplerError, match=r"Two guards sample.*sampler\.original"):
        outer.sampler(f, X)
    assert "forward" not in vars(f)
    assert is_tempered(inner.sampler(f, X))
    assert is_plain(gradient_at(f, X))


def test_temper_inside_a_guarded_sampler_is_refused():
    g = guard(None, lambda f, x: gradient_at(lambda x: g.temper(f(x)), x), **QUARTER)
    with pytest.raises(SamplerError, match="twice"):
        g.sampler(Bowl(), X)


def test_sampler_that_moves_two_modules_needs_model():
    f, h = Bowl(), Bowl()

    def sampler(f, h, x):
        return gradient_at(f, x), gradient_at(h, x)

    with pytest.raises(SamplerError, match=r"2 modules.*Bowl, Bowl.*model=f"):
        guard(None, sampler, **QUARTER).sampler(f, h, X)
    of_f, of_h = guard(None, sampler, model=f, **QUARTER).sampler(f, h, X)
    assert is_tempered(of_f)
    assert is_plain(of_h)
