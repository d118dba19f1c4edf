"""The cells of :mod:`benchmarks.true_scale`: samplers, training and judgement.

The guard's tempered f is (1 - β) g: what the chains draw is q exp((1 - β) g), whose weights are
exp(β g), for q cancels. A cell trains a network for each of its β, side by side: they begin alike,
and see the same images.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ebmguard import Guard, guard
from ebmguard.alerts import Level
from ebmguard.diagnostics import weight_diagnostics
from ebmguard.likelihood import Bracket, Schedule, forward, pilot, reverse
from ebmguard.likelihood import Path as Course
from ebmguard.samplers import Mixture, hmc, mala, sgld
from ebmguard.steering import AdaptiveSteps

from .true_scale_model import Data, Network, Networks, standard, whole

BETAS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5)
KNOWN = 1.0
"""β of annealed negatives, whose weights are known: their sampler is not tempered."""
UPDATES = 20_000
JUDGED = (8_000, UPDATES)
BATCH, STEPS, SIZE = 64, 16, 0.2
"""Images and negatives of an update, Langevin steps of a chain, and a step's noise in u."""
LEAPFROGS = 4
MOST = 4
"""Times the usual steps, as many times finer, of finer chains; adaptive ones may take as many. And
times the usual negatives, of as many times the chains, where there are more."""
CHAINS, FRESH = 1000, 0.01
"""Persistent chains, and the share of a draw that begins anew."""
LR, ADAM, AVERAGED = 5e-4, (0.9, 0.95), 0.999
"""Adam forgets gradients within 20 updates: g is flat for a thousand at first, and a longer memory
of small gradients makes the first large ones explode."""
TEMPERATURES, AIS_CHAINS = 2000, 100
BATCHES, CONVERGED = 15, 500
"""Batches of chains that say what a sampler without a lag would deliver, and their MALA steps."""
LOST = 1e4
LAST = 1000
KEPT = ("grad_scale", "ess", "energy_gap", "ref/grad_scale", "ref/ess", "sampler/steps")
STARTING_ANEW = ("fresh", "adaptive")
"""Samplers whose chains start from the base at every update."""


