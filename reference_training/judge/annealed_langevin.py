"""Samples of a deep model by annealed Langevin dynamics, hot at first and without noise at last."""

from __future__ import annotations

from collections.abc import Callable

from torch import Generator, Tensor

from ebmguard.samplers import annealed, sgld

from ..bism.deep_train import STD
from ..bism.matching import score

HOTTEST = 100.0


def temperatures(steps: int, hottest: float = HOTTEST) -> list[float]:
    """The published course over any number of steps: 100, then down to 1, then straight to 0.

    Published are 500, 2,000 and 200 steps.
    """
    hot, last = steps * 5 // 27, steps * 2 // 27
    down = annealed(hottest, 1.0, steps - hot - last)
    return [hottest] * hot + down + annealed(1.0, 0.0, last, shape="linear")


def anneal(
    log_density: Callable[[Tensor], Tensor],
    x: Tensor,
    steps: int,
    held: float,
    rng: Generator,
    hottest: float = HOTTEST,
) -> Tensor:
    """Ends of annealed chains, and a last step that takes the noise ``held`` off.

    Args:
        log_density: of x, but for its constant, ``(B, ...)`` to ``(B,)``; it may draw latents.
        x: where they start.
        steps: how many.
        held: noise at which the model is the density; 0 takes none off.
        rng: of the chains' noise, on the device of x.
        hottest: the temperature at the start; 1 anneals nothing but the end.

    Returns:
        of x's shape, detached; Tweedie's formula gives the mean of what had noise added.
    """
    noise = [STD * hot**0.5 for hot in temperatures(steps, hottest)]
    ends = sgld(log_density, x, steps=steps, step_size=STD**2 / 2, noise_std=noise, generator=rng)
    if not held:
        return ends
    return (ends + held**2 * score(log_density, ends)).detach()
