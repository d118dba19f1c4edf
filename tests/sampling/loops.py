"""Small samplers in many styles, each with what is true of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn.functional import pad

from ebmguard.samplers import annealed, mala, sgld
from ebmguard.sampling import Measured, Recording
from tests.parts import gradient_at, langevin

Sampler = Callable[[Any, Tensor], Tensor]

SHAPE, STEPS = (1, 8, 8), 6
STEP, NOISE = 0.5, 0.05  # o = 400


@dataclass(frozen=True)
class Loop:
    """A sampler, and what is true of it.

    Attributes:
        sample: of the energy and start points ``(B, *shape)``.
        step: signed, of the gradient of the energy; None where the sampler has to be refused.
        why: what has to be said then.
        clamp: the ends of the samples.
        decay: of -x in the update.
        clip: part of what has to be said of a clipped gradient.
        heads, shape, dtype: of the network and the samples.
        tolerance: relative, of the numbers.
        start: the start points, of their shape.
    """

    sample: Callable[[Any, Tensor], Tensor] | None = None
    step: float | None = STEP
    noise: float = NOISE
    why: str = ""
    clamp: tuple[float, float] | None = None
    decay: float = 0.0
    clip: str = ""
    heads: int = 1
    shape: tuple[int, ...] = SHAPE
    dtype: torch.dtype = torch.float32
    tolerance: float = 1e-4
    start: Callable[..., Tensor] = torch.rand

    @classmethod
    def of(cls, step: float, noise: float) -> Loop:
        return cls(step=step, noise=noise)

    @classmethod
    def refused(cls, why: str, sample: Any = None) -> Loop:
        return cls(sample, step=None, why=why)

    @property
    def scale(self) -> float:
        assert self.step is not None
        return 2 * abs(self.step) / self.noise**2


class Heads(nn.Module):
    """Several smooth outputs for each sample."""

    def __init__(self, heads: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.dims = len(shape)
        size = torch.Size(shape).numel()
        self.net = nn.Sequential(
            nn.Linear(size, 16, dtype=dtype), nn.SiLU(), nn.Linear(16, heads, dtype=dtype)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x.flatten(-self.dims))
        return out.squeeze(-1)


def network(loop: Loop) -> nn.Module:
    return Heads(loop.heads, loop.shape, loop.dtype)


def starts(loop: Loop) -> Tensor:
    """Start points of 32 chains."""
    return loop.start(32, *loop.shape).to(loop.dtype)


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


def stepping(
    update: Callable[[Tensor, Tensor, int], Tensor],
    energy: Callable[[Any, Tensor], Tensor] = lambda f, x: f(x),
    gradient: Callable[[Any, Tensor], Tensor] = gradient_at,
) -> Sampler:
    """x becomes ``update(x, gradient of energy(f, x), t)``, from one leaf to the next."""

    def sample(f: Any, x: Tensor) -> Tensor:
        for t in range(STEPS):
            x = update(x, gradient(lambda x: energy(f, x), x), t)
        return x

    return sample


def noise(x: Tensor, std: float = NOISE) -> Tensor:
    return std * torch.randn_like(x)


def plain(x: Tensor, g: Tensor, t: int = 0) -> Tensor:
    return x + STEP * g + noise(x)


def in_place(f: Any, x: Tensor) -> Tensor:
    return langevin(f, x, STEPS, STEP, NOISE)


def by_backward(f: Any, x: Tensor) -> Tensor:
    """A low energy; the gradient is collected in ``.grad``."""
    x = x.clone().requires_grad_()
    for _ in range(STEPS):
        f(x).sum().backward()
        assert x.grad is not None
        with torch.no_grad():
            x.add_(x.grad, alpha=-STEP)
            x.add_(torch.randn(x.shape), alpha=NOISE)
        x.grad.zero_()
    return x.detach()


def negated(f: Any, x: Tensor) -> Tensor:
    """Goes up, by way of what it goes down."""
    return by_backward(lambda x: -f(x), x)


def noise_first(f: Any, x: Tensor) -> Tensor:
    """IGEBM's: noise of its own std in one buffer, then a clipped gradient, then the clamp."""
    x, buffer = x.clone(), torch.empty_like(x)
    x.requires_grad_()
    for _ in range(STEPS):
        buffer.normal_(0, NOISE)
        x.data.add_(buffer)
        f(x).sum().backward()
        assert x.grad is not None
        x.grad.data.clamp_(-0.01, 0.01)
        x.data.add_(x.grad.data, alpha=-STEP)
        x.grad.detach_()
        x.grad.zero_()
        x.data.clamp_(0, 1)
    return x.detach()


