"""Methods side by side, over the seeds of a grid's runs."""

from __future__ import annotations

from math import isnan
from pathlib import Path

from ebmguard.errors import ConfigError
from ebmguard.runs import load

from ..plots.numbers import NONE, markdown_table

HEAD = (
    "method", "seeds", "log-likelihood", "range", "KL", "Fisher", "ms an update", "seconds in all"
)  # fmt: skip
NOISY = "mdsm and bimdsm learn the density of data with noise of 0.1, whose log-likelihood this is"


def page(out: Path) -> str:
    """Medians over the seeds of each method's finished runs in a folder.

    Log-likelihood and KL are in nats per sample, exact; of models with too many latents for that,
    the log-likelihood is a bracket, or none where the verdict of a run's two sides is that they
    bracket nothing. The range is that over the seeds, of brackets from the lowest end to the
    highest. The sliced Fisher divergence is that to the data but for a constant of the data, so
    that lower is better and it may be negative. Times are CPU time: of the updates alone, and of
    the whole run, evaluations and watched chains included.
    """
    runs = load(out / "*").runs
    if "fisher" not in runs:
        raise ConfigError(f"{out} holds no finished run of `ebmguard train bism`")
    done = runs.dropna(subset="fisher")
    done = done.assign(ms=1000 * done["update_cpu_seconds"] / done["steps"])
    exact, low, high = (f"log_likelihood{end}" for end in ("", "_low", "_high"))
    numbers = ["fisher", "ms", "cpu_seconds", "kl", exact, low, high]
    done = done.reindex(columns=dict.fromkeys((*done.columns, *numbers, "bracket_holds")))
    rows = []
    for method, of in done.groupby("method", sort=False):
        middle = of[numbers].median()
        ends = [low, high] if isnan(middle[exact]) else [exact]
        nats = " to ".join(f"{middle[end]:.3f}" for end in ends)
        nats = "no bracket" if of["bracket_holds"].eq(False).any() else nats
        spread = f"{of[ends[0]].min():.3f} to {of[ends[-1]].max():.3f}"
        kl = NONE if isnan(middle["kl"]) else f"{middle['kl']:.3f}"
        times = f"{middle['ms']:.2f}", f"{middle['cpu_seconds']:.1f}"
        rows.append(
            [str(method), str(len(of)), nats, spread, kl, f"{middle['fisher']:.2f}", *times]
        )
    said = f"\n{NOISY}\n" if {"mdsm", "bimdsm"} & {row[0] for row in rows} else ""
    return f"{markdown_table(HEAD, rows)}\n{said}"
