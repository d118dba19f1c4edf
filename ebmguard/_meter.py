"""Which diagnostics are taken of a step, and what they need to remember."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .diagnostics import (
    diagnostics_of_ranks,
    energy_diagnostics,
    nonfinite_diagnostics,
    pareto_k,
    weight_diagnostics_at,
)
from .energies import Groups, Reduce, has_models, per_sample
from .errors import ConfigError
from .strength import StrengthAt

__all__ = ["Meter"]

# The Pareto shape of one batch is too noisy to act on; that of so many pooled ones is not.
_POOLED_STEPS = 16


@dataclass
class _Seen:
    """What is kept of one sampler call: a few numbers per sample."""

    grad_norm: Tensor | None
    highest: Tensor | None = None
    lowest: Tensor | None = None

    def numbers(self, like: Tensor, models: torch.Size) -> dict[str, Tensor]:
        norm = like.new_full((1,), torch.nan) if self.grad_norm is None else self.grad_norm.float()
        norm = _by_model(norm, models)
        found = {
            "sampler/grad_norm": norm.sum(-1) * (1 / norm.shape[-1]),
            "sampler/grad_norm_max": norm.amax(-1),
        }
        if self.highest is not None and self.lowest is not None:
            largest = torch.finfo(self.highest.dtype).max
            finite = (self.highest <= largest) & (self.lowest >= -largest)
            finite = _by_model(finite, models)
            found["nonfinite/samples"] = 1.0 - finite.float().sum(-1) * (1 / finite.shape[-1])
        return {name: x.to(like.device) for name, x in found.items()}


class Meter:
    """Assembles the named numbers of one loss call from the families of diagnostics.

    Args:
        reduce: how heads become one energy.
        reference: exponent of the diagnostics under ``ref/``.
        output_scale: o, or None where it is unknown.
        models: model dimensions of an ensemble.
        process_group: its ranks share one row, see :func:`diagnostics_of_ranks`.
    """

    def __init__(
        self,
        reduce: Reduce,
        reference: float,
        output_scale: float | None,
        models: torch.Size,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._models = models
        self._reduce = reduce
        self._reference = reference
        self._output_scale = output_scale
        self._process_group = process_group
        self._from_sampler: list[_Seen] = []
        self._recent: deque[Tensor] = deque(maxlen=_POOLED_STEPS)

    @torch.no_grad()
    def saw_samples(self, grad_norm: Tensor | None, samples: object) -> None:
        """Keep what a sampler call shows, until the loss that uses its samples.

        Args:
            grad_norm: ‖∇_x f‖ per sample in the sampler's last evaluation, or None if unknown.
            samples: what the sampler returned; its first floating-point tensor is looked at.
        """
        seen = _Seen(grad_norm)
        x = _first_tensor(samples)
        if x is not None:
            leading = len(self._models) if has_models(x, self._models) else 0
            rows = x.reshape(*x.shape[: leading + 1], -1) if x.ndim else x.reshape(1, 1)
            # NaN and the infinities show in the extremes, without a mask of the samples' size.
            seen.highest, seen.lowest = rows.amax(-1), rows.amin(-1)
        self._from_sampler.append(seen)

    @torch.no_grad()
    def measure(
        self,
        f_pos: Tensor,
        f_neg: Tensor,
        strength: StrengthAt,
        groups: Groups | None,
        extra: Mapping[str, Tensor],
        *,
        slow: bool,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """All numbers of one loss call, and the raw energies where ``slow`` asks for histograms.

        Args:
            f_pos: detached negative energies, high on data, in a layout of
                :mod:`ebmguard.energies`.
            f_neg: the same for negatives.
            strength: the exponent in use.
            groups: class labels, as for the loss.
            extra: further numbers by tag.
            slow: include the tier that is not taken at every step.

        Returns:
            0-dim tensors by tag, or ``(*models,)`` where the members of an ensemble differ, and
            energies by tag. Across ranks the numbers are every rank's, the energies this rank's.

        Raises:
            ConfigError: groups across ranks.
        """
        if groups is not None and self._process_group is not None:
            raise ConfigError("groups across ranks are not defined; leave process_group out.")
        star = strength.beta_star
        if isinstance(star, tuple):
            star = sum(star) / len(star)
        if isinstance(star, Tensor):
            star = star.to(f_neg.device)  # a number for a GPU may well be kept on the CPU
        pos, neg = per_sample(f_pos, star, self._reduce), per_sample(f_neg, star, self._reduce)
        numbers = {
            **energy_diagnostics(pos, neg),
            **nonfinite_diagnostics(pos, neg, star),
            "beta_star": star if isinstance(star, Tensor) else pos.new_full((), star),
            **self._take_from_sampler(neg),
            **extra,
        }
        # A copy: a compiled network may write its next output into the same memory.
        self._recent.append(neg.clone())
        samples: dict[str, Tensor] = {}
        if slow:
            numbers["pareto_k"] = pareto_k(self._pooled_log_weights(star, neg))
            numbers["ref/pareto_k"] = pareto_k(self._pooled_log_weights(self._reference, neg))
            samples = {"f_pos": pos.clone(), "f_neg": neg.clone()}
        stars = star, self._reference
        if self._process_group is None:
            weights, reference = weight_diagnostics_at(pos, neg, stars, groups)
        else:
            (weights, reference), numbers = diagnostics_of_ranks(
                pos, neg, stars, numbers, self._process_group
            )
        if self._output_scale is not None:
            numbers["energy_gap_scaled"] = numbers["energy_gap"] * self._output_scale
        numbers = {**weights, **{f"ref/{name}": x for name, x in reference.items()}, **numbers}
        return numbers, samples

    def of_any_rank(self, number: Tensor) -> Tensor:
        """The largest over ranks of a number; without ranks, the number itself."""
        if self._process_group is not None:
            number = number.detach().clone()
            dist.all_reduce(number, dist.ReduceOp.MAX, self._process_group)
        return number

    def _take_from_sampler(self, like: Tensor) -> dict[str, Tensor]:
        models = self._models
        calls = [seen.numbers(like, models) for seen in self._from_sampler]
        self._from_sampler = []
        if len(calls) == 1:
            return calls[0]
        names = {name for call in calls for name in call}
        return {
            name: torch.stack([x[name].expand(models) for x in calls if name in x]).mean(0)
            for name in sorted(names)
        }

    def _pooled_log_weights(self, beta_star: float | Tensor, like: Tensor) -> Tensor:
        if isinstance(beta_star, Tensor):
            beta_star = beta_star.to(like).unsqueeze(-1)
        logs = [torch.log_softmax(beta_star * f.to(like), -1) for f in self._recent]
        # Each step's weights relative to their mean: batches of any size pool.
        return torch.cat([log + math.log(log.shape[-1]) for log in logs], -1)

    def state_dict(self) -> list[Any]:
        """The energies that are pooled for the Pareto shape, as nested lists."""
        return [f.tolist() for f in self._recent]

    def load_state_dict(self, state: Sequence[Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._from_sampler = []
        # Float64 holds any of them exactly; they are turned back where they are used.
        recent = (torch.tensor(f, dtype=torch.float64) for f in state)
        self._recent = deque(recent, maxlen=_POOLED_STEPS)


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
