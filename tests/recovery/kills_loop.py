"""Kills an ordinary loop again and again, and compares it with the same loop that nobody killed.

Started as ``python -m tests.recovery.kills_loop FOLDER KILLS`` from the project's root. It has one
thread, so that it may fork. Nothing but ``g.resume()`` knows of the kills. A third of them come
while the disk takes nothing more, a third while a slow one is written to. Prints the kills, how
many went on from a later snapshot than the one before, how many left a file that was being written,
the steps at the end, and what differs.
"""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ebmguard import Guard, Recovery, guard
from tests.recovery.parts import Replay, langevin
from tests.runs import frozen, randomness


def train(folder: Path, to: int) -> tuple[dict[str, Any], int | None]:
    """The loop, with all that comes after its optimizer's step; what it is at the end."""
    torch.manual_seed(0)
    f = nn.Sequential(nn.Linear(2, 32), nn.SiLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(f.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.01 * step))
    ema, replay, rng = torch.optim.swa_utils.AveragedModel(f), Replay(64), torch.Generator()

    loss_fn, sample = g = guard(
        None,
        lambda f, x: langevin(f, x, rng),
        beta_star=0.5,
        output_scale=5,
        model=f,
        optimizer=optimizer,
        scheduler=scheduler,
        ema=ema,
        buffer=replay,
        generators=[rng],
        log_dir=folder,
        action="rollback",
        recovery=Recovery(folder=folder / "kept", every=4, certify_after=4, folder_every=4),
    )
    assert isinstance(g, Guard)
    resumed = g.resume()
    while g.step < to:
        x = 0.5 * torch.randn(16, 2) + 1
        x_neg = sample(f, replay.x[torch.randint(64, (16,))])
        loss = loss_fn(f(x), f(x_neg))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        ema.update_parameters(f)
        replay.push(x_neg)
    g.close()
    parts = {"model": f, "optimizer": optimizer, "scheduler": scheduler, "ema": ema}
    return {**frozen({**parts, "buffer": replay, "rng": rng}), **randomness()}, resumed


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def spoil(kind: int, rng: random.Random) -> None:
    """Make this process's disk full after a while, or slow."""
    if kind == 1:
        full = rng.randrange(2_000, 60_000)
        resource.setrlimit(resource.RLIMIT_FSIZE, (full, resource.RLIM_INFINITY))
    elif kind == 2:
        sync = os.fsync

        def slow(descriptor: int) -> None:
            time.sleep(0.05)
            sync(descriptor)

        os.fsync = slow  # type: ignore[assignment]


def main(folder: Path, kills: int) -> None:
    train(folder / "first", 2)  # which takes longer
    began = time.monotonic()
    train(folder / "timed", 20)
    seconds = time.monotonic() - began
    chance, steps, later, torn = random.Random(0), -1, 0, 0
    for kill in range(kills):
        child = os.fork()
        if not child:
            spoil(kill % 3, chance)
            train(folder / "run", 10**9)
        time.sleep(chance.uniform(0.1, 2) * seconds)
        found = (folder / "run" / "kept").glob
        for _ in range(1000 * (kill % 3 == 2)):  # milliseconds
            if any(found("*.partial")):
                break
            time.sleep(0.001)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        torn += any(found("*.partial"))
        kept = [int(x.stem[9:]) for x in found("snapshot-*.pt")]
        later += max(kept, default=-1) > steps
        assert max(kept, default=-1) >= steps, "a snapshot was lost"
        steps = max(kept, default=-1)
    end = steps + 10
    (state, resumed), (whole, _) = train(folder / "run", end), train(folder / "whole", end)
    assert resumed == steps
    wrong = [name for name in whole if state[name] != whole[name]]
    found, wanted = rows(folder / "run"), rows(folder / "whole")
    wrong += ["the steps of rows"] * ([x["step"] for x in found] != [*range(end)])
    wrong += ["rows"] * (found != wanted)
    print(kills, later, torn, end, *wrong, sep="\n")


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
