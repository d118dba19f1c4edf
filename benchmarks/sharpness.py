"""The sharpness S of a sampler's steps: which runs pass 1, how far ahead, and what S is.

python -m benchmarks.sharpness                # all cells, two at a time
python -m benchmarks.sharpness --table-only   # the page of what has been run
"""

from __future__ import annotations

import copy
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.func import grad, hessian, vmap

from ebmguard import guard
from ebmguard.reference_training.plots.canvas import CONTRASTS, new_figure, unframed
from ebmguard.samplers import sgld

from .beta_star import Sparing
from .grid import Grid, Rows, number, percent, rate, table_of
from .population.families import KINDS, Run
from .population.fates import fate_of
from .population.judged import Recorded, load
from .population.record import watched
from .population.trainer import SKILL
from .population.trainer import rate as part_of_rate
from .why_lost import FINE, NETWORKS, STEPS

PICTURE = Path("docs/pictures/sharpness.png")
EACH, LONGEST = 2, 300
"""Runs of a family and fate at most; updates of a healthy one."""
LEAST, MOST = 110, 700
"""Updates at which a dying run of a family must have been lost."""
AFTER, FIRST, ROWS, TENS = 20, 10, 5, 10
"""Updates that a broken run goes on for; the first that counts; rows of a median; of a block."""
WINDOWS = {"last 50": 5, "50 to 100 ahead": 10}
"""Blocks before the death at which windows of 50 updates begin."""
SHARPNESS, SUBSTEPS = "sampler/sharpness", "sampler/substeps"
FATES = ("energy_gap", "f_pos/std", SKILL, "energy_overlap", "beta_star", "grad_scale")
COLUMNS: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "S": lambda row: row.get(SHARPNESS, math.nan),
    "drift to noise": lambda row: row.get("sampler/drift_to_noise", math.nan),
    "learning rate": lambda row: row["rate"],
    "largest gradient": lambda row: row.get("sampler/grad_norm_max", math.nan),
    "mean gradient": lambda row: row.get("sampler/grad_norm", math.nan),
    "gap": lambda row: abs(row["energy_gap"]),
    "gap / spread": lambda row: abs(row["energy_gap"]) / max(row["f_pos/std"], 1e-30),
}
"""S, and numbers of one line: the larger, the nearer to a death."""
ACTIVATIONS = ("silu", "leaky_relu")
ARMS: dict[str, dict[str, Any]] = {"published": {}, "finer": FINE, "auto": {}}
LENGTHS = {"published": 2400, "finer": 700, "auto": 700}
SEEDS = {
    "published": range(4),
    "finer": range(2),
    "auto": range(1),
    **dict.fromkeys(ACTIVATIONS, range(2)),
}
CHAINS, EVERY, UPDATES = 64, 50, 600
DRAWN = ("MLP_published_s0", "MLP_auto_s0", "digits-jem-mlp-06")
SHARES = (1, 1 / 4, 1 / 16, 1 / 64)
"""Of a step."""
CURVATURES = (0.01, 0.1, 0.5, 1.0, 1.5, 1.9)


def chosen(recorded: Sequence[Recorded]) -> list[Recorded]:
    """At β* = 0, of each family that has both: the first runs that die, and the first healthy ones.

    By nothing but their recorded fates. Chains of Langevin steps, at least two a call: else
    there is no S.
    """
    found: list[Recorded] = []
    for family in KINDS:
        own = [
            x
            for x in recorded
            if x.run.family == family
            and (x.run.beta_star, x.run.sampler == "mala") == (0, False)
            and x.run.sgld_steps > 1
        ]
        dying = [x for x in own if x.fate.name == "dead" and LEAST <= (x.fate.death or 0) <= MOST]
        healthy = [x for x in own if x.fate.name == "healthy"]
        found += dying[:EACH] + healthy[:EACH] if dying and healthy else []
    return found


RUNS = {x.run.name: x for x in chosen(load("first", "new", "last look"))}
CELLS: dict[str, dict[str, Any]] = {
    **{name: {"family": x.run.family, "as": x.fate.name} for name, x in RUNS.items()},
    **{
        f"{network}_{arm}_s{seed}": {"network": network, "arm": arm, "seed": seed}
        for arm, network in itertools.product(ARMS, NETWORKS)
        for seed in SEEDS[arm]
    },
    **{
        f"{network}_{activation}_s{seed}": {"network": network, "seed": seed, "of": activation}
        for activation, network in itertools.product(ACTIVATIONS, NETWORKS)
        for seed in SEEDS[activation]
    },
    **{f"quadratic_{x:g}": {"curvature": x} for x in CURVATURES},
}


def network_run(network: str, seed: int, **settings: Any) -> Run:
    return Run("why-lost", seed, "digits", **{"sgld_steps": STEPS, **NETWORKS[network], **settings})


