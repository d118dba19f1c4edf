"""Which diagnostics are taken of a step, and what they need to remember."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..diagnostics import (
    amplification,
    buffer_diagnostics,
    diagnostics_of_ranks,
    energy_diagnostics,
    log_weights,
    mixture_gaps,
    mixture_weights,
    nonfinite_diagnostics,
    pareto_k,
    weight_diagnostics_at,
)
from ..energies import Groups, LogQ, per_sample
from ..sampling import Evaluation, Tempering
from ..trainer import Trainer
from .optimizer import Update
from .sampling import sampled
from .settings import Settings
from .strength import StrengthAt

__all__ = ["Measure"]

# The Pareto shape of one batch is too noisy to act on; that of so many pooled ones is not.
_POOLED_STEPS = 16


class Measure:
    """Assembles the named numbers of a step from the families of diagnostics."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._from_sampler: list[dict[str, float | Tensor]] = []
        self._parts: dict[str, slice] = {}  # whose the latest samples are, in a mixture
        # By its place in the step, what each sampler call is known by until the next step's.
        self._known_by: dict[int, Tensor] = {}
        self._from_update: dict[str, float | Tensor] = {}
        self._grad_scale: float | Tensor = math.nan
        # Energies of the negatives of each step, and log q where it was given.
        self._recent: deque[tuple[Tensor, Tensor | None]] = deque(maxlen=_POOLED_STEPS)

    @torch.no_grad()
    def samples(
        self,
        trainer: Trainer,
        tempering: Tempering | None,
        samples: object,
        compute: Callable[..., Any],
        *,
        evaluations: Sequence[Evaluation] = (),
        slow: bool,
        refinement: int = 1,
        parts: Mapping[str, slice] | None = None,
    ) -> None:
        """Keep what a sampler call shows, until the loss that uses its samples.

        The arguments are those of :func:`sampled`; ``refinement``, in how many finer steps the
        sampler has split each one; and ``parts``, which samples are whose, of a mixture.
        """
        self._parts = dict(parts or {})
        if refinement > 1 and trainer.step_size is not None and trainer.noise_std is not None:
            trainer = replace(
                trainer,
                step_size=trainer.step_size / refinement,
                noise_std=trainer.noise_std / math.sqrt(refinement),
            )
        call = len(self._from_sampler)
        given = tempering, samples, trainer, self._settings, compute, self._known_by.get(call)
        seen, now = sampled(*given, evaluations, slow=slow)
        if now is not None:
            self._known_by[call] = now
        # Now, since another sampler may draw from the same buffer before the loss.
        self._from_sampler.append({**seen, **buffer_diagnostics(trainer.buffer)})

    @torch.no_grad()
    def update(self, update: Update) -> None:
        """Keep what an optimizer step shows for the next row, that of the network it has made."""
        found = {
            "optim/grad_norm": update.gradient_norm,
            "optim/update_norm": update.norm,
            "optim/amplification": amplification(update.relative_norm, self._grad_scale),
        }
        # In float32, as a state that is loaded has them.
        self._from_update = {
            name: x.float() if isinstance(x, Tensor) else x for name, x in found.items()
        }

    @torch.no_grad()
    def loss(
        self,
        trainer: Trainer,
        f_pos: Tensor,
        f_neg: Tensor,
        strength: StrengthAt,
        extra: Mapping[str, Tensor | None],
        compute: Callable[..., Any],
        *,
        slow: bool,
        groups: Groups | None,
        log_q: LogQ | None,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """All numbers of one loss call, and the raw energies where ``slow`` asks for histograms.

        Args:
            f_pos, f_neg: detached negative energies, high on data, in a layout of
                :mod:`ebmguard.energies`.
            extra: further numbers by tag, those that are known.
            compute: calls pure functions.

        Returns:
            0-dim tensors by tag, or ``(*models,)`` where the members of an ensemble differ, and
            energies by tag. Across ranks the numbers are every rank's, the energies this rank's.
        """
        settings, group = self._settings, self._settings.process_group
        star = strength.beta_star
        if isinstance(star, tuple):
            star = sum(star) / len(star)
        if isinstance(star, Tensor):
            star = star.to(f_neg.device)  # a number for a GPU may well be kept on the CPU
        pos = per_sample(f_pos, star, settings.reduce)
        neg = per_sample(f_neg, star, settings.reduce)
        numbers = {
            **compute(energy_diagnostics, pos, neg),
            **compute(nonfinite_diagnostics, pos, neg, star, log_q),
            "beta_star": star if isinstance(star, Tensor) else pos.new_full((), star),
            **self._take_from_sampler(trainer.buffer, neg),
            **{name: _tensor(x, neg) for name, x in self._from_update.items()},
            **{name: x.detach() for name, x in extra.items() if x is not None},
        }
        self._from_update = {}
        # A copy: a compiled network may write its next output into the same memory.
        self._recent.append((neg.clone(), None if log_q is None else log_q[1].detach().clone()))
        stars = star, settings.reference_beta_star
        samples: dict[str, Tensor] = {}
        if slow:
            shapes = pareto_k(self._pooled_log_weights(stars, neg)).unbind()
            numbers["pareto_k"], numbers["ref/pareto_k"] = shapes
            samples = {"f_pos": pos.clone(), "f_neg": neg.clone()}
        if group is None:
            weights, reference = compute(weight_diagnostics_at, pos, neg, stars, groups, log_q)
        else:
            (weights, reference), numbers = diagnostics_of_ranks(
                pos, neg, stars, numbers, group, groups, log_q
            )
        self._grad_scale = self._in_force(weights["grad_scale"], strength)
        if strength.output_scale is not None:
            numbers["energy_gap_scaled"] = numbers["energy_gap"] * strength.output_scale
        if self._parts:
            at = numbers["beta_star"]
            weights |= mixture_weights(pos, neg, self._parts, at, groups, log_q, group)
            at = torch.full_like(at, settings.reference_beta_star)
            reference |= mixture_weights(pos, neg, self._parts, at, groups, process_group=group)
            numbers |= mixture_gaps(pos, neg, self._parts, group)
        numbers = {**weights, **{f"ref/{name}": x for name, x in reference.items()}, **numbers}
        return numbers, samples

    def _in_force(self, grad_scale: Tensor, strength: StrengthAt) -> float | Tensor:
        """The factor that the loss has put on the contrastive gradient."""
        if strength.is_off or self._settings.variant == "no_pos":
            return 1.0
        if isinstance(strength.beta_star, Tensor):
            return torch.where(strength.beta_star.to(grad_scale.device) == 0, 1.0, grad_scale)
        return grad_scale

    def _take_from_sampler(self, buffer: object, like: Tensor) -> dict[str, Tensor]:
        calls, self._from_sampler = self._from_sampler, []
        if not calls:  # sampled inline, or a second loss of the same samples
            calls = [buffer_diagnostics(buffer)]  # type: ignore[list-item]
        found = [{name: _tensor(x, like) for name, x in call.items()} for call in calls]
        if len(found) == 1:
            return found[0]
        names = {name for call in found for name in call}
        models = self._settings.models
        return {
            name: torch.stack([x[name].expand(models) for x in found if name in x]).mean(0)
            for name in sorted(names)
        }

    def _pooled_log_weights(self, beta_stars: Sequence[float | Tensor], like: Tensor) -> Tensor:
        logs = [
            log_weights(f.to(like), beta_stars, None if q is None else q.to(like.device))
            for f, q in self._recent
        ]
        # Each step's weights relative to their mean: batches of any size pool.
        return torch.cat([x.log_softmax(-1) + math.log(x.shape[-1]) for x in logs], -1)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers: energies pooled for the Pareto shape, and what the next row needs."""
        return {
            "recent": [[f.tolist(), None if q is None else q.tolist()] for f, q in self._recent],
            "update": {name: float(x) for name, x in self._from_update.items()},
            "known_by": [[call, x.tolist()] for call, x in self._known_by.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        recent = ((_restored(f), None if q is None else _restored(q)) for f, q in state["recent"])
        self._recent = deque(recent, maxlen=_POOLED_STEPS)
        self._from_update = dict(state["update"])
        self._from_sampler = []
        self._known_by = {call: _restored(x) for call, x in state["known_by"]}


def _tensor(x: float | Tensor, like: Tensor) -> Tensor:
    if isinstance(x, Tensor):
        return x.to(like.device, non_blocking=like.is_cuda)
    return like.new_full((), x, dtype=torch.float32)


def _restored(numbers: list[Any]) -> Tensor:
    # Float64 holds any of them exactly; they are turned back where they are used.
    return torch.tensor(numbers, dtype=torch.float64)
