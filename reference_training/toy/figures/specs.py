"""The figures as data: which runs each needs, and how its panels are laid out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..members import VARIANTS

SIX = ("0", "0.1", "0.3", "0.5", "0.7", "0.9")
FOUR = ("0", "0.1", "0.5", "0.9")


@dataclass(frozen=True)
class FigureSpec:
    """One figure of the paper, or one of ours.

    A figure is made of bands, one for each of its scenarios and of its β or variants, whichever
    does not run across it. A band is a row of densities over a row of log densities: the truth,
    then for every column the learned p_θ and the kernel density estimate of SGLD(p_θ).

    Attributes:
        name: its number in the paper, or a word.
        title: what it shows.
        scenarios: one run each.
        betas: β of every run.
        seeds: models of each β and variant.
        variants: variants of the loss in every run.
        across: what the pairs of columns are.
        band: what tells the bands apart, written at their left.
        split: whether each scenario gets a picture of its own.
        optimum: whether sentences say how close F came to the optimum under a fixed proposal.
        samplers: whether the runs differ in who draws the negatives, and are compared with the
            first one.
    """

    name: str
    title: str
    scenarios: tuple[str, ...]
    betas: tuple[str, ...]
    seeds: int
    variants: tuple[str, ...] = ("default",)
    across: Literal["betas", "variants"] = "betas"
    band: Literal["data", "updates", "variant", "negatives", "samplers"] = "data"
    split: bool = False
    optimum: bool = False
    samplers: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """The β or the variants that run across the figure."""
        return self.betas if self.across == "betas" else self.variants

    @property
    def lines(self) -> tuple[str, ...]:
        """The other ones: a band each."""
        return self.variants if self.across == "betas" else self.betas

    def member(self, line: str, column: str) -> tuple[str, str]:
        """β and variant of the panels where a band meets a pair of columns."""
        return (column, line) if self.across == "betas" else (line, column)


FIGURES = {
    spec.name: spec
    for spec in (
        FigureSpec(
            name="2",
            title="Figure 2: the default setup at different β",
            scenarios=("gmm-default", "circles-default"),
            betas=SIX,
            seeds=3,
        ),
        FigureSpec(
            name="5",
            title="Figure 5: the circles, and the circles with twice as many updates",
            scenarios=("circles-default", "circles-long"),
            betas=FOUR,
            seeds=3,
            band="updates",
        ),
        FigureSpec(
            name="6",
            title="Figure 6: chains that start in the bottom right quadrant",
            scenarios=("gmm-shifted", "circles-shifted"),
            betas=FOUR,
            seeds=5,
        ),
        FigureSpec(
            name="7",
            title="Figure 7: the variants in the default setup",
            scenarios=("gmm-default", "circles-default"),
            # At β = 0 the variants are one and the same loss.
            betas=("0.1", "0.5", "0.9"),
            seeds=5,
            variants=VARIANTS,
            band="variant",
            split=True,
        ),
        FigureSpec(
            name="8",
            title="Figure 8: one negative from the initial distribution, no SGLD: the variants",
            scenarios=("gmm-degenerate", "circles-degenerate"),
            betas=("0.5",),
            seeds=5,
            variants=VARIANTS,
            across="variants",
        ),
        FigureSpec(
            name="9",
            title="Figure 9: negatives from the initial distribution, no SGLD: different β",
            # The last two are not in the paper: they show how far the optimum can be reached.
            scenarios=("gmm-degenerate", "circles-degenerate", "gmm-proposal", "circles-proposal"),
            betas=SIX,
            seeds=5,
            band="negatives",
            optimum=True,
        ),
        FigureSpec(
            name="10",
            title="Figure 10: the GMM with three negatives and three SGLD steps",
            scenarios=("gmm-restricted",),
            betas=SIX,
            seeds=5,
            variants=VARIANTS,
            band="variant",
        ),
        FigureSpec(
            name="11",
            title="Figure 11: the circles with three negatives and three SGLD steps",
            scenarios=("circles-restricted",),
            betas=SIX,
            seeds=5,
            variants=VARIANTS,
            band="variant",
        ),
        FigureSpec(
            name="1d",
            title="A mixture in one dimension at different β",
            scenarios=("mixture1d-default",),
            betas=FOUR,
            seeds=3,
        ),
        FigureSpec(
            name="mixture",
            title="A good sampler, a mixture of it with a broken one, and the broken one alone",
            scenarios=("gmm-default", "gmm-good+exploding", "gmm-exploding"),
            betas=FOUR,
            seeds=5,
            band="samplers",
            samplers=True,
        ),
        FigureSpec(
            name="broken",
            title="Mixtures with other broken samplers, and with half as many negatives",
            scenarios=(
                "gmm-default",
                "gmm-good+lost",
                "gmm-lost",
                "gmm-good+stuck",
                "gmm-stuck",
                "gmm-good+exploding-halved",
                "gmm-halved",
            ),
            betas=FOUR,
            seeds=5,
            band="samplers",
            samplers=True,
        ),
    )
}
