"""The random number generators of a process: their states, and how they are reseeded."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["random_state", "reseed", "restore_random_state"]


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
    """Give every generator a seed that follows from its state and the attempt; say how many.

    So a run that rolls back is still a function of its seed; ranks that drew different numbers
    go on doing so, and generators that drew the same on all ranks (the order of the data, say) do
    too.
    """
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpus = torch.cuda.default_generators if on_gpu else ()
    # All seeds first, since the global one is given to the GPUs too. Of these each rank may use
    # another one, which is no reason to tell them apart.
    seed = _seed_of(torch.default_generator, attempt)
    of_gpus = [_seed_of(each, attempt) for each in gpus]
    of_own = [_seed_of(each, attempt, i) for i, each in enumerate(generators, 1)]
    torch.manual_seed(seed)
    for generator, seed in zip((*gpus, *generators), (*of_gpus, *of_own), strict=True):
        generator.manual_seed(seed)
    # These do not tell their state as bytes.
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
