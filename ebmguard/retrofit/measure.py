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
    energy_unit,
    metropolis_acceptance,
    norm_diagnostics,
    oriented,
    pareto_k,
    sample_diagnostics,
    sample_marks,
    sharpness,
)
from ..errors import Stateful
from ..objective import Terms
from ..ranks import Batch, gathered
from ..sampling import Evaluation, Substeps, Tempering, is_opaque
from ..tags import REFERENCE, SAMPLER_UNIT, SHARPNESS, SUBSTEPS, SUBSTEPS_MISSED
from ..trainer import Trainer, leaves
from .ensemble import energies_by_tag, loss_and_numbers
from .parts import Call, Part, Row, by_tag, joined_ranks, on_device
from .rows import POOLED_STEPS
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
        self._from_sampler: list[Call] = []  # since the latest loss
        # Of these, the drifts' products, and numbers that are finite where all is well.
        self._products: list[Tensor] = []
        self._finite: list[Tensor] = []
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
        self._from_sampler, self._products, self._finite = [], [], []

    def sampled(
        self,
        trainer: Trainer,
        tempering: Tempering | None,
        samples: object,
        evaluations: Sequence[Evaluation],
        finer: Substeps | None,
        *,
        sizes: Mapping[str, float] | None,
        slow: bool,
    ) -> None:
        """Keep measurements of a sampler call until the loss; use the first floating tensor.

        The tags depend on the attached parts, not on what the sampler did, so all ranks have the
        same tags. NaN means unknown. ``evaluations``: the last two, if recorded. ``sizes``: step
        and noise, declared or measured. ``slow``: also measure the slow tier.
        """
        models, steps, call = self._settings.models, trainer.steps, len(self._from_sampler)
        known: Row = {SUBSTEPS: 1.0 if finer is None else float(finer.times)}
        if sizes is not None:
            known[SAMPLER_UNIT] = energy_unit(**sizes)
        # None also where a CUDA graph may have others than those that were recorded.
        count = None if tempering is None else tempering.evaluations
        known["sampler/evaluations"] = math.nan if count is None else float(count)
        parts: Call = [known]
        products = None if tempering is None else tempering.gradients.products
        if products is None:
            known[SHARPNESS] = math.nan
        else:
            products = products.flatten(0, -2) if products.ndim > 1 else products
            parts.append(Part(products, sharpness))
            self._products.append(products)
        if finer is not None and finer.missed is not None:
            parts.append(Part.of({SUBSTEPS_MISSED: finer.missed}))
        elif known[SUBSTEPS] > 1:
            known[SUBSTEPS_MISSED] = math.nan
        # This norm is the drift's, which the tempered energy has; f's is that over the factor.
        drift = None if tempering is None else tempering.gradients.norm
        if tempering is None or drift is None or not drift.numel():
            names = ["grad_norm", "grad_norm_max", *(["drift_to_noise"] if steps else [])]
            known |= {f"sampler/{name}": math.nan for name in names}
        else:
            # A factor that is a tensor is read with the row.
            factor, entries = tempering.factor, tempering.gradients.entries
            shape = (models.numel(), -1) if models and _has_models(drift, models) else (-1,)
            norms = drift.reshape(shape)
            size = None if isinstance(factor, Tensor) else abs(factor)
            if isinstance(factor, Tensor):
                sizes_of = factor.detach().abs().to(norms).reshape(-1, 1)
                sizes_of = sizes_of.expand(*norms.shape[:-1], 1) if norms.ndim > 1 else sizes_of[0]
                norms = torch.cat((norms, sizes_of), -1)
            step_and_noise = None if steps is None else (steps["step_size"], steps["noise_std"])
            parts.append(Part(norms, norm_diagnostics, (size, entries, step_and_noise)))
            self._finite.append(norms)
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
                rows, before = _rows(x.detach(), models), self._known_by.get(call)
                marks = self._known_by[call] = self.compute(sample_marks, rows, trainer.clamp)
                if before is None or before.shape != marks.shape:
                    parts.append(Part(marks.unsqueeze(-3), _samples, (rows.shape[-1],)))
                else:
                    both = torch.stack((marks, before.to(marks)), -3)
                    parts.append(Part(both, _samples, (rows.shape[-1],)))
                self._finite.append(marks)
                break
        # The buffer now, since another sampler may draw from it before the loss.
        self._from_sampler.append([*parts, *_buffer_parts(trainer.buffer)])

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

    def computed(self, batch: Batch, strength: StrengthAt) -> tuple[Tensor | None, Part | None]:
        """Return the loss, 0-dim or ``(*models,)``, None at β* = 0; and the energies' numbers.

        These are None where the host makes them of the energies, later and of several steps at
        once. ``batch`` holds the samples of all ranks, oriented high on data.
        """
        settings, star = self._settings, strength.beta_star
        if isinstance(star, Tensor):
            star = star.to(batch.f_pos)  # a number for a GPU may well be kept on the CPU
        variant = None if strength.is_off else settings.variant
        is_plain = not isinstance(star, Tensor) and batch.groups is None and batch.log_q is None
        options = None if is_plain else self._options(strength)
        if variant is None and options is None:
            return None, None
        arguments = settings.models, *batch[:2], star, *batch[2:4]
        names = {"variant": variant, "options": options}
        loss, tags, table = self.compute(loss_and_numbers, *arguments, **names)
        if table is None:
            return loss, None
        return loss, Part(
            table.reshape(-1, len(tags)) if settings.models else table, by_tag, (tags,)
        )

    def _options(self, strength: StrengthAt) -> dict[str, Any]:
        reference, scale = self._settings.reference_beta_star, strength.output_scale
        return {"reference": reference, "output_scale": scale}

    @torch.no_grad()
    def pulse(self, batch: Batch) -> tuple[float, float, float, float]:
        """Return the gap, the positives' spread, the sharpness of the latest sampler calls, and a
        sum that is finite where all is well, before :meth:`loss` takes these calls."""
        var, mean = torch.var_mean(batch.f_pos, correction=0)
        finite = (x.sum() for x in self._finite)
        sums = torch.stack((mean, var, batch.f_neg.mean(), *finite)).tolist()
        products = [x.tolist() for x in self._products]
        sharp = max((1 - a / b if b else math.nan for a, b in products), default=-math.inf)
        return sums[0] - sums[2], math.sqrt(sums[1]), sharp, sum(sums[3:])

    @torch.no_grad()
    def loss(
        self,
        trainer: Trainer,
        batch: Batch,
        strength: StrengthAt,
        numbers: Part | None,
        shown: Mapping[str, Tensor],
        *,
        slow: bool,
        is_pooled: bool,
    ) -> tuple[Call, dict[str, Tensor]]:
        """Return all measurements of a loss call, and energies by tag for histograms.

        Across ranks the numbers are every rank's, the energies this rank's. ``numbers`` are those
        of :meth:`computed`, ``shown`` those of the loss itself. ``slow`` adds the tier that not
        every step has, which pools the weights of those that are pooled.
        """
        settings, star, scale = self._settings, strength.beta_star, strength.output_scale
        pos, neg = batch.f_pos.detach(), batch.f_neg.detach()
        known: Row = {} if scale is None else {"output_scale": scale}
        call: Call = [known]
        if isinstance(star, Tensor):
            star = star.to(pos)
            shown = {**shown, "beta_star": star}
        else:
            known["beta_star"] = float(star)
        # Copies, since a compiled network may write its next output into the same memory.
        if numbers is not None:
            call.append(numbers)
            if is_pooled:
                pos, neg = pos.clone(), neg.clone()
        else:
            values, n = torch.cat((pos, neg)), len(pos)
            pos, neg = values[:n], values[n:]
            arguments = n, known["beta_star"], *self._options(strength).values()
            call.append(Part(values, _energies, arguments))
        if shown:
            call.append(Part.of({name: x.detach() for name, x in shown.items()}, settings.models))
        self._grad_scale = partial(_in_force, pos, neg, star, *batch[2:4])
        if strength.is_off or settings.variant == "no_pos":
            self._grad_scale = lambda: 1.0
        # None where it was sampled inline, or where these samples had a loss already.
        calls = self._from_sampler or [_buffer_parts(trainer.buffer)]
        self._from_sampler, self._products, self._finite = [], [], []
        rest: Call = calls[0] if len(calls) == 1 else [calls]
        rest += [Part.of(self._update)] if self._update else []
        self._update = {}
        call += rest if settings.process_group is None else self._joined(rest, batch.sizes, neg)
        samples: dict[str, Tensor] = {}
        if is_pooled:
            q = None if batch.log_q is None else batch.log_q[1].detach().clone()
            self._recent.append((neg, q))
        if slow:
            call.append(Part.of(self._pareto(star, neg), settings.models))
            for name, f, sizes in zip(("f_pos", "f_neg"), (pos, neg), batch.sizes, strict=True):
                mine = torch.split(f, sizes or f.shape[-1], -1)[settings.ranks.index]
                samples[name] = mine
        return call, samples

    def _joined(self, call: Call, sizes: tuple[list[int], list[int]], like: Tensor) -> Call:
        """Return a call of the joined numbers of all ranks; an empty one if there are none."""
        group, numbers = self._settings.process_group, on_device(call, like)
        assert group is not None
        if not numbers:  # sampled inline, without a buffer
            return []
        (everyone,) = gathered(group, Part.of(numbers, self._settings.models).values)
        arguments = tuple(numbers), *map(tuple, sizes)
        return [Part(everyone.movedim(0, -2), joined_ranks, arguments)]

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


