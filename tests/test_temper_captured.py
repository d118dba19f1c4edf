"""Samplers that are captured as a CUDA graph: replays temper by the factor of their own call."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from ebmguard import guard
from ebmguard.errors import LossError, SamplerError
from ebmguard.samplers import sgld
from ebmguard.tempering.tempering import Tempering
from tests.guard.parts import Bowl, Energy, energies
from tests.replay import Replay, count_replays_as_graphs

STEPS = 6
SCALE: Any = {"output_scale": 2.0}


@pytest.fixture(autouse=True)
def _replays_count_as_graphs(monkeypatch):
    count_replays_as_graphs(monkeypatch)


def eager(f, x):
    noise = torch.linspace(-1, 1, 4 * x.numel(), dtype=x.dtype).reshape(4, *x.shape)
    return sgld(f, x, steps=4, step_size=0.3, noise_std=0.1, noise=noise)


class Captured:
    """The same chain, captured in its first call and replayed in all of them."""

    def __init__(self, warm_up=True):
        self.graph: Any = None
        self.x: Any = None
        self.out: Any = None
        self.warm_up = warm_up

    def __call__(self, f, x):
        if self.graph is None:
            self.x = x.clone()
            if self.warm_up:
                eager(f, self.x)
            self.graph = Replay()
            with self.graph:
                self.out = eager(f, self.x)
        self.x.copy_(x)
        self.graph.replay()
        return self.out.clone()


class Members(nn.Module):
    """Three bowls of curvature 1, 2, 3 on samples (3, B, 2)."""

    def forward(self, x):
        curvature = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
        return -0.5 * curvature[:, None] * x.square().sum(-1)


def run(sampler, f, shape, beta_star, change=None):
    """Samples and gradient norms of some steps under a guard."""
    g = guard(None, sampler, beta_star=beta_star, **SCALE)
    found = []
    for step in range(STEPS):
        if change is not None:
            change(step)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        samples = g.sampler(f, x)
        members = shape[:1] if len(shape) == 3 else ()
        pos, neg = energies(dtype=torch.float64)
        g.loss_fn(pos.expand(*members, -1), neg.expand(*members, -1))
        found.append((samples, g.last["sampler/grad_norm"]))
    return found


def same(captured, reference):
    for (x, norm), (x_reference, norm_reference) in zip(captured, reference, strict=True):
        torch.testing.assert_close(x, x_reference, rtol=1e-12, atol=1e-12)
        assert norm == pytest.approx(norm_reference, rel=1e-6)


def networks():
    f = Energy(dtype=torch.float64)
    again = Energy(dtype=torch.float64)
    again.load_state_dict(f.state_dict())
    return f, again


@pytest.mark.parametrize("warm_up", [True, False])
@pytest.mark.parametrize(
    "beta_star",
    [
        0.0,
        0.5,
        -1.0,
        lambda step: 0.3 * step,  # starts as the plain sampler
        lambda step: 1.5 - 0.3 * step,  # ends as the plain sampler
        torch.tensor(0.5),
        torch.tensor(0.5, dtype=torch.float64),
        lambda step: torch.tensor(0.3 * step),
        lambda step: 0.7 if step % 2 else torch.tensor(0.2),
    ],
)
def test_replays_are_the_eager_sampler(beta_star, warm_up):
    f, again = networks()
    captured = run(Captured(warm_up), f, (5, 2), beta_star)
    reference = run(eager, again, (5, 2), beta_star)
    same(captured[1:], reference[1:])
    torch.testing.assert_close(captured[0][0], reference[0][0], rtol=1e-12, atol=1e-12)
    if warm_up:  # without it no norm has a value while the graph is captured
        assert captured[0][1] == pytest.approx(reference[0][1], rel=1e-6)


def test_factor_acts_at_all():
    """The comparison above would be empty if the chains did not depend on β*."""
    f, again = networks()
    (x, _), *_ = run(Captured(), f, (5, 2), 0.5)
    (plain, _), *_ = run(Captured(), again, (5, 2), 0.0)
    assert (x - plain).abs().max() > 1e-3


def test_what_a_replay_does_not_show_is_unknown():
    """Of a replay only the gradient norm can be read; what was captured is not what has run."""
    f, again = networks()
    rows: list[list[dict[str, float]]] = []
    for sampler, network in ((Captured(), f), (eager, again)):
        g = guard(None, sampler, beta_star=0.5, **SCALE).attach(step_size=0.3, noise_std=0.1)
        rows.append([])
        for step in range(2):
            x = torch.full((5, 2), 0.5 + step, dtype=torch.float64)
            g.sampler(network, x)
            g.loss_fn(*energies(dtype=torch.float64))
            rows[-1].append(g.last)
    captured, reference = rows
    for row, right in zip(captured, reference, strict=True):
        assert right["sampler/evaluations"] == 4
        assert math.isnan(row["sampler/evaluations"])
        ratio = right["sampler/drift_to_noise"]
        assert row["sampler/drift_to_noise"] == pytest.approx(ratio, rel=1e-6)
    assert math.isnan(captured[0]["sampler/acceptance"])
    assert 0 < reference[0]["sampler/acceptance"] <= 1


@pytest.mark.parametrize("scheduled", [False, True])
def test_members_of_an_ensemble(scheduled):
    first = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    beta_star: Any = (lambda step: first / (1 + step)) if scheduled else first
    captured = run(Captured(), Members(), (3, 5, 2), beta_star)
    same(captured, run(eager, Members(), (3, 5, 2), beta_star))


def test_tensor_that_the_caller_changes():
    f, again = networks()
    found = []
    for sampler, network in ((Captured(), f), (eager, again)):
        beta_star = torch.tensor(0.0, dtype=torch.float64)
        change = lambda step, beta=beta_star: beta.fill_(0.3 * step)  # noqa: E731
        found.append(run(sampler, network, (5, 2), beta_star, change))
    same(*found)


def test_untempered_while_paused_and_in_the_original():
    f, again = networks()
    g = guard(None, Captured(), beta_star=0.5, **SCALE)
    x = torch.randn(5, 2, dtype=torch.float64)
    tempered = g.sampler(f, x)
    with g.paused():
        assert torch.allclose(g.sampler(f, x), eager(again, x), rtol=1e-12)
    assert torch.allclose(g.sampler.original(f, x), eager(again, x), rtol=1e-12)
    assert torch.equal(g.sampler(f, x), tempered)
    assert not torch.allclose(tempered, eager(again, x))


def test_factor_is_one_after_an_error_too():
    f = Energy(dtype=torch.float64)
    g, x = guard(None, Captured(), beta_star=0.5, **SCALE), torch.randn(5, 2, dtype=torch.float64)
    g.sampler(f, x)
    with pytest.raises(RuntimeError, match="match the broadcast shape"):
        g.sampler(f, x.expand(7, 5, 2))
    assert torch.allclose(g.sampler.original(f, x), eager(f, x), rtol=1e-12)


def test_untempered_guard_may_have_its_sampler_captured():
    f, again = networks()
    g = guard(None, Captured(), beta_star=0.5)  # no output scale: the sampler stays as it is
    x = torch.randn(5, 2, dtype=torch.float64)
    for _ in range(3):
        assert torch.allclose(g.sampler(f, x), eager(again, x), rtol=1e-12)


def test_eager_and_captured_calls_may_alternate():
    f, again = networks()
    captured, calls = Captured(), iter(range(STEPS))

    def either(f, x):
        return captured(f, x) if next(calls) % 2 else eager(f, x)

    def beta_star(step):
        return 0.3 * step

    same(run(either, f, (5, 2), beta_star), run(eager, again, (5, 2), beta_star))


def test_norm_is_nan_where_the_latest_graph_is_not_replayed():
    """One cannot tell which graph ran: an old norm must not pass for a new one."""
    f, first, second = Bowl(), Captured(), Captured()
    tempering = Tempering(f)
    x = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    for sampler in (first, second, first):
        with tempering.active(0.5):
            sampler(f, x)
    assert tempering.reached
    assert tempering.grad_norm is not None
    assert tempering.grad_norm.isnan().all()
    with tempering.active(0.5):
        second(f, x)
    assert tempering.grad_norm.isfinite().all()


def test_norm_of_one_call_is_not_overwritten_by_the_next():
    f, sampler = Bowl(), Captured()
    tempering = Tempering(f)
    x = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    norms = []
    for start in (x, x, 2 * x):
        with tempering.active(1.0):
            sampler(f, start)
        norms.append(tempering.grad_norm)
    assert norms[0] == norms[1]
    assert norms[1] != norms[2]


def test_graph_that_the_guard_did_not_see_is_refused():
    f, sampler = Energy(dtype=torch.float64), Captured()
    x = torch.randn(5, 2, dtype=torch.float64)
    sampler(f, x)  # captured before the guard, on the plain energy
    with pytest.raises(SamplerError, match=r"never called Energy\.forward"):
        guard(None, sampler, beta_star=0.5, **SCALE).sampler(f, x)


def test_guarded_calls_inside_a_capture_are_refused():
    g, f = guard(None, eager, beta_star=0.5, **SCALE), Bowl()
    x, before = torch.ones(2, 2, dtype=torch.float64), dict(vars(f))
    with pytest.raises(SamplerError, match="capture and replay inside that"), Replay():
        g.sampler(f, x)
    assert vars(f) == before
    g.sampler(f, x)
    with pytest.raises(LossError, match="outside of them at every step"), Replay():
        g.loss_fn(*energies())
    # Whatever the kind of β*: the step would stand still, and the replays would not be seen.
    for beta_star in (0.5, torch.tensor(0.5)):
        inline = guard(None, None, beta_star=beta_star, **SCALE)
        with pytest.raises(SamplerError, match="capture and replay inside that"), Replay():
            inline.temper(f(x))
        assert inline.step == 0


def test_plain_calls_inside_a_capture_stay_plain():
    g, f = guard(None, eager, beta_star=0.5, **SCALE), Bowl()
    x = torch.ones(2, 2, dtype=torch.float64)
    with g.paused(), Replay() as graph:
        sampled, output = g.sampler(f, x), g.temper(f(x))
    graph.replay()
    assert torch.equal(sampled, eager(f, x))
    assert torch.equal(output, f(x))


def test_modules_that_take_turns_keep_their_graphs():
    f, again = networks()
    g, other = guard(None, lambda sampler, f, x: sampler(f, x), beta_star=0.5, **SCALE), Bowl()
    x, sampler = torch.randn(5, 2, dtype=torch.float64), Captured()
    first = g.sampler(sampler, f, x)
    for _ in range(2):
        g.sampler(eager, other, x)
        assert torch.equal(g.sampler(sampler, f, x), first)
    assert not torch.allclose(first, eager(again, x))


def test_a_module_is_not_kept_alive():
    f = Bowl()
    g, gone = guard(None, eager, beta_star=0.5, **SCALE), weakref.ref(f)
    g.sampler(f, torch.randn(5, 2, dtype=torch.float64))
    del f
    gc.collect()
    assert gone() is None


def test_factor_of_another_shape_is_refused():
    f, sampler = Members(), Captured()
    tempering = Tempering(f)
    x = torch.randn(3, 5, 2, dtype=torch.float64)
    with tempering.active(0.5):
        sampler(f, x)
    wide = torch.full((3,), 0.5)
    with pytest.raises(SamplerError, match=r"shape \(\), and now .* shape \(3,\)"):  # noqa: SIM117
        with tempering.active(wide):
            pass
    assert "forward" not in vars(f)
    with tempering.active(torch.tensor(0.25)):
        tempered = sampler(f, x)
    with Tempering(f).active(torch.full((3,), 0.25)):
        torch.testing.assert_close(eager(f, x), tempered, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: captures CUDA graphs")
@pytest.mark.parametrize(
    "beta_star", [0.5, lambda step: 0.3 * step, lambda step: torch.tensor(0.3 * step).cuda()]
)
def test_on_a_gpu(beta_star, monkeypatch):
    monkeypatch.undo()  # the real question, not the stand-in's
    f, again = (network.cuda() for network in networks())
    noise = torch.randn(4, 5, 2, dtype=torch.float64).cuda()
    settings: Any = {"steps": 4, "step_size": 0.3, "noise_std": 0.1, "noise": noise}
    static, graph = torch.zeros(5, 2, dtype=torch.float64).cuda(), torch.cuda.CUDAGraph()
    out: list[Any] = []

    def captured(f, x):
        static.copy_(x)
        if not out:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                sgld(f, static, **settings)
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph):
                out.append(sgld(f, static, **settings))
        graph.replay()
        return out[0].clone()

    found = []
    for sampler, network in ((captured, f), (lambda f, x: sgld(f, x, **settings), again)):
        g, steps = guard(None, sampler, beta_star=beta_star, judge_in_loss=True, **SCALE), []
        for step in range(STEPS):
            x = torch.full((5, 2), 0.1 * step, dtype=torch.float64).cuda()
            samples = g.sampler(network, x)
            pos, neg = energies(dtype=torch.float64)
            g.loss_fn(pos.cuda(), neg.cuda())
            steps.append((samples, g.last["sampler/grad_norm"]))
        found.append(steps)
    same(*found)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("beta_star", [0.0, 0.5])
def test_nothing_is_compiled_during_the_capture(monkeypatch, beta_star):
    """Compiling is not allowed there; the warm-up of the capture must have done it all."""
    # No replay here: PyTorch compiles nothing while one records.
    capturing = False
    monkeypatch.setattr("ebmguard.tempering.tempering.is_capturing", lambda: capturing)
    compiled_during_the_capture = []

    def backend(graph, example_inputs):
        compiled_during_the_capture.append(capturing)
        return graph.forward

    def captured(f, x):
        nonlocal capturing
        eager(f, x)
        capturing = True
        samples = eager(f, x)
        capturing = False
        return samples

    torch.compiler.reset()
    f, again = networks()
    f.compile(backend=backend)
    g = guard(None, captured, beta_star=beta_star, **SCALE)
    x = torch.randn(5, 2, dtype=torch.float64)
    samples = g.sampler(f, x)
    assert compiled_during_the_capture == [False]
    expected = guard(None, eager, beta_star=beta_star, **SCALE).sampler(again, x)
    torch.testing.assert_close(samples, expected, rtol=1e-12, atol=1e-12)
    torch.compiler.reset()
