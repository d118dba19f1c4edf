"""Runs the trainer's sampler on the tempered energy, and reads off what the call shows."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..diagnostics import (
    ChainState,
    clamped,
    drift_to_noise,
    fingerprint,
    metropolis_acceptance,
    oriented,
    repeated,
)
from ..energies import has_models
from ..errors import SamplerError
from ..sampling import Evaluation, Recording, Tempering, find_module
from ..trainer import Trainer, find_energy
from .callables import refuse_deferred
from .settings import Settings

__all__ = ["Sampling", "sampled"]


class Sampling:
    """Finds the energy module of a sampler call, and runs the call on its tempered output.

    ``tempers`` says whether the sampler's side is defined at all.
    """

    def __init__(self, models: torch.Size, *, tempers: bool) -> None:
        self.calls = 0
        self.is_running = False
        self._models = models
        self._tempers = tempers
        # Kept while their modules live: what a CUDA graph has captured is theirs.
        self._temperings = weakref.WeakKeyDictionary[nn.Module, Tempering]()

    def run(
        self,
        call: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        trainer: Trainer,
        factor: float | Tensor,
        recording: Recording | None = None,
    ) -> tuple[Any, Tempering | None]:
        """What the sampler returns on the tempered energy, and what has tempered it.

        Args:
            trainer: knows the energy module; if it does not, that is found among the arguments.
            factor, recording: as for :meth:`Tempering.active`.

        Raises:
            SamplerError: no energy module can be found, it was never called, or the sampler is a
                generator.
            ConfigError: the module has no such method.
        """
        module = trainer.model
        if module is None:
            try:
                module = find_module(call, args, kwargs)
            except SamplerError:
                if self._tempers:
                    raise  # else the sampler stays as it is, and nothing needs to be found
        tempering = None
        if module is not None:
            find_energy(module, trainer.energy)
            tempering = self._temperings.get(module)
            if tempering is None or tempering.energy != trainer.energy:
                tempering = Tempering(module, trainer.energy, batch_dim=len(self._models))
            self._temperings[module] = tempering
        self.is_running = True
        try:
            if tempering is None:
                result = call(*args, **kwargs)
            else:
                result = tempering.run(call, args, kwargs, factor, recording)
        finally:
            self.is_running = False
        if not isinstance(result, Tensor):
            refuse_deferred(result)
        if tempering is not None and not tempering.reached and self._tempers:
            raise SamplerError(
                f"The sampler never called {type(tempering.module).__name__}.{tempering.energy}, "
                "so it ran on the untempered energy (it calls another method such as `energy`, a "
                "copy, or a CUDA graph that no guarded call has captured, or takes no step). Name "
                "the method with energy=, the module with model=, or temper inside the sampler "
                "with g.temper(energy) and guard(loss_fn, None, ...)."
            )
        self.calls += 1
        return result, tempering


def sampled(
    tempering: Tempering | None,
    samples: object,
    trainer: Trainer,
    settings: Settings,
    compute: Callable[..., Any],
    before: Tensor | None,
    evaluations: Sequence[Evaluation] = (),
    *,
    slow: bool,
) -> tuple[dict[str, float | Tensor], Tensor | None]:
    """Numbers of a sampler call that is just over, and the fingerprint of its samples.

    Args:
        tempering: what ran it; None where no energy module is known.
        samples: what the sampler returned; its first floating-point tensor is looked at.
        trainer, settings: as far as the trainer is known, and of the guard.
        compute: calls pure functions.
        before: the fingerprint of the call before; None where there was none.
        evaluations: the last two, if they were recorded.
        slow: include the tier that is not taken at every step.

    Returns:
        by tag, 0-dim tensors, ``(*models,)`` where the members of an ensemble differ, or numbers
        that the host knows. NaN is unknown. Which tags there are depends on what is attached, not
        on what the sampler did, so that all ranks have the same.
    """
    models, steps = settings.models, trainer.steps
    unknown = ["grad_norm", "grad_norm_max", "evaluations", *(["drift_to_noise"] if steps else [])]
    found: dict[str, float | Tensor] = {f"sampler/{name}": math.nan for name in unknown}
    if tempering is not None:
        if tempering.evaluations is not None:
            found["sampler/evaluations"] = float(tempering.evaluations)
        if (norm := tempering.grad_norm) is not None:
            norms, entries = (norm, tempering.seen.norm), tempering.seen.entries
            found |= compute(_of_gradients, norms, steps, entries, models)
    if slow and steps is not None:
        found["sampler/acceptance"] = math.nan
        # A CUDA graph may have others than those that were recorded.
        is_known = tempering is not None and tempering.evaluations is not None
        if is_known and len(evaluations) == 2:
            acceptance = _acceptance(evaluations, steps, models, settings.sign)
            found["sampler/acceptance"] = acceptance
    if (x := _first_tensor(samples)) is None:
        return found, None
    numbers, known_by = compute(_of_samples, x.detach(), before, trainer.clamp, models)
    return found | numbers, known_by


def _of_gradients(
    norms: tuple[Tensor, Tensor],
    steps: Mapping[str, float] | None,
    entries: int,
    models: torch.Size,
) -> dict[str, Tensor]:
    """Of the norms of f's gradient and of the drift's."""
    norm, drift = (_by_model(x.float(), models) for x in norms)
    found = {
        "sampler/grad_norm": norm.sum(-1) * (1 / norm.shape[-1]),
        "sampler/grad_norm_max": norm.amax(-1),
    }
    if steps is not None:
        found["sampler/drift_to_noise"] = drift_to_noise(drift.mean(-1), entries=entries, **steps)
    return found


def _of_samples(
    x: Tensor, before: Tensor | None, clamp: tuple[float, float] | None, models: torch.Size
) -> tuple[dict[str, float | Tensor], Tensor]:
    """Of the samples themselves, and their fingerprint."""
    rows = _rows(x, models)
    known_by = fingerprint(rows)
    # NaN and the infinities show in the extremes, without a mask of the samples' size.
    _, lowest, highest = known_by.unbind(-1)
    largest = torch.finfo(x.dtype).max
    finite = _by_model((highest <= largest) & (lowest >= -largest), models)
    share = finite.sum(-1, dtype=torch.float32) * (1 / finite.shape[-1])
    found: dict[str, float | Tensor] = {"nonfinite/samples": 1.0 - share}
    if clamp is not None:
        found["sampler/clamped"] = clamped(rows, clamp)
    same = math.nan if before is None else repeated(known_by, before.to(x.device))
    return {**found, "sampler/repeated": same}, known_by


def _rows(x: Tensor, models: torch.Size) -> Tensor:
    """Samples with their entries in one dimension: ``(..., B, d)``."""
    leading = len(models) if has_models(x, models) else 0
    return x.reshape(*x.shape[: leading + 1], -1) if x.ndim else x.reshape(1, 1)


def _acceptance(
    step: Sequence[Evaluation],
    steps: Mapping[str, float],
    models: torch.Size,
    sign: int,
) -> float | Tensor:
    """Mean Metropolis acceptance, where the two are a step of the same chains."""
    before, after = (_point(seen, models, sign) for seen in step)
    if before is None or after is None or before.x.shape != after.x.shape:
        return math.nan
    return metropolis_acceptance(before, after, **steps).mean(-1).float()


def _point(seen: Evaluation, models: torch.Size, sign: int) -> ChainState | None:
    """The chains' state, ``(*models, B, d)``; None where the layout does not tell the samples."""
    x, output = seen.x, seen.output
    if output is None or seen.is_joint:
        return None
    leading = x.shape[: len(models) + 1]
    tells = has_models(x, models) and output.shape[: len(leading)] == leading
    if not tells or not x.numel() or x.is_complex() or output.is_complex():
        return None
    parts = (x, output, seen.cotangent, seen.gradient)
    flat = (part.reshape(*leading, -1) for part in parts if part is not None)
    return oriented(*flat, sign=sign)


def _by_model(x: Tensor, models: torch.Size) -> Tensor:
    """Numbers of samples in one last dimension: those of each model, or those that all share."""
    return x.flatten(len(models) if has_models(x, models) else 0)


def _first_tensor(samples: object) -> Tensor | None:
    if isinstance(samples, Tensor):
        return samples if samples.is_floating_point() and samples.numel() else None
    if isinstance(samples, dict):
        samples = tuple(samples.values())
    if isinstance(samples, tuple | list):
        return next((x for x in map(_first_tensor, samples) if x is not None), None)
    return None
