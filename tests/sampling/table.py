"""Truth against measured, for every loop: ``python -m tests.sampling.table``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ebmguard.sampling import Measured, Recording
from tests.adapters.cases import CODEBASES
from tests.runs import Run, Trial
from tests.sampling.loops import LOOPS, Loop, network, starts

__all__ = ["HEAD", "OF_CODEBASES", "Row", "agrees", "measure", "measure_codebase"]

HEAD = """\
| sampler | truth: step, noise, output scale | measured; share of entries exact |
|---|---|---|"""

# Codebase, its options, and what is true of its sampler; IGEBM's, which is written inline, is
# recorded instead of guarded.
OF_CODEBASES: list[tuple[str, Mapping[str, Any], Loop]] = [
    ("jem", {}, Loop.of(1, 0.01)),
    ("jem", {"class_cond_p_x_sample": True}, Loop.of(1, 0.01)),
    ("jem", {"sgld_std": 0.0}, Loop.refused("gradient steps without noise")),
    ("jempp", {"plc": "alltrain1"}, Loop.refused("gradient steps without noise")),
    ("jempp", {"in_steps": 0, "sgld_lr": 1.0, "sgld_std": 1e-2}, Loop.of(1, 0.01)),
    ("jempp", {"sgld_lr": 0.5, "sgld_std": 1e-2}, Loop.of(1.3, 0.01)),
    ("sadajem", {}, Loop.refused("gradient steps without noise")),
    ("sadajem", {"sgld_std": 1e-2}, Loop.of(1, 0.01)),
    ("hdge", {}, Loop.of(1, 0.01)),
    ("vera", {}, Loop.of(5e-5, 0.01)),
    ("short_run", {}, Loop.of(1, 0.01)),
    ("ebm_anatomy", {}, Loop.of(-1, 0.01)),
    ("improved_cd", {}, Loop.of(-0.5, 1e-3)),
    ("nae", {"step_size": 1.0, "noise_std": 0.1, "clip": None}, Loop.of(-1, 0.1)),
    ("nae", {}, Loop.refused("preconditioned gradient")),  # clipped by the norm of each line
    ("igebm", {"clip": 1e3}, Loop.of(-10, 5e-3)),
]


def measure(loop: Loop) -> Measured:
    """A small sampler, on a small network, in two calls where one does not tell."""
    torch.manual_seed(0)
    f, x = network(loop), starts(loop)
    found = None
    for _ in range(2):
        with Recording(ends=4) as seen:
            assert loop.sample is not None
            result = loop.sample(f, x)
        found = Measured.of(seen.evaluations, seen.draws.log, result).after(found)
        if found.is_exact:
            break
        x = starts(loop)
    assert found is not None
    return found


def measure_codebase(name: str, options: Mapping[str, Any]) -> tuple[Measured, Run]:
    """A codebase's own loop, guarded at β* = 0."""
    if name == "igebm":
        with Recording() as seen:
            run = CODEBASES[name].train(Trial(n=1), **options)
        return Measured.of(seen.evaluations[:3], seen.draws.log), run
    run = CODEBASES[name].train(Trial(beta_star=0.0, n=1), **options)
    found = run.guards[0].measured
    assert found is not None
    return found, run


def agrees(loop: Loop, found: Measured) -> bool:
    """Whether what was measured is true, to the tolerance of the loop."""
    if loop.step is None:
        return loop.why in found.verdict and found.convention is None
    numbers = [
        (found.step, loop.step, found.step_error),
        (found.noise, loop.noise, found.noise_error),
        (found.output_scale, loop.scale, found.output_scale_error),
    ]
    return (
        found.is_exact
        and all(math.isclose(a, b, rel_tol=loop.tolerance, abs_tol=4 * se) for a, b, se in numbers)
        and found.convention == ("log_density" if loop.step > 0 else "energy")
        and loop.clip in found.clip
        and (loop.clamp is None or found.clamp == loop.clamp)
        and math.isclose(found.decay, loop.decay, abs_tol=1e-4)
    )


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    loop: Loop
    found: Measured

    def __str__(self) -> str:
        loop, found = self.loop, self.found
        truth = "" if loop.step is None else f"{loop.step:.4g}, {loop.noise:.4g}, {loop.scale:.5g}"
        said = found.verdict
        if found.is_exact:
            error = f"{found.output_scale_error:.1g}"
            said = f"{found.step:.4g}, {found.noise:.4g}, {found.output_scale:.5g} ± {error}"
            said += f"; {found.share:.0%}" + "".join(f", {note}" for note in found.notes)
        mark = "" if agrees(loop, found) else " **wrong**"
        return f"| {self.name} | {truth or 'refuse'} | {said}{mark} |"


def rows() -> Iterator[Row]:
    """The codebases of docs/codebases.md, then the small loops."""
    for name, options, loop in OF_CODEBASES:
        said = ", ".join(f"{key}={value}" for key, value in options.items())
        yield Row(f"{name} {said}".strip(), loop, measure_codebase(name, options)[0])
    for name, loop in LOOPS.items():
        yield Row(name, loop, measure(loop))


if __name__ == "__main__":
    print(HEAD)
    for row in rows():
        print(row, flush=True)
