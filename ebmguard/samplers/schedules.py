"""How many steps a chain takes, and how large they are along its way."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias, get_args

import torch

from ..errors import ConfigError

__all__ = ["Shape", "annealed", "random_steps"]

Shape: TypeAlias = Literal["linear", "geometric", "cosine"]


def annealed(first: float, last: float, steps: int, *, shape: Shape = "geometric") -> list[float]:
    """A number for each step of a chain, from `first` down or up to `last`.

    For ``step_size`` and ``noise_std`` of :func:`ebmguard.samplers.sgld`. A chain that is to follow
    exp(o f) all the way keeps o = 2 step_size / noise_std**2: its steps are
    ``[o / 2 * noise**2 for noise in annealed(...)]``. With the step kept and the noise annealed, o
    grows along the chain: it begins warm, and its output scale is that of the last steps.

    Args:
        first: number of the first step.
        last: number of the last step, and of the only one.
        steps: how many, at least 0.
        shape: "linear"; "geometric", by the same factor at every step; "cosine", flat at both ends.

    Raises:
        ConfigError: an unknown shape, a negative number of steps, ends that are not finite, or a
            geometric shape between ends that are not above 0.
    """
    if shape not in get_args(Shape):
        raise ConfigError(f"shape={shape!r}; expected one of {', '.join(get_args(Shape))}.")
    if steps < 0:
        raise ConfigError(f"steps is {steps}, expected 0 or more")
    if not (math.isfinite(first) and math.isfinite(last)):
        raise ConfigError(f"first is {first} and last is {last}, expected finite numbers")
    if shape == "geometric" and not (first > 0 and last > 0):
        raise ConfigError(
            f"first is {first} and last is {last}; a geometric shape is for numbers above 0. Use "
            '"linear" or "cosine".'
        )
    ways = [step / (steps - 1) if steps > 1 else 1.0 for step in range(steps)]
    if shape == "geometric":
        return [first ** (1 - way) * last**way for way in ways]
    if shape == "cosine":
        ways = [0.5 - 0.5 * math.cos(math.pi * way) for way in ways]
    return [(1 - way) * first + way * last for way in ways]


def random_steps(low: int, high: int, generator: torch.Generator) -> int:
    """Number of steps of a chain, uniform on {low, ..., high}.

    Args:
        low: smallest number.
        high: largest number.
        generator: source of randomness, on the CPU: one on a GPU would have to be waited for.

    Raises:
        ConfigError: not 0 <= low <= high, or a generator of another device.
    """
    if not 0 <= low <= high:
        raise ConfigError(f"low is {low} and high is {high}, expected 0 <= low <= high")
    if generator.device.type != "cpu":
        raise ConfigError(
            f"generator is on {generator.device}; the number of steps is needed on the host. Use "
            "one on the CPU."
        )
    return int(torch.randint(low, high + 1, (), generator=generator))
