"""Compiled energies are tempered too, and a new beta or a new call compiles nothing."""

from __future__ import annotations

import pytest
import torch

from ebmguard import guard
from tests.guard.parts import Energy, energies, gradient_at

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
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


def test_compiled_wrapper():
    counter, x = Counter(), torch.randn(3, 2)
    f = Energy()
    compiled = torch.compile(f, backend=counter)
    ratios, plain, _ = run(compiled, compiled, x)
    assert ratios == EXPECTED
    assert torch.equal(gradient_at(f, x), plain)
    assert counter.graphs == 1


def test_compiled_wrapper_found_among_the_arguments():
    compiled = torch.compile(Energy(), backend="aot_eager")
    ratios, _, _ = run(None, compiled, torch.randn(3, 2))
    assert ratios == EXPECTED
    assert "forward" in vars(compiled)  # the wrapper's own, put back


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
