"""The cells of :mod:`benchmarks.true_scale`: data, model, samplers, training and judgement.

The model is log p(x) = log q(x) + g(x) - log Z: q is a Gaussian with the covariance of the training
images, or a small flow on top of it, and g a small convolutional network. Chains run in the
coordinates u in which q is N(0, I), and the guard's tempered f is (1 - β) g: what it draws is
q(x) exp((1 - β) g), whose weights are exp(β g), for q cancels.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ebmguard import Guard, guard
from ebmguard.likelihood import Bracket, Gaussian, Schedule, forward, pilot, reverse
from ebmguard.likelihood import Path as Course
from ebmguard.reference_training.data import kept_data
from ebmguard.samplers import Mixture, hmc, mala, sgld
from ebmguard.steering import AdaptiveSteps

from .cells import cell_command, write_json

BETAS = (0.0, 0.1, 0.5, 0.05, 0.2, 0.02)
SEEDS = range(5)
SIDES = {"digits": 8, "flow": 8, "mnist": 14}
"""Pixels of a row of the images: the digits, the digits with a flow as base, and MNIST's, which are
means of squares of four."""
MNIST_IMAGES, MNIST_HELD_OUT = 10_000, 1_000
FLOW, HIDDEN, FLOW_UPDATES = 4, 64, 3_000
"""Couplings of the flow, units of each of their two hidden layers, and updates of 128 images."""
NOISE = 0.15
"""Standard deviation of the noise on images in [-1, 1], training and held-out: 16 levels of grey
have no density without it."""
UPDATES = 20_000
JUDGED = (3_000, 8_000, UPDATES)
BATCH, STEPS, SIZE = 64, 16, 0.2
"""Images and negatives of an update, Langevin steps of a chain, and a step's noise in u."""
LEAPFROGS = 4
MOST = 4
"""Times the usual steps, as many times finer, that the adaptive sampler may take."""
CHAINS, FRESH = 1000, 0.01
"""Persistent chains, and the share of a draw that begins anew."""
LR, ADAM, AVERAGED = 5e-4, (0.9, 0.95), 0.999
"""Adam forgets gradients within 20 updates: g is flat for a thousand at first, and a longer memory
of small gradients makes the first large ones explode."""
TEMPERATURES, AIS_CHAINS = 2000, 100
LOST = 1e4
LAST = 1000
KEPT = ("grad_scale", "ess", "energy_gap", "ref/grad_scale", "ref/ess", "sampler/steps")


class Couplings(nn.Module):
    """A flow of additive couplings (NICE, Dinh et al. 2014), (B, D) -> (B, D).

    A chain calls the inverse at every step, and zuko's takes four times as long.

    Args:
        pixels: D, even.
        count: how many, even; each adds to one half of the coordinates what it makes of the
            other. Without any, and at ``log_scale`` 0, it is the identity.
    """

    def __init__(self, pixels: int, count: int) -> None:
        super().__init__()
        half = pixels // 2
        self.log_scale = nn.Parameter(torch.zeros(pixels))
        self.shifts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(half, HIDDEN),
                nn.SiLU(),
                nn.Linear(HIDDEN, HIDDEN),
                nn.SiLU(),
                nn.Linear(HIDDEN, half),
            )
            for _ in range(count)
        )

    def forward(self, v: Tensor) -> Tensor:
        """To where the base is N(0, I); log |det| of it is the sum of ``log_scale``."""
        a, b = v[:, ::2], v[:, 1::2]
        for shift in self.shifts:
            a, b = b + shift(a), a
        return torch.stack([a, b], 2).flatten(1) * self.log_scale.exp()

    def inverse(self, u: Tensor) -> Tensor:
        """What :meth:`forward` maps to u, (B, D) -> (B, D)."""
        u = u * (-self.log_scale).exp()
        a, b = u[:, ::2], u[:, 1::2]
        for shift in reversed(self.shifts):
            a, b = b, a - shift(b)
        return torch.stack([a, b], 2).flatten(1)


