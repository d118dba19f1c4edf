"""One rank: runs every case and the small DDP model, and writes what it saw to a file.

Started as ``python -m tests.objective.ranks_process RANK FOLDER`` from the project's root.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ebmguard.objective import coefficients, contrastive_loss
from tests.objective.ranks_cases import CASES, VARIANTS, WORLD, Case
from tests.ranks import joined, messages


def _run(case: Case, rank: int, group: dist.ProcessGroup) -> dict[str, Any]:
    pos, neg = (f.requires_grad_() for f in case.energies()[rank])
    options: dict[str, Any] = {
        "variant": case.variant,
        "groups": case.groups()[rank],
        "log_q": case.log_q()[rank],
        "process_group": group,
    }
    # One rank is enough to see what all send.
    with messages(rank == 0) as sent:
        loss = contrastive_loss(pos, neg, case.beta_star, **options)
        sides = torch.autograd.grad(loss.sum(), (pos, neg))
    closed = coefficients(pos, neg, case.beta_star, **options)
    return {"loss": loss.detach(), "sides": sides, "closed": closed, "messages": sent}


def _ddp(rank: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """Parameter gradients as an ordinary DDP trainer gets them."""
    found: dict[str, Any] = {}
    for variant in VARIANTS:
        torch.manual_seed(0)
        net = DistributedDataParallel(torch.nn.Linear(3, 1).double(), process_group=group)
        rng = torch.Generator().manual_seed(rank)
        n_pos, n_neg = 2 * (rank + 1), 3 + rank
        x = torch.randn(n_pos + n_neg, 3, generator=rng, dtype=torch.float64)
        f = net(x).squeeze(1)
        loss = contrastive_loss(f[:n_pos], f[n_pos:], 0.7, variant=variant, process_group=group)
        loss.backward()
        gradient = [p.grad for p in net.parameters()]
        found[variant] = {"x_pos": x[:n_pos], "x_neg": x[n_pos:], "gradient": gradient}
    return found


def main(rank: int, folder: Path) -> None:
    with joined(rank, WORLD, folder):
        groups = {size: dist.new_group(list(range(size))) for size in range(2, WORLD + 1)}
        results: dict[str, Any] = {"ddp": _ddp(rank, groups[2])} if rank < 2 else {}
        for name, case in CASES.items():
            if rank < len(case.sizes):
                results[name] = _run(case, rank, groups[len(case.sizes)])
        torch.save(results, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
