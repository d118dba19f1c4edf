"""The parts of a run that a rollback changes in place: random numbers, learning rate."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["LearningRate", "random_state", "reseed", "restore_random_state"]


def random_state(generators: Sequence[torch.Generator]) -> dict[str, Any]:
    """Return the states of PyTorch's global generators, Python's, NumPy's, and of these."""
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    state: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if on_gpu else [],
        "python": random.getstate(),
        "own": [generator.get_state() for generator in generators],
    }
    if numpy := sys.modules.get("numpy"):
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = [str(name), keys.tolist(), *rest]
    return state


def restore_random_state(state: Mapping[str, Any], generators: Sequence[torch.Generator]) -> None:
    """Restore what :func:`random_state` returned for the same generators."""
    torch.set_rng_state(state["cpu"])
    for device, generator_state in enumerate(state["cuda"]):
        torch.cuda.set_rng_state(generator_state, device)
    random.setstate(state["python"])
    for generator, generator_state in zip(generators, state["own"], strict=True):
        generator.set_state(generator_state)
    if "numpy" in state and (numpy := sys.modules.get("numpy")):
        numpy.random.set_state(tuple(state["numpy"]))


def reseed(attempt: int, generators: Sequence[torch.Generator]) -> int:
    """Seed every generator from its state and the attempt; return the number of generators.

    Ranks whose states were equal stay equal, and others stay different.
    """
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpus = torch.cuda.default_generators if on_gpu else ()
    shared = torch.default_generator, *gpus
    numbered = [*((x, 0) for x in shared), *((x, i) for i, x in enumerate(generators, 1))]
    # All first: the global seed is given to the GPUs too, of which every rank may use another.
    seeds = [_seed(bytes(x.get_state().tolist()), f"{attempt} {i}") for x, i in numbered]
    torch.manual_seed(seeds[0])
    for (generator, _), seed in zip(numbered, seeds, strict=True):
        generator.manual_seed(seed)
    random.seed(_seed(random.randbytes(32), f"{attempt} 0"))
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(_seed(numpy.random.bytes(32), f"{attempt} 0") % (1 << 32))
    return 2 + len(generators) + bool(numpy)


def _seed(state: bytes, salt: str) -> int:
    digest = hashlib.blake2b(state + salt.encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1  # the sign of PyTorch's seeds


class LearningRate:
    """Multiplies the learning rate of an optimizer by ``factor`` inside its ``step`` alone."""

    def __init__(self) -> None:
        self.factor = 1.0
        # Groups whose rate is scaled now, with the trainer's rate and the one in its place.
        self._scaled: list[tuple[dict[str, Any], Any, Any]] = []

    def scale(self, optimizer: Optimizer) -> None:
        """Scale the rates as a step of this optimizer begins."""
        self.restore()  # a step that raised has left it scaled
        for group in optimizer.param_groups if self.factor != 1 else ():
            if (rate := group.get("lr")) is not None:  # some optimizers set their rate
                self._scaled.append((group, rate, rate * self.factor))
                group["lr"] = self._scaled[-1][2]

    def restore(self) -> None:
        """Put the trainer's rates back when the step is over."""
        for group, rate, scaled in self._scaled:
            if group["lr"] is scaled:  # else the trainer has set another one meanwhile
                group["lr"] = rate
        self._scaled.clear()
