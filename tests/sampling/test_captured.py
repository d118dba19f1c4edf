"""Samplers that are captured as a CUDA graph: replays temper by the factor of their own call."""

from __future__ import annotations

import copy
import functools
import gc
import math
import weakref
from typing import Any

import pytest
import torch
from torch.func import grad, vmap

from ebmguard import guard
from ebmguard.errors import LossError, SamplerError
from ebmguard.samplers import sgld
from ebmguard.sampling import Tempering
from tests.parts import Bowl, Bowls, Energy, energies, gradient_at
from tests.replay import Replay, count_replays_as_graphs

STEPS = 7
SCALE: Any = {"output_scale": 2.0}
X = torch.tensor([[3.0, 4.0], [0.0, 2.0], [0.6, 0.8]], dtype=torch.float64)


@pytest.fixture(autouse=True)
def _replays_count_as_graphs(monkeypatch):
    count_replays_as_graphs(monkeypatch)


def eager(f, x, refinement=1):
    """Four steps of Langevin dynamics, each split into some finer ones."""
    steps = 4 * refinement
    noise = torch.linspace(-1, 1, steps * x.numel(), dtype=x.dtype, device=x.device)
    sizes: Any = {"step_size": 0.3 / refinement, "noise_std": 0.1 / math.sqrt(refinement)}
    return sgld(f, x, steps=steps, noise=noise.reshape(steps, *x.shape), **sizes)


class Captured:
    """The same sampler, captured in its first call and replayed in all of them."""

    def __init__(self, sampler=eager, warm_up=True):
        self.sampler = sampler
        self.graph: Any = None
        self.x: Any = None
        self.out: Any = None
        self.warm_up = warm_up

    def __call__(self, f, x):
        if self.graph is None:
            self.x = x.clone()
            self.capture(f)
        self.x.copy_(x)
        self.graph.replay()
        return self.out.clone()

    def capture(self, f):
        if self.warm_up:
            self.sampler(f, self.x)
        self.graph = Replay()
        with self.graph:
            self.out = self.sampler(f, self.x)


class OnGpu(Captured):
    def capture(self, f):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.sampler(f, self.x)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = self.sampler(f, self.x)


def members():
    """For samples (3, B, 2)."""
    return Bowls(torch.tensor([1.0, 2.0, 3.0]))


def run(sampler, f, shape, beta_star, change=None, device="cpu", **options):
    """Samples and gradient norms of some steps under a guard."""
    g = guard(None, sampler, beta_star=beta_star, **SCALE, **options)
    found = []
    for step in range(STEPS):
        if change is not None:
            change(step)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        samples = g.sampler(f, x.to(device))
        members = shape[:1] if len(shape) == 3 else ()
        pos, neg = (each.to(device).expand(*members, -1) for each in energies(dtype=torch.float64))
        g.loss_fn(pos, neg)
        found.append((samples, g.last["sampler/grad_norm"]))
    return found


def same(captured, reference):
    for (x, norm), (x_reference, norm_reference) in zip(captured, reference, strict=True):
        torch.testing.assert_close(x, x_reference, rtol=1e-12, atol=1e-12)
        assert norm == pytest.approx(norm_reference, rel=1e-6)


def networks():
    f = Energy(dtype=torch.float64)
    return f, copy.deepcopy(f)


@pytest.mark.parametrize(
    ("beta_star", "warm_up"),
    [
        (-1.0, False),
        (lambda step: 0.3 * step, True),  # starts as the plain sampler
        (torch.tensor(0.5), True),
        (lambda step: 0.7 if step % 2 else torch.tensor(0.2), False),
    ],
)
def test_replays_are_the_eager_sampler(beta_star, warm_up):
    f, again = networks()
    captured = run(Captured(warm_up=warm_up), f, (5, 2), beta_star)
    reference = run(eager, again, (5, 2), beta_star)
    if not warm_up:  # no norm has a value while the graph is captured
        captured[0] = captured[0][0], reference[0][1]
    same(captured, reference)


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


def test_members_of_an_ensemble():
    first = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    beta_star: Any = lambda step: first / (1 + step)  # noqa: E731
    captured = run(Captured(), members(), (3, 5, 2), beta_star)
    same(captured, run(eager, members(), (3, 5, 2), beta_star))


