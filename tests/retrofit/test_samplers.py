"""Every kind of sampler runs on (1 - beta) f, and on f again once it is over.

A guard that is made once an epoch is told, and other runs are left alone.
"""

from __future__ import annotations

import copy
import functools
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ebmguard import Guard, guard
from ebmguard.errors import ConfigError, SamplerError
from ebmguard.recovery import Recovery
from tests.parts import Bowl, Energy, gradient_at

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


# -- pauses, nested calls and several modules ------------------------------------------------------


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


# -- one guard for a run ---------------------------------------------------------------------------


class Sampler:
    def __call__(self, f: Any, x: torch.Tensor) -> torch.Tensor:
        return gradient_at(f, x)

    def sample(self, f: Any, x: torch.Tensor) -> torch.Tensor:
        return gradient_at(f, x)


class Trainer:
    """Each epoch makes a guard."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.kept = folder, list[Guard]()
        self.new()

    def new(self) -> None:
        self.f = Energy()
        self.optimizer = torch.optim.Adam(self.f.parameters())

    def epoch(self, sampler: Any = gradient_at, **options: Any) -> Guard:
        loss, sample = g = guard(None, sampler, beta_star=0.5, output_scale=1, **options)
        for _ in range(2):
            loss(self.f(torch.randn(4, 2)), self.f(sample(self.f, torch.randn(4, 2)))).backward()
            self.optimizer.step()
        return g

    @property
    def told(self) -> dict[str, Any]:
        return {"model": self.f, "optimizer": self.optimizer}

    def side_by_side(self) -> None:
        """A guard for each term of a loss."""
        self.new()
        pair = [guard(None, gradient_at, beta_star=0, **self.told) for _ in range(2)]
        for _ in range(2):
            for loss, sample in pair:
                loss(self.f(torch.randn(4, 2)), self.f(sample(self.f, torch.randn(4, 2))))
            self.optimizer.step()

    def another_run(self) -> None:
        self.new()
        self.kept.append(self.epoch(**self.told))

    def recorded(self) -> None:
        self.new()
        recovery = Recovery(folder=self.folder)
        told = {**self.told, "action": "rollback", "recovery": recovery}
        self.kept.append(self.epoch(**told, buffer=torch.zeros(1, 2)))


KEPT = Sampler()
REFUSED: dict[str, tuple[Callable[[Trainer], Any], str]] = {
    "kept": (lambda t: t.kept.append(t.epoch(**t.told)), "The optimizer, Adam, has a guard"),
    "nothing told, dropped": (lambda t: t.epoch() and None, "The sampler, gradient_at, has"),
    "a sampler's object": (lambda t: t.kept.append(t.epoch(KEPT)), "The sampler, Sampler, has"),
    "its method": (lambda t: t.epoch(KEPT.sample) and None, r"The sampler, Sampler\.sample, has"),
    "a folder": (lambda t: t.kept.append(guard(None, None, log_dir=t.folder)), "log_dir="),
    "a folder of snapshots": (Trainer.recorded, "Recovery: folder="),
}
ALLOWED: dict[str, Callable[[Trainer], Any]] = {
    "closed": lambda t: t.epoch(**t.told).close(),
    "another run": Trainer.another_run,
    "side by side": Trainer.side_by_side,
    "never used": lambda t: guard(None, gradient_at, **t.told) and None,
    "samples alone": lambda t: t.kept.append(guard(None, gradient_at, beta_star=0)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_guard_that_is_made_once_an_epoch(tmp_path: Path, name: str) -> None:
    make, what = REFUSED[name]
    trainer = Trainer(tmp_path / "run")
    make(trainer)
    with pytest.raises(ConfigError, match=f"{what}(?s:.*)once, before the loop over epochs"):
        make(trainer)


@pytest.mark.parametrize("name", ALLOWED)
def test_another_run_is_no_second_guard(tmp_path: Path, name: str) -> None:
    trainer = Trainer(tmp_path / "run")
    for _ in range(3):
        ALLOWED[name](trainer)


def test_who_means_another_run_asks_once_more(tmp_path: Path) -> None:
    """Nothing else could be said of a guard that is gone."""
    trainer = Trainer(tmp_path)
    trainer.epoch(**trainer.told)
    with pytest.raises(ConfigError, match=r"call guard\(\.\.\.\) once more"):
        trainer.epoch(**trainer.told)
    trainer.epoch(**trainer.told)


class Module(torch.nn.Module):
    """It has the guarded sampler, and a contrastive part of its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.net, self.lock = Energy(), threading.Lock()
        self.loss, self.sampler = guard(self.contrast, gradient_at, **options)

    def contrast(self, f_pos: torch.Tensor, f_neg: torch.Tensor) -> torch.Tensor:
        with self.lock:
            return f_neg.mean() - f_pos.mean()


def test_a_loss_that_knows_the_sampler_keeps_no_guard_alive(tmp_path: Path) -> None:
    """By reference counting alone: the folder is free again at once."""
    gc.disable()
    try:
        for _ in range(3):
            module = Module(log_dir=tmp_path)
            del module.loss
            del module
    finally:
        gc.enable()


def test_a_copy_of_what_holds_the_sampler_copies_no_loss() -> None:
    module = Module()
    del module.lock
    held = {"sampler": module.sampler, "net": module.net}
    module.lock = threading.Lock()  # which nothing can copy
    copied = copy.deepcopy(held)
    assert torch.equal(
        copied["sampler"](copied["net"], torch.ones(2, 2)),
        module.sampler(module.net, torch.ones(2, 2)),
    )


def test_a_guard_that_goes_inside_an_optimizers_step_breaks_none() -> None:
    f = Energy()
    optimizer = torch.optim.SGD(f.parameters(), lr=0.1)
    held = [guard(model=f, optimizer=optimizer)]
    optimizer.step(lambda: held.pop().loss(f(torch.randn(4, 2)), f(torch.randn(4, 2))))
    assert not held