class Chains:
    """The samplers of the grid, by name; each is called with a tempered g of all members.

    Members start alike where they start anew, and draw the same rows of their own chains.

    Args:
        name: "fresh", "adaptive", "persistent", "finer", "more", "mala", "hmc" or "mixture".
        pixels: D.
        generator: of starts and noise.
        members: how many.

    Attributes:
        acceptance: means of the latest call for each member, of MALA and HMC.
        plan: says how many Langevin steps a call takes, and how much finer they are.
    """

    def __init__(self, name: str, pixels: int, generator: torch.Generator, members: int) -> None:
        self.name, self.base, self.rng = name, standard(pixels), generator
        self.count, chains = (n * (MOST if name == "more" else 1) for n in (BATCH, CHAINS))
        self.rows = self.base.sample(chains, generator).repeat(members, 1, 1)
        self.acceptance: list[float] | None = None
        finer = MOST if name == "finer" else 1
        self.plan: Callable[[], tuple[int, int]] = lambda: (STEPS * finer, finer)
        halves = {
            part: lambda g, kind=part: self.climb(g, kind, BATCH // 2)
            for part in ("fresh", "persistent")
        }
        self.mixture = Mixture(halves, dim=1)

    def __call__(self, g: Callable[[Tensor], Tensor]) -> Tensor:
        """(members, 64 or more, D) negatives."""
        return self.mixture(g) if self.name == "mixture" else self.climb(g, self.name, self.count)

    def climb(self, g: Callable[[Tensor], Tensor], kind: str, count: int) -> Tensor:
        """Chains of one kind."""
        fresh = self.base.sample(count, self.rng).expand(len(self.rows), -1, -1)
        if kind in STARTING_ANEW:
            return self.walk(g, kind, fresh)
        rows = torch.randint(self.rows.shape[1], (count,), generator=self.rng)
        anew = torch.rand(count, generator=self.rng) < FRESH
        x = self.walk(g, kind, torch.where(anew[:, None], fresh, self.rows[:, rows]))
        self.rows[:, rows] = x
        return x

    def walk(self, g: Callable[[Tensor], Tensor], kind: str, x: Tensor) -> Tensor:
        """Steps of exp(log q + g): as planned, or 16 gradients of MALA and of HMC."""
        f, seen = whole(g), list[Tensor]()
        steps, finer = self.plan()
        size = SIZE / math.sqrt(finer)
        own: dict[str, Any] = {"step_size": size**2 / 2, "noise_std": size, "generator": self.rng}
        if kind not in ("mala", "hmc"):
            return sgld(f, x, steps=steps, **own)
        own |= {"dim": 1, "on_step": lambda proposal: seen.append(proposal.acceptance.mean(1))}
        if kind == "mala":
            x = mala(f, x, steps=STEPS, **own)
        else:
            x = hmc(f, x, steps=STEPS // LEAPFROGS, leapfrog_steps=LEAPFROGS, **own)
        self.acceptance = torch.stack(seen).mean(0).tolist()
        return x


WALK = Schedule(tuple(k / (STEPS // 2) for k in range(STEPS // 2 + 1)), (SIZE,) * (STEPS // 2))
"""Of annealed negatives: half as many temperatures, since positives are walked back as well."""


@dataclass(frozen=True)
class Cell:
    """Runs of one seed, one for each β."""

    sampler: str
    seed: int
    data: str = "digits"
    betas: tuple[float, ...] = BETAS

    @property
    def name(self) -> str:
        """Of its folder."""
        some = "" if self.betas == BETAS else "_b" + "_".join(f"{beta:g}" for beta in self.betas)
        return f"{self.data}_{self.sampler}{some}_s{self.seed}"


PLAIN, OTHERS, ELSEWHERE = ("persistent", "fresh"), ("mixture", "mala", "hmc"), ("flow", "mnist")
SOME = (0.0, 0.1, 0.5)


def grid(
    names: tuple[str, ...],
    *seeds: int,
    of: tuple[str, ...] = ("digits",),
    betas: tuple[float, ...] = SOME,
) -> list[Cell]:
    return [Cell(name, seed, data, betas) for seed in seeds for data in of for name in names]


# In the order in which they were thought of, and are begun.
LIST = [*grid(PLAIN, 0, 1, betas=BETAS), *grid(OTHERS, 0), *grid(PLAIN, 0, of=ELSEWHERE)]
LIST += [Cell("adaptive", 0, betas=(beta,)) for beta in SOME]
LIST += [Cell("annealed", 0, betas=(KNOWN,)), *grid(PLAIN, 2, 3, 4, betas=BETAS)]
LIST += [*grid(OTHERS, 1), *grid(("mala",), 0, of=ELSEWHERE), *grid(PLAIN, 1, of=ELSEWHERE)]
LIST += [*grid(OTHERS, 2), *grid(PLAIN, 2, of=ELSEWHERE), *grid(("mala",), 1, 2, of=("flow",))]
LIST += [Cell("finer", 0, "flow", (0.0,)), *grid(("more",), 0, 1, 2, betas=(0.0, 0.5))]
CELLS = {cell.name: asdict(cell) for cell in LIST}


def negatives(cell: Cell, networks: Networks, rng: torch.Generator) -> tuple[Guard, Any, Chains]:
    """The guard of a cell, what draws a loss from it, and its chains."""
    pixels = len(networks.form[0].mean)
    chains = Chains(cell.sampler, pixels, rng, len(cell.betas))
    if cell.sampler != "annealed":
        follow: dict[str, Any] = {}
        if cell.sampler == "adaptive":
            follow = {"sgld_steps": STEPS, "adapt": AdaptiveSteps(most=MOST)}
        loss_fn, sample_q = own = guard(
            None, chains, beta_star=torch.tensor(cell.betas), output_scale=1.0, **follow
        )
        if follow:
            chains.plan = own.next_steps

        def loss_of(u: Tensor) -> Tensor:
            u_neg = sample_q(networks.frozen())
            g = networks(torch.cat([u.expand(len(u_neg), -1, -1), u_neg], 1))
            loss: Tensor = loss_fn(g[:, : len(u)], g[:, len(u) :])
            return loss

        return own, loss_of, chains
    own = guard(None, None, beta_star=KNOWN, output_scale=1.0)

    def weighed(u: Tensor) -> Tensor:
        course = Course(whole(networks.frozen().member(0)), standard(pixels))
        ahead = forward(course, WALK, chains=BATCH, generator=rng)
        back = reverse(course, WALK, u, generator=rng)
        f = whole(networks)(torch.cat([u, ahead.samples])[None])[0]
        loss: Tensor = own.loss(f[: len(u)], f[len(u) :], log_q=(back.log_q, ahead.log_q))
        return loss

    return own, weighed, chains


def measure(_: Path, **settings: Any) -> dict[str, Any]:
    """Train a cell from its start; what came of each member."""
    cell = Cell(**settings)
    data = Data.load(cell.data)
    torch.manual_seed(cell.seed)
    networks = Networks(Network(data.gaussian, data.flow.inverse), len(cell.betas))
    average = AveragedModel(networks, multi_avg_fn=get_ema_multi_avg_fn(AVERAGED))
    optimizer = torch.optim.Adam(networks.parameters(), lr=LR, betas=ADAM)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, UPDATES)
    rng = torch.Generator().manual_seed(cell.seed)
    own, loss_of, chains = negatives(cell, networks, rng)
    rows = [deque[dict[str, float | None]](maxlen=LAST) for _ in cell.betas]
    members: list[dict[str, Any]] = [
        {"beta": beta, "lost_at": None, "judged": []} for beta in cell.betas
    ]
    for update in range(1, UPDATES + 1):
        chosen = torch.randint(len(data.train), (BATCH,), generator=rng)
        loss = loss_of(data.white(data.train[chosen], rng))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay.step()
        average.update_parameters(networks)
        for index, row in enumerate(own.members or [own.last]):
            # What all members share is in the row of the whole.
            rows[index].append({name: row.get(name, own.last.get(name)) for name in KEPT})
            if chains.acceptance is not None:
                rows[index][-1]["acceptance"] = chains.acceptance[index]
            if members[index]["lost_at"] is None and not abs(row["energy_gap"]) <= LOST:
                members[index]["lost_at"] = update
        if all(member["lost_at"] for member in members):
            break
        if update in JUDGED:
            frozen = cast(Networks, average.module).frozen()
            for index, member in enumerate(members):
                if member["lost_at"] is None:
                    g, medians = frozen.member(index), medians_of(rows[index])
                    found = judged(g, data)
                    found["converged"] = (
                        None if cell.sampler == "annealed" else converged(g, member["beta"], data)
                    )
                    member["judged"].append({"updates": update, **found, "median": medians})
    errors = [alert for alert in own.alerts if alert.level is Level.ERROR]
    for index, member in enumerate(members):
        first = next((x.step + 1 for x in errors if x.member in (index, None)), None)
        member["first_error"] = first
    return {"members": members}


def medians_of(rows: Iterable[Mapping[str, float | None]]) -> dict[str, float]:
    """Of each number that some of the rows have."""
    seen: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if value is not None:
                seen.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in seen.items()}


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


def converged(g: Callable[[Tensor], Tensor], beta: float, data: Data) -> dict[str, float]:
    """What negatives would be like if chains came to an end: the guard's numbers of them.

    Chains are tested Langevin steps on q exp((1 - β) g) from training images, in batches as large
    as those of the training.
    """
    rng = torch.Generator().manual_seed(0)
    u = data.white(data.train[torch.randperm(len(data.train), generator=rng)], rng)
    u = u[: BATCHES * BATCH]
    own: dict[str, Any] = {"steps": CONVERGED, "step_size": SIZE**2 / 2, "noise_std": SIZE}
    ends = mala(whole(lambda u: (1 - beta) * g(u)), u, generator=rng, **own)
    with torch.no_grad():
        f_pos, f_neg = (g(x).view(-1, BATCH) for x in (u, ends))
    seen = torch.vmap(lambda p, n: weight_diagnostics(p, n, beta))(f_pos, f_neg)
    found = {name: seen[name] for name in ("grad_scale", "ess")}
    found["energy_gap"] = f_pos.mean(1) - f_neg.mean(1)
    return {name: float(value.mean()) for name, value in found.items()}
