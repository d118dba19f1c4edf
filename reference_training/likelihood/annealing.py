"""Annealed importance sampling (Neal 2001): chains that walk from a base to a model, or back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Generator, Tensor

from ebmguard.errors import ConfigError, ShapeError
from ebmguard.samplers import hmc
from ebmguard.samplers.sgld import Energy, check_count

from .exact import Density

__all__ = ["Estimate", "Path", "Schedule", "forward", "pilot", "reverse"]

_COARSE_ESS = 0.8
_PILOT_MOVES = 10
_STILL = 0.0  # the size where no chain moves


@dataclass(frozen=True)
class Path:
    """The densities q(x)^(1-β) exp(β f(x)), β from 0 to 1, and how chains move on them.

    Attributes:
        f: negative energy, ``(B, ...)`` to ``(B,)``: log p(x) = f(x) - log Z.
        base: q; Z is the integral over its support.
        transition: (x, β, generator) to x, such as block Gibbs. It must leave the density at β
            invariant, and be reversible if ``log_q`` is used. None is HMC.
        leapfrog_steps: leapfrog steps per HMC step, else a ConfigError; 1 is MALA.
        moves: transitions at each temperature, else a ConfigError.
    """

    f: Energy
    base: Density
    transition: Callable[[Tensor, float, Generator | None], Tensor] | None = None
    leapfrog_steps: int = 1
    moves: int = 1

    def __post_init__(self) -> None:
        check_count("leapfrog_steps", self.leapfrog_steps, 1)
        check_count("moves", self.moves, 1)


@dataclass(frozen=True)
class Schedule:
    """Inverse temperatures and step sizes, fixed before the weighted chains run.

    Attributes:
        betas: increasing from 0 to 1, else a ConfigError.
        sizes: standard deviation of a step's noise at each of ``betas[1:]``, in units of x; empty
            if the path has its own transition.
    """

    betas: tuple[float, ...]
    sizes: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        steps = [b - a for a, b in pairwise(self.betas)]
        ends = [*self.betas[:1], *self.betas[-1:]]
        if ends != [0, 1] or min(steps) <= 0 or len(self.sizes) not in (0, len(steps)):
            raise ConfigError(
                f"the schedule has {len(self.betas)} betas and {len(self.sizes)} sizes; expected "
                "betas that increase from 0 to 1, and a size for each but the first, or none"
            )


@dataclass(frozen=True)
class Estimate:
    """log Z from B chains that walked between base and model.

    Attributes:
        log_weights: ``(B,)`` in nats; E[exp] is Z, or 1 / Z if reverse.
        samples: ends of the chains, ``(B, ...)``: weighted model samples; if reverse, base samples.
        f: negative energy at the model's end of the chains, ``(B,)``.
        acceptance: mean at each temperature of the walk; NaN for the path's own transition.
        conditional_ess: of each step between temperatures, as a share of the chains.
        is_reverse: whether the chains walked from the model to the base.
    """

    log_weights: Tensor
    samples: Tensor
    f: Tensor
    acceptance: Tensor
    conditional_ess: Tensor
    is_reverse: bool

    @property
    def log_z(self) -> float:
        """log Z in nats: too low in expectation; if reverse and from exact samples, too high."""
        mean = float(self.log_weights.logsumexp(0)) - math.log(len(self.log_weights))
        return -mean if self.is_reverse else mean

    @property
    def weights(self) -> Tensor:
        """Weights ``(B,)`` that add up to 1."""
        return self.log_weights.softmax(0)

    @property
    def ess(self) -> float:
        """Effective sample size of the weights, 1 to B."""
        return 1 / float(self.weights.square().sum())

    @property
    def standard_error(self) -> float:
        """Standard error of ``log_z`` (delta method); far too small if ``ess`` is a few chains."""
        return math.sqrt(max(1 / self.ess - 1 / len(self.log_weights), 0.0))

    @property
    def log_q(self) -> Tensor:
        """``(B,)``, the guard's ``log_q=`` of annealed negatives or, if reverse, positives.

        Density of the walk to the model over that back: exp(f - log_q) are the annealing weights.
        """
        return self.f + self.log_weights if self.is_reverse else self.f - self.log_weights


def pilot(
    path: Path, *, chains: int, temperatures: int, generator: Generator | None = None
) -> Schedule:
    """Choose temperatures and step sizes, with chains that are thrown away: adapting biases them.

    Every step of β costs the same conditional effective sample size (Zhou, Johansen and Aston
    2016), first in coarse steps, which are then divided into `temperatures`. Step sizes adapt the
    acceptance: to 0.574 for MALA (Roberts and Rosenthal 1998), 0.651 for HMC (Beskos et al. 2013).

    ConfigError for fewer than 2 chains or no temperature; ShapeError as :func:`forward`.
    """
    check_count("chains", chains, 2)
    check_count("temperatures", temperatures, 1)
    x = path.base.sample(chains, generator)
    # A step beyond the base's own width leads nowhere, also where every step is accepted.
    size = widest = float(x.cpu().double().std(0).max()) if path.transition is None else 1.0
    target = 0.574 if path.leapfrog_steps == 1 else 0.651
    betas, sizes = [0.0], list[float]()
    while betas[-1] < 1:
        gap = _moved(path, betas[-1], x, _STILL, generator)[2]
        most = 1 - betas[-1]
        # An even share of what is left, at least: the pilot ends, whatever f is.
        step = max(_coarse_step(gap, most), most / max(temperatures - len(sizes), 1))
        betas.append(1.0 if step == most else betas[-1] + step)
        for k in range(_PILOT_MOVES):
            x, acceptance, _ = _moved(path, betas[-1], x, size, generator)
            if path.transition is None:
                size *= math.exp((float(acceptance) - target) / math.sqrt(k + 1))
                size = min(size, widest)
        sizes.append(size)
    at = [k * len(sizes) / temperatures for k in range(1, temperatures + 1)]
    fine = (0.0, *(_between(betas, t) for t in at[:-1]), 1.0)
    own = path.transition is not None
    return Schedule(fine, () if own else tuple(_between(sizes, max(t - 1, 0)) for t in at))


def forward(
    path: Path, schedule: Schedule, *, chains: int, generator: Generator | None = None
) -> Estimate:
    """Anneal `chains` samples of the base to the model: E[weight] = Z.

    Z is unbiased. So log Z is too low in expectation (Jensen), and log-likelihoods too high.

    Raises:
        ConfigError: no chain, or a schedule without the sizes that this path needs.
        ShapeError: f or the base does not return one number for each sample.
    """
    check_count("chains", chains, 1)
    return _anneal(path, schedule, partial(path.base.sample, chains, generator), generator)


def reverse(
    path: Path, schedule: Schedule, x: Tensor, *, generator: Generator | None = None
) -> Estimate:
    """Anneal samples of the model ``(B, ...)`` back to the base: E[weight] = 1 / Z.

    With exact samples of the model, 1 / Z is unbiased, so log Z is too high in expectation (Grosse,
    Ghahramani and Adams 2015). With other samples, *data included*, it is no bound: run long chains
    at β = 1 first. Otherwise arguments and errors are those of :func:`forward`.
    """
    check_count("len(x)", len(x), 1)
    return _anneal(path, schedule, x.detach, generator, is_reverse=True)


def _anneal(
    path: Path,
    schedule: Schedule,
    draw: Callable[[], Tensor],
    generator: Generator | None,
    *,
    is_reverse: bool = False,
) -> Estimate:
    betas = schedule.betas
    # A transition of its own looks at no size.
    sizes = schedule.sizes if path.transition is None else (1.0,) * (len(betas) - 1)
    if not sizes:
        raise ConfigError("the schedule has no step sizes, which HMC needs; make one with pilot()")
    if is_reverse:  # the mirror: chains from the base have moved at 1 last, and never at 0
        betas, sizes = (1.0, *betas[::-1]), (*sizes[::-1], _STILL)
    x = start = draw()
    acceptances, gains = list[Tensor](), list[Tensor]()
    for (before, beta), size in zip(pairwise(betas), sizes, strict=True):
        x, acceptance, gap = _moved(path, beta, x, size, generator)
        if beta != before:
            gains.append((beta - before) * gap)
        if size:
            acceptances.append(acceptance)
    gain = torch.stack(gains)
    with torch.no_grad():
        f = path.f(start if is_reverse else x).to(gain)
    return Estimate(gain.sum(0), x, f, torch.stack(acceptances), _share(gain), is_reverse)


def _moved(
    path: Path, beta: float, x: Tensor, size: float, generator: Generator | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Where the chains go, the mean acceptance, and f - log q where they were."""
    gaps, accepted = list[Tensor](), list[Tensor]()

    def between(x: Tensor) -> Tensor:
        f, log_q = path.f(x), path.base.log_prob(x)
        for name, values in (("f", f), ("base.log_prob", log_q)):
            if values.shape != x.shape[:1]:
                raise ShapeError(
                    f"{name} returned shape {tuple(values.shape)}; expected one number for each "
                    f"sample: ({len(x)},)"
                )
        if not gaps:
            wide = torch.float32 if x.device.type == "mps" else torch.float64
            gaps.append(f.detach().to(wide) - log_q.detach().to(wide))
        return (1 - beta) * log_q + beta * f

    if path.transition is not None or not size:
        with torch.no_grad():
            between(x)
            for _ in range(path.moves):
                if path.transition is not None and size:
                    x = path.transition(x, beta, generator)
        return x, gaps[0].new_tensor(math.nan), gaps[0]
    x = hmc(
        between,
        x,
        steps=path.moves,
        leapfrog_steps=path.leapfrog_steps,
        step_size=size**2 / 2,  # with this noise, of the density exp(1 f)
        noise_std=size,
        generator=generator,
        on_step=lambda step: accepted.append(step.acceptance.mean()),
    )
    return x, torch.stack(accepted).mean(), gaps[0]


def _share(gain: Tensor) -> Tensor:
    """Effective sample size of log weights along the last dimension, as a share."""
    return (2 * gain.logsumexp(-1) - (2 * gain).logsumexp(-1)).exp() / gain.shape[-1]


def _coarse_step(gap: Tensor, most: float) -> float:
    steps = [0.0, most]
    if float(_share(most * gap)) >= _COARSE_ESS:
        return most
    for _ in range(40):
        middle = sum(steps) / 2
        steps[float(_share(middle * gap)) < _COARSE_ESS] = middle
    return steps[0]


def _between(values: Sequence[float], t: float) -> float:
    k, last = int(t), len(values) - 1
    return values[k] + (t - k) * (values[min(k + 1, last)] - values[k])
