"""A saved state of a run: its futures with other random numbers, and what is known of it before."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer

from ebmguard.objective import contrastive_loss
from ebmguard.reference_training.engine.task import DIVERGED_GAP
from ebmguard.samplers import sgld

from .population.trainer import Trainer

FUTURES, HORIZONS = 5, (50, 100)
CHAINS = 64
ROW_TAGS = (
    "energy_gap", "energy_overlap", "f_pos/std", "f_neg/std", "ref/grad_scale", "ref/ess",
    "ref/weight_entropy", "ref/max_weight", "ref/reweighting_angle", "sampler/grad_norm",
    "sampler/grad_norm_max", "buffer/age",
)  # fmt: skip
LAST, RECORD = 10, 64
ITERATIONS = 50
"""Of power iterations."""
PARTS = ("network", "optimizer", "scheduler", "buffer")
"""What a step changes; the buffer holds the trainer's one generator."""
Product = Callable[[Tensor], Tensor]


def is_lost(gap: float) -> bool:
    """Whether a step's energy gap is beyond all bounds, or not finite."""
    return not abs(gap) <= DIVERGED_GAP


def saved(trainer: Trainer) -> dict[str, Any]:
    """A copy of all that a step changes."""
    return {name: copy.deepcopy(getattr(trainer, name).state_dict()) for name in PARTS}


