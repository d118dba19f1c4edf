"""One call that tells the whole story: ``guard()`` takes what ``attach()`` takes."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch

from ebmguard import Guard, guard
from ebmguard.samplers import ReplayBuffer, sgld
from tests.parts import Energy, Memory, energies

STEPS: Any = {"step_size": 0.02, "noise_std": 0.1}


def parts(f: Energy) -> dict[str, Any]:
    optimizer = torch.optim.Adam(f.parameters(), lr=1e-2)
    rng = torch.Generator().manual_seed(1)
    told: dict[str, Any] = {
        "model": f,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 7),
        "ema": torch.optim.swa_utils.AveragedModel(f),
        "scaler": torch.amp.GradScaler("cpu", enabled=False),
        "buffer": ReplayBuffer(16, (2,), reinit_rate=0.1, generator=rng),
        "generators": [rng],
        "clamp": (-2.0, 2.0),
        "sgld_steps": 4,
        "steps_argument": "steps",
    }
    return {**STEPS, **told}


def train(at_once: bool) -> tuple[Guard, list[dict[str, float]]]:
    torch.manual_seed(0)
    f, memory = Energy(), Memory()
    told = parts(f)
    buffer = told["buffer"]

    def sampler(f: Any, steps: int) -> torch.Tensor:
        x, rows = buffer.sample(8)
        x = sgld(f, x, steps=steps, **STEPS)
        buffer.write(rows, x)
        return x

    options: Any = {"beta_star": 0.5, "output_scale": 4.0, "sinks": [memory], "action": "rollback"}
    if at_once:
        g = guard(None, sampler, **options, **told)
    else:
        g = guard(None, sampler, **options).attach(**told)
    for _ in range(3):
        x = g.sampler(f)
        told["optimizer"].zero_grad()
        g.loss_fn(f(torch.randn(8, 2)), f(x)).backward()
        told["optimizer"].step()
    return g, [row for _, row in memory.rows]


def test_it_takes_what_attach_takes_and_does_the_same():
    taken, attached = (inspect.signature(x).parameters["parts"] for x in (guard, Guard.attach))
    assert taken == attached
    (g, rows), (other, others) = train(at_once=True), train(at_once=False)
    assert len(rows) == 3
    assert repr(rows) == repr(others)
    for tag in ("sampler/drift_to_noise", "sampler/clamped", "buffer/age", "sampler/steps"):
        assert math.isfinite(rows[-1][tag]), tag
    assert g.trainer.sgld_steps == other.trainer.sgld_steps == 4
    assert g.trainer.clamp == (-2.0, 2.0)


@pytest.mark.parametrize("scale", [{}, {"output_scale": 4.0}])
def test_the_steps_that_give_the_output_scale_are_known_everywhere(scale):
    """They were forgotten: no drift to noise, no acceptance."""
    f = Energy()
    g = guard(None, lambda f, x: sgld(f, x, steps=3, **STEPS), beta_star=1.0, **STEPS, **scale)
    g.sampler(f, torch.ones(5, 2))
    g.loss_fn(*energies())
    assert g.last["energy_gap_scaled"] == pytest.approx(4.0 * g.last["energy_gap"])
    assert g.last["sampler/drift_to_noise"] > 0
    own = 0.01 / (STEPS["step_size"] * STEPS["noise_std"])
    assert g.last["sampler/unit"] == pytest.approx(own)
    assert 0 <= g.last["sampler/acceptance"] <= 1
    assert [problem.name for problem in g.check() if problem.name == "output_scale"] == []


@pytest.mark.parametrize("follows", [False, True])
def test_reading_a_property_never_changes_the_record(follows):
    """Only a sampler that asks for its steps has their number in the rows."""

    def sampler(f: Any, x: torch.Tensor) -> torch.Tensor:
        return sgld(f, x, steps=g.next_steps() if follows else 3, **STEPS)

    g = guard(None, sampler, beta_star=1.0, output_scale=4.0, sgld_steps=3, **STEPS)
    for _ in range(3):
        assert g.sgld_steps == 3
        g.sampler(Energy(), torch.ones(5, 2))
        g.loss_fn(*energies())
    assert g.last.get("sampler/steps") == (3.0 if follows else None)


def test_a_sampler_gets_the_number_of_its_steps_by_name():
    seen = []

    def sampler(f: Any, x: torch.Tensor, n_steps: int) -> torch.Tensor:
        seen.append(n_steps)
        f(x)
        return x

    g = guard(None, sampler, beta_star=0.0, sgld_steps=5, steps_argument="n_steps")
    x = torch.ones(5, 2)
    # The usual number is the guard's to change; another one is the caller's.
    for args, kwargs in (
        ((), {}),
        ((), {"n_steps": 5}),
        ((5,), {}),
        ((), {"n_steps": 99}),
        ((9,), {}),
    ):
        g.sampler(Energy(), x, *args, **kwargs)
    assert seen == [5, 5, 5, 99, 9]


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"steer": 1}, "steer= is gone. Leave beta_star= out"),
        ({"beta_stars": [0.5, 1.0]}, "beta_stars= is gone. Average the losses of several"),
        ({"beta_star": 1, "reduce": "mean"}, r"reduce= is gone. Heads .* pass f.mean\(1\)"),
        ({"adapt": None}, "adapt= is gone. Leave it out"),
        ({"beta_star": 1, "optimiser": None}, "'optimiser'; did you mean optimizer="),
    ],
)
def test_a_keyword_that_there_is_not_says_what_to_write(keywords, words):
    with pytest.raises(TypeError, match=words):
        guard(None, None, **keywords)


def test_the_signature_fits_on_a_screen():
    assert len(str(inspect.signature(guard))) < 1500