def measure(folder: Path, **settings: Any) -> dict[str, Any]:
    """One cell."""
    if "curvature" in settings:
        return quadratic(settings["curvature"])
    if "of" in settings:
        return exact(**settings)
    if "arm" in settings:
        arm, substeps = settings["arm"], "auto" if settings["arm"] == "auto" else 1
        own = {**ARMS[arm], "steps": LENGTHS[arm]}
        return watch(network_run(settings["network"], settings["seed"], **own), substeps)
    run = RUNS[folder.name].run
    return watch(run, 1, LONGEST if settings["as"] == "healthy" else run.steps)


def watch(run: Run, substeps: Any, updates: int | None = None) -> dict[str, Any]:
    """Train until a run has been broken for a while, or its end."""
    trainer, rows = Sparing(run, beta_star=0.0, substeps=substeps), []
    for step, row in enumerate(itertools.islice(watched(trainer, AFTER), updates)):
        rows.append({**row, "rate": run.lr * part_of_rate(run, step)})
    trainer.guard.close()
    frame = pd.DataFrame(rows)
    fate = fate_of({tag: frame[tag].to_numpy() for tag in FATES}, scale=run.scale)
    end = fate.death if fate.name == "dead" else len(rows)
    traces = {name: pd.Series([of(x) for x in rows[:end]]) for name, of in COLUMNS.items()}
    finer = {} if substeps == 1 else {"N": [x.get(SUBSTEPS, 1) for x in rows[:end]]}
    return {
        "fate": fate.name,
        "death": fate.death,
        "updates": len(rows),
        "o": run.output_scale,
        "rows": [round(x, 4) for x in traces["S"]],
        "tens": {name: in_tens(trace) for name, trace in traces.items()},
        **finer,
    }


def in_tens(trace: pd.Series) -> list[float]:
    """Medians of ten rows, of which the last ten end with the trace."""
    blocks = (np.arange(len(trace)) - len(trace) % TENS) // TENS
    own = trace.groupby(blocks).median()
    return [float(f"{x:.4g}") for x in own[own.index >= 0]]


class Quadratic(nn.Module):
    """f = -c |x|² / 2."""

    def __init__(self, curvature: float) -> None:
        super().__init__()
        self.curvature = nn.Parameter(torch.tensor(curvature))

    def forward(self, x: Tensor) -> Tensor:
        return -self.curvature * x.square().sum(1) / 2


def quadratic(curvature: float) -> dict[str, Any]:
    """S, as the guard has it, of chains of step 1 at o = 1, begun where they settle."""
    torch.manual_seed(0)
    f, noise = Quadratic(curvature), 2**0.5
    start = torch.randn(256, 64) * noise / (1 - (1 - curvature) ** 2) ** 0.5

    def sampler(f: Quadratic, x: Tensor) -> Tensor:
        return sgld(f, x, steps=50, step_size=1.0, noise_std=noise)

    loss, sample = g = guard(None, sampler, model=f, beta_star=0.0, substeps=1)
    loss(f(start), f(sample(f, start))).backward()
    g.flush()
    found = g.last[SHARPNESS]
    g.close()
    return {"S": found}


def exact(network: str, seed: int, of: str) -> dict[str, Any]:
    """S of one step of chains beside step × curvature by exact Hessians, while a run goes on."""
    trainer = Sparing(network_run(network, seed, activation=of, steps=UPDATES), substeps=1)
    states = []
    for step, _ in enumerate(watched(trainer, 0), 1):
        if not step % EVERY:
            states.append({"step": step, **state_of(trainer)})
    trainer.guard.close()
    return {"states": states}


def state_of(trainer: Sparing) -> dict[str, Any]:
    """Of the first chains of the buffer, in float64."""
    run, generator = trainer.run, torch.Generator().manual_seed(0)
    assert trainer.buffer is not None
    network = copy.deepcopy(trainer.network).double().requires_grad_(False)
    x = trainer.buffer.samples[:CHAINS].double()

    def f(one: Tensor) -> Tensor:
        energy: Tensor = network(one[None])[0]
        return energy

    g = vmap(grad(f))(x)
    flat, size = g.flatten(1), g[0].numel()
    minus = -vmap(hessian(f))(x).reshape(len(x), size, size)
    noise = run.noise_std * torch.randn(x.shape, generator=generator, dtype=x.dtype)

    def turned(move: Tensor) -> tuple[Tensor, Tensor]:
        """1 - ⟨g, g'⟩ / ⟨g, g⟩ of each chain, and pooled."""
        change = flat * (flat - vmap(grad(f))(x + move).flatten(1))
        own = flat.square().sum(1)
        return change.sum(1) / own, change.sum() / own.sum()

    each, pooled = turned(run.step_size * g + noise)
    bent = torch.einsum("bi,bij,bj->b", flat, minus, flat) * run.step_size
    own = flat.square().sum(1)
    return {
        "pooled": float(pooled),
        "bent": float(bent.sum() / own.sum()),
        "correlation": float(torch.corrcoef(torch.stack([each, bent / own]))[0, 1]),
        "top": run.step_size * float(torch.linalg.eigvalsh(minus)[:, -1].max()),
        "parts": [float(turned(part * run.step_size * g)[1]) / part for part in SHARES],
    }


