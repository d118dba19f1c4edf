"""Training steps on the device `meta` in a GPU's place: what waits, and what is launched."""

from __future__ import annotations

import functools
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from ebmguard.alerts import Judge, Level
from ebmguard.reference_training.engine.graphs import graphed
from ebmguard.reference_training.engine.progress import Reporter
from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.reference_training.jem.train import train as train_jem
from ebmguard.reference_training.jem.trainer import Trainer
from ebmguard.reference_training.shortrun.config import ShortRunConfig
from ebmguard.reference_training.shortrun.train import train as train_shortrun
from ebmguard.reference_training.toy.config import ToyConfig
from ebmguard.reference_training.toy.train import train as train_toy
from ebmguard.retrofit import rows
from tests.gpu_on_meta import META, MetaGpu, gpu_on_meta
from tests.parts import TORCH, Script

SLOW_EVERY = 3
"""Steps from one slow tier to the next; it is 50 in earnest."""
FIRST, LAST = 2 * SLOW_EVERY, 3 * SLOW_EVERY + 1
"""Good steps, from the first to before the last: graphs are captured, the sampler measured."""
NEVER = 10**6
USUAL: dict[str, Any] = {
    "iterations": NEVER, "checkpoint_every": NEVER, "threads": 0, "seed": 0, "device": str(META)
}  # fmt: skip
TRAINERS: dict[str, tuple[type, Callable[..., object], dict[str, Any]]] = {
    "jem": (JemConfig, train_jem, {
        "data": "digits", "n_pos": 8, "n_neg": 6, "sgld_steps": 3, "buffer_size": 30,
        "test_images": 20, "eval_every": NEVER, "alert_context": 0, "alert_window": 0,
    }),
    "shortrun": (ShortRunConfig, train_shortrun, {
        "data": "digits", "nf": 4, "batch": 8, "sgld_steps": 3, "sample_every": NEVER,
    }),
    "toy": (ToyConfig, train_toy, {"betas": ("0", "0.5"), "seeds": 2, "evaluations": 1}),
}  # fmt: skip
# By name, whose first word is the trainer's: launches of a usual step, of them the guard's, and of
# a step with the slow tier, by torch 2.13, for other versions take other ways to the same numbers;
# and the settings that differ from the trainer's own.
CASES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "jem": (137, 19, 301, {}),
    "jem beta* 0": (137, 20, 270, {"beta_star": 0.0}),
    "jem p(x) and p(x, y)": (208, 36, 465, {"p_x_y_weight": 1.0}),
    "jem rollback": (137, 19, 301, {"action": "rollback"}),
    "jem bfloat16": (176, 19, 340, {"precision": "bfloat16"}),
    "jem classifier": (75, 7, 112, {"p_x_weight": 0.0}),
    "shortrun": (62, 19, 212, {}),
    "shortrun persistent": (87, 20, 237, {"init": "persistent", "buffer_size": 30}),
    "shortrun bfloat16": (73, 19, 223, {"precision": "bfloat16"}),
    "toy": (74, 26, 166, {}),
    # The trainer maps its own losses at each β*, outside the graphs that a guard replays.
    "toy average": (268, 154, 360, {"betas": ("0.1+0.5",)}),
    "toy proposal": (58, 15, 150, {"scenario": "gmm-proposal"}),
}


class Enough(Exception):
    """The steps that were asked for are over."""


class Steps(Reporter):  # type: ignore[misc]
    """Waits and launches of each step of a run, by place and by file."""

    def __init__(self, gpu: MetaGpu) -> None:
        self.gpu = gpu
        self.waits: list[Counter[str]] = []
        self.launches: list[Counter[str]] = []

    def step(self, done: int, state: Mapping[str, float | str]) -> None:
        """A step is over."""
        gpu = self.gpu
        self.waits.append(gpu.waits)
        self.launches.append(gpu.launches)
        gpu.waits, gpu.launches = Counter(), Counter()
        gpu.step += 1
        if gpu.step == LAST:
            raise Enough

    @property
    def usual(self) -> Counter[str]:
        """Launches of the dearest good step without the slow tier; those with it are the first."""
        own = [x for i, x in enumerate(self.launches) if i >= FIRST and i % SLOW_EVERY]
        return max(own, key=Counter.total)

    @property
    def good_waits(self) -> Counter[str]:
        """Waits of all good steps."""
        return sum(self.waits[FIRST:], Counter())


def steps_of(name: str, alerts: Mapping[int, Level] | None = None, **more: Any) -> Steps:
    """Train the case of that name for a few steps.

    Args:
        alerts: by row, what the rules say of it, and no more: the numbers are made up.
        more: further settings.
    """
    kind, train, small = TRAINERS[name.split()[0]]
    script = Script(alerts or {}, "nonfinite", counted=True)
    with ExitStack() as stack:
        out = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
        config, folder, *_ = kind(out=out, **{**USUAL, **small, **CASES[name][3], **more}).open()
        stack.enter_context(patch.object(Judge, "observe", script.observe))
        stack.enter_context(patch("torch.utils.tensorboard.SummaryWriter"))
        stack.enter_context(patch.object(rows, "_SLOW_EVERY", SLOW_EVERY))
        steps = Steps(stack.enter_context(gpu_on_meta()))
        with suppress(Enough):
            train(config, folder, steps)
    return steps


plain_steps_of = functools.cache(steps_of)


