"""Methods side by side, over the seeds of a grid's runs."""

from __future__ import annotations

from pathlib import Path

from ebmguard.errors import ConfigError
from ebmguard.runs import load

from ..plots.markdown import markdown_table

HEAD = ("method", "seeds", "log-likelihood", "KL", "range of the KL", "Fisher", "ms an update")


def page(out: Path) -> str:
    """Medians over the seeds of each method's finished runs in a folder.

    Log-likelihood and KL are in nats per sample, exact. The sliced Fisher divergence is that to the
    data but for a constant of the data, so that lower is better and it may be negative. The time is
    that of the whole run, evaluations and watched chains included, over its updates.

    Raises:
        ConfigError: no run is finished.
    """
    runs = load(out / "*").runs
    if "kl" not in runs:
        raise ConfigError(f"{out} holds no finished run of `ebmguard train bism`")
    done = runs.dropna(subset="kl").assign(ms=lambda x: 1000 * x["wall_seconds"] / x["steps"])
    rows = []
    for method, of in done.groupby("method", sort=False):
        kl = of["kl"]
        rows.append(
            [
                str(method),
                str(len(of)),
                f"{of['log_likelihood'].median():.3f}",
                f"{kl.median():.3f}",
                f"{kl.min():.3f} to {kl.max():.3f}",
                f"{of['fisher'].median():.2f}",
                f"{of['ms'].median():.2f}",
            ]
        )
    return markdown_table(HEAD, rows) + "\n"
