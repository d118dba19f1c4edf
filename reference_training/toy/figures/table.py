"""The numbers of a figure as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ...plots.markdown import markdown_table
from .runs import GOOD_WEIGHT, ToyRun
from .specs import FigureSpec
from .spread import spread
from .words import VARIANT, run_title

COLUMNS = {
    "kl": "KL(p_d‖p_θ)",
    "tv": "TV",
    "kl_sgld": "KL of SGLD(p_θ)",
    "mode_mass_error": "mode mass error",
    "energy_scale": "energy scale",
}
"""Metrics of the tables and their heads."""
OPTIMUM = {"oracle_r2": "R² to the optimum"}
"""The same, of runs whose optimum is known."""
SAMPLERS = {"grad_scale": "GradScale"}
"""The same, where samplers are compared."""
MIXTURE = {GOOD_WEIGHT: "weight on the good"}
"""The same, of runs with several samplers."""

_LEGEND = (
    "Median [smallest, largest] over seeds; KL in nats. KL of SGLD(p_θ): from the truth to the "
    "kernel density estimate of the samples, both blurred alike. Energy scale: slope of the "
    "learned log density on the true one, 1 at the right temperature. An undefined value ranks "
    "last."
)
_LEGEND_OPTIMUM = (
    " R² to the optimum: of the learned log density F against (log p_d − log q)/β + c, weighted by "
    "p_d; q is what negatives are drawn from."
)
_LEGEND_SAMPLERS = (
    " SGLD(p_θ) is always that of the good sampler. GradScale and the weight on the good one's "
    "negatives are those of single updates, at the last five evaluations."
)


def legend(spec: FigureSpec, runs: Mapping[str, ToyRun]) -> str:
    """What the columns are."""
    known = any(run.fixed_proposal for run in runs.values())
    optimum = _LEGEND_OPTIMUM if known else ""
    return _LEGEND + optimum + (_LEGEND_SAMPLERS if spec.samplers else "")


def rows(spec: FigureSpec, run: ToyRun) -> list[dict[str, Any]]:
    """What the figure says of each β and variant of a run, ready for JSON."""
    return [
        {
            "beta": beta,
            "variant": variant,
            **{name: asdict(spread(run, beta, variant, name)) for name in _columns(spec, run)},
            "diverged": _diverged(run, beta, variant),
            "seeds": len(run.of(beta, variant)),
        }
        for variant in spec.variants
        for beta in spec.betas
    ]


def text(spec: FigureSpec, runs: Mapping[str, ToyRun]) -> str:
    """The tables, one for each run."""
    words = 2 if len(spec.variants) > 1 else 1
    parts = []
    for run in runs.values():
        head, *body = cells(spec, run)
        parts += [f"## {run_title(run)}", markdown_table(head, body, words=words)]
    return "\n\n".join(parts)


def page(spec: FigureSpec, runs: Mapping[str, ToyRun], statements: Sequence[str]) -> str:
    """The tables and what they show, as a page of Markdown."""
    said = "\n".join(f"- {statement}" for statement in statements)
    return f"# {spec.title}\n\n{legend(spec, runs)}\n\n{text(spec, runs)}\n\n{said}\n"


def cells(spec: FigureSpec, run: ToyRun) -> list[list[str]]:
    """A run's table, its head first."""
    many = len(spec.variants) > 1
    head = [*(["variant"] if many else []), "β", *_columns(spec, run).values(), "diverged"]
    return [
        head,
        *(
            [
                *([VARIANT[variant]] if many else []),
                beta,
                *(str(spread(run, beta, variant, name)) for name in _columns(spec, run)),
                f"{_diverged(run, beta, variant)} of {len(run.of(beta, variant))}",
            ]
            for variant in spec.variants
            for beta in spec.betas
        ),
    ]


def _columns(spec: FigureSpec, run: ToyRun) -> dict[str, str]:
    optimum = OPTIMUM if run.fixed_proposal else {}
    samplers = SAMPLERS if spec.samplers else {}
    return COLUMNS | optimum | samplers | (MIXTURE if len(run.samplers) > 1 else {})


def _diverged(run: ToyRun, beta: str, variant: str) -> int:
    return sum(member.diverged_at is not None for member in run.of(beta, variant))