@pytest.mark.parametrize("name", CASES)
def test_a_good_step_waits_for_nothing_and_launches_no_more_than_it_did(name):
    steps = plain_steps_of(name)
    assert not steps.good_waits
    assert not steps.gpu.wrong
    usual, guards, slow, _ = CASES[name]
    if TORCH != (2, 13):
        return
    assert usual // 2 < steps.usual.total() <= usual
    # Samplers are the trainer's.
    own = {x: n for x, n in steps.usual.items() if re.match(r"ebmguard/(?!samplers/)", x)}
    assert sum(own.values()) <= guards
    assert steps.launches[FIRST].total() <= slow


def test_chains_are_graphs():
    few, many = plain_steps_of("jem"), steps_of("jem", sgld_steps=12)
    assert few.usual == many.usual
    assert many.gpu.captured["convolution"] == 4 * few.gpu.captured["convolution"] > 0


def test_chains_in_bfloat16_cast_their_weights_once():
    both = plain_steps_of("jem bfloat16"), steps_of("jem bfloat16", sgld_steps=12)
    few, many = (steps.gpu.captured for steps in both)
    # Of a step the samples and what leaves the last convolution, and their gradients.
    assert (many - few)["_to_copy"] == 4 * 9
    assert few["_foreach_copy_"] == many["_foreach_copy_"] == 1


def test_a_rollback_waits_and_the_steps_before_and_after_it_do_not():
    at = FIRST - 1
    steps = steps_of("jem rollback", alerts={at: Level.ERROR})
    assert len(steps.launches) == LAST
    waited = {step for step in range(FIRST, LAST) if steps.waits[step]}
    # The row has reached the host then; the checkpoint that follows counts as the next step's.
    assert waited == {at + 2, at + 3}
    assert any("ebmguard/recovery/" in place for place in steps.waits[at + 2])
    assert not steps.gpu.wrong


def test_an_injected_float_is_found_with_its_line(monkeypatch):
    step = Trainer.step

    def reads(self, number):
        done = step(self, number)
        float(done.sum())
        return done

    monkeypatch.setattr(Trainer, "step", reads)
    line = reads.__code__.co_firstlineno + 2
    found = steps_of("jem").good_waits
    place = f"read: _local_scalar_dense (tests/test_gpu_on_meta.py:{line})"
    assert found == {place: LAST - FIRST}


X = torch.zeros(4, 3, device="meta")


def event():
    made = torch.cuda.Event()
    made.record()
    return made


WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "float": lambda x: float(x.sum()),
    "bool": lambda x: bool(x.sum() > 0),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "copy into pageable memory": lambda x: torch.zeros(4, 3).copy_(x, non_blocking=True),
    "blocking copy into pinned memory": lambda x: torch.zeros(4, 3, pin_memory=True).copy_(x),
    "from the host": lambda x: torch.zeros(3).to("meta"),
    "tensor": lambda x: torch.tensor([1.0], device="meta"),
    "new_tensor": lambda x: x.new_tensor([1.0]),
    "equal": lambda x: torch.equal(x, x),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "mask of rows": lambda x: x[x[:, 0] > 0],
    "assignment by a mask": lambda x: x.__setitem__(x > 0, torch.zeros(12, device="meta")),
    "masked_select": lambda x: x.masked_select(x > 0),
    "synchronize": lambda x: torch.cuda.synchronize(),
    "event": lambda x: event().synchronize(),
}
WAITS_NOT: dict[str, Callable[[torch.Tensor], object]] = {
    "arithmetic": lambda x: (x * 2).sum().sqrt(),
    "copy into pinned memory": lambda x: torch.zeros(4, 3, pin_memory=True).copy_(
        x, non_blocking=True
    ),
    "a number by a mask": lambda x: x.clone().masked_fill_(x > 0, 0.0),
    "where of two": lambda x: torch.where(x > 0, x, 0.0),
    "another type": lambda x: x.double(),
    "full": lambda x: torch.full((3,), 2.0, device="meta"),
    "host alone": lambda x: torch.tensor([1.0, 2.0]).tolist(),
}


@pytest.mark.parametrize("name", [*WAITS, *WAITS_NOT])
def test_what_waits_is_noted_with_its_line(name):
    with gpu_on_meta() as gpu:
        (WAITS | WAITS_NOT)[name](X)
    places = [re.search(r"\(tests/test_gpu_on_meta\.py:\d+\)", place) for place in gpu.waits]
    assert (gpu.waits.total(), all(places)) == (int(name in WAITS), True)


def test_an_event_of_two_steps_ago_has_happened():
    with gpu_on_meta() as gpu:
        made = event()
        gpu.step += 2
        made.synchronize()
    assert not gpu.waits


@pytest.mark.parametrize(
    ("kind", "inside"),
    [
        ("random numbers in a capture", lambda x: x + torch.randn(4, 3, device="meta")),
        ("host tensor in a capture", lambda x: x * torch.tensor(2.0)),
        ("read: _local_scalar_dense in a capture", lambda x: x * float(x.sum())),
    ],
)
def test_what_a_capture_cannot_hold_is_noted(kind, inside):
    with gpu_on_meta() as gpu:
        graphed(lambda network, x0, noise: inside(x0), META)(nn.Linear(1, 1), X, X)
    (place,) = gpu.wrong
    assert place.startswith(f"{kind}")
    assert "tests/test_gpu_on_meta.py" in place