def test_untempered_while_paused_and_in_the_original_after_an_error_too():
    f, again = networks()
    g = guard(None, Captured(), beta_star=0.5, **SCALE)
    x = torch.randn(5, 2, dtype=torch.float64)
    tempered, plain = g.sampler(f, x), eager(again, x)
    with g.paused():
        assert torch.allclose(g.sampler(f, x), plain, rtol=1e-12)
    assert torch.allclose(g.sampler.original(f, x), plain, rtol=1e-12)
    assert torch.equal(g.sampler(f, x), tempered)
    assert not torch.allclose(tempered, plain)
    with pytest.raises(RuntimeError, match="match the broadcast shape"):
        g.sampler(f, x.expand(7, 5, 2))
    assert torch.allclose(g.sampler.original(f, x), plain, rtol=1e-12)


def refined(sampler_of):
    """A sampler whose refinement changes from step to step."""
    schedule = iter([1, 1, 2, 2, 1, 1, 1])
    return lambda f, x: sampler_of(next(schedule))(f, x)


def finer(refinement):
    return functools.partial(eager, refinement=refinement)


def test_each_refinement_has_a_graph_of_its_own():
    f, again = networks()
    graphs = {r: Captured(finer(r)) for r in (1, 2)}
    captured = run(refined(graphs.get), f, (5, 2), 0.5)
    assert all(math.isfinite(norm) for _, norm in captured)
    same(captured, run(refined(finer), again, (5, 2), 0.5))


def in_vmap(f, x):
    return vmap(grad(lambda x: f(x[None]).sum()))(x)


STARTS = {"a": X, "b": 2 * X, "wide": torch.cat([X, 3 * X]), "eager": 4 * X[:2], "vmap": 5 * X}


@pytest.mark.parametrize(
    "order",
    [
        *([], ["a"], ["wide", "a"], ["a", "wide"], ["wide", "b", "a", "b"]),
        *(["eager", "a"], ["wide", "eager"], ["vmap", "a"], ["a", "vmap"]),
    ],
    ids="-".join,
)
def test_of_several_graphs_the_one_replayed_last_is_read(order):
    """Mean and maximum of |x|, also where batches differ; unknown where no norm can be told."""
    f = Bowl()
    tempering = Tempering(f)
    calls: dict[str, Any] = {name: Captured(gradient_at) for name in ("a", "b", "wide")}
    calls |= {"eager": gradient_at, "vmap": in_vmap}
    for name in ("a", "b", "wide", "a"):
        with tempering.active(0.25):
            calls[name](f, STARTS[name])
    before = tempering.gradients.norm
    assert before is not None
    values = before.clone()
    with tempering.active(0.5):
        for name in order:
            calls[name](f, STARTS[name])
    assert torch.equal(before, values)  # later replays write elsewhere
    drift = tempering.gradients.norm
    if "vmap" in order:
        assert drift is None
        return
    assert drift is not None
    if not order:
        assert drift.isnan().all()
        return
    expected = 0.5 * STARTS[order[-1]].norm(dim=1)
    torch.testing.assert_close(drift.mean(), expected.mean(), rtol=1e-12, atol=0)
    torch.testing.assert_close(drift.max(), expected.max(), rtol=1e-12, atol=0)
    assert tempering.gradients.entries == 2


@pytest.mark.parametrize("order", [("own", "shared"), ("shared", "own")])
def test_samples_that_members_share_have_no_norms_in_a_graph_either(order):
    f, starts = members(), {"own": torch.ones(3, 5, 2), "shared": torch.ones(5, 2)}
    graphs = {name: Captured(gradient_at) for name in starts}
    tempering = Tempering(f, batch_dim=1)
    for names in (["own"], ["shared"], order):
        with tempering.active(1.0):
            for name in names:
                graphs[name](f, starts[name].double())
    curvature = [1.0, 2.0, 3.0] if order[-1] == "own" else [math.nan] * 3
    expected = math.sqrt(2) * torch.tensor(curvature, dtype=torch.float64)[:, None].expand(3, 5)
    torch.testing.assert_close(
        tempering.gradients.norm, expected, rtol=1e-12, atol=0, equal_nan=True
    )


