"""Training steps on the device `meta` in a GPU's place: what waits, and what is launched."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from torch import nn

from ebmguard.alerts import Level
from ebmguard.reference_training.engine.graphs import graphed
from ebmguard.reference_training.jem.trainer import Trainer
from ebmguard.samplers import ReplayBuffer
from tests.gpu_on_meta import META, gpu_on_meta, own_place
from tests.meta_steps import CASES, FIRST, LAST, of_guard, steps_of
from tests.parts import TORCH

# Launches of a usual step, of them the guard's, and of a step with the slow tier, by torch 2.13:
# other versions take other ways to the same numbers.
CEILINGS: dict[str, tuple[int, int, int]] = {
    "jem": (141, 20, 287),
    "jem beta* 0": (145, 22, 280),
    "jem class-conditional": (145, 20, 291),
    "jem p(x, y)": (149, 24, 281),
    "jem p(x) and p(x, y)": (213, 34, 454),
    "jem clip": (149, 20, 295),
    "jem L2": (163, 20, 309),
    "jem most_steps": (141, 20, 287),
    "jem steered beta*": (141, 20, 287),
    "jem rollback": (141, 20, 287),
    "jem raise": (141, 20, 287),
    "jem bfloat16": (180, 20, 326),
    "jem classifier": (77, 10, 114),
    "shortrun": (67, 20, 199),
    "shortrun random K": (79, 20, 208),
    "shortrun persistent": (92, 21, 224),
    "shortrun bfloat16": (78, 20, 210),
    "toy": (70, 19, 165),
    "toy all variants": (70, 19, 165),
    # The trainer maps its own losses at each β*, outside the graphs that a guard replays.
    "toy average": (264, 147, 359),
    "toy proposal": (54, 12, 149),
    "toy two samplers": (80, 25, 175),
}


plain_steps_of = functools.cache(steps_of)


@pytest.mark.parametrize("name", CASES)
def test_a_good_step_waits_for_nothing_and_launches_no_more_than_it_did(name):
    steps = plain_steps_of(name)
    assert not steps.good_waits
    assert not steps.wrong
    usual, guards, slow = CEILINGS[name]
    if TORCH != (2, 13):
        return
    assert usual // 2 < steps.usual.total() <= usual
    assert of_guard(steps.usual) <= guards
    assert steps.slow.total() <= slow


def test_chains_are_graphs():
    few, many = plain_steps_of("jem"), steps_of("jem", sgld_steps=12)
    assert few.usual == many.usual
    assert many.captured["convolution"] == 4 * few.captured["convolution"] > 0


def test_chains_in_bfloat16_cast_their_weights_once():
    few, many = (
        plain_steps_of("jem bfloat16").captured,
        steps_of("jem bfloat16", sgld_steps=12).captured,
    )
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
    assert not steps.wrong


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


def test_a_wait_deep_inside_is_found_where_it_is(monkeypatch):
    sample = ReplayBuffer.sample

    def reads(self, *args):
        self.ages.max().item()
        return sample(self, *args)

    monkeypatch.setattr(ReplayBuffer, "sample", reads)
    (place,) = steps_of("jem").good_waits
    assert place.endswith(f"(tests/test_gpu_on_meta.py:{reads.__code__.co_firstlineno + 1})")


X = torch.zeros(4, 3, device="meta")
WAITS = {
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
    "event": lambda x: torch.cuda.Event().record() or event().synchronize(),
}


def event():
    made = torch.cuda.Event()
    made.record()
    return made


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_is_noted(name):
    with gpu_on_meta() as gpu:
        WAITS[name](X)
    assert gpu.waits.total() == 1
    (place,) = gpu.waits
    assert re.search(r"\(tests/test_gpu_on_meta\.py:\d+\)", place)


WAITS_NOT = {
    "arithmetic": lambda x: (x * 2).sum().sqrt(),
    "copy into pinned memory": lambda x: torch.empty_like(x, device="cpu", pin_memory=True).copy_(
        x, non_blocking=True
    ),
    "a number by a mask": lambda x: x.clone().masked_fill_(x > 0, 0.0),
    "where of two": lambda x: torch.where(x > 0, x, 0.0),
    "another type": lambda x: x.double(),
    "full": lambda x: torch.full((3,), 2.0, device="meta"),
    "host alone": lambda x: torch.tensor([1.0, 2.0]).tolist(),
}


@pytest.mark.parametrize("name", WAITS_NOT)
def test_what_does_not_wait_is_not_noted(name):
    with gpu_on_meta() as gpu:
        WAITS_NOT[name](X)
    assert not gpu.waits


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


def test_launches_by_file():
    with gpu_on_meta() as gpu:
        x = torch.zeros(3, 4, device="meta")
        x.t().exp().view(4, 3)
        torch.empty(3, device="meta")
        torch.zeros(3)
    assert gpu.launches == {"tests/test_gpu_on_meta.py": 2}
    assert own_place().startswith("tests/test_gpu_on_meta.py:")
