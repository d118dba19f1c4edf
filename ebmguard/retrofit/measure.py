"""Which diagnostics are taken of a step, and what they need to remember."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..diagnostics import (
    buffer_diagnostics,
    grad_scale_of,
    joined_row,
    named_energies,
    named_mixture,
    named_nonfinite,
    named_weights,
    pareto_k,
)
from ..energies import SMALLEST
from ..errors import Stateful
from ..ranks import Batch, gathered
from ..tags import REFERENCE
from ..trainer import Trainer
from .ensemble import WEIGHT_SUMS, over_models
from .optimizer import Update
from .parts import Part, Row
from .rows import POOLED_STEPS
from .settings import Settings
from .strength import StrengthAt

__all__ = ["Measure"]


class Measure(Stateful):
    """Assembles the named numbers of a step from the families of diagnostics."""

    _owner = "the diagnostics"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        # Of each sampler call since the latest loss.
        self._from_sampler: list[tuple[list[Part], Row]] = []
        self._parts: dict[str, slice] = {}  # whose the latest samples are, in a mixture
        # By its place in the step, what each sampler call is known by until the next step's.
        self._known_by: dict[int, Tensor] = {}
        self._update: dict[str, Tensor] = {}
        self._grad_scale: Callable[[], float | Tensor] = lambda: math.nan
        # Energies of the negatives of each step, and log q where it was given.
        self._recent: deque[tuple[Tensor, Tensor | None]] = deque(maxlen=POOLED_STEPS)

    def _saved(self) -> Mapping[str, Any]:
        return {"_recent": _read_recent, "_update": _read_tensors, "_known_by": _read_known}

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers: energies pooled for the Pareto shape, and what the next row needs."""
        return {name: _lists(x) for name, x in super().state_dict().items()}

    def _take(self, read: Mapping[str, Any]) -> None:
        super()._take(read)
        self._from_sampler = []

    def known_by(self) -> Tensor | None:
        """What the samples of this sampler call's place in the step before are known by."""
        return self._known_by.get(len(self._from_sampler))

    def samples(
        self,
        trainer: Trainer,
        found: tuple[list[Part], Row],
        known_by: Tensor | None,
        parts: Mapping[str, slice] | None = None,
    ) -> None:
        """Keep what a sampler call shows, until the loss that uses its samples.

        ``parts``: which samples are whose, of a mixture.
        """
        self._parts = dict(parts or {})
        if known_by is not None:
            self._known_by[len(self._from_sampler)] = known_by
        # Now, since another sampler may draw from the same buffer before the loss.
        of_buffer, known = found
        self._from_sampler.append(([*of_buffer, *_of_buffer(trainer.buffer)], known))

    @torch.no_grad()
    def update(self, update: Update) -> None:
        """Keep what an optimizer step shows for the next row, that of the network it has made."""
        found = {
            "optim/grad_norm": update.gradient_norm,
            "optim/update_norm": update.norm,
            # Adaptive optimizers divide by the gradient's recent size, which undoes GradScale
            # (Appendix H): the network keeps moving on next to no evidence.
            "optim/amplification": update.relative_norm / self._grad_scale(),
        }
        # In float32, as a state that is loaded has them.
        self._update = {name: x.float() for name, x in found.items()}

    def parts_of(self, f_neg: Tensor) -> tuple[Tensor, ...]:
        """Which sampler of a mixture each negative is of, ``(M,)`` from 1; none without one."""
        sizes = [part.stop - part.start for part in self._parts.values()]
        if sum(sizes) != f_neg.shape[-1]:
            return ()
        whose = [f_neg.new_full((size,), i) for i, size in enumerate(sizes, 1)]
        return (torch.cat(whose),)

    def computed(
        self, own: Batch, strength: StrengthAt, compute: Callable[..., Any]
    ) -> tuple[Tensor | None, Tensor]:
        """The loss, 0-dim or ``(*models,)``, None at β* = 0; and the sums of its diagnostics.

        Args:
            own: negative energies, high on data, ``(N,)`` and ``(M,)``, or with the models'
                dimensions first; of all ranks where there are several.
            compute: calls pure functions.
        """
        settings, star = self._settings, strength.beta_star
        if isinstance(star, Tensor):
            star = star.to(own.f_pos)  # a number for a GPU may well be kept on the CPU
        elif abs(star) < SMALLEST:
            star = 0.0
        whose = None
        if own.of_neg:
            numbers = range(1, len(self._parts) + 1)
            whose = torch.stack([own.of_neg[0] == i for i in numbers])
        found: tuple[Tensor | None, Tensor] = compute(
            over_models,
            settings.models,
            *own[:2],
            star,
            settings.reference_beta_star,
            *own[2:4],
            whose,
            variant=None if strength.is_off else settings.variant,
        )
        return found

    def loss(
        self,
        trainer: Trainer,
        own: Batch,
        strength: StrengthAt,
        sums: Tensor,
        *,
        slow: bool,
        is_pooled: bool = True,
    ) -> tuple[list[Part], Row, dict[str, Tensor]]:
        """All numbers of a loss call whose sums are given: see :meth:`computed`.

        Args:
            slow: include the tier that is not taken at every step.
            is_pooled: whether the next slow tier pools these weights.

        Returns:
            parts of the row, numbers of it that the host knows, and energies by tag for histograms.
            Across ranks the numbers are every rank's, the energies this rank's.
        """
        settings, star = self._settings, strength.beta_star
        pos, neg, groups, log_q = own[:4]
        n, m = pos.shape[-1], neg.shape[-1]
        has_loss, names = not strength.is_off, tuple(self._parts)
        options = has_loss, groups is not None, names, bool(own.of_neg), strength.output_scale
        parts = [Part(sums, partial(_named, n, m, *options))]
        known: Row = {}
        if isinstance(star, Tensor):
            parts.append(Part.of({"beta_star": star.to(neg.device)}, settings.models))
        else:
            known["beta_star"] = float(star)
        self._grad_scale = partial(self._in_force, sums, n, m, strength)
        rest, of_sampler = self._take_from_sampler(trainer.buffer)
        rest += [Part.of(self._update)] if self._update else []
        self._update = {}
        if settings.process_group is None:
            parts += rest
            known |= of_sampler
        else:
            parts += self._joined(rest, of_sampler, own.sizes, neg)
        samples: dict[str, Tensor] = {}
        with torch.no_grad():
            if is_pooled:
                # A copy: a compiled network may write its next output into the same memory.
                q = None if log_q is None else log_q[1].detach().clone()
                self._recent.append((neg.detach().clone(), q))
            if slow:
                parts.append(Part.of(self._pareto(star, neg), settings.models))
                rank = settings.ranks.index
                sides = zip(("f_pos", "f_neg"), (pos, neg), own.sizes, strict=True)
                for name, f, sizes in sides:
                    start = sum(sizes[:rank])
                    mine = f.detach()[..., start : start + sizes[rank]] if sizes else f.detach()
                    samples[name] = mine.clone()
        return parts, known, samples

    def _in_force(self, sums: Tensor, n: int, m: int, strength: StrengthAt) -> float | Tensor:
        """The factor that the loss has put on the contrastive gradient."""
        if strength.is_off or self._settings.variant == "no_pos":
            return 1.0
        found = grad_scale_of(sums[..., 1 : 1 + WEIGHT_SUMS], n, m)
        if isinstance(strength.beta_star, Tensor):
            return torch.where(strength.beta_star.to(sums.device) == 0, 1.0, found)
        return found

    def _take_from_sampler(self, buffer: object) -> tuple[list[Part], Row]:
        calls, self._from_sampler = self._from_sampler, []
        if not calls:  # sampled inline, or a second loss of the same samples
            return _of_buffer(buffer), {}
        if len(calls) == 1:
            return calls[0]
        return [Part.mean(calls)], {}

    def _joined(
        self, parts: Sequence[Part], known: Row, sizes: tuple[list[int], list[int]], like: Tensor
    ) -> list[Part]:
        """The parts of all ranks as one, whose numbers are joined; none if there are no numbers."""
        group = self._settings.process_group
        assert group is not None
        own = [part for part in parts if part.values.numel()]
        if known:  # filled in on the device: a copy from the host would wait
            own.append(Part.of({k: like.new_full((), x) for k, x in known.items()}))
        if not own:  # sampled inline, without a buffer
            return []
        everyone = gathered(group, *(part.values for part in own))
        (*models,) = self._settings.models
        count = math.prod(models)
        # (..., ranks, numbers) of each part, of which some are those of every model.
        wide = [
            (x if part.is_shared or not models else x.movedim(0, 1)).expand(
                *([count] if models else []), *x.shape[-2:] if part.is_shared else (len(x), -1)
            )
            for x, part in zip(everyone, own, strict=True)
        ]
        ends = [x.shape[-1] for x in wide]

        def named(values: Sequence[float]) -> Row:
            rows: list[Row] = []
            per_rank = len(values) // len(sizes[0])
            for start in range(0, len(values), per_rank):
                row: Row = {}
                place = start
                for part, length in zip(own, ends, strict=True):
                    row |= part.named(values[place : place + length])
                    place += length
                rows.append(row)
            return joined_row(rows, *sizes)

        return [Part(torch.cat(wide, -1).flatten(-2), named)]

    def _pareto(self, star: float | Tensor, like: Tensor) -> dict[str, Tensor]:
        """At β* and at the reference, of the steps that are pooled."""
        by = star.to(like).unsqueeze(-1) if isinstance(star, Tensor) else star
        logs = []
        for f, q in self._recent:
            f = f.to(like) - f.to(like)[..., :1]
            at_star = by * f if q is None else by * f - q.to(like)
            both = torch.stack([at_star, self._settings.reference_beta_star * f])
            # Each step's weights relative to their mean: batches of any size pool.
            logs.append(both.log_softmax(-1) + math.log(f.shape[-1]))
        own, reference = pareto_k(torch.cat(logs, -1)).unbind()
        return {"pareto_k": own, f"{REFERENCE}pareto_k": reference}