def restore(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Go back to a state that :func:`saved` returned, which stays as it is."""
    for name in PARTS:
        getattr(trainer, name).load_state_dict(copy.deepcopy(state[name]))


def futures(trainer: Trainer, state: Mapping[str, Any], own: int | None) -> list[int | None]:
    """After how many steps each future is lost, of which the run's own way is the first.

    The last two are left out where the first three agree within each horizon.
    """
    deaths = [own]
    for seed in range(1, FUTURES):
        within = {tuple(d is not None and d <= h for h in HORIZONS) for d in deaths}
        if len(deaths) > FUTURES // 2 and len(within) == 1:
            break  # the majority is known
        deaths.append(future(trainer, state, seed))
    return deaths


def future(trainer: Trainer, state: Mapping[str, Any], seed: int) -> int | None:
    """Go on from a state with other random numbers; after how many steps it is lost, if it is."""
    restore(trainer, state)
    trainer.rng.manual_seed(1_000_003 * trainer.run.seed + seed - 1)
    for step in range(max(HORIZONS)):
        if is_lost(plain_step(trainer)):
            return step + 1
    return None


def loss_of(
    trainer: Trainer, x: Tensor, negatives: Tensor, clean: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    """The run's loss, and the energy gap in it."""
    f_pos, f_neg = trainer.network(x), trainer.network(negatives)
    loss = contrastive_loss(f_pos, f_neg, trainer.run.beta_star)
    if trainer.run.task == "jem":
        loss = loss + functional.cross_entropy(trainer.network.classify(clean), y)
    return loss, f_pos.detach().mean() - f_neg.detach().mean()


def plain_step(trainer: Trainer) -> float:
    """The trainer's step without what the guard measures, at a third less; its energy gap."""
    run, data = trainer.run, trainer.data
    chosen = torch.randint(len(data.x), (run.batch,), generator=trainer.rng)
    clean, y = data.x[chosen], data.y[chosen]
    x = clean + data.noise * torch.randn(clean.shape, generator=trainer.rng)
    negatives = trainer.draw(trainer.network, x, None, run.sgld_steps)
    loss, gap = loss_of(trainer, x, negatives, clean, y)
    trainer.optimizer.zero_grad()
    loss.backward()
    trainer.optimizer.step()
    trainer.scheduler.step()
    return float(gap)


def features_of(
    trainer: Trainer, state: Mapping[str, Any], rows: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """All that is known of a state before its futures; ``rows`` are those of the steps before."""
    restore(trainer, state)
    generator = torch.Generator().manual_seed(trainer.run.seed)
    assert trainer.buffer is not None
    chosen = torch.randint(len(trainer.buffer.samples), (CHAINS,), generator=generator)
    chains = trainer.buffer.samples[chosen].clone()
    chosen = torch.randint(len(trainer.data.x), (CHAINS,), generator=generator)
    data = trainer.data.x[chosen]
    data = data + trainer.data.noise * torch.randn(data.shape, generator=generator)
    return {
        **of_rows(rows),
        **of_probes(trainer, data, chains, generator),
        **of_input(trainer, chains, generator),
        **of_parameters(trainer, data, trainer.data.y[chosen], chains, generator),
        "settings/step": float(len(rows)),
        "settings/lr": trainer.run.lr,
        "settings/beta_star": trainer.run.beta_star,
    }


def of_rows(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Medians of the last rows, and by how much two sizes have outgrown those before."""

    def values(tag: str) -> Any:
        return np.abs([row.get(tag, math.nan) for row in rows[-RECORD:]])

    found = {f"row/{tag}": float(np.median(values(tag)[-LAST:])) for tag in ROW_TAGS}
    for tag in ("energy_gap", "sampler/grad_norm"):
        size = values(tag)
        before, now = np.median(size[: len(size) // 2]), np.median(size[-LAST:])
        found[f"growth/{tag}"] = float(np.log((now + 1) / (before + 1)))
    return found


@torch.no_grad()
def of_probes(
    trainer: Trainer, data: Tensor, chains: Tensor, generator: torch.Generator
) -> dict[str, float]:
    """How far f rises over that of the data along chains 10 times as long, and of 4 × the step."""
    run, f = trainer.run, trainer.network
    f_pos, found = f(data), dict[str, float]()
    clamp = (-run.clamp, run.clamp) if run.clamp else None
    for name, longer, larger in (("long", 10, 1), ("coarse", 1, 4)):
        size = {"step_size": larger * run.step_size, "noise_std": run.noise_std * larger**0.5}
        own: dict[str, Any] = {"steps": longer * run.sgld_steps, "clamp": clamp, **size}
        above = f(sgld(f, chains, generator=generator, **own)) - f_pos.mean()
        found |= {
            f"probe/{name}/mean": float(above.mean()),
            f"probe/{name}/max": float(above.max()),
        }
    return found


def of_input(trainer: Trainer, chains: Tensor, generator: torch.Generator) -> dict[str, float]:
    """Step size × the eigenvalues of f's Hessian in x that are largest in size, over chains."""
    start = torch.randn(len(chains), chains[0].numel(), generator=generator)
    sizes = trainer.run.step_size * largest_sizes(hessian_of_f(trainer.network, chains), start)
    return {"hessian_x/median": float(sizes.median()), "hessian_x/max": float(sizes.max())}


def of_parameters(
    trainer: Trainer, data: Tensor, labels: Tensor, chains: Tensor, generator: torch.Generator
) -> dict[str, float]:
    """Learning rate × extreme eigenvalues of the loss's Hessian, preconditioned as by Adam."""
    loss, _ = loss_of(trainer, data, chains, data, labels)
    parameters = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    product = hessian_of_loss(loss, parameters, preconditioner(trainer.optimizer))
    start = torch.randn(1, sum(p.numel() for p in parameters), generator=generator)
    size = largest_sizes(product, start)
    top, lr = top_eigenvalues(product, start, size), trainer.run.lr
    return {"adam/size": lr * float(size), "adam/top": lr * float(top)}


def largest_sizes(product: Product, start: Tensor, iterations: int = ITERATIONS) -> Tensor:
    """Of symmetric matrices, how large the largest eigenvalue is without its sign: ``(B,)``.

    Power iteration: ‖H v‖ of the last vector, from below, and the closer the smaller the next
    eigenvalue is beside it. Two that differ in the sign alone do no harm.

    Args:
        product: each matrix times its vector, ``(B, n)`` to ``(B, n)``.
        start: vectors that are no eigenvectors, ``(B, n)``, such as random ones.
    """
    image = start
    for _ in range(iterations):
        image = product(functional.normalize(image, dim=1))
    sizes: Tensor = torch.linalg.vector_norm(image, dim=1)
    return sizes


def top_eigenvalues(
    product: Product, start: Tensor, sizes: Tensor, iterations: int = ITERATIONS
) -> Tensor:
    """The largest eigenvalue with regard to the sign, ``(B,)``: of the matrices plus their sizes.

    ``sizes`` is what :func:`largest_sizes` returned.
    """
    return largest_sizes(lambda v: product(v) + sizes[:, None] * v, start, iterations) - sizes


def hessian_of_f(f: Callable[[Tensor], Tensor], x: Tensor) -> Product:
    """Products with the Hessians of f in each of its samples x, (B, ...), by double backward."""
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)

    def product(v: Tensor) -> Tensor:
        inner = (gradient * v.reshape(x.shape)).sum()
        return torch.autograd.grad(inner, x, retain_graph=True)[0].flatten(1)

    return product


def hessian_of_loss(
    loss: Tensor, parameters: Sequence[Tensor], scales: Sequence[Tensor]
) -> Product:
    """Products with P^-1/2 H P^-1/2, where H is the Hessian of the loss: ``(1, n)`` to ``(1, n)``.

    P's diagonal is in ``scales``, as :func:`preconditioner` returns it.
    """
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    gradient = torch.cat([g.flatten() for g in gradients])
    root = torch.cat([s.flatten() for s in scales]).rsqrt()

    def product(v: Tensor) -> Tensor:
        inner = (gradient * (root * v[0])).sum()
        found = torch.autograd.grad(inner, parameters, retain_graph=True, materialize_grads=True)
        return (root * torch.cat([h.flatten() for h in found]))[None]

    return product


def preconditioner(optimizer: Optimizer) -> list[Tensor]:
    """By what an optimizer's step divides each entry: Adam's sqrt(v) + eps, v unbiased; else 1."""
    scales = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            state: Mapping[str, Any] = optimizer.state.get(p, {})
            if "exp_avg_sq" not in state:
                scales.append(torch.ones_like(p))
                continue
            v = state["exp_avg_sq"] / (1 - group["betas"][1] ** float(state["step"]))
            scales.append(v.sqrt() + group["eps"])
    return scales