@dataclass(frozen=True)
class Data:
    """Images, and the coordinates in which the base is N(0, I).

    Attributes:
        train, test: images without noise, (N, D), in [-1, 1].
        gaussian: that of the noisy training images.
        flow: from the coordinates in which the Gaussian is N(0, I) to those in which the base is;
            without couplings the Gaussian is the base.
    """

    train: Tensor
    test: Tensor
    gaussian: Gaussian
    flow: Couplings

    @classmethod
    def load(cls, name: str = "digits") -> Data:
        """The trainers' split: of the digits 1,437 and 360 images."""
        if name == "mnist":
            counts = {"train_images": MNIST_IMAGES, "test_images": MNIST_HELD_OUT}
            images = kept_data(name, None, image_size=SIDES[name], **counts)
        else:
            images = kept_data("digits", None)
        train, test = (images.scale(x).flatten(1).double() for x in (images.train_x, images.test_x))
        gaussian = Gaussian.fit(train, noise=NOISE, independent=False)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            flow = Couplings(train.shape[1], FLOW * (name == "flow"))
        own = cls(train, test, gaussian, flow)
        if flow.shifts:
            own.fit()
        own.flow.requires_grad_(False)
        return own

    def fit(self) -> None:
        """Fit the flow to the training images, with new noise at every update."""
        rng = torch.Generator().manual_seed(0)
        optimizer = torch.optim.AdamW(self.flow.parameters(), lr=1e-3, weight_decay=0.1)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, FLOW_UPDATES)
        for _ in range(FLOW_UPDATES):
            rows = torch.randint(len(self.train), (2 * BATCH,), generator=rng)
            u = self.white(self.train[rows], rng)
            loss = u.square().sum(1).mean() / 2 - self.flow.log_scale.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            decay.step()

    @property
    def pixels(self) -> int:
        """D."""
        return self.train.shape[1]

    @property
    def log_det(self) -> float:
        """log p(u) - log p(x)."""
        return float(self.gaussian.factor.diagonal().log().sum() - self.flow.log_scale.sum())

    @property
    def noisy(self) -> tuple[Tensor, Tensor]:
        """u of training and held-out images with the noise that every judgement sees."""
        rng = torch.Generator().manual_seed(0)
        return self.white(self.train, rng), self.white(self.test, rng)

    def white(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """u of images (B, D) with noise: (B, D) float32."""
        noise = torch.empty_like(x).normal_(generator=generator)
        off = (x + NOISE * noise - self.gaussian.mean).T
        white: Tensor = torch.linalg.solve_triangular(self.gaussian.factor, off, upper=False)
        u: Tensor = self.flow(white.T.float())
        return u


class Network(nn.Module):
    """g(u): two convolutions over the image that u stands for and two layers, (B, D) -> (B,).

    Images of 14 x 14 are halved twice, those of 8 x 8 once, so that both have as many parameters.

    Args:
        gaussian: of the images.
        back: from u to the coordinates in which the Gaussian is N(0, I).
        channels: of the first convolution; the second has twice as many.
    """

    def __init__(
        self, gaussian: Gaussian, back: Callable[[Tensor], Tensor], channels: int = 8
    ) -> None:
        super().__init__()
        self.back = back
        self.mean = nn.Buffer(gaussian.mean.float())
        self.factor = nn.Buffer(gaussian.factor.T.float().contiguous())
        self.side = math.isqrt(len(gaussian.mean))
        halved = 1 + (self.side > 8)
        self.layers = nn.Sequential(
            nn.Conv2d(1, channels, 4, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(channels, 2 * channels, 3, stride=halved, padding=1),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(32 * channels, 128),
            nn.SiLU(),
            nn.Linear(128, 1),
        )

    def image(self, v: Tensor) -> Tensor:
        """That the Gaussian's coordinates stand for, (B, 1, H, H)."""
        return torch.addmm(self.mean, v, self.factor).view(-1, 1, self.side, self.side)

    def forward(self, u: Tensor) -> Tensor:
        """The part of log p that the base lacks."""
        value: Tensor = self.layers(self.image(self.back(u))).squeeze(1)
        return value


class Frozen(nn.Module):
    """g with the weights of now, every layer between activations one matrix, (B, D) -> (B,).

    A chain calls g many times with the same weights, and convolutions of so few pixels take three
    times as long as products with their matrices.
    """

    @torch.no_grad()
    def __init__(self, network: Network) -> None:
        super().__init__()
        self.back = network.back
        self.stages = list[tuple[Tensor, Tensor]]()
        affine, shape = list[Callable[[Tensor], Tensor]]([network.image]), network.mean.shape
        for layer in (*network.layers, nn.SiLU()):
            if not isinstance(layer, nn.SiLU):
                affine.append(layer)
                continue
            inputs = torch.cat([torch.zeros(1, shape.numel()), torch.eye(shape.numel())])
            values = inputs.view(-1, *shape)
            for part in affine:
                values = part(values)
            rows = values.flatten(1)
            self.stages.append((rows[0], rows[1:] - rows[0]))
            affine, shape = [], values.shape[1:]

    def forward(self, u: Tensor) -> Tensor:
        """The network's own, but for rounding."""
        (offset, matrix), *later = self.stages
        u = torch.addmm(offset, self.back(u), matrix)
        for offset, matrix in later:
            u = torch.addmm(offset, nn.functional.silu(u), matrix)
        return u.squeeze(1)


def standard(pixels: int) -> Gaussian:
    """The base in its own coordinates."""
    zeros = torch.zeros(pixels, dtype=torch.float64)
    return Gaussian(zeros, torch.ones_like(zeros))


def whole(g: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """log q + g of u, without log Z."""

    def f(u: Tensor) -> Tensor:
        return g(u) - u.square().sum(1) / 2 - u.shape[1] / 2 * math.log(2 * math.pi)

    return f


STARTING_ANEW = ("fresh", "adaptive")
"""Samplers whose chains start from the base at every update."""


class Chains:
    """The samplers of the grid, by name; each is called with a tempered g.

    Args:
        name: "fresh", "adaptive", "persistent", "mala", "hmc" or "mixture".
        pixels: D.
        generator: of starts and noise.

    Attributes:
        acceptance: mean of the latest call, of MALA and HMC.
        plan: says how many Langevin steps a call takes, and how much finer they are.
    """

    def __init__(self, name: str, pixels: int, generator: torch.Generator) -> None:
        self.name, self.base, self.rng = name, standard(pixels), generator
        self.rows = self.base.sample(CHAINS, generator)
        self.acceptance: float | None = None
        self.plan: Callable[[], tuple[int, int]] = lambda: (STEPS, 1)
        halves = {
            part: lambda g, kind=part: self.climb(g, kind, BATCH // 2)
            for part in ("fresh", "persistent")
        }
        self.mixture = Mixture(halves)

    def __call__(self, g: Callable[[Tensor], Tensor]) -> Tensor:
        """(64, D) negatives."""
        return self.mixture(g) if self.name == "mixture" else self.climb(g, self.name, BATCH)

    def climb(self, g: Callable[[Tensor], Tensor], kind: str, count: int) -> Tensor:
        """Chains of one kind."""
        fresh = self.base.sample(count, self.rng)
        if kind in STARTING_ANEW:
            return self.walk(g, kind, fresh)
        rows = torch.randint(CHAINS, (count,), generator=self.rng)
        anew = torch.rand(count, generator=self.rng) < FRESH
        x = self.walk(g, kind, torch.where(anew[:, None], fresh, self.rows[rows]))
        self.rows[rows] = x
        return x

    def walk(self, g: Callable[[Tensor], Tensor], kind: str, x: Tensor) -> Tensor:
        """Steps of exp(log q + g), 16 gradients unless planned otherwise."""
        f, seen = whole(g), list[float]()
        steps, finer = self.plan()
        size = SIZE / math.sqrt(finer)
        own: dict[str, Any] = {"step_size": size**2 / 2, "noise_std": size, "generator": self.rng}
        if kind in (*STARTING_ANEW, "persistent"):
            return sgld(f, x, steps=steps, **own)
        own["on_step"] = lambda proposal: seen.append(float(proposal.acceptance.mean()))
        if kind == "mala":
            x = mala(f, x, steps=STEPS, **own)
        else:
            x = hmc(f, x, steps=STEPS // LEAPFROGS, leapfrog_steps=LEAPFROGS, **own)
        self.acceptance = statistics.mean(seen)
        return x


KNOWN = Schedule(tuple(k / (STEPS // 2) for k in range(STEPS // 2 + 1)), (SIZE,) * (STEPS // 2))
"""Of annealed negatives: half as many temperatures, since positives are walked back as well."""


@dataclass(frozen=True)
class Cell:
    """One run of the grid; annealed negatives know their weights, and have no β."""

    sampler: str
    beta: float
    seed: int
    data: str = "digits"

    @property
    def name(self) -> str:
        """Of its folder."""
        of = "" if self.data == "digits" else f"{self.data}_"
        return f"{of}{self.sampler}_b{self.beta:g}_s{self.seed}"

    def command(self, folder: Path) -> Sequence[str]:
        """What runs it."""
        return cell_command("true_scale", folder)


PLAIN = ("fresh", "persistent")
OTHERS = ("mala", "hmc", "mixture")
MAIN = BETAS[:3]
CELLS = [Cell(name, beta, 0) for beta in MAIN for name in PLAIN]
CELLS += [Cell(name, beta, 0) for beta in MAIN[:2] for name in OTHERS]
CELLS += [
    Cell(name, beta, 0, data) for beta in MAIN for data in ("mnist", "flow") for name in PLAIN
]
CELLS += [Cell("mala", beta, 0, data) for beta in MAIN[:2] for data in ("flow", "mnist")]
CELLS += [Cell(name, beta, 1) for beta in MAIN for name in PLAIN]
CELLS += [Cell("adaptive", beta, 0) for beta in MAIN]
CELLS += [Cell(name, beta, 0) for beta in BETAS[3:] for name in PLAIN]
CELLS += [Cell(name, beta, 2) for beta in MAIN for name in PLAIN]
CELLS += [Cell(name, beta, seed) for seed in (1, 2) for beta in BETAS[3:] for name in PLAIN]
CELLS += [Cell(name, beta, seed) for seed in (3, 4) for beta in BETAS for name in PLAIN]
CELLS += [
    Cell(name, beta, seed, data)
    for seed in (1, 2)
    for data in ("flow", "mnist")
    for beta in MAIN
    for name in PLAIN
]
CELLS += [Cell("annealed", 1.0, seed) for seed in SEEDS]


def negatives(cell: Cell, network: Network, rng: torch.Generator) -> tuple[Guard, Any, Chains]:
    """The guard of a cell, what draws a loss from it, and its chains."""
    pixels = len(network.mean)
    chains = Chains(cell.sampler, pixels, rng)
    if cell.sampler != "annealed":
        follow: dict[str, Any] = {}
        if cell.sampler == "adaptive":
            follow = {"sgld_steps": STEPS, "adapt": AdaptiveSteps(most=MOST)}
        loss_fn, sample_q = own = guard(
            None, chains, beta_star=cell.beta, output_scale=1.0, **follow
        )
        if follow:
            chains.plan = own.next_steps

        def loss_of(u: Tensor) -> Tensor:
            u_neg = sample_q(Frozen(network))
            loss: Tensor = loss_fn(network(u), network(u_neg))
            return loss

        return own, loss_of, chains
    own = guard(None, None, beta_star=1.0, output_scale=1.0)

    def weighed(u: Tensor) -> Tensor:
        course = Course(whole(Frozen(network)), standard(pixels))
        ahead = forward(course, KNOWN, chains=BATCH, generator=rng)
        back = reverse(course, KNOWN, u, generator=rng)
        f = whole(network)
        loss: Tensor = own.loss(f(u), f(ahead.samples), log_q=(back.log_q, ahead.log_q))
        return loss

    return own, weighed, chains


def run(cell: Cell, root: Path) -> None:
    """Train a cell from its start, and write what came of it after each judgement."""
    logging.getLogger("ebmguard").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    folder = root / cell.name
    folder.mkdir(parents=True, exist_ok=True)
    data = Data.load(cell.data)
    torch.manual_seed(cell.seed)
    network = Network(data.gaussian, data.flow.inverse)
    average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(AVERAGED))
    optimizer = torch.optim.Adam(network.parameters(), lr=LR, betas=ADAM)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, UPDATES)
    rng = torch.Generator().manual_seed(cell.seed)
    own, loss_of, chains = negatives(cell, network, rng)
    rows: list[dict[str, float | None]] = []
    result: dict[str, Any] = {"lost_at": None, "judged": []}
    for update in range(1, UPDATES + 1):
        chosen = torch.randint(len(data.train), (BATCH,), generator=rng)
        loss = loss_of(data.white(data.train[chosen], rng))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay.step()
        average.update_parameters(network)
        rows = [*rows[1 - LAST :], {name: own.last.get(name) for name in KEPT}]
        rows[-1]["acceptance"] = chains.acceptance
        if not abs(own.last["energy_gap"]) <= LOST:
            result["lost_at"] = update
            break
        if update in JUDGED:
            seen = {name: [x for row in rows if (x := row[name]) is not None] for name in rows[0]}
            medians = {name: statistics.median(values) for name, values in seen.items() if values}
            found = {
                "updates": update,
                **judged(Frozen(cast(Network, average.module)), data),
                "median": medians,
            }
            result["judged"].append(found)
            write_json(folder / "result.json", result)
    write_json(folder / "result.json", result)


def judged(
    g: Callable[[Tensor], Tensor], data: Data, temperatures: int = TEMPERATURES
) -> dict[str, Any]:
    """Log-likelihoods of noisy images in nats, with log Z from both sides.

    Reverse chains start where as many MALA steps as there are temperatures have led from training
    images.
    """
    rng = torch.Generator().manual_seed(0)
    f = whole(g)
    course = Course(f, standard(data.pixels))
    train, test = data.noisy
    schedule = pilot(course, chains=AIS_CHAINS, temperatures=temperatures, generator=rng)
    ahead = forward(course, schedule, chains=AIS_CHAINS, generator=rng)
    size = schedule.sizes[-1]
    starts = train[torch.randperm(len(train), generator=rng)[:AIS_CHAINS]]
    starts = mala(
        f, starts, steps=temperatures, step_size=size**2 / 2, noise_std=size, generator=rng
    )
    bracket = Bracket(ahead, reverse(course, schedule, starts, generator=rng), "long-run")
    sides = {
        name: {"log_z": side.log_z, "standard_error": side.standard_error, "ess": side.ess}
        for name, side in (("forward", bracket.forward), ("reverse", bracket.reverse))
    }
    with torch.no_grad():
        means = {name: float(f(u).mean()) for name, u in (("train", train), ("test", test))}
    return {
        **{name: mean - data.log_det for name, mean in means.items()},
        **sides,
        "lower": bracket.lower,
        "upper": bracket.upper,
        "problems": bracket.problems,
    }