def _of_buffer(buffer: object) -> list[Part]:
    found = buffer_diagnostics(buffer)
    return [Part.of(found)] if found else []


def _named(
    n: int,
    m: int,
    has_loss: bool,
    is_grouped: bool,
    names: Sequence[str],
    has_parts: bool,
    output_scale: float | None,
    values: Sequence[float],
) -> Row:
    """The numbers of a loss, from the sums of :func:`.ensemble.of_loss` that the host has read."""
    k, loss = WEIGHT_SUMS, values[0]
    values = values[has_loss:]
    row = named_weights(values[:k], n, m, is_grouped=is_grouped)
    reference = named_weights(values[k : 2 * k], n, m, is_grouped=is_grouped)
    energies = named_energies(values[2 * k : 2 * k + 26], n, m)
    if names:
        of_parts = values[2 * k + 26 :] if has_parts else [math.nan] * (4 * len(names))
        own, other = named_mixture(of_parts, names, energies["f_pos/mean"])
        row |= own
        reference |= other
    row |= {f"{REFERENCE}{name}": x for name, x in reference.items()}
    row |= energies | named_nonfinite(n - values[k - 2], m - values[k - 1], n, m)
    if has_loss:
        row["loss"] = loss
    if output_scale is not None:
        row["energy_gap_scaled"] = row["energy_gap"] * output_scale
        row["output_scale"] = output_scale
    return row


def _lists(x: Any) -> Any:
    """With lists of numbers for tensors."""
    if isinstance(x, Tensor):
        return x.tolist()
    if isinstance(x, dict):
        return {name: _lists(each) for name, each in x.items()}
    return [_lists(each) for each in x] if isinstance(x, list) else x


def _read_recent(pairs: Sequence[Any]) -> deque[tuple[Tensor, Tensor | None]]:
    read = ((_restored(f), None if q is None else _restored(q)) for f, q in pairs)
    return deque(read, maxlen=POOLED_STEPS)


def _read_tensors(numbers: Mapping[str, float]) -> dict[str, Tensor]:
    return {name: torch.tensor(float(x)) for name, x in numbers.items()}


def _read_known(pairs: Mapping[Any, Any]) -> dict[int, Tensor]:
    return {int(call): _restored(x) for call, x in pairs.items()}


def _restored(numbers: Any) -> Tensor:
    # Float64 holds any number exactly; they are turned back where they are used.
    is_tensor = isinstance(numbers, Tensor)  # which stays what it was, so that states are equal
    return numbers if is_tensor else torch.tensor(numbers, dtype=torch.float64)