@torch.no_grad()
def _in_force(f_pos: Tensor, f_neg: Tensor, star: float | Tensor, *more: Any) -> Tensor:
    """Return the factor that a loss has put on the contrastive gradient."""
    terms = Terms.of(f_pos, f_neg, star, *more)
    scale = terms.grad_scale(terms.is_paired)
    scale = torch.where(terms.is_pos.all() & terms.is_neg.all(), scale, math.nan)
    return torch.where(star == 0, 1.0, scale) if isinstance(star, Tensor) else scale


def _energies(
    values: Tensor, n: int, star: float, reference: float, scale: float | None
) -> Mapping[str, Tensor]:
    f_pos, f_neg = values[..., :n].contiguous(), values[..., n:].contiguous()
    return energies_by_tag(f_pos, f_neg, star, reference=reference, output_scale=scale)


def _samples(pair: Tensor, entries: int) -> Mapping[str, Tensor]:
    """Return the shares of samples from their marks, and those of the call before if there are."""
    marks, *before = pair.unbind(-3)
    return sample_diagnostics(marks, next(iter(before), None), entries=entries)


def _has_models(x: Tensor, models: torch.Size) -> bool:
    """Return whether the models have separate samples in x, instead of all sharing the same."""
    return x.ndim > len(models) and (not models or x.shape[: len(models)] == models)


def _rows(x: Tensor, models: torch.Size) -> Tensor:
    """Return samples with their entries in one dimension: ``(..., B, d)``."""
    leading = len(models) if _has_models(x, models) else 0
    rows = x.reshape(*x.shape[: leading + 1], -1) if x.ndim else x.reshape(1, 1)
    return rows.flatten(0, leading - 1) if leading > 1 else rows


def _buffer_parts(buffer: object) -> Call:
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
