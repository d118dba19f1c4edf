"""`--likelihood` of `ebmguard evaluate`: log p of held-out samples, from both sides."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ebmguard.samplers import hmc

from ..data import ImageData
from ..likelihood import Bracket, Estimate, Path, forward, pilot, reverse
from ..plots.numbers import table_of

SEED = 0
"""The same chains in every evaluation, so that two differ by their models alone."""
WALLS = 6
"""How far the walls of the cube stand beyond images, in standard deviations of their noise."""
BATCH = 250


@dataclass(frozen=True)
class Cube:
    """The uniform density on [-half, half]^D, whose walls reflect.

    A network's exp(f) has no integral over all of space, where f may grow for ever. Chains see
    f(fold(x)), which goes on behind a wall as it came, so that no step is lost at one.

    Attributes:
        half: half of a side.
        like: one sample, for its shape, dtype and device.
    """

    half: float
    like: Tensor

    def fold(self, x: Tensor) -> Tensor:
        """Where in the cube a point is that may be behind its walls; inside, x itself."""
        behind = torch.remainder(x + self.half, 4 * self.half)
        folded = torch.minimum(behind, 4 * self.half - behind) - self.half
        return torch.where(x.abs() <= self.half, x, folded)

    def log_prob(self, x: Tensor) -> Tensor:
        """``(B, ...)`` to ``(B,)`` float64, the same on both sides of a wall."""
        size = math.log(2 * self.half) * self.like.numel()
        return torch.full(x.shape[:1], -size, dtype=torch.float64, device=x.device)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """``(count, ...)``."""
        x = self.like.new_empty((count, *self.like.shape))
        return self.half * (2 * x.uniform_(generator=generator) - 1)


def image_likelihood(
    network: Callable[[Tensor], Tensor],
    output_scale: float,
    data: ImageData,
    noise: float,
    *,
    chains: int,
    **effort: int,
) -> dict[str, Any]:
    """:func:`measure` of the model exp(o f) and test images, on a cube around all images.

    The long chains, whose ends walk back, start from training images.

    Args:
        network: f, of images (B, C, H, W).
        output_scale: o.
        data: on the network's device.
        noise: standard deviation of the noise that images get first.
        chains: of each side.
        **effort: the temperatures.
    """
    generator = torch.Generator(data.test_x.device).manual_seed(SEED)
    images, held_out = (
        x + noise * torch.randn(x.shape, generator=generator, device=x.device)
        for x in (data.scale(data.train_x[:chains]), data.scale(data.test_x))
    )
    cube = Cube(1 + WALLS * noise, held_out[0])
    path = Path(lambda x: output_scale * network(cube.fold(x)), cube)
    return measure(path, images, held_out, generator, chains=chains, exact=False, **effort)


def measure(
    path: Path,
    samples: Tensor,
    held_out: Tensor,
    generator: torch.Generator,
    *,
    temperatures: int,
    chains: int,
    exact: bool,
) -> dict[str, Any]:
    """Both sides of log Z, the verdict, and the mean of log p = f - log Z over held-out samples.

    Args:
        path: from a base to the model.
        samples: exact samples of the model; or where chains start that first go as many steps of
            MALA at β = 1 as there are temperatures.
        held_out: samples whose log-likelihood is wanted.
        generator: on the device of the samples.
        temperatures: of the annealing.
        chains: from the base; back from the model there are as many as samples.
        exact: what `samples` are.

    Returns:
        plain values; brackets are pairs, the lower end first.
    """
    schedule = pilot(path, chains=chains, temperatures=temperatures, generator=generator)
    ahead = forward(path, schedule, chains=chains, generator=generator)
    if not exact:
        size = schedule.sizes[-1]
        samples = hmc(
            path.f,
            samples,
            steps=temperatures,
            leapfrog_steps=path.leapfrog_steps,
            step_size=size**2 / 2,
            noise_std=size,
            generator=generator,
        )
    back = reverse(path, schedule, samples, generator=generator)
    bracket = Bracket(ahead, back, "exact" if exact else "long-run")
    with torch.no_grad():
        f = torch.cat([path.f(x).double() for x in torch.split(held_out, BATCH)])
    ends = (bracket.lower, bracket.upper)
    return {
        "temperatures": temperatures,
        "chains": chains,
        "starts": bracket.starts,
        "log_z": ends,
        "forward": _side(ahead),
        "reverse": _side(back),
        "holds": not bracket.problems,
        "verdict": bracket.verdict,
        "held_out": len(held_out),
        "log_likelihood": tuple(float(f.mean()) - end for end in reversed(ends)),
        "log_likelihood_error": float(f.std()) / len(f) ** 0.5,
    }


def described(found: Mapping[str, Any]) -> str:
    """What :func:`measure` returned, for people."""
    columns = {
        "log Z": "{log_z:.3f}",
        "s.e.": "{standard_error:.3f}",
        "ESS": "{ess:.1f}",
        "acceptance": "{acceptance:.3f}",
    }
    low, high = found["log_likelihood"]
    lines = [
        table_of("annealing", columns, {name: found[name] for name in ("forward", "reverse")}),
        found["verdict"],
        f"log p of {found['held_out']:,} held-out samples: {low:.3f} to {high:.3f} nats each, "
        f"± {found['log_likelihood_error']:.3f} for the samples"
        + ("" if found["holds"] else "; not to be quoted"),
    ]
    return "\n".join(lines)


def _side(found: Estimate) -> dict[str, float]:
    values = {name: getattr(found, name) for name in ("log_z", "standard_error", "ess")}
    return {**values, "acceptance": float(found.acceptance.mean())}
