"""What a rollback changes: random numbers, poisoned rows of the buffer, the learning rate."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = [
    "LearningRate",
    "poisoned_rows",
    "purge",
    "random_state",
    "rates",
    "reseed",
    "restore_random_state",
]

# As far out as no chain of a healthy buffer.
_FAR = 10.0
_MAD_TO_SIGMA = 1.4826
# Fresh rows and chains at a clamp all have about the same largest entry, and a MAD near 0; chains
# that have moved lie a few times farther out.
_FLOOR = 0.3


def random_state(generators: Sequence[torch.Generator]) -> dict[str, Any]:
    """Of PyTorch's global generators, of Python's and NumPy's, and of those given."""
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    state: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if on_gpu else [],
        "python": random.getstate(),
        "own": [each.get_state() for each in generators],
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = [str(name), keys.tolist(), *rest]
    return state


def restore_random_state(state: Mapping[str, Any], generators: Sequence[torch.Generator]) -> None:
    """Restore what :func:`random_state` returned for the same generators."""
    torch.set_rng_state(state["cpu"])
    for device, each in enumerate(state["cuda"]):
        torch.cuda.set_rng_state(each, device)
    random.setstate(state["python"])
    for generator, own in zip(generators, state["own"], strict=True):
        generator.set_state(own)
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        numpy.random.set_state(tuple(state["numpy"]))


def reseed(attempt: int, generators: Sequence[torch.Generator]) -> int:
    """Seed every generator from its state and the attempt, so that ranks stay equal or different.

    Returns how many.
    """
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpus = torch.cuda.default_generators if on_gpu else ()
    # All first, since the global one is given to the GPUs too; each rank may use another of these.
    seed = _seed_of(torch.default_generator, attempt)
    of_gpus = [_seed_of(each, attempt) for each in gpus]
    of_own = [_seed_of(each, attempt, i) for i, each in enumerate(generators, 1)]
    torch.manual_seed(seed)
    for generator, seed in zip((*gpus, *generators), (*of_gpus, *of_own), strict=True):
        generator.manual_seed(seed)
    random.seed(_seed_after(random.randbytes(32), attempt))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(_seed_after(numpy.random.bytes(32), attempt) % (1 << 32))
    return 2 + len(generators) + (numpy is not None)


def _seed_of(generator: torch.Generator, attempt: int, i: int = 0) -> int:
    return _seed_after(bytes(generator.get_state().tolist()), attempt, i)


def _seed_after(state: bytes, attempt: int, i: int = 0) -> int:
    digest = hashlib.blake2b(state + f"{attempt} {i}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1  # the sign of PyTorch's seeds


def poisoned_rows(samples: Tensor) -> Tensor:
    """Which rows of ``(rows, ...)`` are not finite, or far outside the others; bool ``(rows,)``.

    Far is 10 robust standard deviations above the median of the rows' largest absolute entries.
    """
    largest = samples.reshape(len(samples), -1).abs().amax(-1).double()
    finite = torch.isfinite(largest)
    if not bool(finite.any()):
        return ~finite
    known = largest[finite]
    centre = known.median()
    scale = torch.maximum(_MAD_TO_SIGMA * (known - centre).abs().median(), _FLOOR * centre)
    return ~finite | (largest > centre + _FAR * scale)


def purge(samples: Tensor, generator: torch.Generator, classes: int = 1) -> int:
    """Overwrite poisoned rows of ``(rows, ...)`` by healthy ones of their class; say how many.

    The generator is on the CPU. Classes are equal blocks of rows; without a healthy row one stays.
    """
    poisoned = poisoned_rows(samples)
    count = 0
    for own, bad in zip(samples.chunk(classes), poisoned.chunk(classes), strict=True):
        healthy = (~bad).nonzero().squeeze(1)
        replaced = int(bad.sum())
        if replaced and len(healthy):
            chosen = torch.randint(len(healthy), (replaced,), generator=generator)
            own[bad] = own[healthy[chosen.to(own.device)]]
            count += replaced
    return count


def rates(optimizer: Optimizer | None) -> list[float]:
    """The learning rates of an optimizer's groups that have one, read on the host."""
    groups = [] if optimizer is None else optimizer.param_groups
    return [float(group["lr"]) for group in groups if group.get("lr") is not None]


class LearningRate:
    """Multiplies the learning rate of an optimizer by ``factor`` inside its ``step`` alone."""

    def __init__(self) -> None:
        self.factor = 1.0
        # Groups whose rate is scaled now, with the trainer's own and the one in its place.
        self._scaled: list[tuple[dict[str, Any], Any, Any]] = []
        self._undo: list[Callable[[], None]] = []

    def watch(self, optimizer: Optimizer) -> None:
        """Act on this optimizer from now on, instead of an earlier one."""
        for undo in self._undo:
            undo()
        self._undo = [
            optimizer.register_step_pre_hook(self._before).remove,
            optimizer.register_step_post_hook(self._restore).remove,
        ]

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        self._restore()  # a step that raised has left it scaled
        if self.factor == 1:
            return
        for group in optimizer.param_groups:
            own = group.get("lr")
            if own is not None:  # some optimizers set their own
                group["lr"] = own * self.factor
                self._scaled.append((group, own, group["lr"]))

    def _restore(self, *_: Any) -> None:
        for group, own, scaled in self._scaled:
            if group["lr"] is scaled:  # else the trainer has set another one meanwhile
                group["lr"] = own
        self._scaled.clear()
