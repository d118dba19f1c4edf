"""The toy scenarios by name: what is sampled, how, and for how long.

Settings that the paper states are in Section 4.1, Appendix K and the captions of Figures 5 to 11.
Those it leaves open (noise, learning rate of the GMM, component weights, the shift of Figure 6),
and a learning rate of the circles for a tenth of the updates, were chosen by the sweeps in
docs/results/toy-settings.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

GOOD = "good"
"""The sampler of the scenario as it is."""


class Fault(NamedTuple):
    """What is wrong with a sampler that is otherwise the scenario's."""

    step: float = 1.0
    """Factor of the Langevin step: that of the step size, and of the noise's variance."""
    away: float = 0.0
    """How far the start points lie from where they belong, in each coordinate, in standard
    deviations of the Gaussian that they come from."""


SAMPLERS = {
    GOOD: Fault(),
    "exploding": Fault(step=100.0),  # leaves the data, the further the steeper the energy
    "lost": Fault(away=10.0),  # starts so far away that its steps do not reach the data
    "stuck": Fault(step=0.01),  # delivers its start points
}
"""Samplers of the toys by name."""


@dataclass(frozen=True)
class Scenario:
    """One training setup, that of the GMM by default; the network is the same in all of them.

    Attributes:
        data: name of the distribution, see :data:`.distributions.DISTRIBUTIONS`.
        n_pos: positives of an update.
        n_neg: negatives of an update, of each sampler.
        sgld_steps: Langevin steps from the Gaussian to the negatives; 0 takes its draws as they
            are.
        step_size, noise_std: x += step_size * df/dx + noise_std * randn.
        init_mean, init_std: of the Gaussian, equal in every coordinate.
        lr: Adam's learning rate at the first update; it decays exponentially to ``lr_end``.
        iterations: updates.
        samplers: who draws the negatives: names of :data:`SAMPLERS`, joined by "+".
    """

    data: str = "gmm"
    n_pos: int = 50
    n_neg: int = 20
    sgld_steps: int = 20
    step_size: float = 1.0
    noise_std: float = 0.1
    init_mean: float = 0.0
    init_std: float = 1.0
    lr: float = 3e-3
    lr_end: float = 3e-5
    iterations: int = 10_000
    samplers: str = GOOD

    @property
    def sampler_names(self) -> tuple[str, ...]:
        """Who draws the negatives."""
        return tuple(self.samplers.split("+"))

    @property
    def negatives(self) -> int:
        """Negatives of an update, of all samplers together."""
        return self.n_neg * len(self.sampler_names)

    @property
    def output_scale(self) -> float:
        """The factor o for which the Langevin step is correct for exp(o f)."""
        return 2 * self.step_size / self.noise_std**2

    def lr_at(self, step: int) -> float:
        """Adam's learning rate for update ``step``."""
        decay: float = (self.lr_end / self.lr) ** (step / self.iterations)
        return self.lr * decay


def _setups(base: Scenario) -> dict[str, Scenario]:
    halved = replace(base, n_neg=base.n_neg // 2)
    names = [*(n for n in SAMPLERS if n != GOOD), *(f"{GOOD}+{n}" for n in SAMPLERS if n != GOOD)]
    return {
        "default": base,
        "long": replace(base, iterations=2 * base.iterations),
        # Figure 6: chains start in the quadrant (+, +), half as wide, with ten times the step.
        "shifted": replace(
            base,
            init_std=base.init_std / 2,
            init_mean=base.init_std,
            step_size=10 * base.step_size,
            # The step of the Langevin equation is noise_std**2: the output scale stays what it is.
            noise_std=math.sqrt(10) * base.noise_std,
        ),
        "restricted": replace(base, n_neg=3, sgld_steps=3),
        "degenerate": replace(base, n_neg=1, sgld_steps=0),
        # Not in the paper: Figure 9's setting with enough negatives and a learning rate that
        # decays, where the optimum is known exactly (Appendix I with a fixed proposal). Without
        # chains the noise is nothing but the output scale, the same on all data here.
        "proposal": Scenario(
            base.data,
            n_pos=100,
            n_neg=100,
            sgld_steps=0,
            init_std=base.init_std,
            iterations=(4 if base.data == "circles" else 2) * base.iterations,
        ),
        # Not in the paper but for a sentence of its discussion: one good negative is enough.
        **{name: replace(base, samplers=name) for name in names},
        "halved": halved,
        f"{GOOD}+exploding-halved": replace(halved, samplers=f"{GOOD}+exploding"),
    }


_CIRCLES = Scenario(
    "circles", n_pos=100, n_neg=100, noise_std=0.04, init_std=2.0, lr=1e-3, lr_end=1e-3
)
SCENARIOS: dict[str, Scenario] = {
    f"{base.data}-{name}": scenario
    for base in (Scenario(), _CIRCLES, Scenario("mixture1d"))
    for name, scenario in _setups(base).items()
}
"""Every scenario by its name, such as "gmm-default" or "circles-shifted"."""
