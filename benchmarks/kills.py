"""Sixty kills, half of them inside a write or on a full disk: runs go on with the same bits.

    python -m benchmarks.kills

Thirty of a plain loop with ``Recovery(folder=)`` and thirty of ``ebmguard train jem``. Each life of
a run ends by SIGKILL: at a random moment; while a slow disk keeps it in a write; while its disk is
full, as for a process that may not write large files. Each life of the loop must begin with the
bits of a run that nobody kills, at a snapshot no older than the last; the trainer must leave, at
the end, what one leaves that nobody kills.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import resource
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.small_run import begun, bits, leaves_of, train
from ebmguard.reference_training.engine.progress import Reporter
from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.reference_training.jem.train import train as train_jem

HOW = ("from a write on", "slow disk", "any moment", "full disk")
SMALL: dict[str, Any] = {"data": "digits", "device": "cpu", "n_pos": 8, "n_neg": 6, "sgld_steps": 2}
SMALL |= {"buffer_size": 30, "test_images": 40, "eval_every": 1000, "checkpoint_every": 2}


def killed(live: Callable[[], object], how: str, folder: Path, rng: random.Random) -> str:
    """Fork, let the child live for a while, mostly from its first write on, and kill it."""
    for partial in folder.rglob("*.partial"):
        partial.unlink()
    before, began, end = {*folder.rglob("*.pt")}, time.monotonic(), 0.0
    child = os.fork()
    if not child:
        _live(live, how, rng)
    while not end or time.monotonic() < end:
        time.sleep(0.001)
        inside = any(folder.rglob("*.partial"))
        has_written = inside or {*folder.rglob("*.pt")} - before
        if not end and (has_written or how == "any moment" or time.monotonic() > began + 15):
            end = time.monotonic() + rng.uniform(0, 3)
        elif inside and how == "slow disk" and rng.random() < 0.02:
            break
        if os.waitpid(child, os.WNOHANG)[0]:
            return f"{how}: ended by itself"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return f"{how}: {'inside' if any(folder.rglob('*.partial')) else 'outside'} a write"


def _live(live: Callable[[], object], how: str, rng: random.Random) -> None:
    fsync, (_, hard) = os.fsync, resource.getrlimit(resource.RLIMIT_FSIZE)

    def slowly(file: int) -> None:
        time.sleep(0.05)
        fsync(file)

    if how == "slow disk":
        os.fsync = slowly  # type: ignore[assignment]
    if how == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (rng.randrange(1, 20) * 1000, hard))
    try:
        live()
    finally:
        os._exit(1)


def loop(place: Path, kills: int, rng: random.Random) -> Counter[str]:
    """Kill the plain loop; count what was killed where, and what was wrong."""
    cut, whole, one = (place / name for name in ("cut", "whole", "one"))
    reference, kept, last, found = begun(whole), dict[str, bytes](), -1, Counter[str]()
    own_random = torch.get_rng_state()
    one.mkdir()

    def live() -> None:
        g = begun(cut)
        if g.resume() is not None:
            g.trainer.scheduler.step()  # what comes after the optimizer's step comes again
        while True:
            train(g, 1)

    for i in range(kills):
        found[killed(live, HOW[i % len(HOW)], cut, rng)] += 1
        g = begun(cut)
        step = g.resume() or 0
        left, name = bits(g), f"snapshot-{step:08d}.pt"
        torch.set_rng_state(own_random)
        while name not in kept and reference.step < step + 20:
            train(reference, 1)
            kept |= {x.name: x.read_bytes() for x in whole.glob("*.pt") if x.name not in kept}
        own_random = torch.get_rng_state()
        (one / name).write_bytes(kept.get(name, b""))
        g = begun(one)
        found["wrong"] += not (0 < step == g.resume() and step >= last and left == bits(g))
        (one / name).unlink()
        last = step
    print(f"the loop came to step {last}")
    return found


def jem(place: Path, kills: int, rng: random.Random) -> Counter[str]:
    """The same of the trainer, whose bits are compared at its end."""
    cut, whole, found = place / "cut", place / "whole", Counter[str]()
    JemConfig(out=whole, **SMALL).load_data()  # once: children have read it then

    def trained(out: Path, steps: int) -> None:
        begins = not (out / "config.json").exists()
        config = JemConfig(
            out=out, resume=not begins, iterations=steps, **(SMALL if begins else {})
        )
        train_jem(*config.open(), Reporter())

    def left(out: Path) -> Any:
        state = torch.load(max((out / "checkpoints").glob("step-*.pt")), weights_only=True)
        del state["record"]["elapsed"]
        return leaves_of(state), (out / "metrics.jsonl").read_bytes()

    for i in range(kills):
        found[killed(lambda: trained(cut, 100_000), HOW[i % len(HOW)], cut, rng)] += 1
    last = max((cut / "checkpoints").glob("step-*.pt")).stem.removeprefix("step-")
    for out in (cut, whole):
        trained(out, int(last) + 4)
    print(f"jem came to step {last}")
    found["wrong"] += left(cut) != left(whole)
    return found


def main() -> None:
    """Kill, count, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills")
    parser.add_argument("--kills", type=int, default=30, help="of each")
    kills = parser.parse_args().kills
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    for run in (loop, jem):
        with tempfile.TemporaryDirectory() as place:
            print(run.__name__, dict(sorted(run(Path(place), kills, random.Random(0)).items())))


if __name__ == "__main__":
    main()
