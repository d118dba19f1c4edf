"""Misuse: every case raises its own error, says what to do, and leaves everything as it was."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ebmguard import Guard, errors, guard
from ebmguard.errors import ConfigError, EnergyTypeError, LossError, SamplerError, ShapeError
from tests.parts import Energy, Memory, gradient_at, rising_difference

X = torch.ones(3, 2)
POS, NEG = torch.ones(4), torch.zeros(5)


class Pair(Energy):
    def forward(self, x):
        return super().forward(x), x


@dataclass
class World:
    """What a mistake could damage."""

    folder: Path
    f: Energy = field(default_factory=Energy)
    h: Energy = field(default_factory=Energy)
    pair: Pair = field(default_factory=lambda: Pair())
    memory: Memory = field(default_factory=Memory)
    guards: list[Guard] = field(default_factory=list)

    def guard(self, loss_fn: Any = None, sampler: Any = None, **options: Any) -> Guard:
        defaults: dict[str, Any] = {"beta_star": 1.0, "output_scale": 10.0}
        options = defaults | {"sinks": [self.memory]} | options
        self.guards.append(guard(loss_fn, sampler, **options))
        return self.guards[-1]

    def attach(self, **parts: Any) -> Any:
        return self.guard().attach(**parts)

    def loss(self, pos: Any = POS, neg: Any = NEG, groups: Any = None, **options: Any) -> Any:
        return self.guard(**options).loss_fn(pos, neg, groups)

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=0.1)


def unwritable(w: World) -> Any:
    (w.folder / "file").write_text("not a folder")
    try:
        return w.guard(log_dir=w.folder / "file" / "logs")
    finally:
        (w.folder / "file").unlink()


class Chains:
    def __init__(self, f):
        self.f = f

    def sample_new(self, x):
        return gradient_at(self.f, x)


def sampled(w: World, sampler: Any, *args: Any, **options: Any) -> Any:
    return w.guard(None, sampler, **options).sampler(*args)


# Arguments that guard() and attach() refuse alike, with what they say.
TOLD: list[tuple[dict[str, Any], str]] = [
    ({"model": 1}, "model= is a int; expected the torch.nn.Module"),
    ({"energy": len}, "energy= is a builtin_function_or_method; expected the name"),
    ({"optimizer": nn.Identity()}, "optimizer= is a Identity; expected a torch Optimizer"),
    ({"scheduler": "cosine"}, "scheduler= is a str; expected an object with state_dict"),
    ({"ema": 0.999}, "ema= is a float; expected an object with state_dict"),
    ({"scaler": "fp16"}, r"scaler= is a str; expected a torch.amp.GradScaler"),
    ({"scaler": torch.amp.GradScaler("cpu")}, "scaler= needs the optimizer that it scales"),
    ({"buffer": torch.zeros(())}, "buffer= is a Tensor; expected a tensor of rows"),
    ({"buffer": [torch.zeros(3), 4]}, "buffer= is a list; expected a tensor of rows"),
    ({"generators": [0]}, "generators= holds a int; expected torch.Generators"),
    ({"clamp": 1.0}, r"clamp=1.0; expected the lowest and the highest value.*\(-1, 1\)"),
    ({"clamp": (1.0, -1.0)}, r"clamp=\(1.0, -1.0\); expected the lowest and the highest"),
    ({"clamp": (0.0, float("nan"))}, "expected the lowest and the highest"),
    ({"sgld_steps": 0}, "sgld_steps=0; expected the number of SGLD steps"),
    ({"steps_argument": "steps"}, "steps_argument= needs sgld_steps="),
    ({"step_size": "large", "noise_std": 0.1}, "step_size='large' is a str"),
    ({"step_size": -1.0, "noise_std": 0.1}, "step_size=-1; expected a number above 0"),
    ({"step_size": 1.0, "noise_std": -0.1}, "noise_std=-0.1; expected a number of 0 or more"),
    ({"step_size": float("inf"), "noise_std": 0.1}, "step_size=inf; expected a finite number"),
]
# How strong: of nothing else, with what is said of a mistake there.
STRENGTHS: list[tuple[dict[str, Any], str]] = [
    ({"beta": 0.1, "beta_star": 1.0}, "Pass one of beta_star= and beta=, or none"),
    ({"beta_star": math.nan}, "beta_star=nan; expected a finite number"),
    ({"beta_star": "0.5"}, "is '0.5'; expected a number, Tensor, a function or None"),
    ({"beta_star": 1e-31}, "too small for its inverse"),
    ({"beta_star": torch.tensor([1.0, math.nan])}, r"are not finite at step 0: \[1.0, nan\]"),
    ({"beta_star": torch.tensor([1, 2])}, "dtype torch.int64 .* expected floating point"),
    ({"beta_star": torch.ones(0)}, r"shape \(0,\); expected .* one entry for each model"),
    ({"beta_star": lambda step: None}, r"beta_star\(step=0\)=None is a NoneType"),
    ({"beta": 0.1}, r"beta= needs the output scale: add output_scale=.*beta_star="),
    ({"beta": 1.5, "output_scale": 5}, "= 1.5 at step 0 is above 1: the sampler would run"),
    ({"beta_star": 6, "output_scale": 5}, "beta = beta_star / output_scale = 6 / 5 = 1.2 at"),
    ({"beta": torch.tensor([0.5, 1.5]), "output_scale": 4}, "6 / 4 = 1.5 at step 0 is"),
    ({"beta_star": 1, "sampler_scale": torch.tensor(-0.5)}, "sampler_scale=-0.5 at step 0"),
    ({"beta_star": 1, "output_scale": 0}, "output_scale=0; it must be positive"),
    ({"beta_star": 1, "output_scale": math.inf}, "output_scale=inf; expected a finite"),
    (
        {"beta_star": 1, "output_scale": 2, "step_size": 1, "noise_std": 0.01},
        "output_scale=2 contradicts step_size and noise_std, which mean .* = 20000",
    ),
    ({"beta_star": 1, "step_size": 1}, "step_size= and noise_std= go together"),
    (
        {"beta_star": 1, "step_size": 1, "noise_std": 0},
        "without noise has no output scale. Leave both out",
    ),
    ({"beta_star": 1, "sampler_scale": math.nan}, "sampler_scale=nan"),
    (
        {"beta_star": torch.ones(3), "sampler_scale": torch.ones(2)},
        r"shape \(2,\), but beta_star has model dimensions \(3,\)",
    ),
    ({"beta_star": 1, "sampler_scale": lambda step: "x"}, r"sampler_scale\(step=0\)='x'"),
]
# What guard() alone takes beside that.
ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"convention": "logp"}, "one of 'log_density', 'energy'"),
    ({"variant": "fancy"}, "'default', 'no_pos', 'batch'"),
    ({"action": "stop"}, "expected one of 'auto', 'warn', 'raise'"),
    ({"loss_fn": 3.0}, r"loss_fn= is float\(\); expected a function of \(f_pos, f_neg\)"),
    ({"flush_every": 0}, "flush_every=0; expected"),
    ({"reference_beta_star": 0}, "uniform weights"),
    ({"sinks": [3]}, "is no sink"),
    *(({"substeps": x}, "substeps=.*; expected a whole number") for x in (0, True, 2.5)),
]

NONE: dict[str, Any] = {"beta_star": None, "output_scale": None}
TRAINS_NONE = "trains none of the model's parameters"
Mistake = Callable[[World], Any]
# By error, a mistake and a regular expression for what is said of it.
MISUSES: dict[type[Exception], list[tuple[Mistake, str]]] = {
    ConfigError: [
        (unwritable, "cannot be written: Not a directory"),
        # The sampler.
        (
            lambda w: w.guard(None, Chains(w.f)),
            r"Name the methods that draw samples.*sample_new",
        ),
        (
            lambda w: w.guard(None, Chains(w.f), methods=("sample",)),
            "has no method sample; it has sample_new",
        ),
        (lambda w: w.guard(None, gradient_at, methods=("__call__",)), "this is a function"),
        (lambda w: w.guard(methods=("a",)), "pass the sampler"),
        (lambda w: w.guard(None, Chains), r"the class Chains.*Chains\(\.\.\.\)"),
        (
            lambda w: w.guard(None, w.guard(None, gradient_at).sampler),
            "guarded already.*sampler.original",
        ),
        (lambda w: w.guard(w.guard().loss_fn), "guarded already"),
        (
            lambda w: w.loss(POS, NEG, (POS, NEG), variant="batch"),
            'groups are defined for variant="default"',
        ),
        *((partial(World.guard, **NONE | told), words) for told, words in STRENGTHS),
        *((partial(World.guard, **told), words) for told, words in ARGUMENTS),
        *((partial(World.guard, output_scale=None, **told), words) for told, words in TOLD),
        *((partial(World.attach, **told), words) for told, words in TOLD),
        (lambda w: w.attach(model=w.f, optimizer=w.optimizer(w.h)), TRAINS_NONE),
        (lambda w: w.guard(model=w.f, optimizer=w.optimizer(w.h)), TRAINS_NONE),
        (lambda w: w.guard().load_state_dict({}), "Not a guard's state"),
    ],
    SamplerError: [
        # No module, and two.
        (lambda w: sampled(w, lambda x: gradient_at(w.f, x), X), "No energy module.*model=f"),
        (
            lambda w: sampled(w, lambda f, h, x: gradient_at(f, x), w.f, w.h, X),
            r"2 modules .*Energy, Energy.*which one is the energy.*model=f",
        ),
        # One that never reaches forward, samples from a copy, or gets energies in a tuple.
        (
            lambda w: sampled(w, lambda f, x: gradient_at(f.classify, x), w.f, X),
            r"never called Energy.forward.*g\.temper\(energy\)",
        ),
        (
            lambda w: sampled(w, lambda f, x: gradient_at(w.h, x), w.f, X),
            "never called Energy.forward.*a copy",
        ),
        (
            lambda w: sampled(w, lambda f, x: f(x)[0], w.pair, X),
            r"returned a tuple.*Return only the energy.*g\.temper\(energy\)",
        ),
        (
            lambda w: w.guard(None, gradient_at).loss_fn(POS, NEG),
            r"the guarded sampler never was.*pass sampler=None",
        ),
    ],
    EnergyTypeError: [
        (lambda w: w.loss(POS.int()), "f_pos has dtype torch.int32"),
    ],
    ShapeError: [
        (lambda w: w.loss(POS.mean(), NEG.mean()), r"before `\.mean\(\)`"),
        (lambda w: w.loss(POS[:, None], NEG), "would broadcast to a matrix. Squeeze"),
        (lambda w: w.loss(POS, NEG[:0]), r"shape \(0,\): it holds no"),
        (
            lambda w: w.loss(beta_star=torch.ones(2)),
            r"must have shape \(2, samples\); got \(4,\)",
        ),
        (lambda w: w.loss(POS[:1], variant="true"), "at least two"),
        (lambda w: w.loss(POS, NEG, (POS, POS)), r"y_neg has shape \(4,\)"),
    ],
    LossError: [
        (lambda w: w.loss(loss_fn=rising_difference), "pass convention='energy'"),
    ],
}


@pytest.mark.parametrize(
    ("error", "mistake", "message"),
    [(error, *case) for error, cases in MISUSES.items() for case in cases],
)
def test_misuse(error, mistake, message, tmp_path):
    world = World(tmp_path)
    before = [dict(vars(module)) for module in (world.f, world.h)]
    rng = torch.get_rng_state()
    with pytest.raises(error, match=f"(?s){message}") as caught:
        mistake(world)
    assert isinstance(caught.value, errors.EbmguardError)
    assert type(caught.value) is error
    assert len(str(caught.value)) > 35  # what was wrong, and what to do
    # Nothing has changed.
    for g in world.guards:
        assert g.step == 0
        assert g.last == {}
        assert g.alerts == []
        assert g.trainer == type(g.trainer)()
        assert g.state_dict()["losses"] == g.state_dict()["sampler_calls"] == 0
        g.close()
    assert world.memory.rows == []
    assert world.memory.alerts == []
    assert [dict(vars(module)) for module in (world.f, world.h)] == before
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(torch.get_rng_state(), rng)
