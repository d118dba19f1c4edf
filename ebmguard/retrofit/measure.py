"""The diagnostics that a step computes, and what they must remember."""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..diagnostics import (
    ChainState,
    buffer_diagnostics,
    drift_to_noise,
    energy_unit,
    grad_scale_of,
    metropolis_acceptance,
    named_energies,
    named_nonfinite,
    named_samples,
    named_weights,
    oriented,
    pareto_k,
    sample_shares,
)
from ..errors import Stateful
from ..ranks import Batch, gathered
from ..sampling import Evaluation, Tempering, is_opaque
from ..tags import REFERENCE, SAMPLER_UNIT, SHARPNESS, SUBSTEPS, SUBSTEPS_MISSED
from ..trainer import Trainer, leaves
from .ensemble import WEIGHT_SUMS, Variants, over_models
from .rows import POOLED_STEPS, Part, Row, joined_row
from .strength import Settings, StrengthAt

__all__ = ["Measure"]


class Measure(Stateful):
    """An assembler of the named numbers of a step, from the families of diagnostics.

    Attributes:
        compute: calls pure functions of tensors.
    """

    _owner = "the diagnostics"

    def __init__(self, settings: Settings) -> None:
        self.compute: Callable[..., Any] = _compiled if settings.compiles else operator.call
        self._settings = settings
        self._from_sampler: list[list[Part]] = []  # one list per call since the latest loss
        # By a sampler call's place in the step, what that call is known by until the next step's.
        self._known_by: dict[int, Tensor] = {}
        self._update: dict[str, Tensor] = {}
        self._grad_scale: Callable[[], float | Tensor] = lambda: math.nan
        # Energies of the negatives, by step, and log q where it was given.
        self._recent: deque[tuple[Tensor, Tensor | None]] = deque(maxlen=POOLED_STEPS)

    def _saved(self) -> Mapping[str, Any]:
        return {
            "_recent": lambda steps: deque([tuple(map(_restored, x)) for x in steps], POOLED_STEPS),
            "_update": lambda numbers: {
                name: torch.tensor(float(x), device="cpu") for name, x in numbers.items()
            },
            "_known_by": lambda calls: {int(call): _restored(x) for call, x in calls.items()},
        }

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers: energies for the Pareto shape, and what the next row needs."""
        saved = super().state_dict()
        return tree_map(lambda x: x.tolist() if isinstance(x, Tensor) else x, saved)  # type: ignore[no-any-return]

    def _take(self, read: Mapping[str, Any]) -> None:
        super()._take(read)
        self._from_sampler = []

    def sampled(
        self,
        trainer: Trainer,
        tempering: Tempering | None,
        samples: object,
        evaluations: Sequence[Evaluation],
        *,
        times: int,
        missed: Tensor | None,
        sizes: Mapping[str, float] | None,
        slow: bool,
    ) -> None:
        """Keep measurements of a sampler call until the loss; use the first floating tensor.

        The tags depend on the attached parts, not on what the sampler did, so all ranks have the
        same tags. NaN means unknown. ``evaluations``: the last two, if recorded. ``sizes``: step
        and noise, declared or measured. ``slow``: also measure the slow tier.
        """
        models, steps, call = self._settings.models, trainer.steps, len(self._from_sampler)
        known: Row = {SUBSTEPS: float(times)}
        if sizes is not None:
            known[SAMPLER_UNIT] = energy_unit(**sizes)
        # None also where a CUDA graph may have others than those that were recorded.
        count = None if tempering is None else tempering.evaluations
        known["sampler/evaluations"] = math.nan if count is None else float(count)
        parts: list[Part] = []
        follows = None if tempering is None else tempering.gradients.products
        if follows is None:
            known[SHARPNESS] = math.nan
        else:
            parts.append(Part(follows.flatten(0, -2) if follows.ndim > 1 else follows, _sharpness))
        if missed is not None:
            parts.append(Part.of({SUBSTEPS_MISSED: missed}))
        elif times > 1:
            known[SUBSTEPS_MISSED] = math.nan
        # This norm is the drift's, which the tempered energy has; f's is that over the factor.
        drift = None if tempering is None else tempering.gradients.norm
        if tempering is None or drift is None or not drift.numel():
            names = ["grad_norm", "grad_norm_max", *(["drift_to_noise"] if steps else [])]
            known |= {f"sampler/{name}": math.nan for name in names}
        else:
            # A factor that is a tensor is read with the row.
            f, entries = tempering.factor, tempering.gradients.entries
            factor, size = (f, 1.0) if isinstance(f, Tensor) else (None, abs(f))

            def named(sums: Sequence[float]) -> Row:
                mean, largest, divisor = (*sums, size)[:3]
                row = {"sampler/grad_norm": mean, "sampler/grad_norm_max": largest}
                row = {name: x / divisor if divisor else math.nan for name, x in row.items()}
                if steps is not None:
                    noise = drift_to_noise(mean, entries=entries, **steps)
                    row["sampler/drift_to_noise"] = noise
                return row

            leading = (models.numel(),) if models and _has_models(drift, models) else ()
            parts.append(Part(self.compute(_norms, drift.reshape(*leading, -1), factor), named))
        if slow and steps is not None:
            # Mean Metropolis acceptance, where the two are a step of the same chains.
            pair = evaluations if count is not None and len(evaluations) == 2 else ()
            scale = 1.0 if tempering is None else tempering.factor
            first, last = [self._point(evaluation, scale) for evaluation in pair] or (None, None)
            if first is None or last is None or first.x.shape != last.x.shape:
                known["sampler/acceptance"] = math.nan
            else:
                acceptance = metropolis_acceptance(first, last, **steps).mean(-1).float()
                parts.append(Part.of({"sampler/acceptance": acceptance}, models))
        for x in leaves(samples):
            if isinstance(x, Tensor) and not is_opaque(x) and x.is_floating_point() and x.numel():
                arguments = _rows(x.detach(), models), self._known_by.get(call), trainer.clamp
                shares, self._known_by[call] = self.compute(sample_shares, *arguments)
                parts.append(Part(shares, named_samples))
                break
        # The buffer now, since another sampler may draw from it before the loss.
        self._from_sampler.append([*parts, *_buffer_parts(trainer.buffer), Part.known(known)])

    def _point(self, evaluation: Evaluation, factor: float | Tensor) -> ChainState | None:
        """Return the chains' state, ``(*models, B, d)``; None if the layout hides the samples."""
        x, output, models = evaluation.x, evaluation.output, self._settings.models
        leading = x.shape[: len(models) + 1]
        if output is None or evaluation.is_joint or output.shape[: len(leading)] != leading:
            return None
        if not _has_models(x, models) or not x.numel() or x.is_complex() or output.is_complex():
            return None
        if output.shape[len(leading) :].numel() > 1:  # heads keep their values
            output = output * factor
        parts = (x, output, evaluation.cotangent, evaluation.gradient)
        flat = (x.reshape(*leading, -1) for x in parts if x is not None)
        return oriented(*flat, sign=self._settings.sign)

    @torch.no_grad()
    def update(self, gradient_norm: Tensor, norm: Tensor, relative_norm: Tensor) -> None:
        """Keep an optimizer step's measurements for the next row, the updated network's.

        See :class:`~.optimizer.OptimizerHooks`.
        """
        self._update = {  # in float32, as a state that is loaded has them
            "optim/grad_norm": gradient_norm.float(),
            "optim/update_norm": norm.float(),
            # Adaptive optimizers divide by the gradient's recent size, which undoes GradScale
            # (Appendix H): the network keeps moving on next to no evidence.
            "optim/amplification": (relative_norm / self._grad_scale()).float(),
        }

    def computed(self, batch: Batch, strength: StrengthAt) -> tuple[Tensor | None, Tensor]:
        """Return the loss, 0-dim or ``(*models,)``, None at β* = 0; and its diagnostics' sums.

        ``batch`` holds the samples of all ranks, oriented high on data.
        """
        settings, star = self._settings, strength.beta_star
        if isinstance(star, Tensor):
            star = star.to(batch.f_pos)  # a number for a GPU may well be kept on the CPU
        variant = None if strength.is_off else settings.variant
        arguments = *batch[:2], star, settings.reference_beta_star, *batch[2:4]
        result: tuple[Tensor | None, Tensor]
        result = self.compute(over_models, settings.models, *arguments, variant=variant)
        return result

    def loss(
        self,
        trainer: Trainer,
        batch: Batch,
        strength: StrengthAt,
        sums: Tensor,
        *,
        slow: bool,
        is_pooled: bool,
    ) -> tuple[list[Part], dict[str, Tensor]]:
        """Return all numbers of a loss call, from its sums: see :meth:`computed`.

        They are parts of the row, and energies by tag for histograms; across ranks the numbers are
        every rank's, the energies this rank's. ``slow`` adds the tier that not every step has,
        which pools the weights of those that are pooled.
        """
        settings, star = self._settings, strength.beta_star
        pos, neg, _, log_q = batch[:4]
        n, m = pos.shape[-1], neg.shape[-1]
        parts = [self._loss_part(batch, strength, sums)]
        if isinstance(star, Tensor):
            parts.append(Part.of({"beta_star": star.to(neg.device)}, settings.models))
        self._grad_scale = partial(_in_force, settings.variant, sums, n, m, strength)
        # None where it was sampled inline, or where these samples had a loss already.
        calls, self._from_sampler = self._from_sampler or [_buffer_parts(trainer.buffer)], []
        rest = calls[0] if len(calls) == 1 else [Part.mean(calls)]
        rest += [Part.of(self._update)] if self._update else []
        self._update = {}
        parts += rest if settings.process_group is None else self._joined(rest, batch.sizes, neg)
        samples: dict[str, Tensor] = {}
        with torch.no_grad():
            if is_pooled:
                # A copy: a compiled network may write its next output into the same memory.
                q = None if log_q is None else log_q[1].detach().clone()
                self._recent.append((neg.detach().clone(), q))
            if slow:
                parts.append(Part.of(self._pareto(star, neg), settings.models))
                for name, f, sizes in zip(("f_pos", "f_neg"), (pos, neg), batch.sizes, strict=True):
                    mine = torch.split(f, sizes or f.shape[-1], -1)[settings.ranks.index]
                    samples[name] = mine.detach().clone()
        return parts, samples

    def _loss_part(self, batch: Batch, strength: StrengthAt, sums: Tensor) -> Part:
        """Return the numbers of a loss, from the sums of :func:`.ensemble.of_loss`."""
        n, m, k = batch.f_pos.shape[-1], batch.f_neg.shape[-1], WEIGHT_SUMS
        scale, star, has_loss = strength.output_scale, strength.beta_star, not strength.is_off
        name_weights = partial(named_weights, n=n, m=m, is_grouped=batch.groups is not None)

        def named(values: Sequence[float]) -> Row:
            loss, values = values[0], values[has_loss:]
            row, reference = name_weights(values[:k]), name_weights(values[k : 2 * k])
            row |= {f"{REFERENCE}{name}": x for name, x in reference.items()}
            row |= named_energies(values[2 * k :], n, m)
            row |= named_nonfinite(n - values[k - 2], m - values[k - 1], n, m)
            row |= {"loss": loss} if has_loss else {}
            if scale is not None:
                row |= {"energy_gap_scaled": row["energy_gap"] * scale, "output_scale": scale}
            return row if isinstance(star, Tensor) else row | {"beta_star": float(star)}

        return Part(sums, named)

    def _joined(
        self, parts: Sequence[Part], sizes: tuple[list[int], list[int]], like: Tensor
    ) -> list[Part]:
        """Return one part with the joined numbers of all ranks; none if there are no numbers."""
        group = self._settings.process_group
        assert group is not None
        local = []
        for part in parts:
            # What the host knows is filled in on the device: a copy from the host would wait.
            known = {} if part.values.numel() else part.named([])
            filled = {name: like.new_full((), x) for name, x in known.items()}
            local.append(Part.of(filled) if filled else part)
        whole = Part.mean([local])
        n = whole.values.shape[-1]
        if not n:  # sampled inline, without a buffer
            return []
        (everyone,) = gathered(group, whole.values)

        def named(values: Sequence[float]) -> Row:
            rows = [whole.named(values[start : start + n]) for start in range(0, len(values), n)]
            return joined_row(rows, *sizes)

        return [Part(everyone.movedim(0, -2).flatten(-2), named)]

    def _pareto(self, star: float | Tensor, like: Tensor) -> dict[str, Tensor]:
        """Return the Pareto shapes of the pooled steps, at β* and at the reference."""
        exponent = star.to(like).unsqueeze(-1) if isinstance(star, Tensor) else star
        logs = []
        for f, q in self._recent:
            f = f.to(like) - f.to(like)[..., :1]
            at_star = exponent * f if q is None else exponent * f - q.to(like)
            both = torch.stack([at_star, self._settings.reference_beta_star * f])
            # The weights of a step are relative to their mean, so that batches of any size pool.
            logs.append(both.log_softmax(-1) + math.log(f.shape[-1]))
        shape, reference = pareto_k(torch.cat(logs, -1)).unbind()
        return {"pareto_k": shape, f"{REFERENCE}pareto_k": reference}


