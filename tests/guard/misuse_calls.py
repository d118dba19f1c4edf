"""Mistakes with samplers, energies, losses and the rest of the trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ebmguard.errors import ConfigError, EnergyTypeError, LossError, SamplerError, ShapeError
from tests.guard.misuse_world import NEG, POS, Case, World, X
from tests.parts import gradient_at


def generator(f, x):
    yield gradient_at(f, x)


async def coroutine(f, x):
    return gradient_at(f, x)


def hidden_generator(f, x):
    return (gradient_at(f, x) for _ in range(2))


class Chains:
    def __init__(self, f):
        self.f = f

    def sample_new(self, x):
        return gradient_at(self.f, x)

    def stream(self, x):
        yield gradient_at(self.f, x)


def softplus(pos, neg):
    return nn.functional.softplus(neg.mean() - pos.mean())


def wrong_way(pos, neg):
    return pos.mean() - neg.mean()


def sampled(w: World, sampler: Any, *args: Any, **options: Any) -> Any:
    return w.guard(None, sampler, **options).sampler(*args)


def nested(w: World) -> Any:
    inner = w.guard(None, gradient_at)
    return w.guard(None, lambda f, x: inner.sampler(f, x)).sampler(w.f, X)


# Arguments that guard() and attach() refuse alike, with what they say.
TOLD: list[tuple[dict[str, Any], str]] = [
    ({"model": 1}, "model= is a int; expected the torch.nn.Module"),
    ({"optimizer": nn.Identity()}, "optimizer= is a Identity; expected a torch Optimizer"),
    ({"scheduler": "cosine"}, "scheduler= is a str; expected an object with state_dict"),
    ({"scheduler": torch.optim.lr_scheduler.StepLR}, "scheduler= is the class StepLR"),
    ({"ema": 0.999}, "ema= is a float; expected an object with state_dict"),
    ({"scaler": "fp16"}, r"scaler= is a str; expected a torch.amp.GradScaler"),
    ({"scaler": torch.amp.GradScaler("cpu")}, "scaler= needs the optimizer that it scales"),
    ({"buffer": 10_000}, "buffer= is a int; expected a tensor of rows, a list of tensors, or"),
    ({"buffer": torch.zeros(())}, "buffer= is a Tensor; expected a tensor of rows"),
    ({"buffer": [torch.zeros(3), 4]}, "buffer= is a list; expected a tensor of rows"),
    ({"generators": torch.Generator()}, "generators= is a Generator; expected a list of"),
    ({"generators": [0]}, "generators= holds a int; expected torch.Generators"),
    ({"clamp": 1.0}, r"clamp=1.0; expected the lowest and the highest value.*\(-1, 1\)"),
    ({"clamp": (1.0, -1.0)}, r"clamp=\(1.0, -1.0\); expected the lowest and the highest"),
    ({"clamp": (0.0, 0.0)}, "expected the lowest and the highest"),
    ({"clamp": (0.0, float("nan"))}, "expected the lowest and the highest"),
    ({"clamp": (0, 1, 2)}, "expected the lowest and the highest"),
    ({"sgld_steps": 0}, "sgld_steps=0; expected the number of SGLD steps"),
    ({"sgld_steps": 2.5}, "sgld_steps=2.5; expected the number of SGLD steps"),
    ({"steps_argument": "steps"}, "steps_argument= needs sgld_steps="),
    ({"step_size": "large", "noise_std": 0.1}, "step_size='large' is a str"),
    ({"step_size": -1.0, "noise_std": 0.1}, "step_size=-1.*above 0|step_size=-1; it must be pos"),
    ({"step_size": 1.0, "noise_std": -0.1}, "noise_std=-0.1; expected a number of 0 or more"),
    ({"step_size": float("inf"), "noise_std": 0.1}, "step_size=inf; expected a finite number"),
]
MISTOLD: list[tuple[str, Any, type[Exception], str]] = [
    (f"{how}({', '.join(told)}) {i}", mistake, ConfigError, message)
    for i, (told, message) in enumerate(TOLD)
    for how, mistake in (
        ("attach", lambda w, told=told: w.guard().attach(**told)),
        ("guard", lambda w, told=told: w.guard(**{"output_scale": None} | told)),
    )
] + [
    (
        "optimizer of another network",
        lambda w: w.guard().attach(model=w.f, optimizer=w.optimizer(w.h)),
        ConfigError,
        "trains none of the model's parameters",
    ),
    (
        "optimizer of another network, at once",
        lambda w: w.guard(model=w.f, optimizer=w.optimizer(w.h)),
        ConfigError,
        "trains none of the model's parameters",
    ),
]

CALLS = [
    Case(*case)
    for case in [
        # The sampler, at once.
        (
            "generator",
            lambda w: w.guard(None, generator),
            SamplerError,
            "is a generator or coroutine.*g.temper",
        ),
        ("coroutine", lambda w: w.guard(None, coroutine), SamplerError, "generator or coroutine"),
        (
            "generator method",
            lambda w: w.guard(None, Chains(w.f), methods=("stream",)),
            SamplerError,
            "generator or coroutine",
        ),
        ("not callable", lambda w: w.guard(None, 5), ConfigError, "is a int, which cannot be"),
        (
            "object without methods=",
            lambda w: w.guard(None, Chains(w.f)),
            ConfigError,
            r"Name the methods that draw samples.*sample_new, stream",
        ),
        (
            "unknown method",
            lambda w: w.guard(None, Chains(w.f), methods=("sample",)),
            ConfigError,
            "has no method sample; it has sample_new, stream",
        ),
        (
            "methods as a string",
            lambda w: w.guard(None, Chains(w.f), methods="sample_new"),
            ConfigError,
            r"expected a sequence of names, e.g. \('sample_new',\)",
        ),
        (
            "methods of a function",
            lambda w: w.guard(None, gradient_at, methods=("__call__",)),
            ConfigError,
            "this is a function",
        ),
        ("methods of nothing", lambda w: w.guard(methods=("a",)), ConfigError, "pass the sampler"),
        (
            "class",
            lambda w: w.guard(None, Chains),
            ConfigError,
            r"the class Chains.*Chains\(\.\.\.\)",
        ),
        (
            "guarded sampler",
            lambda w: w.guard(None, w.guard(None, gradient_at).sampler),
            ConfigError,
            "guarded already.*sampler.original",
        ),
        ("guarded loss", lambda w: w.guard(w.guard().loss_fn), ConfigError, "guarded already"),
        # The sampler, when it runs.
        (
            "generator that does not look like one",
            lambda w: sampled(w, hidden_generator, w.f, X),
            SamplerError,
            "generator or coroutine",
        ),
        (
            "no module",
            lambda w: sampled(w, lambda x: gradient_at(w.f, x), X),
            SamplerError,
            r"No energy module.*guard\(\.\.\., model=f\)",
        ),
        (
            "two modules",
            lambda w: sampled(w, lambda f, h, x: gradient_at(f, x), w.f, w.h, X),
            SamplerError,
            r"2 modules .*Energy, Energy.*which one is the energy.*model=f",
        ),
        (
            "never reaches forward",
            lambda w: sampled(w, lambda f, x: gradient_at(f.classify, x), w.f, X),
            SamplerError,
            r"never called Energy.forward.*g\.temper\(energy\)",
        ),
        (
            "samples from a copy",
            lambda w: sampled(w, lambda f, x: gradient_at(w.h, x), w.f, X),
            SamplerError,
            "never called Energy.forward.*a copy",
        ),
        (
            "energies in a tuple",
            lambda w: sampled(w, lambda f, x: f(x)[0], w.pair, X),
            SamplerError,
            r"returned a tuple.*Return only the energy.*g\.temper\(energy\)",
        ),
        ("nested guards", nested, SamplerError, "Two guards sample from the same module at once"),
        (
            "loss without sampling",
            lambda w: w.guard(None, gradient_at).loss_fn(POS, NEG),
            SamplerError,
            r"the guarded sampler never was.*pass sampler=None",
        ),
        # The energies.
        ("integers", lambda w: w.loss(POS.int()), EnergyTypeError, "f_pos has dtype torch.int32"),
        ("a list", lambda w: w.loss(POS, [1.0]), EnergyTypeError, "f_neg is of type list"),
        ("means", lambda w: w.loss(POS.mean(), NEG.mean()), ShapeError, r"before `\.mean\(\)`"),
        (
            "broadcast",
            lambda w: w.loss(POS[:, None], NEG),
            ShapeError,
            "would broadcast to a matrix. Squeeze",
        ),
        (
            "heads",
            lambda w: w.loss(torch.ones(4, 3), torch.ones(4, 2)),
            ShapeError,
            "both must agree",
        ),
        ("no samples", lambda w: w.loss(POS, NEG[:0]), ShapeError, r"shape \(0,\): it holds no"),
        (
            "members",
            lambda w: w.loss(beta_star=torch.ones(2)),
            ShapeError,
            r"must have shape \(2, samples\); got \(4,\)",
        ),
        ("one positive", lambda w: w.loss(POS[:1], variant="true"), ShapeError, "at least two"),
        ("labels", lambda w: w.loss(POS, NEG, (POS, POS)), ShapeError, r"y_neg has shape \(4,\)"),
        (
            "labels in a variant without",
            lambda w: w.loss(POS, NEG, (POS, NEG), variant="batch"),
            ConfigError,
            'groups are defined for variant="default"',
        ),
        (
            "reweighted means",
            lambda w: w.guard().reweight(POS, NEG.mean()),
            ShapeError,
            "f_neg is a",
        ),
        # The loss.
        (
            "not affine",
            lambda w: w.loss(loss_fn=softplus),
            LossError,
            "add the other terms outside",
        ),
        ("sign", lambda w: w.loss(loss_fn=wrong_way), LossError, "pass convention='energy'"),
        (
            "sign of energies",
            lambda w: w.loss(loss_fn=lambda p, n: -wrong_way(p, n), convention="energy"),
            LossError,
            "pass convention='log_density'",
        ),
        # What it is told of the rest of the trainer.
        *MISTOLD,
        (
            "foreign state",
            lambda w: w.guard().load_state_dict({}),
            ConfigError,
            "Not a guard's state",
        ),
    ]
]
