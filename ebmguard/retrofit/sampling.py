"""Runs the trainer's sampler on the tempered energy, and reads off what the call shows."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from ..diagnostics import (
    ChainState,
    drift_to_noise,
    metropolis_acceptance,
    named_samples,
    oriented,
    sample_shares,
)
from ..errors import SamplerError
from ..sampling import Evaluation, Recording, Tempering, find_module, other_networks
from ..trainer import Trainer, find_energy, found_lazy
from .parts import Part, Row
from .settings import Settings

__all__ = ["OTHER_THREAD", "Sampling", "Turn", "sampled", "tensors"]


_log = logging.getLogger("ebmguard")
OTHER_THREAD = (
    "The guarded sampler was called while another thread is inside it, or inside `with "
    "g.paused():`, and would run untempered. Let one thread sample at a time (a lock around the "
    "calls), call `sampler.original` for pictures and inside a sampler, or give each thread a "
    "model and a guard of its own."
)


class Turn:
    """Taken by one call at a time; a lock could not be copied.

    Attributes:
        thread: which has it.
    """

    def __init__(self) -> None:
        self.thread: int | None = None
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

    def __init__(self, models: torch.Size) -> None:
        self.calls = 0
        self._models = models
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
        factor: float | Tensor,
        recording: Recording | None,
        must_temper: bool,
        acts: bool,
        later: bool,
    ) -> tuple[Any, Tempering | None]:
        """What the sampler returns on the tempered energy, and what has tempered it.

        Args:
            must_temper: refuse a call that does not run on the tempered energy.
            acts: refuse samples that are still to be computed.
            later: say once what will be refused.

        Raises:
            SamplerError: no energy module is known or among the arguments, it was never called, or
                the sampler's steps are still to come.
            ConfigError: the module has no such method.
        """
        module, tempering = trainer.model, None
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
                tempering = Tempering(module, trainer.energy, batch_dim=len(self._models))
            self._temperings[module] = tempering
        if tempering is None:
            result = call(*args, **kwargs)
        else:
            result = tempering.run(call, args, kwargs, factor, recording)
        wrong = lazy = "" if isinstance(result, Tensor) else found_lazy(result)
        if (must_temper or later) and not lazy and tempering and not tempering.reached:
            wrong = _never_called(tempering, call, args, kwargs)
        if wrong and (must_temper or (lazy and acts)) and not _is_one(factor):
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


def sampled(
    tempering: Tempering | None,
    samples: object,
    trainer: Trainer,
    settings: Settings,
    compute: Callable[..., Any],
    before: Tensor | None,
    evaluations: Sequence[Evaluation],
    refinement: int,
    slow: bool,
) -> tuple[tuple[list[Part], Row], Tensor | None]:
    """Parts of the row of a sampler call, numbers that the host knows, and what its samples are.

    Which tags there are depends on what is attached, not on what the sampler did, so that all ranks
    have the same. NaN is unknown.

    Args:
        samples: what the sampler returned; its first floating-point tensor is looked at.
        before: what identified the samples of the call before; None where there was none.
        evaluations: the last two, if they were recorded.
        refinement: in how many finer steps the sampler has split each one.
        slow: include the tier that is not taken at every step.
    """
    models, steps = settings.models, trainer.steps
    if steps is not None:
        by = {"step_size": refinement, "noise_std": math.sqrt(refinement)}
        steps = {name: x / by[name] for name, x in steps.items()}
    # None also where a CUDA graph may have others than those that were recorded.
    count = None if tempering is None else tempering.evaluations
    known: Row = {"sampler/evaluations": math.nan if count is None else float(count)}
    parts: list[Part] = []
    # The norm of the drift, which the tempered energy has.
    drift = None if tempering is None else tempering.seen.norm
    if tempering is None or drift is None or not drift.numel():
        names = ["grad_norm", "grad_norm_max", *(["drift_to_noise"] if steps else [])]
        known |= {f"sampler/{name}": math.nan for name in names}
    else:
        # A factor that is a tensor is read with the row.
        given, entries = tempering.given, tempering.seen.entries
        factor, size = (given, 1.0) if isinstance(given, Tensor) else (None, abs(given))
        sums = compute(_norms, _by_model(drift, models), factor)
        parts.append(Part(sums, partial(_named_norms, entries, steps, size)))
    if slow and steps is not None:
        # Mean Metropolis acceptance, where the two are a step of the same chains.
        seen = evaluations if count is not None and len(evaluations) == 2 else ()
        first, last = [_point(each, models, settings.sign) for each in seen] or (None, None)
        if first is None or last is None or first.x.shape != last.x.shape:
            known["sampler/acceptance"] = math.nan
        else:
            acceptance = metropolis_acceptance(first, last, **steps).mean(-1).float()
            parts.append(Part.of({"sampler/acceptance": acceptance}, models))
    floating = (x for x in tensors(samples) if x.is_floating_point() and x.numel())
    if (x := next(floating, None)) is None:
        return (parts, known), None
    shares, known_by = compute(sample_shares, _rows(x.detach(), models), before, trainer.clamp)
    parts.append(Part(shares, named_samples))
    return (parts, known), known_by


def _norms(norm: Tensor, factor: Tensor | None) -> Tensor:
    """Mean and largest of norms ``(..., B)``, and the size of the factor where it is a tensor."""
    sums = [norm.mean(-1).float(), norm.amax(-1).float()]
    if factor is not None:
        size = factor.detach().abs().to(sums[0]).flatten()
        sums.append(size.expand_as(sums[0]) if sums[0].ndim else size[0])
    return torch.stack(sums, -1)


def _named_norms(
    entries: int, steps: Mapping[str, float] | None, size: float, sums: Sequence[float]
) -> Row:
    """Of the norm of f's gradient, and of the drift's, that of the tempered f."""
    mean, largest, *read = sums
    size = read[0] if read else size
    found = {"sampler/grad_norm": mean, "sampler/grad_norm_max": largest}
    found = {name: x / size if size else math.nan for name, x in found.items()}
    if steps is not None:
        found["sampler/drift_to_noise"] = drift_to_noise(mean, entries=entries, **steps)
    return found


def has_models(x: Tensor, models: torch.Size) -> bool:
    """Whether each model has samples of its own in x, instead of all sharing the same."""
    return x.ndim > len(models) and (not models or x.shape[: len(models)] == models)


def _rows(x: Tensor, models: torch.Size) -> Tensor:
    """Samples with their entries in one dimension: ``(..., B, d)``."""
    leading = len(models) if has_models(x, models) else 0
    rows = x.reshape(*x.shape[: leading + 1], -1) if x.ndim else x.reshape(1, 1)
    return rows.flatten(0, leading - 1) if leading > 1 else rows


def _point(seen: Evaluation, models: torch.Size, sign: int) -> ChainState | None:
    """The chains' state, ``(*models, B, d)``; None where the layout does not tell the samples."""
    x, output = seen.x, seen.output
    leading = x.shape[: len(models) + 1]
    if output is None or seen.is_joint or output.shape[: len(leading)] != leading:
        return None
    if not has_models(x, models) or not x.numel() or x.is_complex() or output.is_complex():
        return None
    parts = (x, output, seen.cotangent, seen.gradient)
    return oriented(*(x.reshape(*leading, -1) for x in parts if x is not None), sign=sign)


def _by_model(x: Tensor, models: torch.Size) -> Tensor:
    """Numbers ``(models, B)`` of samples, or ``(B,)`` of those that all share."""
    return x.reshape(models.numel(), -1) if models and has_models(x, models) else x.flatten()


def tensors(samples: object) -> Iterator[Tensor]:
    """Those that a sampler has returned, alone or in tuples, lists and dicts."""
    if isinstance(samples, Tensor):
        yield samples
    elif isinstance(samples, dict | tuple | list):
        for each in samples.values() if isinstance(samples, dict) else samples:
            yield from tensors(each)
