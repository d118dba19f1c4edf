"""At beta* = 0 a guarded run is the unguarded one, bit for bit.

Compiled energies are tempered too, and a new beta or a new call compiles nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from ebmguard import Level, guard
from ebmguard.objective import contrastive_loss
from tests.parts import (
    Energy,
    Script,
    difference,
    energies,
    get_sample_q,
    gradient_at,
    langevin,
    rising_difference,
)
from tests.runs import Run, Training, begin, train

N_STEPS = 52


def begun(
    loss_fn: Any = None,
    *,
    told: Mapping[str, Any] | None = None,
    inline: bool = False,
    reweights: bool = False,
    **options: Any,
) -> Run:
    """A run with a guard.

    Args:
        told: what the guard is told beside the model and the optimizer; None tells it of neither.
        inline: the sampler asks the guard by itself.
        reweights: the loss stays the trainer's own.
    """
    run = begin()
    attach = None if told is None else {"model": run.model, "optimizer": run.optimizer, **told}
    g = run.guard(loss_fn, None if inline else run.sampler, attach=attach, **options)
    run.sampler = get_sample_q(temper=g.temper) if inline else g.sampler
    run.loss_fn = run.loss_fn if reweights else g.loss_fn
    return run


def trained(n: int = N_STEPS, **options: Any) -> Run:
    run = begun(**options)
    more: Any = {"reweight": run.guards[0].reweight} if options.get("reweights") else {}
    return train(run, n, negate=options.get("convention") == "energy", **more)


@pytest.fixture(scope="module")
def unguarded() -> Run:
    return train(begin(), N_STEPS)


SCALE: Any = {"beta_star": 0, "output_scale": 20_000}
JEM: Any = {"step_size": 1.0, "noise_std": 0.01}
ENERGY: Any = {"beta_star": 0, "convention": "energy"}
OFF: dict[str, dict[str, Any]] = {
    "attached": {"told": {}, **SCALE},
    "nothing attached": {"beta_star": 0},
    # Slow steps copy and register hooks, and the run does not notice.
    "all that is known": {"told": {"clamp": (-1, 1), **JEM}, **SCALE},
    "the trainer's own loss": {"loss_fn": difference, "beta": 0, "told": {}, **JEM},
    "energy convention": ENERGY,
    "energy convention, the trainer's own loss": {"loss_fn": rising_difference, **ENERGY},
    "reweighted energies": {"reweights": True, **SCALE},
    "inline sampler": {"inline": True, **SCALE},
    "a schedule": {"beta_star": lambda step: 0.0, "output_scale": 20_000},
}


@pytest.mark.parametrize("name", OFF)
def test_off(unguarded, tmp_path, name):
    run = trained(**OFF[name], log_dir=tmp_path)
    assert run.equals(unguarded)
    assert run.memories[0].steps == list(range(N_STEPS))
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == N_STEPS
    if name == "all that is known":
        watched = {"sampler/clamped", "sampler/drift_to_noise", "optim/grad_norm"}
        assert watched <= set(run.guards[0].last)


def test_alerts_with_warn_change_nothing(unguarded, caplog):
    run = begun(beta_star=0, told={}, action="warn")
    Script(dict.fromkeys(range(N_STEPS), Level.ERROR)).watches(run.guards[0])
    with caplog.at_level(logging.CRITICAL, "ebmguard"):
        assert train(run, N_STEPS).equals(unguarded)
    assert len(run.guards[0].alerts) == N_STEPS


# -- compiled energies -----------------------------------------------------------------------------

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


class Counter:
    """The eager backend, counting what it is given."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, example_inputs):
        self.graphs += 1
        return graph.forward


def run(module, f, x, *, sampler=gradient_at):
    """Five steps of a beta that moves; returns gradient over untempered gradient, per step."""
    betas = [0.1, 0.2, 0.3, 0.4, 0.5]
    g = guard(None, sampler, beta_star=lambda t: betas[min(t, 4)], output_scale=1.0, model=module)
    ratios = []
    plain = gradient_at(f, x)
    for _ in betas:
        ratios.append((g.sampler(f, x) / plain).mean().item())
        g.loss_fn(*energies())
    return ratios, plain, g


EXPECTED = pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5], rel=1e-5)


def test_compiled_in_place():
    counter, x = Counter(), torch.randn(3, 2)
    f = Energy()
    f.compile(backend=counter)
    before = vars(f)["_compiled_call_impl"]
    ratios, plain, g = run(f, f, x)
    assert ratios == EXPECTED
    # One graph without the factor and one with it, whatever its value.
    assert counter.graphs == 2
    assert torch.equal(gradient_at(f, x), plain)
    assert counter.graphs == 2
    assert vars(f)["_compiled_call_impl"] is before
    assert "forward" not in vars(f)
    norm = plain.norm(dim=1).mean().item()
    assert g.last["sampler/grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_module_inside_a_compiled_function():
    counter, x = Counter(), torch.randn(3, 2)
    f = Energy()
    score = torch.compile(lambda x: f(x), backend=counter)
    ratios, plain, g = run(f, score, x)
    assert ratios == EXPECTED
    assert counter.graphs == 2
    assert torch.equal(gradient_at(score, x), plain)
    # Nothing inside compiled code can be watched.
    assert g.last["sampler/grad_norm"] != g.last["sampler/grad_norm"]


# -- what torch.compile counts ---------------------------------------------------------------------


def counted() -> dict[str, dict[str, Any]]:
    """Frames, graphs, captured calls and breaks since the last reset."""
    return {name: dict(own) for name, own in counters.items() if own}


def counted_in_training(beta_star, *, in_place: bool) -> dict[str, dict[str, Any]]:
    """The same of six guarded steps of sampling and training."""
    torch.compiler.reset()
    counters.clear()
    f = Energy()
    net = torch.compile(f, backend="eager")
    if in_place:
        f.compile(backend="eager")
        net = f
    training = Training(langevin, f=net, model=None, beta_star=beta_star, output_scale=4.0)
    training.go(6)
    return counted()


@pytest.mark.parametrize(
    ("schedule", "in_place"),
    [
        (lambda step: 0.1 * step, True),  # from the standard loss on
        (lambda step: torch.tensor(0.5 + 0.1 * step), False),
    ],
)
def test_a_schedule_compiles_what_a_constant_does(schedule, in_place):
    constant = counted_in_training(1.0, in_place=in_place)
    assert constant["stats"]["unique_graphs"] > 0
    assert counted_in_training(schedule, in_place=in_place) == constant


def test_a_compiled_loss_takes_beta_star_as_a_tensor():
    compiled = torch.compile(contrastive_loss, backend="eager")
    found = []
    for beta_star in (0.5, 0.7, 0.0, 1.1):
        pos, neg = energies()
        loss = compiled(pos, neg, torch.tensor(beta_star))
        right = contrastive_loss(pos, neg, torch.tensor(beta_star))
        torch.testing.assert_close(loss, right)
        torch.testing.assert_close(
            torch.autograd.grad(loss, (pos, neg)), torch.autograd.grad(right, (pos, neg))
        )
        found.append(counted())
    assert found == found[:1] * 4
    assert found[0]["stats"]["unique_graphs"] == 1
    assert "graph_break" not in found[0]
