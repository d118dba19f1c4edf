"""Who is in an ensemble: every variant with every β with every seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast, get_args

import torch
from torch import Tensor

from ebmguard.energies import Variant
from ebmguard.errors import ConfigError
from ebmguard.objective import contrastive_loss

VARIANTS: tuple[Variant, ...] = get_args(Variant)


@dataclass(frozen=True)
class Beta:
    """β over a run, as it is written: "0.5", a linear schedule "0:0.9", an average "0.1+0.5+0.9".

    It starts at the first update and ends after the last one; there are several where losses of
    several β are averaged.
    """

    text: str
    starts: tuple[float, ...]
    ends: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Beta:
        """Read a β as it is written on the command line."""
        try:
            terms = [[float(number) for number in part.split(":")] for part in text.split("+")]
        except ValueError:
            terms = [[math.nan]]
        if any(len(term) > 2 or not all(-math.inf < b <= 1 for b in term) for term in terms):
            raise ConfigError(
                f"beta is {text!r}, expected a number up to 1 such as 0.5, a linear schedule such "
                "as 0:0.9, or several whose losses are averaged, such as 0.1+0.5+0.9"
            )
        return cls(text, *(tuple(term[end] for term in terms) for end in (0, -1)))


@dataclass(frozen=True)
class Members:
    """The members of an ensemble: variants, then β, then seeds, the seeds varying fastest."""

    betas: tuple[Beta, ...]
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]

    @classmethod
    def of(cls, betas: Sequence[str], variants: Sequence[str], seeds: Sequence[int]) -> Members:
        """Check the lists of what is to be trained."""
        for name, values in (("betas", betas), ("variants", variants), ("seeds", seeds)):
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"{name} is {list(values)}, expected different values, 1 or more")
        for variant in set(variants) - set(VARIANTS):
            raise ConfigError(f"variant is {variant!r}, expected one of {', '.join(VARIANTS)}")
        parsed = tuple(map(Beta.parse, betas))
        if len({len(beta.starts) for beta in parsed} - {1}) > 1:
            raise ConfigError(
                f"betas is {list(betas)}: averages in one ensemble need equally many terms"
            )
        return cls(parsed, tuple(cast(Variant, variant) for variant in variants), tuple(seeds))

    def __len__(self) -> int:
        return len(self.variants) * len(self.betas) * len(self.seeds)

    def describe(self) -> list[dict[str, Any]]:
        """Each member's beta (as written), variant and seed, in order."""
        return [
            {"beta": beta.text, "variant": variant, "seed": seed}
            for variant in self.variants
            for beta in self.betas
            for seed in self.seeds
        ]

    @property
    def beta_of_each(self) -> list[Beta]:
        """The β of each member."""
        return [beta for beta in self.betas for _ in self.seeds] * len(self.variants)

    @property
    def seed_of_each(self) -> list[int]:
        """The seed of each member."""
        return [*self.seeds] * (len(self.betas) * len(self.variants))

    def spread(self, per_seed: Tensor, dim: int = 0) -> Tensor:
        """What was drawn once for each seed, for every member: S entries along ``dim`` -> G."""
        return torch.cat([per_seed] * (len(self.variants) * len(self.betas)), dim)

    @property
    def terms(self) -> int:
        """Losses of how many β are averaged; 1 where none are."""
        return max(len(beta.starts) for beta in self.betas)

    def exponents(
        self, output_scale: float, iterations: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """β* of each member at the first update, and how much it grows by each: (terms, G)."""
        ends = [(beta.starts, beta.ends) for beta in self.beta_of_each]
        rows = [[each * (self.terms // len(each)) for each in own] for own in ends]
        both = torch.tensor(rows, dtype=torch.float64, device=device)  # (G, 2, terms)
        starts, stops = both.permute(1, 2, 0).contiguous()
        return starts * output_scale, (stops - starts) / iterations * output_scale

    def strength(
        self, output_scale: float, iterations: int, device: torch.device
    ) -> dict[str, Any]:
        """The keywords of :func:`ebmguard.guard` that say how strong it acts on each member.

        Where losses of several β are averaged, it is their mean on which the sampler runs.
        """
        start, slope = (x.mean(0) for x in self.exponents(output_scale, iterations, device))
        constant = all(beta.starts == beta.ends for beta in self.betas)
        beta_star = start if constant else lambda step: start + step * slope
        return {"beta_star": beta_star, "output_scale": output_scale}


def averaged_loss(
    f_pos: Tensor, f_neg: Tensor, exponents: Tensor, variants: Sequence[Variant]
) -> Tensor:
    """Mean of the losses at several β*, (terms, G), summed over the members of (G, N) energies.

    Each variant has equally many members, which stand together.
    """
    count = len(variants)
    parts = zip(variants, *(x.chunk(count, -2) for x in (f_pos, f_neg)), strict=True)
    losses = [
        torch.vmap(partial(contrastive_loss, variant=variant))(pos, neg, beta_star).sum()
        for (variant, pos, neg), own in zip(parts, exponents.chunk(count, 1), strict=True)
        for beta_star in own
    ]
    return torch.stack(losses).sum() / len(exponents)
