"""What the guard measures of a sampler it uses and keeps; what it cannot tell it says, once."""

from __future__ import annotations

import copy
import json
import logging
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ebmguard import guard
from ebmguard.errors import ConfigError, SamplerError
from ebmguard.report.page import page
from ebmguard.samplers import Mixture, sgld
from ebmguard.sinks import read_jsonl
from tests.parts import Bowls, Energy, climb, get_sample_q, gradient_at, unit_langevin
from tests.runs import begin, train
from tests.sampling.loops import LOOPS

STEPS: Any = {"step_size": 0.02, "noise_std": 0.2}  # o = 1


class Normal(nn.Module):
    """The log-density of N(0, 1/a) in one dimension, over o."""

    def __init__(self, o: float) -> None:
        super().__init__()
        self.a, self.o = nn.Parameter(torch.tensor(0.95)), o

    def forward(self, x: Tensor) -> Tensor:
        return -(self.a / self.o * x.square() / 2).sum(1)


def langevin(o: float, steps: int = 10, size: float = 0.02) -> Any:
    """Correct for exp(o f)."""
    return lambda f, x: unit_langevin(lambda x: o * f(x), x, steps, size)


def precision(beta: float | None, o: float, steps: int, **options: Any) -> float:
    """What is learned from N(0, 1), whose batches have the variance 1 in every digit."""
    torch.manual_seed(0)
    f, data = Normal(o), torch.randn(256, 1)
    data = (data - data.mean()) / data.std(correction=0)
    optimizer = torch.optim.SGD(f.parameters(), lr=0.15 * o)
    beta_star = None if beta is None else beta * o
    options |= {"model": f, "optimizer": optimizer, "beta_star": beta_star}
    loss, sample = guard(None, langevin(o), **options)
    x, found = torch.randn(1024, 1), []
    for step in range(steps):
        x = sample(f, x)
        optimizer.zero_grad()
        loss(f(data), f(x)).backward()
        optimizer.step()
        found += [f.a.item()] if step > steps / 3 else []
    return sum(found) / len(found)


@pytest.mark.parametrize(("beta", "o"), [(None, 1), (0, 100), (0.2, 2), (0.5, 1), (0.8, 100)])
def test_the_normal_distribution_is_learned_with_no_scale_given(
    beta: float | None, o: float
) -> None:
    assert precision(beta, o, 110) == pytest.approx(1, abs=0.03)


def test_without_the_scale_it_is_another() -> None:
    assert precision(0.5, 1, 100, sampler_scale=1.0) < 0.75


# -- what is used ---------------------------------------------------------------------------------


