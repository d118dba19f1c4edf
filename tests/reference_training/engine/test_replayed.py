"""A guard's calls as CUDA graphs show what they show as they are, on stand-ins everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ebmguard import guard
from ebmguard.errors import DivergenceError
from ebmguard.reference_training.engine import graphs
from ebmguard.reference_training.engine.graphs import Replayed
from ebmguard.samplers import sgld
from tests.reference_training.parts import CPU
from tests.replay import capture_as_replays

G, N, M = 3, 7, 5


@pytest.fixture
def stand_ins(monkeypatch):
    """CUDA graphs by replayed CPU operations."""
    capture_as_replays(monkeypatch)


def labels(step):
    rng = torch.Generator().manual_seed(step)
    return torch.randint(3, (N,), generator=rng), torch.randint(3, (M,), generator=rng)


def densities(step):
    rng = torch.Generator().manual_seed(step)
    return torch.randn(N, generator=rng), torch.randn(M, generator=rng)


SINGLE: dict[str, dict[str, Any]] = {
    "default": {"beta_star": 0.7},
    "off": {"beta_star": 0.0},
    "no_pos": {"beta_star": 0.7, "variant": "no_pos"},
    "batch": {"beta_star": 0.7, "variant": "batch"},
    "true": {"beta_star": 0.7, "variant": "true"},
    "energy": {"beta_star": 0.7, "convention": "energy"},
    "numbers": {"beta_star": lambda step: 0.1 * (1 + step)},
    "tensors": {"beta_star": lambda step: torch.tensor(0.1 * step)},
    "late": {"beta_star": 0.7, "judge_in_loss": False},
    "chosen": {"output_scale": 20.0},
    "sampler": {"beta_star": 0.7, "output_scale": 20.0},
    "raise": {"beta_star": 0.7, "action": "raise"},
}
MODELS: dict[str, dict[str, Any]] = {
    "members": {"beta_star": torch.tensor([0.0, 0.5, 1.0])},
    "members' sampler": {"beta_star": torch.tensor([0.0, 0.5, 1.0]), "output_scale": 20.0},
    "of variants": {"beta_star": torch.ones(G), "variant": ("default", "true", "batch")},
}
BESIDE: dict[str, dict[str, Any]] = {"groups": {"groups": labels}, "log_q": {"log_q": densities}}
GUARDS = [
    *[pytest.param(told, {}, (), id=name) for name, told in SINGLE.items()],
    *[pytest.param(told, {}, (G,), id=name) for name, told in MODELS.items()],
    *[pytest.param(SINGLE["default"], own, (), id=name) for name, own in BESIDE.items()],
]


class Bowl(nn.Module):
    """Energies of samples of three entries."""

    def forward(self, x):
        return -x.square().sum(-1)


def sample_bowl(f, x0, generator):
    return sgld(f, x0, steps=2, step_size=0.1, noise_std=0.1, generator=generator)


def guarded_run(told, beside, models, compute=None, steps=8):
    """What the steps of a guarded training show, of two losses each: all of it, to the bit."""
    bowl = Bowl()
    given_sampler = sample_bowl if "output_scale" in told else None
    g = guard(None, given_sampler, **told)
    if compute is not None:
        g.compute = compute
    weight = nn.Parameter(torch.ones(models))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    g.attach(optimizer=optimizer)
    if given_sampler is not None:
        g.attach(step_size=0.1, noise_std=0.1, clamp=(-1.0, 1.0))
    _, sample_q = g
    shown: list[Any] = []
    for step in range(steps):
        rng = torch.Generator().manual_seed(step)
        losses = []
        if given_sampler is not None:
            x0 = torch.randn(*models, M, 3, generator=rng)
            x0[..., 0, 0] = torch.nan if step == 6 else 0.0
            # The last two calls return the same samples.
            sample_q(bowl, x0, torch.Generator().manual_seed(min(step, 6)))
        for shift in (0.0, 1.0):
            f_pos, f_neg = (torch.randn(*models, n, generator=rng) + shift for n in (N, M))
            if step == 5:
                f_neg[..., 0] = torch.nan
            f = [weight.unsqueeze(-1) * x if models else weight * x for x in (f_pos, f_neg)]
            given: dict[str, Any] = {name: of(step) for name, of in beside.items()}
            losses.append(g.loss(f[0], f[1], **given))
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        try:
            optimizer.step()
        except DivergenceError as error:
            shown.append(str(error))
            break
        assert weight.grad is not None
        numbers = [x.tolist() for x in (*losses, weight.grad)]
        shown += map(repr, (*numbers, g.last, g.members))
    shown += [repr(g.alerts), repr(g.state_dict())]
    g.close()
    return shown


@pytest.mark.parametrize(("told", "beside", "models"), GUARDS)
@pytest.mark.usefixtures("stand_ins")
def test_a_guard_shows_the_same_bits_where_its_calls_are_replayed(told, beside, models):
    replays = Replayed(CPU)
    found = guarded_run(told, beside, models, replays)
    assert found == guarded_run(told, beside, models)
    captured = {key[0] for key in replays._graphs}
    # At β* = 0 there is no loss of the guard's to capture, and the host makes the numbers.
    star = told.get("beta_star", 0.0)
    is_off = not isinstance(star, torch.Tensor) and star == 0.0
    assert ("loss_and_numbers" in captured) == (told is not SINGLE["numbers"] and not is_off)
    assert ("sample_marks" in captured) == ("output_scale" in told)


def test_calls_themselves_on_a_cpu():
    g = guard(None, None, beta_star=0.5)
    g.compute = Replayed(CPU)
    f = torch.arange(3.0, requires_grad=True)
    (slope,) = torch.autograd.grad(g.loss(f, f.clone()), f, create_graph=True)
    assert slope.requires_grad


@pytest.mark.usefixtures("stand_ins")
def test_a_result_is_the_callers_and_its_gradient_is_scaled():
    def spread(x, power):
        return {"loss": (x**power).sum(), "names": ("a",), "whole": x.detach().round().long()}

    call = Replayed(CPU)
    kept = []
    for step in range(5):
        x = torch.tensor([1.0 + step, 2.0]).requires_grad_()
        found = call(spread, x, 2)
        (3 * found["loss"]).backward()
        torch.testing.assert_close(x.grad, 6 * x.detach(), rtol=0, atol=0)
        kept.append(found)
        assert call(spread, x[:1], 3)["loss"] == (1.0 + step) ** 3  # another graph
    assert [found["loss"].item() for found in kept] == [5.0, 8.0, 13.0, 20.0, 29.0]
    assert [found["whole"].tolist() for found in kept] == [[1 + step, 2] for step in range(5)]
    assert kept[3]["names"] == ("a",)
    (again,) = torch.autograd.grad(kept[4]["loss"] * 1.0, x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        again.sum().backward()


@pytest.mark.usefixtures("stand_ins")
def test_constants_that_never_come_again_fill_no_memory(monkeypatch):
    monkeypatch.setattr(graphs, "_MOST_GRAPHS", 4)
    call = Replayed(CPU)
    for power in range(20):
        assert call(torch.pow, torch.tensor(2.0), power) == 2.0**power
    assert not call._graphs
    for step in range(30):
        assert call(torch.pow, torch.tensor(2.0), step // 3) == 2.0 ** (step // 3)
    assert len(call._graphs) == 4
