"""Methods side by side, over the seeds of a grid's runs."""

from __future__ import annotations

from math import isnan
from pathlib import Path

from ebmguard.errors import ConfigError
from ebmguard.runs import load

from ..plots.markdown import NONE, markdown_table

HEAD = ("method", "seeds", "log-likelihood", "KL", "range of the KL", "Fisher", "ms an update")
# What not every run has.
_OF_SOME = ("log_likelihood", "kl", "log_likelihood_low", "log_likelihood_high", "bracket_holds")


def page(out: Path) -> str:
    """Medians over the seeds of each method's finished runs in a folder.

    Log-likelihood and KL are in nats per sample, exact; of models with too many latents for that,
    the log-likelihood is a bracket, or none where the verdict of a run's two sides is that they
    bracket nothing. The sliced Fisher divergence is that to the data but for a constant of the
    data, so that lower is better and it may be negative. The time is that of the whole run,
    evaluations and watched chains included, over its updates.

    Raises:
        ConfigError: no run is finished.
    """
    runs = load(out / "*").runs
    if "fisher" not in runs:
        raise ConfigError(f"{out} holds no finished run of `ebmguard train bism`")
    done = runs.dropna(subset="fisher").assign(ms=lambda x: 1000 * x["wall_seconds"] / x["steps"])
    done = done.reindex(columns=dict.fromkeys((*done.columns, *_OF_SOME)))
    rows = []
    for method, of in done.groupby("method", sort=False):
        middle = of[["fisher", "ms", *_OF_SOME[:-1]]].median()
        low, high, kl = middle["log_likelihood_low"], middle["log_likelihood_high"], of["kl"]
        nats = f"{middle['log_likelihood']:.3f}"
        if not isnan(low):
            nats = f"{low:.3f} to {high:.3f}" if of["bracket_holds"].all() else "no bracket"
        has_density = not isnan(middle["kl"])
        rows.append(
            [
                str(method),
                str(len(of)),
                nats,
                f"{middle['kl']:.3f}" if has_density else NONE,
                f"{kl.min():.3f} to {kl.max():.3f}" if has_density else NONE,
                f"{middle['fisher']:.2f}",
                f"{middle['ms']:.2f}",
            ]
        )
    return markdown_table(HEAD, rows) + "\n"
