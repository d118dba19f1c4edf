"""Adaptive SGLD steps in a guarded loop: what runs, and what its rows say."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from ebmguard import guard
from ebmguard.errors import ConfigError
from ebmguard.steering import AdaptiveSteps
from tests.parts import Bowl, Memory, gradient_at

ADAPT = AdaptiveSteps(most=8, fall_after=3)


def energies(gap=0.0, spread=0.0):
    """Positives at 0; negatives `gap` below them, the first of which is `spread` above the rest."""
    neg = torch.full((16,), -gap)
    neg[0] += spread
    return torch.zeros(16), neg


class Loop:
    """A loop whose sampler asks the guard for its steps; each element says what energies come."""

    def __init__(self, **settings):
        self.memory = Memory()
        self.paces = []
        self.factors = []
        settings = {"beta_star": 0.5, "judge_in_loss": True, "output_scale": 4.0} | settings
        self.guard = guard(None, self.sample, sinks=[self.memory], **settings)
        self.guard.attach(sgld_steps=3)
        self.f = Bowl()

    def sample(self, f, x):
        self.paces.append(tuple(self.guard.next_steps()))
        gradient = gradient_at(f, x)
        self.factors.append(float((gradient / -x).mean()))
        return x

    def go(self, given):
        for pair in given:
            self.guard.sampler(self.f, torch.ones(4, 2, dtype=torch.float64))
            self.guard.loss_fn(*pair)
        return self

    def rows(self, tag):
        self.guard.close()
        return [row.get(tag) for _, row in self.memory.rows]


LOST, FINE = energies(gap=200.0), energies()


@pytest.mark.parametrize("judge_in_loss", [True, False])
def test_a_lost_sampler_gets_more_and_finer_steps_and_the_rows_say_what_ran(judge_in_loss):
    loop = Loop(adapt=ADAPT, judge_in_loss=judge_in_loss).go([FINE] * 2 + [LOST] * 4 + [FINE] * 12)
    factors = [refinement for _, refinement in loop.paces]
    assert loop.paces == [(3 * factor, factor) for factor in factors]
    assert factors[:3] == [1, 1, 1]
    assert max(factors) == 8
    assert factors[-1] < 8
    assert all(b in (a, 2 * a, a // 2) for a, b in itertools.pairwise(factors))
    assert loop.rows("sampler/steps") == [3.0 * factor for factor in factors]
    assert loop.rows("sampler/steps_factor") == factors


def test_with_hold_the_next_call_knows_of_this_step():
    loop = Loop(adapt=ADAPT).go([LOST] * 5 + [FINE] * 9)
    assert [factor for _, factor in loop.paces] == [1, 2, 4, 8, 8] + [8] * 3 + [4] * 3 + [2] * 3


def test_what_it_costs_is_in_the_rows():
    loop = Loop(adapt=ADAPT).go([FINE] * 4 + [LOST] * 4)
    spent = [steps for steps, _ in loop.paces]
    cost = loop.rows("steering/extra_compute")
    assert cost == pytest.approx([1.0] + [sum(spent[:i]) / (3 * i) for i in range(1, 8)])


def test_a_sampler_without_the_word_for_it_gets_the_number_by_name():
    seen = []

    def sample(f, x, n_steps):
        seen.append(n_steps)
        return gradient_at(f, x)

    g = guard(None, sample, beta_star=0.5, judge_in_loss=True, adapt=ADAPT)
    g.attach(sgld_steps=5, steps_argument="n_steps")
    f = Bowl()
    for _ in range(3):
        g.sampler(f, torch.ones(4, 2, dtype=torch.float64), n_steps=99)
        g.loss_fn(*LOST)
    assert seen == [5, 10, 20]


def test_without_them_nothing_of_it_is_in_the_rows():
    loop = Loop().go([LOST] * 3)
    assert loop.paces == [(3, 1)] * 3
    assert loop.rows("beta_star") == [0.5] * 3
    loop.guard.close()
    tags = {tag for _, row in loop.memory.rows for tag in row}
    assert not {tag for tag in tags if tag.startswith("steering/")} | tags & {
        "sampler/steps_factor"
    }


def test_a_run_that_is_saved_and_continued_is_the_uninterrupted_one():
    given = [LOST, LOST, FINE, energies(2.0, 40.0)] * 6
    whole = Loop(adapt=ADAPT).go(given)
    first = Loop(adapt=ADAPT).go(given[:11])
    second = Loop(adapt=ADAPT)
    second.guard.load_state_dict(json.loads(json.dumps(first.guard.state_dict())))
    second.go(given[11:])
    assert first.paces + second.paces == whole.paces
    assert first.factors + second.factors == whole.factors


def test_a_sampler_that_never_asks_is_refused():
    g = guard(None, gradient_at, beta_star=0.5, adapt=ADAPT)
    g.attach(sgld_steps=5)
    g.sampler(Bowl(), torch.ones(4, 2, dtype=torch.float64))
    with pytest.raises(ConfigError, match="has not asked for it"):
        g.loss_fn(*LOST)


def test_settings_of_another_kind_are_refused():
    with pytest.raises(ConfigError, match="adapt="):
        guard(None, gradient_at, beta_star=0.5, adapt=True)  # type: ignore[arg-type]