def test_number_of_entries_is_unknown_where_graphs_differ_in_it():
    f, graphs = Bowl(), {d: Captured(gradient_at) for d in (2, 3)}
    g = guard(None, lambda f, x: graphs[x.shape[1]](f, x), beta_star=0.5, **SCALE)
    g.attach(step_size=0.3, noise_std=0.1)
    ratios = []
    for d in (2, 2, 3, 3, 2):
        g.sampler(f, torch.ones(4, d, dtype=torch.float64))
        g.loss_fn(*energies(dtype=torch.float64))
        assert g.last["sampler/grad_norm"] == pytest.approx(math.sqrt(d))
        ratios.append(g.last["sampler/drift_to_noise"])
    assert [math.isnan(ratio) for ratio in ratios] == [False, False, True, True, True]


def test_the_graph_replayed_last_is_found_without_waiting(monkeypatch):
    """On the device `meta` whatever reads a value on the host raises."""
    capturing = True
    monkeypatch.setattr("ebmguard.sampling.tempering.is_capturing", lambda: capturing)
    f = Bowl().to("meta")
    tempering = Tempering(f)
    for x in (X, STARTS["wide"]):
        with tempering.active(0.5):
            gradient_at(f, x.to("meta"))
    capturing = False
    with tempering.active(0.5):
        gradient_at(f, X.to("meta"))
    assert tempering.gradients.norm is not None
    assert tempering.gradients.norm.shape == (6,)
    assert tempering.gradients.norm.is_meta


def test_guarded_calls_inside_a_capture_are_refused_and_plain_ones_stay_plain():
    g, f = guard(None, eager, beta_star=0.5, **SCALE), Bowl()
    x, before = torch.ones(2, 2, dtype=torch.float64), dict(vars(f))
    with g.paused(), Replay() as graph:
        sampled, output = g.sampler(f, x), g.temper(f(x))
    graph.replay()
    assert torch.equal(sampled, eager(f, x))
    assert torch.equal(output, f(x))
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


def test_modules_that_take_turns_keep_their_graphs_and_are_not_kept_alive():
    f, again = networks()
    g, other = guard(None, lambda sampler, f, x: sampler(f, x), beta_star=0.5, **SCALE), Bowl()
    x, sampler = torch.randn(5, 2, dtype=torch.float64), Captured()
    first = g.sampler(sampler, f, x)
    for _ in range(2):
        g.sampler(eager, other, x)
        assert torch.equal(g.sampler(sampler, f, x), first)
    assert not torch.allclose(first, eager(again, x))
    gone = weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None


def test_factor_of_another_shape_is_refused():
    f, sampler = members(), Captured()
    tempering = Tempering(f)
    x = torch.randn(3, 5, 2, dtype=torch.float64)
    with tempering.active(0.5):
        sampler(f, x)
    wide = torch.full((3, 1), 0.5)
    with pytest.raises(SamplerError, match=r"shape \(\), and now .* shape \(3, 1\)"):  # noqa: SIM117
        with tempering.active(wide):
            pass
    assert "forward" not in vars(f)
    with tempering.active(torch.tensor(0.25)):
        tempered = sampler(f, x)
    with Tempering(f).active(torch.full((3, 1), 0.25)):
        torch.testing.assert_close(eager(f, x), tempered, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: captures CUDA graphs")
@pytest.mark.parametrize(
    "beta_star", [0.5, lambda step: 0.3 * step, lambda step: torch.tensor(0.3 * step).cuda()]
)
def test_on_a_gpu(beta_star, monkeypatch):
    monkeypatch.undo()  # the real question, not the stand-in's
    f, again = (network.cuda() for network in networks())
    graphs = {r: OnGpu(finer(r)) for r in (1, 2)}
    options: Any = {"device": "cuda", "judge_in_loss": True}
    captured = run(refined(graphs.get), f, (5, 2), beta_star, **options)
    same(captured, run(refined(finer), again, (5, 2), beta_star, **options))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_nothing_is_compiled_during_the_capture(monkeypatch):
    """Compiling is not allowed there; the warm-up of the capture must have done it all."""
    # No replay here: PyTorch compiles nothing while one records.
    capturing = False
    monkeypatch.setattr("ebmguard.sampling.tempering.is_capturing", lambda: capturing)
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
    g = guard(None, captured, beta_star=0.5, **SCALE)
    x = torch.randn(5, 2, dtype=torch.float64)
    samples = g.sampler(f, x)
    assert compiled_during_the_capture == [False]
    expected = guard(None, eager, beta_star=0.5, **SCALE).sampler(again, x)
    torch.testing.assert_close(samples, expected, rtol=1e-12, atol=1e-12)
    torch.compiler.reset()
