"""The numbers of a row: their tags, charts, meanings, and how ranks join them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = [
    *("REFERENCE", "SECTIONS", "TAGS", "Join", "Scale", "Tag"),
    *("is_guard_tag", "weight_tag", "why_not_logged"),
]

# How the numbers of several ranks become one.
Join = Literal["average", "exact", "lowest", "highest", "sum", "positives", "negatives", "both"]
Scale = Literal["share", "linear", "log", "symlog"]  # of the axis of a chart

REFERENCE = "ref/"
"""Prefix of numbers at the reference exponent, which are informative at β* = 0 too."""

# The tags that one room writes and another reads: read as `tags.GRAD_SCALE`.
ALERT_LEVEL = "alert_level"
ATTEMPT = "recovery/attempt"
BETA_STAR = "beta_star"
ENERGY_GAP = "energy_gap"
ESS = "ess"
GRADIENTS_SKIPPED = "nonfinite/gradients"
GRAD_SCALE = "grad_scale"
SAMPLER_GRAD_NORM = "sampler/grad_norm"
SAMPLER_UNIT = "sampler/unit"
SCALER_SKIPPED = "scaler/skipped"
SHARPNESS = "sampler/sharpness"
SUBSTEPS = "sampler/substeps"
SUBSTEPS_MISSED = "sampler/substeps_missed"


@dataclass(frozen=True)
class Tag:
    """One number of a row.

    The joins "positives", "negatives" and "both" are averages, weighted by the ranks' numbers of
    these samples; "exact" is computed from sums over the joined batch. The scale "share" is linear
    from 0 to 1; "symlog" is linear up to 1 and logarithmic beyond.
    """

    name: str  # without the prefix guard/; <name> in it stands for any name
    title: str  # its name for people
    scale: Scale | None  # of its chart; None where it has none
    definition: str  # in the markdown of docs/diagnostics.md
    healthy: str = ""  # its value in a healthy run
    tells: str = ""  # what other values mean
    join: Join = "average"  # how the numbers of several ranks become one


_POS = "these numbers of the positives' energies f⁺; histogram in the *slow* tier"
_NEG = "these numbers of the negatives' energies f⁻; histogram in the *slow* tier"
# fmt: off
SECTIONS: dict[str, tuple[Tag, ...]] = {
    "Weights of the negatives": (
        Tag(GRAD_SCALE, "GradScale", "share", "GradScale = mean 1 - w⁺ (Eq. 30)", "M/(M+1)",
            "→ 0: no negative is as likely as data, the contrastive gradient fades", "exact"),
        Tag("weight_entropy", "weight entropy", None, "H(w) / log M", "near 1",
            "→ 0: one negative carries the batch", "exact"),
        Tag(ESS, "ESS / M", "share", "1 / Σw², as a fraction of M", "above 0.1",
            "→ 0: one negative carries the batch", "exact"),
        Tag("max_weight", "largest weight", "share", "the largest w", "a few times 1/M",
            "→ 1: one negative carries the batch", "exact"),
        Tag("pareto_k", "Pareto k", "linear",
            "Pareto shape of the upper tail of the weights of the last 16 steps (PSIS); *slow*",
            "below 0.7", "above: averages under these weights do not settle"),
        Tag("positive_weight_entropy", "entropy of the positives' shares", None,
            "entropy of the positives' shares of the gradient (Eq. 31) / log N", "near 1",
            "how much the extra negatives act among positives", "exact"),
        Tag("reweighting_angle", "reweighting angle", "share",
            "cosine between the gradient's coefficients at β* and at 0", "near 1",
            "how far the run leans on attractor-repeller dynamics (Appendix J)", "exact"),
        Tag("unpaired", "positives without a partner", None,
            "positives without a negative of their class; with `groups` only", "0",
            "they are left out of the loss", "exact"),
    ),
    "Energies": (
        Tag(ENERGY_GAP, "energy gap", "symlog", "mean f⁺ - mean f⁻", "near 0, steady",
            "the sampler lags (large) or over-shoots (negative)", "exact"),
        Tag("energy_gap_scaled", "energy gap × o", None, "the gap times the output scale",
            "near 0, steady", "the gap in units of the log-density", "exact"),
        Tag("energy_overlap", "energy overlap", "share", "P(f⁻ > f⁺), ties counted half",
            "near 0.5", "the gap without its scale"),
        Tag("f_pos/mean", "f⁺, mean", None, _POS, "steady", "the raw signal", "positives"),
        Tag("f_pos/std", "f⁺, standard deviation", None, _POS, "steady", "the raw signal", "exact"),
        Tag("f_pos/min", "f⁺, lowest", None, _POS, "steady", "the raw signal", "lowest"),
        Tag("f_pos/q05", "f⁺, 5%", None, _POS, "steady", "the raw signal"),
        Tag("f_pos/median", "f⁺, median", "symlog", _POS, "steady", "the raw signal"),
        Tag("f_pos/q95", "f⁺, 95%", None, _POS, "steady", "the raw signal"),
        Tag("f_pos/max", "f⁺, highest", None, _POS, "steady", "the raw signal", "highest"),
        Tag("f_neg/mean", "f⁻, mean", None, _NEG, "steady", "the raw signal", "negatives"),
        Tag("f_neg/std", "f⁻, standard deviation", None, _NEG, "steady", "the raw signal", "exact"),
        Tag("f_neg/min", "f⁻, lowest", "symlog", _NEG, "steady", "the raw signal", "lowest"),
        Tag("f_neg/q05", "f⁻, 5%", None, _NEG, "steady", "the raw signal"),
        Tag("f_neg/median", "f⁻, median", "symlog", _NEG, "steady", "the raw signal"),
        Tag("f_neg/q95", "f⁻, 95%", None, _NEG, "steady", "the raw signal"),
        Tag("f_neg/max", "f⁻, highest", None, _NEG, "steady", "the raw signal", "highest"),
        Tag("nonfinite/pos", "positives not finite", None, "number of positives that the loss "
            "leaves out: f or log q not finite, or abs(β* f) > 1e30", "0", "something broke",
            "sum"),
        Tag("nonfinite/neg", "negatives not finite", None, "number of negatives that it leaves out",
            "0", "something broke", "sum"),
        Tag("nonfinite/energies", "energies not finite", "share",
            "share of all energies that it leaves out", "0", "something broke", "both"),
        Tag("nonfinite/samples", "samples not finite", "share",
            "share of the returned samples with an entry that is not finite", "0",
            "the sampler left the network's domain", "negatives"),
        Tag(GRADIENTS_SKIPPED, "gradients not finite", "share",
            "1 where an optimizer step was skipped for its gradients; needs `optimizer`", "0",
            "a NaN came through the network's own backward pass"),
        Tag(SCALER_SKIPPED, "steps skipped by the AMP scaler", None,
            "1 where the AMP GradScaler skipped the step; needs `scaler`", "0, rarely 1",
            "the scaler at work"),
    ),
    "Sampler": (
        Tag(SAMPLER_GRAD_NORM, "sampler gradient norm", "log",
            "‖∇ₓf‖ per sample at the last evaluation, mean", "steady",
            "the earliest sign of a blow-up", "negatives"),
        Tag("sampler/grad_norm_max", "sampler gradient norm, largest", None,
            "‖∇ₓf‖ per sample at the last evaluation, largest", "steady",
            "the earliest sign of a blow-up", "highest"),
        Tag(SHARPNESS, "sharpness of the sampler's steps", "linear",
            "S = 1 - Σ⟨g, g'⟩ / Σ⟨g, g⟩ over chains and consecutive gradients g, g' of a sampler "
            "call; of a quadratic f it is step size × curvature along the drift", "under 1",
            "over 1: the steps jump over the peak, they are too long; far under 1 while the gap "
            "grows: the chains are too slow", "negatives"),
        Tag(SUBSTEPS, "finer steps per SGLD step", "linear",
            "N, where each of the sampler's steps is taken as N finer ones", "1",
            "above: its own steps are too long"),
        Tag(SUBSTEPS_MISSED, "finer steps that missed", None,
            "share of the entries that did not land where the guard's finer steps end; with finer "
            "steps only", "0", "the sampler's steps changed; the guard looks at them again",
            "negatives"),
        Tag("sampler/evaluations", "SGLD steps", "linear",
            "evaluations whose gradient was taken, mean over the step's sampler calls",
            "the SGLD steps", "what a sampler call cost"),
        Tag("sampler/steps", "SGLD steps asked for", None,
            "SGLD steps that the call should take; needs `sgld_steps`, and a sampler that asks",
            "", "what a rollback made of them"),
        Tag("sampler/repeated", "repeated samples", "share",
            "share of the samples that equal those of the call before", "0",
            "the chains do not move", "negatives"),
        Tag("sampler/drift_to_noise", "SGLD drift to noise", "log", "step_size · ‖∇ₓh‖ / "
            "(noise_std · √d) at the last evaluation, mean over samples of d entries; needs "
            "`step_size`, `noise_std`", "1 to 10",
            "far above: gradient ascent; far below: a random walk (Appendix A.3)", "negatives"),
        Tag(SAMPLER_UNIT, "unit of the energies", None,
            "0.01 / (step_size · noise_std), without noise 1 / step_size; needs `step_size`, "
            "`noise_std`", "1 at JEM's settings", "the unit in which alerts measure f"),
        Tag("sampler/acceptance", "Metropolis acceptance", "share", "mean probability that MALA's "
            "Metropolis test accepts the last step with both ends evaluated, for the density "
            "∝ exp(o h), o = 2 step_size / noise_std²; *slow*, needs `step_size`, `noise_std`",
            "above 0.3", "near 0: the steps are too long for this density", "negatives"),
        Tag("sampler/clamped", "share at the clamp", "share", "share of the entries of the "
            "returned samples at an end of the clamp, or beyond; needs `clamp`", "that of the data",
            "near 1: the samples are saturated, and have no gradient there", "negatives"),
    ),
    "Replay buffer": (
        Tag("buffer/age", "age of the chains", "linear",
            "how often the drawn chains were drawn since their restart, mean",
            "at most (1 - r)/r of the reinitialisation rate r: 19 for 0.05",
            "above: stale chains, restarts too rare", "negatives"),
        Tag("buffer/duplicates", "repeated chains", "share",
            "share of the draw that repeats a row of the same draw", "about draws / (2 rows)",
            "above: the buffer is too small for the batch", "negatives"),  # of one rank's draw
        Tag("buffer/reinit", "restarted chains", None, "share of the draw that was restarted", "r",
            "0: nothing new enters", "negatives"),
        Tag("buffer/<name>", "another buffer's own number", None,
            "the number of this name that the `diagnostics()` of another buffer returns"),
    ),
    "Optimizer": (
        Tag("optim/grad_norm", "gradient norm", "log", "‖gradient‖ of all parameters, without an "
            "AMP scale; NaN where the closure is of L-BFGS or of an optimizer outside "
            "`torch.optim`", "steady", "the size of all terms of the loss together"),
        Tag("optim/update_norm", "update norm", "log",
            "‖parameters after - before‖, with weight decay", "falls slowly",
            "how fast the network moves"),
        Tag("optim/amplification", "optimizer's amplification", "log", "‖update / lr‖ / GradScale, "
            "each parameter group by its own lr; GradScale counts as 1 where it is not in force "
            "(β* = 0, `no_pos`); NaN where the step was left out, infinite where GradScale is 0",
            "flat, within a factor of two", "rises: Adam undoes GradScale (Appendix H), and the "
            "network goes on moving on next to no evidence"),
    ),
    "The rest of a row": (
        Tag(BETA_STAR, "β*", "linear", "the exponent in use"),
        Tag("output_scale", "output scale", None,
            "o in the sampler's factor 1 - β*/o, measured or given",
            "", "none: o is unknown, and the sampler runs on f"),
        Tag("loss", "contrastive term", None, "the contrastive term of the loss"),
        Tag("loss_weight", "weight of the contrastive term", None,
            "its weight in the caller's `loss_fn`"),
        Tag(ALERT_LEVEL, "alert level", None,
            "2 from an ERROR until its condition ends, 1 during a WARN, else 0", "0",
            "[alerts.md](alerts.md)"),
        Tag(ATTEMPT, "rollbacks so far", None, "rollbacks so far, if any are possible", "0",
            "[recovery.md](recovery.md)"),
    ),
}
# fmt: on
"""The lines by the heading of their table in ``docs/diagnostics.md``."""

TAGS = {tag.name: tag for section in SECTIONS.values() for tag in section}
"""The lines by their tags."""

# The parts before the slash of the guard's names; the columns that name a row in data frames.
_FAMILIES = {"ref", "guard", "_alerts", *(name.partition("/")[0] for name in TAGS if "/" in name)}
LOG_EVERY = "log_every"
"""In rows of a long, thinned run: from this row on, one in so many rows was written."""
_COLUMNS = {"run", "step", "attempt", "abandoned", LOG_EVERY}


def is_guard_tag(name: str) -> bool:
    """Return whether this name in a row belongs to the guard, so that no trainer may write it."""
    return name in TAGS or name in _COLUMNS or name.partition("/")[0] in _FAMILIES


def why_not_logged(name: object) -> str:
    """Return in words why no number of a trainer may have this name; empty if it may."""
    if not (isinstance(name, str) and name.isprintable() and name):
        return "it is empty, or no text"
    return "the guard writes it itself" if is_guard_tag(name) else ""


def weight_tag(name: str, beta_star: float) -> str:
    """Return a weight number's tag: under ``ref/`` at β* = 0, where the weights are uniform."""
    return REFERENCE + name if beta_star == 0 else name
