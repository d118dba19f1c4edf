"""What holds for every codebase, in loops of their structure."""

from __future__ import annotations

import pytest
import torch

from ebmguard.errors import ConfigError
from tests.adapters.cases import CODEBASES, Codebase
from tests.parts import doubles
from tests.runs import Trial


def each(field: str) -> pytest.MarkDecorator:
    """The codebases with each of their entries."""

    rows = [
        pytest.param(codebase, entry, id=f"{name} {entry}")
        for name, codebase in CODEBASES.items()
        for entry in getattr(codebase, field)
    ]
    return pytest.mark.parametrize(("codebase", "entry"), rows)


@each("off")
def test_off_it_is_the_same_run(codebase, entry):
    unguarded = codebase.train(Trial(n=10), **entry)
    for attach in (False, True) if entry == codebase.off[0] else (True,):
        run = codebase.train(Trial(0.0, n=10, attach=attach), **entry)
        assert run.equals(unguarded)
        for g, memory in zip(run.guards, run.memories, strict=True):
            # Without an optimizer a step ends with the next one's samples.
            assert g.step == (10 if attach else 9)
            assert memory.steps == list(range(10))


@doubles()
@each("on")
def test_the_gradient_of_every_loss_is_the_closed_form(codebase: Codebase, entry):
    beta_star, options = entry
    run = codebase.train(Trial(beta_star, n=5), **options)
    assert not run.equals(codebase.train(Trial(n=5), **options))
    assert len(run.calls) >= 5
    for call in run.calls:
        to_pos, to_neg = codebase.expected(call, beta_star, options)
        torch.testing.assert_close(call.to_pos, to_pos, rtol=1e-7, atol=1e-12)
        torch.testing.assert_close(call.to_neg, to_neg, rtol=1e-7, atol=1e-12)


@doubles()
@each("tempered")
def test_the_sampler_runs_on_the_tempered_energy(codebase: Codebase, entry):
    beta_star, options, factor = entry
    guarded, by_hand, plain = (
        codebase.train(trial, **options).calls[0].x_neg
        for trial in (Trial(beta_star, 1), Trial(n=1, scale=factor), Trial(n=1))
    )
    if factor == 1:
        assert torch.equal(guarded, plain)
    else:
        torch.testing.assert_close(guarded, by_hand, rtol=0, atol=1e-12)
        assert not torch.allclose(by_hand, plain, rtol=0, atol=1e-9)


@each("told")
def test_told(codebase: Codebase, entry):
    changes, told = entry
    assert codebase.settings(**changes) == told


@each("refused")
def test_refused(codebase: Codebase, entry):
    changes, says = entry
    with pytest.raises(ConfigError, match=says):
        codebase.settings(**changes)
