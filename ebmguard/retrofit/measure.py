"""Which diagnostics are taken of a step, and what they need to remember."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..diagnostics import (
    buffer_diagnostics,
    grad_scale_of,
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
from .parts import Part, Row, joined_row, named_in_turn
from .rows import POOLED_STEPS
from .settings import Settings
from .strength import StrengthAt

__all__ = ["Measure"]


class Measure(Stateful):
    """Assembles the named numbers of a step from the families of diagnostics."""

    _owner = "the diagnostics"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._from_sampler: list[tuple[list[Part], Row]] = []  # each call since the latest loss
        self._parts: dict[str, slice] = {}  # whose the latest samples are, in a mixture
        # By its place in the step, what each sampler call is known by until the next step's.
        self._known_by: dict[int, Tensor] = {}
        self._update: dict[str, Tensor] = {}
        self._grad_scale: Callable[[], float | Tensor] = lambda: math.nan
        # Energies of the negatives of each step, and log q where it was given.
        self._recent: deque[tuple[Tensor, Tensor | None]] = deque(maxlen=POOLED_STEPS)

    def _saved(self) -> Mapping[str, Any]:
        return {
            "_recent": _read_recent,
            "_update": lambda own: {name: torch.tensor(float(x)) for name, x in own.items()},
            "_known_by": lambda own: {int(call): _restored(x) for call, x in own.items()},
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers: energies pooled for the Pareto shape, and what the next row needs."""
        saved = super().state_dict()
        return tree_map(lambda x: x.tolist() if isinstance(x, Tensor) else x, saved)  # type: ignore[no-any-return]

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
        parts: Mapping[str, slice] | None,
    ) -> None:
        """Keep what a sampler call shows, until the loss; of a mixture, which samples are whose."""
        self._parts = dict(parts or {})
        if known_by is not None:
            self._known_by[len(self._from_sampler)] = known_by
        # Now, since another sampler may draw from the same buffer before the loss.
        of_buffer, known = found
        self._from_sampler.append(([*of_buffer, *_of_buffer(trainer.buffer)], known))

    @torch.no_grad()
    def update(self, update: Update) -> None:
        """Keep what an optimizer step shows for the next row, that of the network it has made."""
        self._update = {  # in float32, as a state that is loaded has them
            "optim/grad_norm": update.gradient_norm.float(),
            "optim/update_norm": update.norm.float(),
            # Adaptive optimizers divide by the gradient's recent size, which undoes GradScale
            # (Appendix H): the network keeps moving on next to no evidence.
            "optim/amplification": (update.relative_norm / self._grad_scale()).float(),
        }

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

        ``own`` is of all ranks, high on data; ``compute`` calls pure functions.
        """
        settings, star = self._settings, strength.beta_star
        if isinstance(star, Tensor):
            star = star.to(own.f_pos)  # a number for a GPU may well be kept on the CPU
        elif abs(star) < SMALLEST:
            star = 0.0
        whose = None
        if own.of_neg:
            whose = torch.stack([own.of_neg[0] == i for i in range(1, len(self._parts) + 1)])
        variant = None if strength.is_off else settings.variant
        given = *own[:2], star, settings.reference_beta_star, *own[2:4], whose
        found: tuple[Tensor | None, Tensor]
        found = compute(over_models, settings.models, *given, variant=variant)
        return found

    def loss(
        self,
        trainer: Trainer,
        own: Batch,
        strength: StrengthAt,
        sums: Tensor,
        *,
        slow: bool,
        is_pooled: bool,
    ) -> tuple[list[Part], Row, dict[str, Tensor]]:
        """All numbers of a loss call whose sums are given: see :meth:`computed`.

        They are parts of the row, numbers of it that the host knows, and energies by tag for
        histograms; across ranks the numbers are every rank's, the energies this rank's. ``slow``
        adds the tier that not every step has, which pools the weights of those that are pooled.
        """
        settings, star = self._settings, strength.beta_star
        pos, neg, groups, log_q = own[:4]
        n, m = pos.shape[-1], neg.shape[-1]
        options = groups is not None, not strength.is_off, tuple(self._parts), strength.output_scale
        parts = [Part(sums, partial(_named, n, m, *options))]
        known: Row = {}
        if isinstance(star, Tensor):
            parts.append(Part.of({"beta_star": star.to(neg.device)}, settings.models))
        else:
            known["beta_star"] = float(star)
        self._grad_scale = partial(self._in_force, sums, n, m, strength)
        # None where it was sampled inline, or where these samples had a loss already.
        calls, self._from_sampler = self._from_sampler or [(_of_buffer(trainer.buffer), {})], []
        rest, of_sampler = calls[0] if len(calls) == 1 else ([Part.mean(calls)], {})
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
                for name, f, sizes in zip(("f_pos", "f_neg"), (pos, neg), own.sizes, strict=True):
                    mine = torch.split(f, sizes or f.shape[-1], -1)[settings.ranks.index]
                    samples[name] = mine.detach().clone()
        return parts, known, samples

    def _in_force(self, sums: Tensor, n: int, m: int, strength: StrengthAt) -> float | Tensor:
        """The factor that the loss has put on the contrastive gradient."""
        if strength.is_off or self._settings.variant == "no_pos":
            return 1.0
        found = grad_scale_of(sums[..., 1 : 1 + WEIGHT_SUMS], n, m)
        if isinstance(strength.beta_star, Tensor):
            return torch.where(strength.beta_star.to(sums.device) == 0, 1.0, found)
        return found

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
        # (..., ranks, numbers) of each part, of which some are those of every model.
        pairs = zip(everyone, own, strict=True)
        wide = [x if part.is_shared else x.movedim(0, 1) for x, part in pairs]
        if models := self._settings.models:
            wide = [x.expand(models.numel(), -1, -1) for x in wide]

        def named(values: Sequence[float]) -> Row:
            each = iter(values)
            return joined_row([named_in_turn(own, each) for _ in sizes[0]], *sizes)

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
    is_grouped: bool,
    has_loss: bool,
    names: Sequence[str],
    output_scale: float | None,
    values: Sequence[float],
) -> Row:
    """The numbers of a loss, from the sums of :func:`.ensemble.of_loss` that the host has read."""
    k, loss = WEIGHT_SUMS, values[0]
    values = values[has_loss:]
    row = named_weights(values[:k], n, m, is_grouped=is_grouped)
    reference = named_weights(values[k : 2 * k], n, m, is_grouped=is_grouped)
    energies = named_energies(values[2 * k : 2 * k + 26], n, m)
    if names:  # whose samples it was are not always known
        of_parts = values[2 * k + 26 :] or [math.nan] * (4 * len(names))
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


def _read_recent(pairs: Sequence[Any]) -> deque[tuple[Tensor, Tensor | None]]:
    read = ((_restored(f), None if q is None else _restored(q)) for f, q in pairs)
    return deque(read, maxlen=POOLED_STEPS)


# Float64 holds any number exactly; they are turned back where they are used.
_restored = partial(torch.as_tensor, dtype=torch.float64)