def all_at_once(f: Any, x: Tensor) -> Tensor:
    noises = torch.randn(STEPS, *x.shape, dtype=x.dtype)
    for t in range(STEPS):
        x = x + STEP * gradient_at(f, x) + NOISE * noises[t]
    return x


def by_row_norm(bound: float) -> Any:
    def update(x: Tensor, g: Tensor, t: int) -> Tensor:
        norm = g.flatten(1).norm(dim=1)[:, None, None, None]
        return plain(x, g * (bound / norm).clamp(max=1), t)

    return stepping(update)


def by_batch_norm(x: Tensor, g: Tensor, t: int) -> Tensor:
    return plain(x, g * (0.1 / g.norm()), t)


def by_optimizer(kind: Any, **options: Any) -> Any:
    def sample(f: Any, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        optimizer = kind([x], lr=STEP, **options)
        for _ in range(STEPS):
            optimizer.zero_grad()
            (-f(x).sum()).backward()
            optimizer.step()
            x.data += noise(x)
        return x.detach()

    return sample


def with_momentum(f: Any, x: Tensor) -> Tensor:
    v = torch.zeros_like(x)
    for _ in range(STEPS):
        v = 0.9 * v + STEP * gradient_at(f, x) + noise(x)
        x = x + v
    return x


def hamiltonian(f: Any, x: Tensor) -> Tensor:
    for _ in range(2):
        v = torch.randn_like(x)
        v = v + 0.05 * gradient_at(f, x)
        for _ in range(4):
            x = x + 0.1 * v
            v = v + 0.1 * gradient_at(f, x)
    return x


def preconditioned_for_most(x: Tensor, g: Tensor, t: int) -> Tensor:
    """Most samples have a preconditioned gradient, and two a plain one."""
    is_first = (torch.arange(len(x)) < 2)[:, None, None, None]
    return x + torch.where(is_first, STEP * g, 0.05 * g / (g.abs().sqrt() + 1e-3)) + noise(x)


def metropolis(f: Any, x: Tensor) -> Tensor:
    """MALA that goes back where a proposal is rejected, here for some of the rows."""
    for _ in range(STEPS):
        to = x + STEP * gradient_at(f, x) + noise(x)
        with torch.no_grad():
            f(to)
        x = torch.where((torch.rand(len(x)) < 0.7)[:, None, None, None], to, x)
    return x


def of_library_mala(f: Any, x: Tensor) -> Tensor:
    return mala(f, x, steps=STEPS, step_size=0.5 * NOISE**2, noise_std=NOISE)


def gibbs_with_gradients(f: Any, x: Tensor) -> Tensor:
    x = x.round()
    for _ in range(STEPS):
        gain = (1 - 2 * x) * gradient_at(f, x)
        flip = torch.multinomial(gain.flatten(1).softmax(1), 1)
        x = x.flatten(1).scatter_add(1, flip, torch.ones(flip.shape)).fmod(2).reshape(x.shape)
    return x


def augmented(f: Any, x: Tensor) -> Tensor:
    moved: Tensor = f(pad(x, (1, 0)).flip(-1)[..., 1:] + 0.01 * torch.randn_like(x))
    return moved


def scheduled(keeps_scale: bool) -> Any:
    stds = annealed(4 * NOISE, NOISE, STEPS)

    def update(x: Tensor, g: Tensor, t: int) -> Tensor:
        step = 200 * stds[t] ** 2 if keeps_scale else STEP
        return x + step * g + noise(x, stds[t])

    return stepping(update)


def by_library(f: Any, x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return sgld(
        f,
        x,
        steps=STEPS,
        step_size=STEP,
        noise_std=NOISE,
        clamp=(0.0, 1.0),
        generator=generator,
    )


def short(steps: int, loop: Loop) -> Loop:
    """The same sampler, of a step or two a call."""

    def sample(f: Any, x: Tensor) -> Tensor:
        assert loop.sample is not None
        with patch(f"{__name__}.STEPS", steps):
            return loop.sample(f, x)

    return replace(loop, sample=sample)


def by_sample(x: Tensor, g: Tensor, t: int) -> Tensor:
    sizes = torch.linspace(0.1, 1, len(x))[:, None, None, None]
    return x + sizes * STEP * g + sizes.sqrt() * noise(x)


def two_kinds(x: Tensor, g: Tensor, t: int) -> Tensor:
    """The first samples have a step of their own."""
    is_first = (torch.arange(len(x)) < 0.1 * len(x))[:, None, None, None]
    return x + torch.where(is_first, 2 * STEP, STEP) * g + noise(x)


def ramped(*, is_alike: bool) -> Any:
    """No noise, then a temperature that rises; or half of the chains have its end's throughout."""

    def sample(f: Any, x: Tensor) -> Tensor:
        begun = (torch.arange(len(x)) < len(x) // 2) & (not is_alike)
        for t in torch.linspace(0, 1, 20):
            share = torch.where(begun, 1.0, ((t - 0.8) / 0.2).clamp(0, 1))
            std = NOISE * share.sqrt()[:, None, None, None]
            x = x - STEP * gradient_at(f, x) + std * torch.randn_like(x)
        return x

    return sample


def refused(sample: Any, why: str) -> Loop:
    return Loop.refused(why, sample)


LOOPS = {
    "in place, autograd.grad": Loop(in_place),
    "backward(), low energy": Loop(by_backward, step=-STEP),
    "backward() of -f": Loop(negated),
    "noise first, in one buffer, clipped and clamped": Loop(
        noise_first, step=-STEP, clip="entries at 0.01"
    ),
    "clamped": Loop(stepping(lambda x, g, t: plain(x, g, t).clamp(0, 1)), clamp=(0, 1)),
    "most entries at the clamp": Loop(
        stepping(lambda x, g, t: (x + 2 * g + noise(x)).clamp(0, 1)),
        step=2,
        clamp=(0, 1),
        start=lambda *shape: torch.rand(*shape).round(),
    ),
    "clipped by value": Loop(
        stepping(lambda x, g, t: plain(x, g.clamp(-0.02, 0.02))), clip="entries at 0.02"
    ),
    "clipped by norm, some samples": Loop(by_row_norm(0.14), clip="norm"),
    "annealed, o kept": Loop(scheduled(True), step=200 * 16 * NOISE**2, noise=4 * NOISE),
    "decay in the update": Loop(stepping(lambda x, g, t: plain(0.99 * x, g)), decay=0.01),
    "prior inside autograd": Loop(
        stepping(plain, energy=lambda f, x: f(x) - 0.5 * x.square().flatten(1).sum(1))
    ),
    "logsumexp of logits": Loop(stepping(plain, energy=lambda f, x: f(x).logsumexp(1)), heads=5),
    "one logit each": Loop(
        stepping(plain, energy=lambda f, x: f(x).gather(1, torch.arange(len(x))[:, None] % 5)),
        heads=5,
    ),
    "heads summed": Loop(stepping(plain), heads=3),
    "mean over the batch": Loop(
        stepping(lambda x, g, t: plain(x, 32 * g), energy=lambda f, x: f(x).mean())
    ),
    "temperature inside": Loop(stepping(plain, energy=lambda f, x: f(x) / 0.1), step=10 * STEP),
    "augmentation inside": Loop(stepping(plain, energy=augmented)),
    "in the logit of x": Loop(
        stepping(plain, energy=lambda f, u: f(u.sigmoid())), start=torch.randn
    ),
    "all noise at once": Loop(all_at_once),
    "torch.distributions": Loop(
        stepping(lambda x, g, t: x + STEP * g + Normal(torch.zeros_like(x), NOISE).sample())
    ),
    "float64": Loop(stepping(plain), dtype=torch.float64, tolerance=1e-9),
    "optimizer SGD": Loop(by_optimizer(torch.optim.SGD)),
    "MALA, rows rejected": Loop(metropolis),
    "MALA of the library": Loop(
        of_library_mala, step=0.5 * NOISE**2, noise=NOISE, tolerance=1e-2, start=torch.randn
    ),
    "SGLD of the library, generator": Loop(by_library, clamp=(0, 1)),
    "annealed, step kept": refused(scheduled(False), "sizes change along the chain"),
    "clipped by norm, every sample": refused(by_row_norm(0.01), "clipped by norm in every sample"),
    "clipped by the batch's norm": refused(stepping(by_batch_norm), "norm of the batch"),
    "clipped in every entry": refused(
        stepping(lambda x, g, t: x + g.clamp(-1e-7, 1e-7) * 1e5 + noise(x)), "sign of the gradient"
    ),
    "optimizer with momentum": refused(by_optimizer(torch.optim.SGD, momentum=0.9), "momentum"),
    "momentum": refused(with_momentum, "momentum (0.9)"),
    "HMC": refused(hamiltonian, "HMC"),
    "optimizer Adam": refused(by_optimizer(torch.optim.Adam), "preconditioned gradient"),
    "preconditioned for most samples": refused(
        stepping(preconditioned_for_most), "preconditioned gradient"
    ),
    "uniform noise": refused(
        stepping(lambda x, g, t: x + STEP * g + NOISE * (torch.rand_like(x) - 0.5)),
        "non-Gaussian noise",
    ),
    "noise of numpy": refused(
        stepping(
            lambda x, g, t: (
                x + STEP * g + NOISE * torch.from_numpy(np.random.randn(*x.shape)).float()
            )
        ),
        "noise that torch did not draw",
    ),
    "noise of size 0": refused(
        stepping(lambda x, g, t: x + STEP * g + noise(x, 0.0)), "gradient steps without noise"
    ),
    "no noise": refused(stepping(lambda x, g, t: x + STEP * g), "gradient steps without noise"),
    "a size for each sample": refused(stepping(by_sample), "step sizes differ between samples"),
    "two step sizes": refused(stepping(two_kinds), "differ between samples"),
    "temperature that rises": refused(ramped(is_alike=True), "along the chain (from no noise to o"),
    "the same, half at its end": refused(ramped(is_alike=False), "differ between samples"),
    "a square of the output": refused(
        stepping(plain, energy=lambda f, x: f(x).square()), "differentiated as it is"
    ),
    "discrete": refused(gibbs_with_gradients, "discrete samples"),
    "two steps a call": short(2, Loop(in_place)),
    "one step a call": short(1, Loop(in_place)),
    "torch.func.grad": refused(
        stepping(plain, gradient=lambda f, x: torch.func.grad(lambda x: f(x).sum())(x)),
        "no step could be seen (differentiated calls: 0)",
    ),
    "NaN on the way": refused(
        stepping(lambda x, g, t: torch.where(x > 0.99, torch.nan, plain(x, g, t))), "not finite"
    ),
    "lost in rounding": refused(
        stepping(lambda x, g, t: x + 1e-9 * g + 1e-9 * torch.randn_like(x)), "rounding hides"
    ),
    "gradient lost in rounding": refused(
        stepping(lambda x, g, t: x + 1e-12 * g + noise(x)), "not identifiable yet"
    ),
}
