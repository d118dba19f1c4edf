"""The random number generators of a process: their states, and how they are reseeded."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["random_state", "reseed", "restore_random_state"]

_SPREAD = 0x9E3779B97F4A7C15
_WORD = 1 << 63


def random_state(generators: Sequence[torch.Generator]) -> dict[str, Any]:
    """The states of PyTorch's global generators, of Python's and NumPy's, and of those given.

    GPUs that nothing has used yet, and a NumPy that nobody has imported, have none.
    """
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
    torch.set_rng_state(_cpu(state["cpu"]))
    for device, each in enumerate(state["cuda"]):
        torch.cuda.set_rng_state(_cpu(each), device)
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    for generator, own in zip(generators, state["own"], strict=True):
        generator.set_state(_cpu(own))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))


def reseed(attempt: int, generators: Sequence[torch.Generator]) -> int:
    """Give every generator a seed that follows from its own and the attempt.

    So a run that rolls back is still a function of its seed, and ranks stay apart by whatever
    generator they were told apart.

    Returns:
        how many were reseeded.
    """
    seeds = [torch.default_generator.initial_seed()]
    seeds += [each.initial_seed() for each in generators]
    new = [_next_seed(seed, attempt, i) for i, seed in enumerate(seeds)]
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpus = torch.cuda.default_generators if on_gpu else ()
    of_gpus = [_next_seed(each.initial_seed(), attempt, 0) for each in gpus]
    torch.manual_seed(new[0])  # gives its seed to all GPUs
    for generator, seed in zip(gpus, of_gpus, strict=True):
        generator.manual_seed(seed)
    # These do not tell their seed.
    random.seed(new[0] + random.getrandbits(63))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed((new[0] + int(numpy.random.randint(1 << 31))) % (1 << 32))
    for generator, seed in zip(generators, new[1:], strict=True):
        generator.manual_seed(seed)
    return len(new) + 1 + (numpy is not None)


def _next_seed(seed: int, attempt: int, i: int) -> int:
    return (seed + attempt * _SPREAD + i) % _WORD


def _cpu(state: Tensor) -> Tensor:
    return state.cpu()
