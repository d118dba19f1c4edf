"""The guard measures its sampler, and holds what it was told against it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ebmguard import guard
from ebmguard.errors import ConfigError
from tests.runs import Run, begin, train
from tests.sampling.loops import LOOPS, network, starts

EXACT = [name for name, loop in LOOPS.items() if loop.step is not None]


def trained(n: int = 4, state: Any = None, **options: Any) -> Run:
    run = begin()
    g = run.guard(None, run.sampler, **{"beta_star": 0.5, **options})
    if state is not None:
        g.load_state_dict(state)
    run.loss_fn, run.sampler = g
    return train(run, n)


def test_the_measured_scale_gives_the_run_of_the_number() -> None:
    run = trained()
    found = run.guards[0].measured
    assert found is not None
    assert found.output_scale == 20_000
    # Its first sampler call is the untempered one; all else is that of output_scale=20_000.
    told = trained(sampler_scale=lambda step: 1.0 if step == 0 else 1 - 0.5 / 20_000)
    assert run.final == told.final


@pytest.mark.parametrize(("given", "warns"), [(20_000, False), (20_150, False), (800, True)])
def test_a_number_that_was_given_is_checked_once(given: float, warns: bool) -> None:
    run = trained(output_scale=given)
    messages = [alert.message for alert in run.guards[0].alerts if alert.rule == "output_scale"]
    assert len(messages) == warns
    assert not warns or "output_scale=20000" in messages[0]
    assert [record["rule"] for record in run.memories[0].alerts].count("output_scale") == warns


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("is_right", [True, False])
def test_a_convention_that_the_sampler_contradicts_is_an_error(
    name: str, is_right: bool, caplog: pytest.LogCaptureFixture
) -> None:
    loop = LOOPS[name]
    torch.manual_seed(0)
    f, x = network(loop), starts(loop)
    assert loop.step is not None
    convention: Any = "log_density" if (loop.step > 0) == is_right else "energy"
    loss_fn, sample = guard(None, loop.sample, beta_star=0.0, convention=convention, model=f)
    x_neg = sample(f, x)
    if is_right:
        loss_fn(f(x), f(x_neg))
    elif name in ("logsumexp of logits", "one logit each"):  # the loss gets their sum: said first
        loss_fn(f(x), f(x_neg))
        assert "and the loss gets the sum of them" in caplog.text
    else:
        with pytest.raises(ConfigError, match=rf"convention='{convention}' contradicts"):
            loss_fn(f(x), f(x_neg))
    assert not f._forward_hooks


def test_energies_that_the_trainer_turns_round_are_no_contradiction() -> None:
    run = begin()
    g = run.guard(None, run.sampler, beta_star=0.5, convention="energy")
    run.loss_fn, run.sampler = g
    found = train(run, 2, negate=True).guards[0].measured
    assert found is not None
    assert found.is_exact
