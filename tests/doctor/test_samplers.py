"""What is read out of a sampling loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ebmguard.doctor.facts import Facts
from ebmguard.doctor.source import Source
from ebmguard.doctor.values import number
from tests.doctor.trainers import TRAINERS


def facts(text: str) -> Facts:
    return Facts.of(Source(Path("train.py"), text))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("jem", ("sample_q", "f", 1, 1.0, 0.01, False)),
        ("short_run", ("sample_q", "f", 1, 1.0, 0.01, False)),
        ("anatomy", ("sample_s_t", "f", -1, 1.0, None, False)),
        ("inline", ("train", "model", -1, 10.0, 0.005, True)),
        ("object", ("generate_samples", "model", 1, 10.0, 0.005, False)),
    ],
)
def test_step_noise_sign_and_module(name, expected):
    (sampler,) = facts(TRAINERS[name]).samplers
    assert sampler.has_noise
    assert sampler.moves_input
    assert expected == (
        sampler.name,
        sampler.module,
        sampler.sign,
        sampler.step,
        sampler.noise,
        sampler.is_inline,
    )


LOOP = """
def draw(f, x, lr=0.25, std=0.5, n=3):
    for _ in range(n):
        x.requires_grad_()
        {gradient}
        {move}
    return x.detach()
"""


@pytest.mark.parametrize(
    ("gradient", "move", "sign", "step", "noise"),
    [
        ("g = grad(f(x).sum(), x)[0]", "x = x + lr * g + std * randn_like(x)", 1, 0.25, 0.5),
        ("(g,) = grad(f(x).sum(), x)", "x = x - lr * g", -1, 0.25, None),
        ("g = grad(-f(x).sum(), x)[0]", "x = x - lr * g", 1, 0.25, None),
        ("g = grad([f.forward(x).sum()], [x])[0]", "x = x.detach() - 2 * lr * g", -1, 0.5, None),
        ("e = f(x).sum(); g = grad(e, x)[0]", "x.data.sub_(g, alpha=lr)", -1, 0.25, None),
        ("e = f(x); g = grad(e.sum(), x)[0]", "x.data.add_(-lr, g)", -1, 0.25, None),
        (
            "g = grad(f(x).sum(), x)[0]",
            "d = -lr * g + std * randn(3)\n        x = x + d",
            -1,
            0.25,
            0.5,
        ),
        ("g = grad(f(x).sum(), x)[0]", "x = x + lr * g / 2", 1, 0.125, None),
        ("g = grad(f(x).sum(), x)[0]", "x = x + 0.5 * lr ** 2 * g", 1, 0.03125, None),
        ("g = grad(f(x).sum(), x)[0]", "x = x + args.unknown * g", 1, None, None),
        ("f(x).sum().backward()", "x.data += lr * x.grad", 1, 0.25, None),
    ],
)
def test_ways_to_write_a_langevin_step(gradient, move, sign, step, noise):
    (sampler,) = facts(LOOP.format(gradient=gradient, move=move)).samplers
    assert (sampler.sign, sampler.step, sampler.noise) == (sign, step, noise)
    assert sampler.module == "f"
    assert sampler.has_noise == (noise is not None)


@pytest.mark.parametrize(
    "text",
    [
        # Training loops and helpers, not samplers.
        "for x in data:\n    loss = f(x).mean()\n    loss.backward()\n    opt.step()",
        "def step(f, x):\n    return x + grad(f(x).sum(), x)[0]",
        "for p in params:\n    p.grad.zero_()",
    ],
)
def test_what_is_no_sampler(text):
    assert facts(text).samplers == []


def test_a_momentum_is_not_taken_for_the_input():
    text = LOOP.format(gradient="g = grad(f(x).sum(), x)[0]", move="v = v - lr * g; x = x + lr * v")
    (sampler,) = facts(text).samplers
    assert not sampler.moves_input


@pytest.mark.parametrize(
    ("name", "clipped", "clamp"),
    [
        ("jem", 0, None),
        ("inline", 1, (0.0, 1.0)),
        ("object", 1, (-1.0, 1.0)),
    ],
)
def test_clips_and_clamps(name, clipped, clamp):
    (sampler,) = facts(TRAINERS[name]).samplers
    assert len(sampler.clipped) == clipped
    assert [(low, high) for _, low, high in sampler.clamps] == ([clamp] if clamp else [])


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2", 2.0),
        ("-1e-2", -0.01),
        ("2 * 1 / 0.01 ** 2", 20_000.0),
        ("args.lr", 0.1),
        ("FLAGS.step_lr", 100.0),
        ("cfg.noise", 0.5),
        ("STEP", 3.0),
        ("twice", None),
        ("unknown", None),
        ("args.unknown", None),
        ("1 / 0", None),
        ("'text'", None),
        ("f(1)", None),
    ],
)
def test_numbers(expression, value):
    text = f"""
STEP = 3
twice = 1
twice = 2
parser.add_argument("--lr", "-l", type=float, default=1e-1)
flags.DEFINE_float("step_lr", 100.0, "size")
class Config:
    noise: float = 0.5
x = {expression}
"""
    source = Source(Path("train.py"), text)
    found: Any = source.tree.body[-1]
    assert number(source, found.value) == value
