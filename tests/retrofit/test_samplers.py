"""Every kind of sampler runs on (1 - beta) f, and on f again once it is over; nested calls too."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ebmguard import guard
from ebmguard.errors import ConfigError, SamplerError
from tests.parts import Bowl, gradient_at

# beta = 1/4, so that the sampler runs on 3/4 of the energy.
QUARTER: Any = {"beta_star": 0.5, "output_scale": 2.0}
X = torch.tensor([[1.0, -2.0], [0.5, 3.0], [0.0, 1.0]], dtype=torch.float64)


def is_tempered(gradient: torch.Tensor) -> bool:
    return torch.allclose(gradient, -0.75 * X, rtol=1e-12, atol=0)


def is_plain(gradient: torch.Tensor) -> bool:
    return torch.equal(gradient, -X)


class Model(Bowl):
    """An energy that samples from itself."""

    def sample(self, x):
        return gradient_at(self, x)


class Wrapper(nn.Module):
    """What DistributedDataParallel is to its module."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


class Proposal(nn.Module):
    def forward(self, f, x):
        return gradient_at(f, x)


class Chains:
    """A sampler object in the manner of the deep-energy tutorials."""

    def __init__(self, model):
        self.model, self.examples = model, [1, 2]

    def sample_new(self, x):
        return self.generate(self.model, x)

    def untouched(self, x):
        return gradient_at(self.model, x)

    generate = staticmethod(gradient_at)
    __call__ = sample_new


# Of an energy the sampler, what the guard is told of it, and the arguments of a call.
KINDS: dict[str, Callable[[Model], tuple[Any, Any, tuple[Any, ...]]]] = {
    "function": lambda f: (gradient_at, None, (f, X)),
    "method of an object that has the energy": lambda f: (Chains(f).sample_new, None, (X,)),
    "closure": lambda f: (lambda x: gradient_at(f, x), f, (X,)),
    "method of an object": lambda f: (Chains(f).untouched, f, (X,)),
    "method of the energy": lambda f: (f.sample, None, (X,)),
    "partial of the samples": lambda f: (functools.partial(gradient_at, x=X), None, (f,)),
    "callable object": lambda f: (Chains(f), f, (X,)),
    "module": lambda f: (Proposal(), None, (f, X)),
    "forward by name": lambda f: (
        lambda f, x: gradient_at(lambda x: f.forward(x), x),
        None,
        (f, X),
    ),
    "outer wrapper": lambda f: (gradient_at, None, (Wrapper(f), X)),
    "the module inside, which the wrapper calls": lambda f: (gradient_at, f, (Wrapper(f), X)),
}


@pytest.mark.parametrize("name", KINDS)
def test_it_runs_on_the_tempered_energy_and_on_the_plain_one_once_it_is_over(name):
    f = Model()
    sampler, model, args = KINDS[name](f)
    g = guard(None, sampler, model=model, **QUARTER)
    assert is_tempered(g.sampler(*args))
    assert is_plain(g.sampler.original(*args))
    assert is_plain(sampler(*args))
    assert is_plain(gradient_at(f, X))
    g.close()
    told_later = guard(None, sampler, **QUARTER).attach(model=model)
    assert is_tempered(told_later.sampler(*args))


def test_arguments_may_be_given_by_name():
    f = Bowl()
    g = guard(None, gradient_at, **QUARTER)
    assert is_tempered(g.sampler(f=f, x=X))
    assert is_tempered(g.sampler(f=f.forward, x=X))
    assert is_tempered(guard(None, functools.partial(gradient_at, f=f), **QUARTER).sampler(x=X))
    assert g.sampler.__name__ == "gradient_at"
    # Of a module it is none, which frameworks would register as one.
    of_module = guard(None, Proposal(), **QUARTER).sampler
    assert of_module.training
    assert not isinstance(of_module, nn.Module)


def test_method_guarded_in_the_body_of_its_class():
    g = guard(None, None, **QUARTER)

    class Model(Bowl):
        def draw(self, x):
            return gradient_at(self, x)

        loss_fn, sample = guard(None, draw, **QUARTER)

    first, second = Model(), Model()
    assert is_tempered(first.sample(X))
    assert is_tempered(second.sample(X))
    assert is_plain(first.draw(X))
    assert is_tempered(Model.sample(first, X))
    with pytest.raises(ConfigError, match="guarded already"):
        guard(None, first.sample, **QUARTER)
    with pytest.raises(ConfigError, match="guarded already"):
        guard(None, functools.partial(Model.sample, first), **QUARTER)
    assert g.step == 0


def test_an_objects_methods_are_tempered_and_its_attributes_pass_through_both_ways():
    chains = Chains(Bowl())
    told: Any = {"methods": ("sample_new", "generate"), "model": chains.model}
    sampler = guard(None, chains, **told, **QUARTER).sampler
    assert is_tempered(sampler.sample_new(X))
    assert is_tempered(sampler.generate(chains.model, X))
    assert is_plain(sampler.untouched(X))
    assert is_plain(sampler.sample_new.original(X))
    assert is_plain(sampler.original.sample_new(X))
    assert sampler.examples is chains.examples
    sampler.examples = "new"
    assert chains.examples == "new"
    with pytest.raises(AttributeError, match="missing"):
        _ = sampler.missing
    assert copy.copy(sampler).original is chains


def test_results_arguments_and_side_effects_are_the_samplers_own():
    seen = SimpleNamespace(calls=[])

    def sampler(f, x, *rest, flag=False, **more):
        seen.calls.append((rest, flag, more))
        return gradient_at(f, x), "status", {"k": 1}

    result = guard(None, sampler, **QUARTER).sampler(Bowl(), X, 1, 2, flag=True, z=3)
    assert is_tempered(result[0])
    assert result[1:] == ("status", {"k": 1})
    assert seen.calls == [((1, 2), True, {"z": 3})]


def test_sampler_is_left_as_it_is_where_only_beta_star_is_given():
    f = Bowl()
    g = guard(None, lambda x: gradient_at(f, x), beta_star=2.0)
    assert is_plain(g.sampler(X))  # a closure, and no model= needed


# -- pauses, nested calls and several modules ----------------------------------------------------


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


def test_temper_inside_a_guarded_sampler_is_refused():
    g = guard(None, lambda f, x: gradient_at(lambda x: g.temper(f(x)), x), **QUARTER)
    with pytest.raises(SamplerError, match="twice"):
        g.sampler(Bowl(), X)


def test_of_two_modules_that_a_sampler_moves_one_is_the_energy():
    f, h = Bowl(), Bowl()
    g = guard(None, lambda f, h, x: (gradient_at(f, x), gradient_at(h, x)), model=f, **QUARTER)
    of_f, of_h = g.sampler(f, h, X)
    assert is_tempered(of_f)
    assert is_plain(of_h)
