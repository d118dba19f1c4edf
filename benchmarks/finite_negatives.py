"""What M negatives and β cost an exact sampler: a Gaussian whose precision is learned (Eq. 8).

python -m benchmarks.finite_negatives   # the table of docs/results/finite_negatives.md, in seconds
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import stats

from ebmguard.reference_training.engine.run_folder import write_text

from .grid import RESULTS, filled, table_of

DIMENSIONS, BETAS, NEGATIVES = (1, 10, 100), (0.0, 0.1, 0.25, 0.5), (1, 8, 64, 256)
_NODES = 800


def efficiency(beta: float, negatives: Sequence[int], d: int) -> tuple[float, list[float]]:
    """ESS / M of many negatives, and for each number of them E Cov(∇f) / Cov(∇f).

    f = -θ |x|² / 2 in d dimensions at θ = 1. Of u = |x|² alone there are integrals: negatives have
    u / 2 ~ Gamma(d / 2) over 1 - β and weights exp(-β u / 2). A sum S of M weights stands below a
    fraction line, and 1 / S is the integral of exp(-t S) over t, which factors.
    """
    x, w = np.polynomial.legendre.leggauss(_NODES)
    own = stats.gamma(d / 2, scale=2 / (1 - beta))
    low, high = np.log(own.ppf(1e-18)), np.log(own.isf(1e-18))
    u = np.exp(low + (high - low) * (x + 1) / 2)
    w = w * (high - low) / 2 * u * own.pdf(u)
    slope, weight = (d - u) / 2, np.exp(-beta * u / 2)
    weight /= w @ weight
    full = w @ (weight * slope**2)
    log_t = np.linspace(-40, 12, 1500)
    t = np.exp(log_t)
    below = np.exp(-np.outer(t, weight)) * w
    one, two, none = below @ (weight * slope), below @ (weight * slope) ** 2, below.sum(1)
    lost = [
        np.trapezoid(t * (two * none**m + m * one**2 * none ** (m - 1)), log_t) for m in negatives
    ]
    return 1 / (w @ weight**2), [1 - each / full for each in lost]


def main() -> None:
    lines = []
    for d in DIMENSIONS:
        for beta in BETAS:
            share, kept = efficiency(beta, NEGATIVES, d)
            line = {"d": str(d), "β": f"{beta:g}", "ESS / M": f"{share:.3f}"}
            for m, own in zip(NEGATIVES, kept, strict=True):
                line[f"M = {m}"] = f"{own:.3f} ({m * share / (1 + m * share):.3f})"
            lines.append(line)
    page = RESULTS / "finite_negatives.md"
    write_text(page, filled(page.read_text(encoding="utf-8"), {"kept": table_of(lines)}))


if __name__ == "__main__":
    main()
