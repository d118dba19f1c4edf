"""Which diagnostics are drawn, and on which scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..alerts import Bands, Limits

__all__ = ["ACCURACY", "CHARTS", "MORE_CHARTS", "Bands", "Chart", "Limits", "value_of"]

Scale = Literal["share", "linear", "log", "symlog"]

_REFERENCE = "ref/"


@dataclass(frozen=True)
class Chart:
    """One diagnostic as a person reads it.

    Attributes:
        tag: the diagnostic, without the ``guard/`` prefix.
        title: its name.
        scale: "share" is linear from 0 to 1, "symlog" linear up to 1 and logarithmic beyond.
        note: what is healthy, in a few words.
    """

    tag: str
    title: str
    scale: Scale
    note: str


ACCURACY = Chart("accuracy", "test accuracy", "share", "of the evaluations")
CHARTS = (
    Chart("energy_gap", "energy gap", "symlog", "near 0 and steady; mean f⁺ − mean f⁻"),
    Chart("grad_scale", "GradScale", "share", "near 1; towards 0 no negative is competitive"),
    Chart("ess", "ESS / M", "share", "effective share of the negatives"),
    Chart("energy_overlap", "energy overlap", "share", "near 0.5; P(f⁻ > f⁺)"),
    Chart("sampler/grad_norm", "sampler gradient norm", "log", "steady; ‖∇f‖ at the last step"),
)
MORE_CHARTS = (
    Chart("f_pos/median", "f⁺, median", "symlog", "steady"),
    Chart("f_neg/median", "f⁻, median", "symlog", "steady, near that of f⁺"),
    Chart("f_neg/min", "f⁻, lowest", "symlog", "steady"),
    Chart("pareto_k", "Pareto k", "linear", "weights whose variance can be trusted are below 0.7"),
    Chart("max_weight", "largest weight", "share", "small"),
    Chart("reweighting_angle", "reweighting angle", "share", "near 1; cosine between β* and 0"),
    Chart("sampler/drift_to_noise", "SGLD drift to noise", "log", "how much a step is gradient"),
    Chart("sampler/acceptance", "Metropolis acceptance", "share", "of the last SGLD step"),
    Chart("sampler/clamped", "share at the clamp", "share", "near 0"),
    Chart("sampler/repeated", "repeated samples", "share", "0; samples of a step that came before"),
    Chart("sampler/steps_factor", "SGLD steps, factor", "linear", "1 unless they are adapted"),
    Chart("sampler/evaluations", "SGLD steps", "linear", "energy gradients spent in a step"),
    Chart("buffer/age", "age of the chains", "linear", "training steps since they began"),
    Chart("buffer/duplicates", "repeated chains", "share", "share of a draw"),
    Chart("optim/grad_norm", "gradient norm", "log", "of the parameters"),
    Chart("optim/update_norm", "update norm", "log", "of the parameters"),
    Chart("optim/amplification", "optimiser's amplification", "log", "flat"),
    Chart("nonfinite/energies", "energies not finite", "share", "0"),
    Chart("nonfinite/samples", "samples not finite", "share", "0"),
    Chart("nonfinite/gradients", "gradients not finite", "share", "0"),
    Chart("beta_star", "β*", "linear", "the exponent in use"),
)


def value_of(row: Mapping[str, float], tag: str) -> float | None:
    """A diagnostic of a row, None where the row lacks it.

    At β* = 0 the weights are uniform and say nothing; as the alert rules do, it is then read at the
    reference exponent.
    """
    if row.get("beta_star") == 0 and _REFERENCE + tag in row:
        tag = _REFERENCE + tag
    return row.get(tag)
