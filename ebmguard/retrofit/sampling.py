"""The sampler: what is refused, what takes its place, and its calls on the tempered energy."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from torch import Tensor, nn

from ..errors import SamplerError
from ..sampling import Recording, Tempering, find_module, other_networks
from ..trainer import Trainer, find_energy, found_lazy
from .strength import Strength, StrengthAt

__all__ = ["OTHER_THREAD", "Sampling", "Turn"]

_log = logging.getLogger("ebmguard")
OTHER_THREAD = (
    "The guarded sampler was called while another thread is inside it, or inside `with "
    "g.paused():`, and would run untempered. Let one thread sample at a time (a lock around the "
    "calls), call `sampler.original` for pictures and inside a sampler, or give each thread a "
    "model and a guard of its own."
)


class Turn:
    """Taken by one call at a time; a lock could not be copied."""

    def __init__(self) -> None:
        self.thread: int | None = None  # which has it
        self._free = [True]

    @contextmanager
    def take(self) -> Iterator[bool]:
        """Whether the block has it: not while another call does."""
        try:
            free = self._free.pop()
        except IndexError:
            yield False
            return
        self.thread = get_ident()
        try:
            yield True
        finally:
            self.thread = None
            self._free.append(free)


class Sampling:
    """Finds the energy module of a sampler call, and runs the call on its tempered output."""

    def __init__(self, dims: int) -> None:
        self.calls = 0
        self._dims = dims  # model dimensions of the energies
        self.turn = Turn()
        self._has_warned = False
        # Kept while their modules live: what a CUDA graph has captured is theirs.
        self._temperings = weakref.WeakKeyDictionary[nn.Module, Tempering]()

    @property
    def modules(self) -> list[nn.Module]:
        """The energy modules of sampler calls so far, as long as they live."""
        return list(self._temperings)

    def run(
        self,
        call: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        trainer: Trainer,
        strength: Strength,
        now: StrengthAt,
        recording: Recording | None,
    ) -> tuple[Any, Tempering | None]:
        """What the sampler returns on the tempered energy, and what has tempered it.

        Raises:
            SamplerError: no energy module is known or among the arguments, it was never called, or
                the sampler's steps are still to come.
            ConfigError: the module has no such method.
        """
        module, tempering, factor = trainer.model, None, now.factor_of_samples
        must_temper = now.must_temper
        # What β* = 0 allows and a later step of the schedule does not is said once.
        later = now.is_off and strength.is_scheduled and strength.tempers
        if module is None:
            try:
                module = find_module(call, args, kwargs)
            except SamplerError:
                if must_temper and not _is_one(factor):
                    raise
        if module is not None and (must_temper or hasattr(module, trainer.energy)):
            find_energy(module, trainer.energy)
            tempering = self._temperings.get(module)
            if tempering is None or tempering.energy != trainer.energy:
                tempering = Tempering(module, trainer.energy, batch_dim=self._dims)
            self._temperings[module] = tempering
        if tempering is None:
            result = call(*args, **kwargs)
        else:
            result = tempering.run(call, args, kwargs, factor, recording)
        wrong = lazy = "" if isinstance(result, Tensor) else found_lazy(result)
        if (must_temper or later) and not lazy and tempering and not tempering.reached:
            wrong = _never_called(tempering, call, args, kwargs)
        if wrong and (must_temper or (lazy and not now.is_off)) and not _is_one(factor):
            raise SamplerError(wrong)
        if wrong and (must_temper or later) and not self._has_warned:
            self._has_warned = True
            _log.warning("At β* = 0 nothing is tempered; above 0 this will end: %s", wrong)
        self.calls += 1
        return result, tempering


def _is_one(factor: float | Tensor) -> bool:
    """Read on the host, where a call would be refused otherwise."""
    return isinstance(factor, Tensor) and bool((factor == 1).all())


def _never_called(
    tempering: Tempering, call: object, args: Sequence[object], kwargs: Mapping[str, object]
) -> str:
    energy = f"{type(tempering.module).__name__}.{tempering.energy}"
    others = " and ".join(other_networks(tempering.module, call, args, kwargs))
    why = f"it uses another network, {others}; a copy is another one, too"
    if not others:
        why = (
            "it calls another method such as `energy`, a copy, or a CUDA graph that no guarded "
            "call has captured, or takes no step"
        )
    return (
        f"The sampler never called {energy}, so it ran on the untempered energy ({why}). For a "
        "picture use `sampler.original`, or `with g.paused():`. To train, name the network with "
        "model=. Name the method with energy=, or temper inside the sampler with g.temper(energy) "
        "and guard(loss_fn, None, ...)."
    )