def smooth(row: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """Medians of five S, of the updates that count."""
    trace = pd.Series(row["rows"], dtype=float).rolling(ROWS).median()
    found: np.ndarray[Any, Any] = trace.to_numpy()[FIRST:]
    return found


def first_over(row: Mapping[str, Any], limit: float = 1.0) -> int | None:
    """The first update whose median of five S is over it."""
    over = np.flatnonzero(smooth(row) > limit)
    return FIRST + int(over[0]) if over.size else None


def ahead(row: Mapping[str, Any]) -> float:
    """Updates from that to the death; NaN without one."""
    first = first_over(row)
    return math.nan if first is None else row["death"] - first


def over_at_last(row: Mapping[str, Any]) -> bool:
    """Whether any median of five of the last 50 updates is over 1."""
    return bool((smooth(row)[-50:] > 1).any())


def largest(row: Mapping[str, Any]) -> float:
    known = smooth(row)
    return float(np.nanmax(known)) if np.isfinite(known).any() else math.nan


def at(row: Mapping[str, Any], name: str, start: int) -> float:
    """The median of 50 updates from a block on, or of the last 50 there are."""
    own = row["tens"][name]
    start = max(0, min(start, len(own) - 5))
    known = [x for x in own[start : start + 5] if not math.isnan(x)]
    return median(known) if known else math.nan


def pairs(dying: Rows, healthy: Rows, name: str, back: int) -> np.ndarray[Any, Any]:
    """1 where a number is larger in a dying run than in a healthy one at the same updates, else 0.

    A half for equal ones, NaN where either does not have it.
    """
    found = np.full((len(dying), len(healthy)), np.nan)
    for (i, one), (j, other) in itertools.product(enumerate(dying), enumerate(healthy)):
        start = len(one["tens"][name]) - back
        x, y = at(one, name, start), at(other, name, start)
        if not math.isnan(x + y):
            found[i, j] = (x > y) + (x == y) / 2
    return found


def interval(found: np.ndarray[Any, Any], resamples: int = 1000) -> str:
    """The mean, with 95% over runs of either kind, drawn with replacement."""
    rng, means = np.random.default_rng(0), []
    for _ in range(resamples):
        one, other = (rng.integers(n, size=n) for n in found.shape)
        means.append(np.nanmean(found[np.ix_(one, other)]))
    low, high = np.percentile(means, [2.5, 97.5])
    return f"{np.nanmean(found):.2f} ({low:.2f} to {high:.2f})"


def areas(dying: Rows, healthy: Rows) -> str:
    """A line for each number: the area under its ROC curve."""
    lines = []
    for name in COLUMNS if dying and healthy else ():
        line = {"number": name}
        for window, back in WINDOWS.items():
            found = pairs(dying, healthy, name, back)
            one, other = (np.array([x["family"] for x in own]) for own in (dying, healthy))
            without = [
                np.nanmean(found[np.ix_(one != x, other != x)]) for x in sorted({*one, *other})
            ]
            same = found[one[:, None] == other]
            line |= {
                window: interval(found),
                f"{window}: a family left out": f"{min(without):.2f} to {max(without):.2f}",
                f"{window}: same family": number(np.nanmean(same), ".2f"),
            }
        lines.append(line)
    return table_of(lines)


def quartiles(values: Sequence[float]) -> str:
    known = [x for x in values if not math.isnan(x)]
    return ", ".join(f"{x:.0f}" for x in np.percentile(known, [25, 50, 75])) if known else "–"


def crossings(groups: Mapping[str, Rows]) -> str:
    """A line for each group of runs."""
    lines = []
    for name, rows in groups.items():
        if not rows:
            continue
        dies = all(x["death"] for x in rows)
        ever = sum(first_over(x) is not None for x in rows)
        lines.append(
            {
                "runs": name,
                "S: median": number(median(np.nanmedian(x["rows"]) for x in rows), ".2f"),
                "largest S": number(max(map(largest, rows)), ".2f"),
                "S > 1 in the last 50": rate(sum(map(over_at_last, rows)), len(rows)),
                "at any time": rate(ever, len(rows)),
                "updates from the first one to the loss": (
                    quartiles([*map(ahead, rows)]) if dies else "–"
                ),
                "updates over 1": percent(np.mean([np.mean(smooth(x) > 1) for x in rows])),
            }
        )
    return table_of(lines)


def per_run(rows: Rows) -> str:
    """A line for each run that is lost."""
    return table_of(
        [
            {
                "lost run": x["cell"],
                "o": number(x["o"], ".2g"),
                "loss": str(x["death"]),
                "S > 1 from": number(first_over(x), ".0f"),
                "S, 100 to 50 ahead": number(at(x, "S", len(x["tens"]["S"]) - 10), ".2f"),
                "last 50": number(at(x, "S", len(x["tens"]["S"]) - 5), ".2f"),
                "largest": number(largest(x), ".2f"),
            }
            for x in rows
        ]
    )


def hessians(rows: Rows) -> str:
    """A line for each network and activation."""
    lines = []
    for activation, network in itertools.product(ACTIVATIONS, NETWORKS):
        own = [x for x in rows if (x.get("of"), x["network"]) == (activation, network)]
        states = [state for x in own for state in x["states"]]
        if not states:
            continue

        def spread(of: Callable[[Any], float], form: str = ".2f", states: Any = states) -> str:
            low, mid, high = np.nanquantile([of(x) for x in states], [0, 0.5, 1])
            return ", ".join(number(x, form) for x in (low, mid, high))

        smooth = activation == "silu"
        lines.append(
            {
                "network": f"{network}, {'SiLU' if smooth else 'LeakyReLU'}",
                "states of runs": f"{len(states)} of {len(own)}",
                "S of one step, pooled": spread(lambda x: x["pooled"]),
                "step × curvature along g, pooled": spread(lambda x: x["bent"]),
                "correlation, chain by chain": (
                    spread(lambda x: x["correlation"]) if smooth else "–"
                ),
                "step × largest eigenvalue of -H": spread(lambda x: x["top"], ".2g"),
                "S per step, at 1, 1/4, 1/16, 1/64 of one": ", ".join(
                    number(median(x["parts"][i] for x in states), ".2f") for i in range(len(SHARES))
                ),
            }
        )
    return table_of(lines)


def draw(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """S over time: a run that is lost, the same with finer steps once needed, and a healthy one."""
    figure = new_figure(8, 4.2)
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    lost, finer, healthy = (rows[name] for name in DRAWN)
    named = {
        "lost at the cross": lost,
        'the same run, substeps="auto"': finer,
        f"healthy ({healthy['cell']})": healthy,
    }
    for colour, (label, row) in zip(CONTRASTS, named.items(), strict=False):
        trace = pd.Series(row["rows"], dtype=float).rolling(ROWS).median()
        top.plot(trace, color=colour, label=label, linewidth=1)
        if row is lost:
            top.plot(trace.index[-1], trace.iloc[-1], "x", color=colour)
    top.axhline(1, color="#444444", linewidth=0.8, linestyle="--")
    top.set(ylabel="S, median of five", ylim=(0, 2))
    top.legend(frameon=False, fontsize=8, loc="upper left")
    below.step(range(len(finer["N"])), finer["N"], color=CONTRASTS[1], where="post")
    below.set(ylabel="N", xlabel="update", yscale="log", yticks=[1, 4, 16])
    below.set_yticks([1, 4, 16], ["1", "4", "16"], minor=False)
    below.minorticks_off()
    for axes in (top, below):
        unframed(axes)
    figure.tight_layout()
    figure.savefig(PICTURE)


def slots(rows: Rows) -> dict[str, str]:
    if {x["cell"] for x in rows} >= {*DRAWN}:
        draw({x["cell"]: x for x in rows})
    families = [x for x in rows if "family" in x]
    dying = [x for x in families if x["as"] == "dead" and x["death"]]
    healthy = [x for x in families if x["as"] == "healthy" and not x["death"]]
    groups: dict[str, Rows] = {"families: lost": dying, "families: alive": healthy}
    for network, arm in itertools.product(NETWORKS, ("published", "finer")):
        of = (network, arm)
        own = [x for x in rows if "arm" in x and (x["network"], x["arm"]) == of]
        groups[f"{network}, {'published' if arm == 'published' else '4 times finer'}"] = own
    settled = [x for x in rows if "curvature" in x]
    return {
        "crossings": crossings(groups),
        "areas": areas(dying, healthy),
        "runs": per_run(dying),
        "quadratic": table_of(
            [{"step × curvature": f"{x['curvature']:g}"} | {"S": f"{x['S']:.3f}"} for x in settled]
        ),
        "hessians": hessians([x for x in rows if "of" in x]),
    }


GRID = Grid("sharpness", CELLS, measure, slots)

if __name__ == "__main__":
    sys.exit(GRID.main())