def _in_force(
    variant: Variants, sums: Tensor, n: int, m: int, strength: StrengthAt
) -> float | Tensor:
    """Return the factor that a loss has put on the contrastive gradient."""
    if strength.is_off or variant == "no_pos":
        return 1.0
    scale = grad_scale_of(sums[..., 1 : 1 + WEIGHT_SUMS], n, m)
    if isinstance(strength.beta_star, Tensor):
        return torch.where(strength.beta_star.to(sums.device) == 0, 1.0, scale)
    return scale


def _sharpness(sums: Sequence[float]) -> Row:
    product, squared = sums
    return {SHARPNESS: 1 - product / squared if squared else math.nan}


def _norms(norm: Tensor, factor: Tensor | None) -> Tensor:
    """Return mean and largest of norms ``(..., B)``, and the factor's size if it is a tensor."""
    sums = [norm.mean(-1).float(), norm.amax(-1).float()]
    if factor is not None:
        size = factor.detach().abs().to(sums[0]).flatten()
        sums.append(size.expand_as(sums[0]) if sums[0].ndim else size[0])
    return torch.stack(sums, -1)


def _has_models(x: Tensor, models: torch.Size) -> bool:
    """Return whether the models have separate samples in x, instead of all sharing the same."""
    return x.ndim > len(models) and (not models or x.shape[: len(models)] == models)


def _rows(x: Tensor, models: torch.Size) -> Tensor:
    """Return samples with their entries in one dimension: ``(..., B, d)``."""
    leading = len(models) if _has_models(x, models) else 0
    rows = x.reshape(*x.shape[: leading + 1], -1) if x.ndim else x.reshape(1, 1)
    return rows.flatten(0, leading - 1) if leading > 1 else rows


def _buffer_parts(buffer: object) -> list[Part]:
    numbers = buffer_diagnostics(buffer)
    return [Part.of(numbers)] if numbers else []


def _restored(x: Any) -> Tensor | None:
    # Float64 holds any number exactly; they are turned back where they are used.
    return None if x is None else torch.as_tensor(x, dtype=torch.float64, device="cpu")


@cache
def _compiled_of(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True)


def _compiled(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _compiled_of(function)(*args, **kwargs)