class Pair(Energy):
    """f(x, y)."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return super().forward(x) * (1.0 if y is None else y)


def library(f: Any, x: Tensor) -> Tensor:
    return sgld(f, x, steps=4, **STEPS)


def of_class(f: Any, x: Tensor) -> Tensor:
    return sgld(lambda x: f(x, torch.full((len(x),), 2.0)), x, steps=4, **STEPS)


USED: dict[str, tuple[Any, Any, Any]] = {  # sampler, energy, β* at o = 1
    "langevin": (langevin(1), Energy(), 0.5),
    "sgld": (library, Energy(), 0.5),
    "mixture with a proposal": (
        Mixture({"a": library, "b": lambda f, x: torch.randn_like(x)}),
        Energy(),
        0.5,
    ),
    "conditional": (of_class, Pair(), 0.5),
    "ensemble": (langevin(1), Bowls(torch.tensor([1.0, 2.0])), torch.tensor([0.2, 0.5])),
    "schedule": (langevin(1), Energy(), lambda step: 0.5),
}


@pytest.mark.parametrize("name", USED)
def test_from_the_second_call_on_the_sampler_runs_on_the_tempered_energy(name: str) -> None:
    sampler, f, star = USED[name]
    x = torch.randn(16, 2)
    by = 1 - torch.as_tensor(star(0) if callable(star) else star)
    _, sample = g = guard(None, sampler, beta_star=star, model=f)
    twin: Any = copy.copy(sampler)  # a sampler has one guard
    known = guard(None, twin, beta_star=star, model=f, sampler_scale=by).sampler
    for call, other in ((sample, sampler), (sample, known)):
        torch.manual_seed(1)
        found = call(f, x)
        torch.manual_seed(1)
        torch.testing.assert_close(found, other(f, x), rtol=1e-6, atol=1e-6)
    assert g.measured is not None
    assert g.measured.output_scale == 1


def test_it_is_in_the_log_the_rows_the_report_and_the_state(tmp_path: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "ebmguard")
    f, x = Energy(), torch.randn(16, 2)
    loss, sample = g = guard(None, langevin(100), beta_star=0.5, model=f, log_dir=tmp_path)
    for _ in range(3):
        loss(f(x), f(sample(f, x)))
    g.close()
    assert sum("output_scale=100 " in said for said in caplog.messages) == 1
    assert [row["output_scale"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [100] * 3
    assert "output scale" in page([tmp_path])
    # A resumed run uses it from its first call on.
    state = json.loads(json.dumps(g.state_dict()))
    again = guard(None, gradient_at, beta_star=50.0, model=f)
    again.load_state_dict(state)
    torch.testing.assert_close(again.sampler(f, x), 0.5 * gradient_at(f, x))


def test_at_zero_the_run_stays_the_same_bit_by_bit(caplog: Any) -> None:
    for sampler in (get_sample_q(), get_sample_q(noise_std=0.0)):
        run = begin()
        run.loss_fn, run.sampler = run.guard(None, sampler, beta_star=0.0)
        train(run)
        plain = begin()
        plain.sampler = sampler
        assert run.equals(train(plain))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_sampler_of_a_step_or_two_is_measured_from_what_it_returns(steps: int) -> None:
    f, x = Energy(), torch.randn(16, 2)
    loss, sample = g = guard(None, langevin(4, steps), beta=0.25, output_scale=4, model=f)
    for _ in range(2):
        loss(f(x), f(sample(f, x)))
    assert g.measured is not None
    assert g.measured.is_exact
    assert g.measured.output_scale == 4


# -- β alone --------------------------------------------------------------------------------------


def test_beta_needs_no_scale_where_it_is_measured() -> None:
    f, x = Energy(), torch.randn(16, 2)
    loss, sample = g = guard(None, langevin(4), beta=0.25, model=f)
    twin = copy.deepcopy(f)
    known_loss, known = guard(None, langevin(4), beta=0.25, output_scale=4, model=twin)
    found = []
    for own, call, of in ((f, sample, loss), (twin, known, known_loss)):
        torch.manual_seed(1)
        negatives = call(own, x)  # the first call is tempered: its factor is known
        found.append((negatives, of(own(x), own(negatives)).detach()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert g.last["beta_star"] == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sampler": None}, "beta= needs the output scale"),
        ({"beta": 1.5}, "= 1.5 at step 0 is above 1"),
        ({"output_scale": "measure"}, "output_scale= is 'measure'; expected a number or None"),
    ],
    ids=str,
)
def test_what_beta_alone_cannot_be_is_refused_at_once(options: Any, said: str) -> None:
    sampler = options.pop("sampler", climb)
    with pytest.raises(ConfigError, match=said):
        guard(None, sampler, **{"beta": 0.1, **options})


def test_a_loss_whose_beta_star_stays_unknown_is_refused_with_the_reason() -> None:
    f, x = Energy(), torch.randn(16, 2)
    loss, sample = guard(None, climb, beta=0.1, model=f)
    negatives = sample(f, x)
    with pytest.raises(ConfigError, match=r"beta= needs the output scale.*without noise"):
        loss(f(x), f(negatives))
    loss, sample = guard(None, climb, beta=0.0, model=f)
    assert loss(f(x), f(sample(f, x))).isfinite()


def test_a_beta_star_above_the_measured_scale_is_refused() -> None:
    _, sample = guard(None, langevin(1), beta_star=2.0)
    with pytest.raises(ConfigError, match="beta = beta_star / output_scale = 2 / 1 = 2"):
        sample(Energy(), torch.randn(16, 2))


# -- what cannot be told --------------------------------------------------------------------------


UNTOLD: dict[str, tuple[Any, str]] = {
    **{x: (LOOPS[x].sample, LOOPS[x].why) for x in ("no noise", "noise of numpy", "momentum")},
    "one step, rounded": (
        lambda f, x: langevin(1, steps=1)(f, x).bfloat16().float(),
        "more than the gradient and the noise",
    ),
    "another method": (lambda f, x: langevin(1)(f.classify, x), "never called Energy.forward"),
    "compiled": (torch.compile(langevin(1), backend="eager"), "compiled by torch.compile"),
}


@pytest.mark.parametrize("name", UNTOLD)
def test_what_cannot_be_told_is_said_once_and_stays_as_it_is(name: str, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "ebmguard")
    sampler, why = UNTOLD[name]
    f, x = Energy(), torch.randn(16, 2)
    loss, sample = g = guard(None, sampler, beta_star=0.5, model=f)
    for _ in range(7):
        for seed in (torch.manual_seed, np.random.seed):
            seed(1)
        found = sample(f, x)
        loss(f(x), f(found))
        for seed in (torch.manual_seed, np.random.seed):
            seed(1)
        assert torch.equal(found, sampler(f, x))
    (said,) = [each for each in caplog.records if "not be measured" in each.getMessage()]
    assert why in said.getMessage()
    assert "pass output_scale=" in said.getMessage()
    assert why in next(str(each) for each in g.check() if each.name == "no_output_scale")
    assert (said.levelno == logging.INFO) == (name == "no noise")


@pytest.mark.parametrize(("o", "is_refused"), [(1, True), (20_000, False)])
def test_a_call_that_is_not_tempered_is_refused_where_it_matters(
    o: float, is_refused: bool
) -> None:
    """A picture of JEM's drawn from a copy is the same to 2.5e-5."""
    f, x = Energy(), torch.randn(16, 2)
    _, sample = guard(None, lambda f, net, x: langevin(o)(net, x), beta_star=0.5, model=f)
    sample(f, f, x)
    if is_refused:
        with pytest.raises(SamplerError, match="never called"):
            sample(f, copy.deepcopy(f), x)
    else:
        sample(f, copy.deepcopy(f), x)


@pytest.mark.parametrize(("heads", "of"), [(10, lambda f: f.mean(1)), (1, lambda f: f[:, 0] / 5)])
def test_a_scale_that_is_not_that_of_the_losss_energy_is_refused(
    heads: int, of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def sampler(f: Any, x: Tensor) -> Tensor:
        return unit_langevin(lambda z: of(f(z)), x)

    for scale in (None, 1.0):
        f = nn.Linear(2, heads)
        loss, sample = guard(None, sampler, beta_star=0.01, output_scale=scale, model=f)
        x = torch.randn(16, 2)
        right = pytest.raises(ConfigError, match="of the loss: output_scale=1")
        with nullcontext() if scale else right:
            loss(of(f(x)), of(f(sample(f, x))))
    assert "output_scale = 1" not in caplog.text
